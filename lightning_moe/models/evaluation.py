"""The values that are logged: of a training step from its sums, of an evaluation from what it added up."""

from typing import cast

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_moe.metrics import ExpertLoad, MTPAccuracy, TokenMean
from lightning_moe.metrics.expert_load import expert_load_values
from lightning_moe.metrics.mtp_accuracy import mtp_accuracy_values
from lightning_moe.models.base import MoEModelOutput


class Evaluation(nn.Module):
    """Means over all tokens of an evaluation: losses, accuracy of the depths, load of the experts.

    Args:
        mtp_depths: Multi-token-prediction depths.
        moe_layers: MoE layers, those of the depths included.
        n_routed_experts: Routed experts of a layer.
    """

    def __init__(self, mtp_depths: int, moe_layers: int, n_routed_experts: int) -> None:
        super().__init__()
        self.loss = TokenMean()
        self.mtp_losses = nn.ModuleList(TokenMean() for _ in range(mtp_depths))
        self.mtp_accuracy = MTPAccuracy(mtp_depths) if mtp_depths else None
        self.expert_load = ExpertLoad(moe_layers, n_routed_experts) if moe_layers else None

    def update(self, output: MoEModelOutput) -> None:
        """Adds a batch.

        Args:
            output: What the model returned, with labels and predictions.
        """
        self.loss.update(cast(Tensor, output.loss), cast(Tensor, output.num_tokens))
        for mean, loss, tokens in zip(self.mtp_losses, output.mtp_losses, output.mtp_num_tokens, strict=True):
            cast(TokenMean, mean).update(loss, tokens)
        if self.mtp_accuracy is not None and output.mtp_correct is not None:
            self.mtp_accuracy.update(output.mtp_correct, torch.stack(output.mtp_num_tokens), output.mtp_accepted)
        if self.expert_load is not None and output.expert_counts:
            self.expert_load.update(torch.stack(output.expert_counts))

    def compute(self, stage: str) -> dict[str, Tensor]:
        """Returns the values to log, and starts anew.

        Args:
            stage: Prefix of the names, such as ``"val"``.
        """
        values = {f"{stage}/loss": self.loss.compute()}
        for depth, mean in enumerate(self.mtp_losses, start=1):
            values[f"{stage}/mtp_loss_{depth}"] = cast(TokenMean, mean).compute()
        if self.mtp_accuracy is not None:
            values.update(_mtp_values(stage, self.mtp_accuracy.compute()))
        if self.expert_load is not None:
            values.update(_load_values(stage, self.expert_load.compute()))
        self.reset()
        return values

    def reset(self) -> None:
        """Forgets what was added."""
        for metric in self.modules():
            if isinstance(metric, Metric):
                metric.reset()


def step_values(sums: dict[str, Tensor], expert_counts: list[Tensor]) -> dict[str, Tensor]:
    """Returns the values of a training step by logged name.

    Args:
        sums: :class:`~lightning_moe.models.step_sums.StepSums` by name, already summed over all ranks.
        expert_counts: Tokens of each expert, likewise, one tensor for each MoE layer.
    """
    num_tokens = sums["num_tokens"]
    values = {
        "train/loss": sums["loss"] / num_tokens,
        "train/total_loss": sums["total_loss"] / num_tokens,
        "train/grad_norm": sums["grad_norm"],
    }
    if "balance_loss" in sums:
        values["train/balance_loss"] = sums["balance_loss"] / num_tokens
    if "mtp_losses" in sums:
        for depth, loss in enumerate((sums["mtp_losses"] / sums["mtp_num_tokens"]).unbind(), start=1):
            values[f"train/mtp_loss_{depth}"] = loss
    # No metric objects: their states come from the host, which would have to wait for the device.
    if "mtp_correct" in sums:
        computed = mtp_accuracy_values(sums["mtp_correct"], sums["mtp_num_tokens"], sums["mtp_accepted"])
        values.update(_mtp_values("train", computed))
    if expert_counts:
        values.update(_load_values("train", expert_load_values(torch.stack(expert_counts))))
    return values


def _mtp_values(stage: str, computed: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the accuracies of each depth by logged name."""
    return {
        f"{stage}/mtp_{name}_{depth}": value
        for name, values in computed.items()
        for depth, value in enumerate(values.reshape(-1).unbind(), start=1)
    }


def _load_values(stage: str, computed: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the loads by logged name."""
    return {f"{stage}/expert_load_{name}": value for name, value in computed.items()}
