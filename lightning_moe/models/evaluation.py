"""What a validation or test run adds up, and the values that it logs."""

from typing import cast

import torch
from torch import Tensor, nn

from lightning_moe.metrics import ExpertLoad, MTPAccuracy, TokenMean
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
        self.loss.reset()
        for depth, mean in enumerate(self.mtp_losses, start=1):
            values[f"{stage}/mtp_loss_{depth}"] = cast(TokenMean, mean).compute()
            cast(TokenMean, mean).reset()
        if self.mtp_accuracy is not None:
            values.update(mtp_values(stage, self.mtp_accuracy))
        if self.expert_load is not None:
            values.update(load_values(stage, self.expert_load))
        return values


def mtp_values(stage: str, metric: MTPAccuracy) -> dict[str, Tensor]:
    """Returns the metric's values by logged name, and resets it."""
    computed = metric.compute()
    metric.reset()
    return {
        f"{stage}/mtp_{name}_{depth}": value
        for name, values in computed.items()
        for depth, value in enumerate(values.reshape(-1).unbind(), start=1)
    }


def load_values(stage: str, metric: ExpertLoad) -> dict[str, Tensor]:
    """Returns the metric's values by logged name, and resets it."""
    computed = metric.compute()
    metric.reset()
    return {f"{stage}/expert_load_{name}": value for name, value in computed.items()}
