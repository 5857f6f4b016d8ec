"""Experts as one function of rows, weights and offsets: the result and all gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Case = tuple[Any, Any, Any, Any, Any]  # rows, gate_up, down, weights or None, gradient
NAMES = ("forward", "rows", "gate_up", "down", "weights")


def run_experts(
    offsets: Tensor, compute: Callable[..., Tensor], given: Case, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """What is called as :data:`NAMES`; the last one is missing without weights."""
    *inputs, weights, grad = given
    rows, gate_up, down = (tensor.detach().to(dtype).requires_grad_() for tensor in inputs)
    leaves = [rows, gate_up, down]
    if weights is not None:
        weights = weights.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        leaves.append(weights)
    out = compute(rows, gate_up, down, offsets, weights)
    assert out.dtype == dtype
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]
