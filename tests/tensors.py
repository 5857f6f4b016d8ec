"""Small helpers for tensors in tests."""

from torch import Tensor


def grad(tensor: Tensor) -> Tensor:
    """The gradient of a tensor, which it must have."""
    assert tensor.grad is not None
    return tensor.grad
