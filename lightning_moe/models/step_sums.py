"""Sums over the micro-batches of one optimizer step, kept on the device."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_moe.models.base import MoEModelOutput


@dataclass
class StepSums:
    """Adds up what the micro-batches of one optimizer step return; nothing outlives the step.

    Args:
        micro_batches: Micro-batches added.
        positions: Input positions added, a number of the host.
        sums: Sums by name, detached scalars or vectors on the device.
        expert_counts: Tokens of each expert, one tensor for each MoE layer.
    """

    micro_batches: int = 0
    positions: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    expert_counts: list[Tensor] = field(default_factory=list)

    def add(self, output: MoEModelOutput, total_loss: Tensor, positions: int) -> None:
        """Adds a micro-batch.

        Args:
            output: What the model returned, with labels.
            total_loss: The sum of all weighted loss terms.
            positions: Input positions of the micro-batch.
        """
        self.micro_batches += 1
        self.positions += positions
        self._add("loss", output.loss)
        self._add("num_tokens", output.num_tokens)
        self._add("total_loss", total_loss)
        self._add("balance_loss", output.balance_loss)
        self._add("mtp_losses", _stack(output.mtp_losses))
        self._add("mtp_num_tokens", _stack(output.mtp_num_tokens))
        self._add("mtp_correct", output.mtp_correct)
        self._add("mtp_accepted", output.mtp_accepted)
        counts = list(output.expert_counts)
        if self.expert_counts:
            counts = [a + b for a, b in zip(self.expert_counts, counts, strict=True)]
        self.expert_counts = counts

    def _add(self, name: str, value: Tensor | None) -> None:
        if value is not None:
            value = value.detach()
            self.sums[name] = self.sums[name] + value if name in self.sums else value


def _stack(values: tuple[Tensor, ...]) -> Tensor | None:
    return torch.stack(values) if values else None
