"""The clock behind the logged tokens per second."""

import time


class StepClock:
    """Tokens per second between two readings, without validation and without what callbacks do after a step.

    Args:
        tokens_seen: Tokens seen when the clock starts.
    """

    def __init__(self, tokens_seen: int = 0) -> None:
        self._tokens_read = self._tokens = tokens_seen
        self._seconds = 0.0
        self._since: float | None = time.perf_counter()

    def pause(self) -> None:
        """Stops counting time."""
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def resume(self) -> None:
        """Goes on counting time."""
        if self._since is None:
            self._since = time.perf_counter()

    def step_done(self, tokens_seen: int) -> None:
        """Takes note of a finished optimizer step, and stops counting time until :meth:`resume`.

        Args:
            tokens_seen: Tokens seen after the step.
        """
        self._tokens = tokens_seen
        self.pause()

    def tokens_per_second(self) -> float | None:
        """Returns the speed since the last reading, or ``None`` when no time has passed."""
        tokens, seconds = self._tokens - self._tokens_read, self._seconds
        self._tokens_read, self._seconds = self._tokens, 0.0
        return tokens / seconds if seconds > 0 else None
