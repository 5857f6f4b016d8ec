"""What is logged of one optimizer step, from the sums on the device to values of the host."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_moe.models.evaluation import step_values
from lightning_moe.models.host_copy import HostCopy
from lightning_moe.models.step_sums import StepSums


def is_logged(trainer: Any, step: int) -> bool:
    """Returns whether a trainer logs an optimizer step, counted from 1."""
    return step % max(getattr(trainer, "log_every_n_steps", 1), 1) == 0


class StepReport:
    """The values of an optimizer step on their way to the host.

    Made when the gradients are complete, before the optimizer's kernels are queued: the host logs while these run, so
    that the device does not wait for it. How many operations and copies it takes does not depend on the layers.

    Args:
        step: Sums of the step; the expert counts are those of all ranks already.
        skipped_steps: Steps skipped so far, a scalar on the device.
        sum_over_ranks: Sums a tensor over the ranks that read different data.
        ranks: Their number.
    """

    def __init__(
        self, step: StepSums, skipped_steps: Tensor, sum_over_ranks: Callable[[Tensor], Tensor], ranks: int
    ) -> None:
        self._positions = step.positions
        self._ranks = ranks
        here = {name: value for name, value in step.sums.items() if name != "grad_norm"}
        # Not torch.tensor(), which makes the host wait for the device.
        here["positions"] = torch.full_like(step.sums["num_tokens"], step.positions)
        sums = _sum_together(here, sum_over_ranks)
        positions = sums.pop("positions")
        values = step_values({**sums, "grad_norm": step.sums["grad_norm"]}, step.expert_counts)
        values["train/skipped_steps"] = skipped_steps
        # The difference, because the numbers themselves are larger than float32 is exact for.
        self._copy = HostCopy({**values, "positions_apart": positions - step.positions * ranks})

    def read(self) -> dict[str, Tensor]:
        """Waits for the values, and returns them by logged name, on the host.

        Raises:
            ValueError: The ranks read different numbers of tokens.
        """
        values = self._copy.read()
        apart = int(values.pop("positions_apart"))
        if apart:
            raise ValueError(
                f"The processes read different numbers of tokens in one optimizer step ({self._positions} here, "
                f"{self._positions * self._ranks + apart} in all {self._ranks}), so that schedules in tokens would "
                "part.\nGive all processes batches of one shape; mask what is not there with labels of -100 and "
                "valid=False."
            )
        return values


def _sum_together(sums: dict[str, Tensor], sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Sums over ranks with one reduction for each dtype."""
    alike: dict[torch.dtype, list[str]] = defaultdict(list)
    for name, value in sums.items():
        alike[value.dtype].append(name)
    summed: dict[str, Tensor] = {}
    for names in alike.values():
        flat = [sums[name].reshape(-1) for name in names]
        parts = sum_over_ranks(torch.cat(flat)).split([part.numel() for part in flat])
        summed.update((name, part.view(sums[name].shape)) for name, part in zip(names, parts, strict=True))
    return summed
