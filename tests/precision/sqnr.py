"""Signal to quantisation noise of the three multiplications of a layer, against float64."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_moe.moe.grouped_mm import grouped_mm

Multiply = Callable[..., Tensor]


def sqnr(actual: Tensor, expected: Tensor) -> float:
    """Ratio in dB."""
    noise = (actual.double() - expected.double()).square().sum()
    return (10 * torch.log10(expected.double().square().sum() / noise)).item()


def linear_sqnr(multiply: Multiply, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[float, float, float]:
    """SQNR of forward, gradient of the input and gradient of the weight of a linear."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = multiply(x, weight)
    out.backward(grad)
    assert x.grad is not None
    assert weight.grad is not None
    x64, weight64, grad64 = (t.detach().double() for t in (x, weight, grad))
    return (
        sqnr(out.detach(), x64 @ weight64.T),
        sqnr(x.grad, grad64 @ weight64),
        sqnr(weight.grad, grad64.flatten(0, -2).T @ x64.flatten(0, -2)),
    )


def grouped_sqnr(
    multiply: Multiply, rows: Tensor, weight_eNK: Tensor, grad: Tensor, offsets: Tensor
) -> tuple[float, float, float]:
    """SQNR of forward, gradient of the rows and gradient of the weights of a grouped multiplication."""
    results = []
    for function, dtype in ((multiply, rows.dtype), (grouped_mm, torch.float64)):
        a, b = rows.detach().to(dtype).requires_grad_(), weight_eNK.detach().to(dtype).requires_grad_()
        out = function(a, b.transpose(1, 2), offsets)
        out.backward(grad.to(dtype))
        results.append((out.detach(), a.grad, b.grad))
    return tuple(sqnr(actual, expected) for actual, expected in zip(*results, strict=True))  # type: ignore[return-value]
