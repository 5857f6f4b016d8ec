"""Linears in FP8 as one operator with casts of our own.

With a scale per row and column of each product, on CUDA by the Triton kernels of :mod:`.float8_kernel` and torch's
scaled multiplication; or blockwise, by those of :mod:`.blockwise_kernel` and DeepGEMM. Elsewhere in plain PyTorch with
the same numbers, up to the order of summation. An operand is quantised in one pass over memory; one with a scale for
each of its columns in two.

Kept for backward are the input and the weight in bfloat16, as without quantisation.

Shapes: ``M`` rows, ``K`` inner and ``N`` outer width.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe.precision.blockwise_casts import TILE
from lightning_moe.precision.blockwise_mm import blockwise_mm
from lightning_moe.precision.float8_casts import Quantised
from lightning_moe.precision.recipes import Recipe


@functools.cache
def float8_linear(recipe: Recipe) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the function ``(x (..., K), weight (N, K)) -> (..., N)`` of a recipe, differentiable in both.

    On CUDA widths must be multiples of 16, and blockwise everywhere of 128; rows may be any number. What comes in is
    cast to bfloat16, and what comes out is cast back.

    Args:
        recipe: FP8 with a scale per row, or blockwise with gradients of weights in high precision.
    """
    blockwise = recipe.name == "fp8_blockwise"
    in_high_precision = recipe.wgrad_in_high_precision

    def multiply(x: Tensor, weight_NK: Tensor) -> Tensor:
        x_MK = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
        out_MN = torch.ops.lightning_moe.float8_linear(x_MK, weight_NK.to(torch.bfloat16), in_high_precision, blockwise)
        return out_MN.reshape(*x.shape[:-1], weight_NK.shape[0]).to(x.dtype)

    return multiply


@torch.library.custom_op("lightning_moe::float8_linear", mutates_args=())
def _float8_linear(x_MK: Tensor, weight_NK: Tensor, in_high_precision: bool, blockwise: bool = False) -> Tensor:
    rows = x_MK.shape[0]
    if rows == 0:  # a kernel over nothing cannot be launched
        return x_MK.new_empty(0, weight_NK.shape[0])
    casts, weight_NK = casts_for(x_MK, blockwise), weight_NK.contiguous()
    if blockwise:
        return blockwise_mm(casts.quantise_rows(_padded(x_MK)), casts.quantise_weight(weight_NK[None]))[:rows]
    return multiply_quantised(casts.quantise_rows(x_MK.contiguous()), casts.quantise_rows(weight_NK))


@_float8_linear.register_fake
def _(x_MK: Tensor, weight_NK: Tensor, in_high_precision: bool, blockwise: bool = False) -> Tensor:
    return x_MK.new_empty(x_MK.shape[0], weight_NK.shape[0])


@torch.library.custom_op("lightning_moe::float8_linear_backward", mutates_args=())
def _float8_linear_backward(
    grad_MN: Tensor, x_MK: Tensor | None, weight_NK: Tensor | None, in_high_precision: bool, blockwise: bool = False
) -> tuple[Tensor, Tensor]:
    """Gradients of the input, which needs the weight, and of the weight, which needs the input; empty without them."""
    grad_x, grad_weight = grad_MN.new_empty(0), grad_MN.new_empty(0)
    rows, width = grad_MN.shape
    if rows == 0:
        if weight_NK is not None:
            grad_x = grad_MN.new_empty(0, weight_NK.shape[1])
        if x_MK is not None:
            grad_weight = grad_MN.new_zeros(width, x_MK.shape[1])
        return grad_x, grad_weight
    casts, grad_MN = casts_for(grad_MN, blockwise), grad_MN.contiguous()
    grad: Quantised | None = None
    if x_MK is not None and in_high_precision:
        grad_weight = grad_MN.T @ x_MK
    elif x_MK is not None:
        grad_columns, grad = casts.quantise_whole_columns(grad_MN, of_rows=weight_NK is not None)
        x_columns, _ = casts.quantise_whole_columns(x_MK.contiguous())
        # Over all tokens, what fast accumulation cuts off adds up: 5% of a gradient of kv_b_proj were measured.
        grad_weight = multiply_quantised(grad_columns, x_columns, fast=False)
        del grad_columns, x_columns
    if weight_NK is not None and blockwise:
        weight_columns = casts.quantise_weight_columns(weight_NK.contiguous()[None])
        grad_x = blockwise_mm(casts.quantise_rows(_padded(grad_MN)), weight_columns)[:rows]
    elif weight_NK is not None:
        if grad is None:
            grad = casts.quantise_rows(grad_MN)
        weight_columns, _ = casts.quantise_whole_columns(weight_NK.contiguous())
        grad_x = multiply_quantised(grad, weight_columns)
    return grad_x, grad_weight


@_float8_linear_backward.register_fake
def _(
    grad_MN: Tensor, x_MK: Tensor | None, weight_NK: Tensor | None, in_high_precision: bool, blockwise: bool = False
) -> tuple[Tensor, Tensor]:
    rows, width = grad_MN.shape
    grad_x = grad_MN.new_empty(0) if weight_NK is None else grad_MN.new_empty(rows, weight_NK.shape[1])
    return grad_x, grad_MN.new_empty(0) if x_MK is None else grad_MN.new_empty(width, x_MK.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_MK, weight_NK, *ctx.options = inputs
    of_x, of_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x_MK if of_weight else None, weight_NK if of_x else None)


def _backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, ...]:
    x_MK, weight_NK = ctx.saved_tensors
    grad_x, grad_weight = torch.ops.lightning_moe.float8_linear_backward(grad_MN, x_MK, weight_NK, *ctx.options)
    return None if weight_NK is None else grad_x, None if x_MK is None else grad_weight, None, None


_float8_linear.register_autograd(_backward, setup_context=_save)


def has_operator(recipe: Recipe) -> bool:
    """Whether :func:`float8_linear` and :func:`.float8_experts.float8_experts` have a recipe."""
    return recipe.name == "fp8_rowwise" or (recipe.name == "fp8_blockwise" and recipe.wgrad_in_high_precision)


def casts_for(operand: Tensor, blockwise: bool = False) -> Any:
    """The module whose casts run where an operand is: Triton kernels on CUDA, plain PyTorch elsewhere."""
    kind = "blockwise" if blockwise else "float8"
    where = "kernel" if operand.device.type == "cuda" else "casts"
    return importlib.import_module(f"lightning_moe.precision.{kind}_{where}")


def multiply_quantised(a: Quantised, b: Quantised, *, fast: bool = True) -> Tensor:
    """Multiplies two operands that were quantised along what is summed over.

    Args:
        a: Values ``(M, K)`` and scales ``(M,)``.
        b: Values ``(N, K)`` and scales ``(N,)``.
        fast: Whether a GPU's matrix units may keep sums to less than float32 between a few of them.

    Returns:
        The product ``(M, N)`` in bfloat16.
    """
    (a_MK, a_scale_M), (b_NK, b_scale_N) = a, b
    if a_MK.device.type == "cuda":
        return _scaled_mm(a, b, fast=fast)
    product_MN = (a_MK.float() * a_scale_M[:, None]) @ (b_NK.float() * b_scale_N[:, None]).T
    return product_MN.to(torch.bfloat16)


def _scaled_mm(a: Quantised, b: Quantised, *, fast: bool = True) -> Tensor:
    (a_MK, a_scale_M), (b_NK, b_scale_N) = a, b
    return torch._scaled_mm(
        a_MK,
        b_NK.T,
        scale_a=a_scale_M[:, None],
        scale_b=b_scale_N[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def _padded(x_MK: Tensor) -> Tensor:
    return F.pad(x_MK, (0, 0, 0, -x_MK.shape[0] % TILE)).contiguous()
