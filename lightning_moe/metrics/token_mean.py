import torch
from torch import Tensor

from lightning_moe.metrics.exact import ExactMetric


class TokenMean(ExactMetric):
    """Mean over tokens of a loss given as sums, whatever the number of tokens of a batch or a process.

    ``compute`` is NaN when no token was counted: a mean of nothing is not a loss of zero.

    """

    is_differentiable = False
    higher_is_better = False
    total: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, total: Tensor | float, tokens: Tensor | int) -> None:
        """Adds a batch, without a host sync.

        Args:
            total: Sum of the loss over the valid tokens, a scalar.
            tokens: Number of those tokens, a scalar.

        """
        # Not in place: a state that validation created in inference mode could not be changed in training
        self.total = self.total + (total.detach() if isinstance(total, Tensor) else total)
        self.tokens = self.tokens + tokens

    def compute(self) -> Tensor:
        """Returns the mean, a float32 scalar."""
        return (self.total / self.tokens).float()
