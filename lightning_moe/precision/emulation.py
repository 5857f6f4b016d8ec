"""Low-precision multiplications on any device: operands are rounded as a recipe says, and multiplied as they are.

They have the numbers of the recipe's kernels, up to the order of summation, and none of their speed. Products are
summed in float32 at least.

Shapes: ``M`` rows, ``K`` inner width, ``N`` outer width, ``R`` rows ordered by expert, ``e`` experts.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_moe.moe.grouped_mm import grouped_mm
from lightning_moe.precision.quantisation import quantise, quantise_groups
from lightning_moe.precision.recipes import ElementFormat, Recipe, ScaleRule, Tile


@functools.cache
def emulated_linear(recipe: Recipe) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the function ``(x (..., K), weight (N, K)) -> (..., N)`` of a recipe, differentiable in both."""

    def multiply(x: Tensor, weight_NK: Tensor) -> Tensor:
        out_MN = torch.ops.lightning_moe.quantised_mm(
            x.reshape(-1, x.shape[-1]),
            weight_NK,
            recipe.activation_tile,
            recipe.weight_tile,
            recipe.scale,
            recipe.wgrad_in_high_precision,
            recipe.gradient,
        )
        return out_MN.unflatten(0, x.shape[:-1])

    return multiply


@functools.cache
def emulated_grouped_mm(recipe: Recipe) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns the :func:`~lightning_moe.moe.grouped_mm.grouped_mm` of a recipe, differentiable in both operands.

    Raises:
        ValueError: The recipe's tiles would join rows of different experts.
    """
    if recipe.activation_tile[0] != 1 or recipe.gradient != "e4m3":
        raise ValueError(f"{recipe.name} shares scales over rows, which belong to different experts; use fp8_rowwise.")

    def multiply(a_RK: Tensor, b_eKN: Tensor, offsets_e: Tensor) -> Tensor:
        return torch.ops.lightning_moe.quantised_grouped_mm(
            a_RK,
            b_eKN,
            offsets_e,
            recipe.activation_tile,
            recipe.weight_tile,
            recipe.scale,
            recipe.wgrad_in_high_precision,
        )

    return multiply


# Operators, so that torch.compile leaves them whole: compiled and eager models then compute the same numbers.
@torch.library.custom_op("lightning_moe::quantised_mm", mutates_args=())
def _quantised_mm(
    a_MK: Tensor,
    b_NK: Tensor,
    a_tile: Sequence[int],
    b_tile: Sequence[int],
    scale: str,
    wgrad_in_high_precision: bool,
    gradient: str,
    a_format: str = "e4m3",
) -> Tensor:
    rule = cast(ScaleRule, scale)
    return quantise(a_MK, _tile(a_tile), rule, cast(ElementFormat, a_format)) @ quantise(b_NK, _tile(b_tile), rule).T


@_quantised_mm.register_fake
def _(a_MK: Tensor, b_NK: Tensor, *recipe: Any) -> Tensor:
    return a_MK.new_empty(a_MK.shape[0], b_NK.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
    ctx.recipe = tuple(value for value in inputs if not isinstance(value, Tensor))


def _mm_backward(ctx: Any, grad_MN: Tensor) -> tuple[Any, ...]:
    a_MK, b_NK = ctx.saved_tensors
    a_tile, b_tile, scale, in_high_precision, gradient, _ = ctx.recipe
    rest = (scale, in_high_precision, gradient, gradient)
    multiply = torch.ops.lightning_moe.quantised_mm
    grad_a = multiply(grad_MN, b_NK.T, a_tile, b_tile, *rest) if ctx.needs_input_grad[0] else None
    grad_b = None
    if ctx.needs_input_grad[1]:
        grad_b = grad_MN.T @ a_MK if in_high_precision else multiply(grad_MN.T, a_MK.T, a_tile, a_tile, *rest)
    return grad_a, grad_b, *(None for _ in ctx.recipe)


_quantised_mm.register_autograd(_mm_backward, setup_context=_save)


@torch.library.custom_op("lightning_moe::quantised_grouped_mm", mutates_args=())
def _quantised_grouped_mm(
    a_RK: Tensor,
    b_eKN: Tensor,
    offsets_e: Tensor,
    a_tile: Sequence[int],
    b_tile: Sequence[int],
    scale: str,
    wgrad_in_high_precision: bool,
) -> Tensor:
    rule = cast(ScaleRule, scale)
    across, along = _tile(b_tile)
    return grouped_mm(quantise(a_RK, _tile(a_tile), rule), quantise(b_eKN, (along, across), rule), offsets_e)


@_quantised_grouped_mm.register_fake
def _(a_RK: Tensor, b_eKN: Tensor, offsets_e: Tensor, *recipe: Any) -> Tensor:
    return a_RK.new_empty(a_RK.shape[0], b_eKN.shape[2])


@torch.library.custom_op("lightning_moe::quantised_grouped_outer", mutates_args=())
def _quantised_grouped_outer(g_RN: Tensor, a_RK: Tensor, offsets_e: Tensor, block: int, scale: str) -> Tensor:
    """For each expert, the sum over its rows of the outer products of ``g`` and ``a``: ``(e, N, K)``."""
    rule = cast(ScaleRule, scale)
    return torch.ops.lightning_moe.grouped_outer(
        quantise_groups(g_RN, offsets_e, block, rule), quantise_groups(a_RK, offsets_e, block, rule), offsets_e
    )


@_quantised_grouped_outer.register_fake
def _(g_RN: Tensor, a_RK: Tensor, offsets_e: Tensor, block: int, scale: str) -> Tensor:
    return g_RN.new_empty(offsets_e.shape[0], g_RN.shape[1], a_RK.shape[1])


def _grouped_backward(ctx: Any, grad_RN: Tensor) -> tuple[Any, ...]:
    a_RK, b_eKN, offsets_e = ctx.saved_tensors
    (_, block), _, scale, in_high_precision = ctx.recipe
    grad_RN = grad_RN.contiguous()  # the library's operator refuses expanded ones
    grad_a = None
    if ctx.needs_input_grad[0]:
        multiply = torch.ops.lightning_moe.quantised_grouped_mm
        grad_a = multiply(grad_RN, b_eKN.transpose(1, 2), offsets_e, *ctx.recipe)
    grad_b = None
    if ctx.needs_input_grad[1]:
        ops = torch.ops.lightning_moe
        if in_high_precision:
            grad_b = ops.grouped_outer(grad_RN, a_RK, offsets_e)
        else:
            grad_b = ops.quantised_grouped_outer(grad_RN, a_RK, offsets_e, block, scale)
        grad_b = grad_b.transpose(1, 2)
    return grad_a, grad_b, None, *(None for _ in ctx.recipe)


_quantised_grouped_mm.register_autograd(_grouped_backward, setup_context=_save)


def _tile(extents: Sequence[int]) -> Tile:
    across, along = extents
    return across, along
