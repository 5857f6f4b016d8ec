"""The dense SwiGLU feed-forward, and the linear layer that all projections are made of."""

from torch import Tensor, nn

from lightning_moe.moe.swiglu import swiglu


class Linear(nn.Linear):
    """A linear layer without bias whose weight starts from N(0, ``initializer_range``).

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        initializer_range: Standard deviation of the initial weight.
    """

    def __init__(self, in_features: int, out_features: int, initializer_range: float) -> None:
        self.initializer_range = initializer_range
        super().__init__(in_features, out_features, bias=False)

    @property
    def master_weight(self) -> Tensor:
        """The weight as it is held, where ``weight`` may be a copy in the compute dtype."""
        weight = self._parameters["weight"]
        assert weight is not None
        return weight

    def reset_parameters(self) -> None:
        """Draws the weight anew."""
        nn.init.normal_(self.weight, std=self.initializer_range)


class GatedMLP(nn.Module):
    """SwiGLU feed-forward with gate and up in one multiplication.

    Args:
        hidden_size: Width of a token.
        intermediate_size: Width inside.
        initializer_range: Standard deviation of the initial weights.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, initializer_range: float = 0.006) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, initializer_range)
        self.down_proj = Linear(intermediate_size, hidden_size, initializer_range)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer to ``(..., D)``."""
        return self.down_proj(swiglu(self.gate_up_proj(x)))
