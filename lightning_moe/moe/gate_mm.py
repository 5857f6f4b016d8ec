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

from lightning_moe.kernels import has_kernels


def gate_mm(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Returns ``x @ weight.T`` in the weight's dtype.

    Args:
        x_TD: Tokens, any floating dtype.
        weight_ED: Weight of the gate, at least float32.
    """
    if x_TD.is_cuda and x_TD.dtype == torch.bfloat16 and weight_ED.dtype == torch.float32:
        return torch.ops.lightning_moe.gate_mm(x_TD, weight_ED)
    return F.linear(x_TD.to(weight_ED.dtype), weight_ED)


def gate_products(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Products of bfloat16 tokens with the three parts of the gate's weight; the logits are their sum.

    Returns:
        ``(T, 3, E)`` float32: of the middle, the high and the low part.
    """
    parts_PED = split_weight(weight_ED)[1:]
    return _mm(x_TD, parts_PED.flatten(0, 1).T).unflatten(1, parts_PED.shape[:2])


def gate_gradients(grad_T4E: Tensor, x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the tokens, bfloat16, and of the gate's weight, float32.

    The gradient's last three parts are multiplied with the weight's first three, its first three with the tokens.

    Args:
        grad_T4E: Gradient of the logits in bfloat16 parts ``(T, 4, E)``, contiguous: low, middle, high, and high again.
        x_TD: Tokens, bfloat16.
        weight_ED: Weight of the gate, float32.
    """
    experts = weight_ED.shape[0]
    factors = grad_T4E.flatten(1)
    # Middle times high, high times middle, high times high: 16 bits of each factor, for what is rounded to 8.
    grad_x = _mm(factors[:, experts:], split_weight(weight_ED)[:3].flatten(0, 1), x_TD.dtype)
    parts_PED = _mm(factors[:, : 3 * experts].T, x_TD).unflatten(0, (3, -1))
    return grad_x, parts_PED.sum(dim=0)


def split_weight(weight_ED: Tensor) -> Tensor:
    """Bfloat16 parts ``(4, E, D)`` of a float32 weight: high, middle, high again, and low.

    In this order the last three are the factors of forward, and the first three those of the tokens' gradient.
    """
    if has_kernels(weight_ED.device, weight_ED.dtype):
        from lightning_moe.moe.router_kernel import split_weight_kernel

        return split_weight_kernel(weight_ED.contiguous())
    high, middle, low = _in_three_parts(weight_ED)
    return torch.stack((high, middle, high, low))


def _in_three_parts(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bfloat16 tensors that sum up to a float32 one to the last bit: high, middle and low."""
    high = tensor.to(torch.bfloat16)
    rest = tensor - high
    middle = rest.to(torch.bfloat16)
    return high, middle, (rest - middle).to(torch.bfloat16)


def _mm(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Product of bfloat16 matrices with sums in float32, in a dtype."""
    if not a.is_cuda:
        return (a.float() @ b.float()).to(dtype)
    return torch.mm(a, b) if dtype == a.dtype else torch.mm(a, b, out_dtype=dtype)


@torch.library.custom_op("lightning_moe::gate_mm", mutates_args=())
def _gate_mm(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    middle_TE, high_TE, low_TE = gate_products(x_TD, weight_ED).unbind(1)
    return low_TE + middle_TE + high_TE  # the small parts first


@_gate_mm.register_fake
def _(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    return weight_ED.new_empty(x_TD.shape[0], weight_ED.shape[0])


@torch.library.custom_op("lightning_moe::gate_mm_backward", mutates_args=())
def _gate_mm_backward(grad_TE: Tensor, x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    high_TE, middle_TE, low_TE = _in_three_parts(grad_TE)
    return gate_gradients(torch.stack((low_TE, middle_TE, high_TE, high_TE), dim=1), x_TD, weight_ED)


@_gate_mm_backward.register_fake
def _(grad_TE: Tensor, x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    return x_TD.new_empty(x_TD.shape), weight_ED.new_empty(weight_ED.shape)


def _save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.lightning_moe.gate_mm_backward(grad_TE, *ctx.saved_tensors)


_gate_mm.register_autograd(_backward, setup_context=_save_inputs)
