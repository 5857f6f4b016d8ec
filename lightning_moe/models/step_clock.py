"""The clock behind the logged tokens per second."""

import time
from typing import Any

import torch


class StepClock:
    """Tokens per second between two readings, without validation, checkpoints and what else is left out.

    The host runs ahead of the device, so its time is that of the training only where it has waited for the device. It
    does so here at readings, for the mark of the step alone, so that the device still has work meanwhile; and, for all
    that is queued, where something begins or ends that is left out.

    Args:
        device: Device that trains.
        tokens_seen: Tokens seen when the clock starts.
    """

    def __init__(self, device: torch.device, tokens_seen: int = 0) -> None:
        self._device = device
        self._tokens_read = tokens_seen
        self._speed: float | None = None
        self._seconds = 0.0
        self._since: float | None = time.perf_counter()
        self._mark: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_mark": None}  # a module is copied with its clock, and an event cannot be

    def mark(self) -> None:
        """Marks, at the same point of every step, how far the device has to be for a reading of this step."""
        if self._device.type == "cuda":
            self._mark = torch.cuda.Event() if self._mark is None else self._mark
            self._mark.record(torch.cuda.current_stream(self._device))

    def pause(self) -> None:
        """Stops counting time until :meth:`resume`."""
        if self._since is not None:
            self._seconds += self._now() - self._since
            self._since = None

    def resume(self) -> None:
        """Goes on counting time."""
        if self._since is None:
            self._since = self._now()

    def restart(self, tokens_seen: int) -> None:
        """Forgets the time and the tokens so far.

        Args:
            tokens_seen: Tokens seen until now.
        """
        self._tokens_read, self._speed, self._seconds, self._since = tokens_seen, None, 0.0, self._now_at_mark()

    def tokens_per_second(self, tokens_seen: int) -> float | None:
        """Returns the speed since the last reading, or ``None`` when there was nothing since the last start.

        At the same number of tokens it is the same reading, whoever asks.

        Args:
            tokens_seen: Tokens seen until now.
        """
        if tokens_seen == self._tokens_read:
            return self._speed
        if self._since is not None:
            now = self._now_at_mark()
            self._seconds, self._since = self._seconds + now - self._since, now
        self._speed = (tokens_seen - self._tokens_read) / self._seconds if self._seconds > 0 else None
        self._tokens_read, self._seconds = tokens_seen, 0.0
        return self._speed

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _now_at_mark(self) -> float:
        if self._mark is None:
            return self._now()
        self._mark.synchronize()
        return time.perf_counter()
