"""The gate's multiplication: float32 accuracy for bfloat16 tokens, at the speed of bfloat16 on CUDA.

A float32 number is the sum of three bfloat16 numbers to its last bit. Products of bfloat16 numbers are exact in
float32, so a float32 weight in three parts gives, with float32 sums, what a float32 multiplication gives, which GPUs do
on far slower units.

Shapes: ``T`` tokens, ``D`` hidden size, ``E`` experts.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def gate_mm(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Returns ``x @ weight.T`` in the weight's dtype.

    Args:
        x_TD: Tokens, any floating dtype.
        weight_ED: Weight of the gate, at least float32.
    """
    if x_TD.is_cuda and x_TD.dtype == torch.bfloat16 and weight_ED.dtype == torch.float32:
        return torch.ops.lightning_moe.gate_mm(x_TD, weight_ED)
    return F.linear(x_TD.to(weight_ED.dtype), weight_ED)


def _in_parts(tensor: Tensor, parts: int) -> list[Tensor]:
    """Bfloat16 tensors that sum up to a float32 one: to 8 bits with one part, to the last bit with three."""
    taken = []
    for _ in range(parts):
        taken.append(tensor.to(torch.bfloat16))
        tensor = tensor - taken[-1]
    return taken


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """Product of bfloat16 matrices in float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


@torch.library.custom_op("lightning_moe::gate_mm", mutates_args=())
def _gate_mm(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    parts_PED = torch.stack(_in_parts(weight_ED, 3))
    logits_TPE = _mm(x_TD, parts_PED.flatten(0, 1).T).unflatten(1, parts_PED.shape[:2])
    return logits_TPE.flip(1).sum(dim=1)  # the small parts first


@_gate_mm.register_fake
def _(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    return weight_ED.new_empty(x_TD.shape[0], weight_ED.shape[0])


@torch.library.custom_op("lightning_moe::gate_mm_backward", mutates_args=())
def _gate_mm_backward(grad_TE: Tensor, x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    high_TE, middle_TE, low_TE = _in_parts(grad_TE, 3)
    weight_high, weight_middle = _in_parts(weight_ED, 2)
    # 16 bits of each factor, for a gradient that is rounded to 8.
    factors = torch.cat((middle_TE, high_TE, high_TE), dim=1)
    grad_x = _mm(factors, torch.cat((weight_high, weight_middle, weight_high))).to(x_TD.dtype)
    parts_PED = _mm(torch.cat((low_TE, middle_TE, high_TE), dim=1).T, x_TD).unflatten(0, (3, -1))
    return grad_x, parts_PED.sum(dim=0)


@_gate_mm_backward.register_fake
def _(grad_TE: Tensor, x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    return x_TD.new_empty(x_TD.shape), weight_ED.new_empty(weight_ED.shape)


def _save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.lightning_moe.gate_mm_backward(grad_TE, *ctx.saved_tensors)


_gate_mm.register_autograd(_backward, setup_context=_save_inputs)
