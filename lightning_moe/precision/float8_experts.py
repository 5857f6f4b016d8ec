"""Experts as a whole in FP8: both multiplications, what is between them, and their gradients.

One operator, so that casts are fused with what makes their input: SwiGLU writes no result but E4M3, and its gradient is
quantised along both dimensions where it is computed. With a scale per row, on CUDA by the Triton kernels of
:mod:`.float8_kernel` and torch's scaled grouped multiplication; or blockwise, by those of :mod:`.blockwise_kernel` and
DeepGEMM. Elsewhere in plain PyTorch with the same numbers, up to the order of summation.

For backward the rows, and gate and up of each row, are kept in bfloat16: no more than without quantisation. Rows in
E4M3 would have scales along the wrong dimension, and dispatchers make the rows once more rather than keeping them.

Shapes: ``R`` rows ordered by expert, ``D`` hidden size, ``F`` expert width, ``K`` and ``N`` inner and outer width,
``e`` experts held here.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_moe.precision.blockwise_mm import blockwise_grouped_mm
from lightning_moe.precision.float8_casts import Quantised, groups_of
from lightning_moe.precision.float8_linear import casts_for, multiply_quantised
from lightning_moe.precision.recipes import Recipe

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


@functools.cache
def float8_experts(recipe: Recipe) -> Experts:
    """Returns the :meth:`~lightning_moe.moe.experts.GroupedExperts.compute` of a recipe, differentiable.

    On CUDA groups must be padded to 16 rows, blockwise to 128, as dispatchers do, and widths be multiples of that. What
    comes in is cast to bfloat16, and what comes out is cast back.

    Args:
        recipe: FP8 with a scale per row, or blockwise with gradients of weights in high precision.
    """
    blockwise = recipe.name == "fp8_blockwise"
    in_high_precision = recipe.wgrad_in_high_precision

    def compute(
        rows_RD: Tensor, gate_up_proj: Tensor, down_proj: Tensor, offsets_e: Tensor, weights_R: Tensor | None
    ) -> Tensor:
        rows_bf16, gate_up_bf16, down_bf16 = (t.to(torch.bfloat16) for t in (rows_RD, gate_up_proj, down_proj))
        out_RD, _ = torch.ops.lightning_moe.float8_experts(
            rows_bf16, gate_up_bf16, down_bf16, offsets_e, weights_R, in_high_precision, blockwise
        )
        return out_RD.to(rows_RD.dtype)

    return compute


@torch.library.custom_op("lightning_moe::float8_experts", mutates_args=())
def _float8_experts(
    rows_RD: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    offsets_e: Tensor,
    weights_R: Tensor | None,
    in_high_precision: bool,
    blockwise: bool = False,
) -> tuple[Tensor, Tensor]:
    """The result, and gate and up of each row, which backward needs."""
    if rows_RD.shape[0] == 0:  # a kernel over nothing cannot be launched
        return rows_RD.new_empty(rows_RD.shape), rows_RD.new_empty(0, gate_up_proj.shape[1])
    casts, grouped_mm = casts_for(rows_RD, blockwise), blockwise_grouped_mm if blockwise else _grouped_mm
    rows, gate_up = casts.quantise_rows(rows_RD.contiguous()), casts.quantise_weight(gate_up_proj.contiguous())
    gate_up_R2F = grouped_mm(rows, gate_up, offsets_e)
    del rows, gate_up
    hidden = casts.swiglu_rows(gate_up_R2F, _contiguous(weights_R))
    return grouped_mm(hidden, casts.quantise_weight(down_proj.contiguous()), offsets_e), gate_up_R2F


@_float8_experts.register_fake
def _(
    rows_RD: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    offsets_e: Tensor,
    weights_R: Tensor | None,
    in_high_precision: bool,
    blockwise: bool = False,
) -> tuple[Tensor, Tensor]:
    return rows_RD.new_empty(rows_RD.shape), rows_RD.new_empty(rows_RD.shape[0], gate_up_proj.shape[1])


@torch.library.custom_op("lightning_moe::float8_experts_backward", mutates_args=())
def _float8_experts_backward(
    grad_RD: Tensor,
    rows_RD: Tensor,
    gate_up_R2F: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    offsets_e: Tensor,
    weights_R: Tensor | None,
    in_high_precision: bool,
    of_rows: bool,
    of_parameters: bool,
    blockwise: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of rows, both projections and routing weights; empty where not asked for."""
    grad_rows, grad_gate_up_proj, grad_down_proj, no_weights = (grad_RD.new_empty(0) for _ in range(4))
    grad_weights: Tensor | None
    if rows_RD.shape[0] == 0:
        if of_parameters:
            grad_gate_up_proj, grad_down_proj = torch.zeros_like(gate_up_proj), torch.zeros_like(down_proj)
        if of_rows:
            grad_rows = grad_RD.new_empty(rows_RD.shape)
        if weights_R is not None:
            no_weights = weights_R.new_empty(weights_R.shape)
        return grad_rows, grad_gate_up_proj, grad_down_proj, no_weights
    casts, grouped_mm = casts_for(grad_RD, blockwise), blockwise_grouped_mm if blockwise else _grouped_mm
    grad_RD, weights_R = grad_RD.contiguous(), _contiguous(weights_R)
    quantises_columns = of_parameters and not in_high_precision
    grad_columns: Quantised | None = None
    if quantises_columns:
        grad_columns, grad = casts.quantise_columns(grad_RD, offsets_e, of_rows=True)
    else:
        grad = casts.quantise_rows(grad_RD)
    down = casts.quantise_weight_columns(down_proj.contiguous())
    grad_hidden_RF = grouped_mm(grad, down, offsets_e)
    del grad, down
    if quantises_columns:
        hidden_columns, gate_up_columns, grad_gate_up, grad_weights = casts.swiglu_backward_columns(
            grad_hidden_RF, gate_up_R2F, weights_R, offsets_e
        )
        del grad_hidden_RF
        grad_down_proj = _grouped_outer(grad_columns, hidden_columns, offsets_e)
        del grad_columns, hidden_columns
        rows_columns, _ = casts.quantise_columns(rows_RD.contiguous(), offsets_e)
        grad_gate_up_proj = _grouped_outer(gate_up_columns, rows_columns, offsets_e)
        del gate_up_columns, rows_columns
    else:
        hidden_RF, grad_gate_up_R2F, grad_gate_up, grad_weights = casts.swiglu_backward_rows(
            grad_hidden_RF, gate_up_R2F, weights_R
        )
        del grad_hidden_RF
        if of_parameters:
            grad_down_proj = torch.ops.lightning_moe.grouped_outer(grad_RD, hidden_RF, offsets_e)
            grad_gate_up_proj = torch.ops.lightning_moe.grouped_outer(grad_gate_up_R2F, rows_RD.contiguous(), offsets_e)
    if of_parameters:
        casts.zero_empty_groups(grad_down_proj, offsets_e)
        casts.zero_empty_groups(grad_gate_up_proj, offsets_e)
    if of_rows:
        gate_up = casts.quantise_weight_columns(gate_up_proj.contiguous())
        grad_rows = grouped_mm(grad_gate_up, gate_up, offsets_e)
    return grad_rows, grad_gate_up_proj, grad_down_proj, no_weights if grad_weights is None else grad_weights


@_float8_experts_backward.register_fake
def _(
    grad_RD: Tensor,
    rows_RD: Tensor,
    gate_up_R2F: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    offsets_e: Tensor,
    weights_R: Tensor | None,
    in_high_precision: bool,
    of_rows: bool,
    of_parameters: bool,
    blockwise: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def like(tensor: Tensor | None, wanted: bool) -> Tensor:
        return grad_RD.new_empty(0) if tensor is None or not wanted else tensor.new_empty(tensor.shape)

    parameters = (like(gate_up_proj, of_parameters), like(down_proj, of_parameters))
    return like(rows_RD, of_rows), *parameters, like(weights_R, True)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows_RD, gate_up_proj, down_proj, offsets_e, weights_R, ctx.in_high_precision, ctx.blockwise = inputs
    _, gate_up_R2F = output
    ctx.mark_non_differentiable(gate_up_R2F)
    ctx.set_materialize_grads(False)  # there would be zeros for gate and up
    ctx.save_for_backward(rows_RD, gate_up_R2F, gate_up_proj, down_proj, offsets_e, weights_R)


def _backward(ctx: Any, grad_RD: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_RD is None:
        return (None,) * 7
    rows_RD, gate_up_R2F, gate_up_proj, down_proj, offsets_e, weights_R = ctx.saved_tensors
    of_rows, of_gate_up, of_down = ctx.needs_input_grad[:3]
    grad_rows, grad_gate_up_proj, grad_down_proj, grad_weights = torch.ops.lightning_moe.float8_experts_backward(
        grad_RD,
        rows_RD,
        gate_up_R2F,
        gate_up_proj,
        down_proj,
        offsets_e,
        weights_R,
        ctx.in_high_precision,
        of_rows,
        of_gate_up or of_down,
        ctx.blockwise,
    )
    return (
        grad_rows if of_rows else None,
        grad_gate_up_proj if of_gate_up else None,
        grad_down_proj if of_down else None,
        None,
        grad_weights if weights_R is not None and ctx.needs_input_grad[4] else None,
        None,
        None,
    )


_float8_experts.register_autograd(_backward, setup_context=_save)


def _grouped_mm(a: Quantised, b: Quantised, offsets_e: Tensor) -> Tensor:
    """Products ``(R, N)`` in bfloat16 of values ``(R, K)`` with scales ``(R,)`` and ``(e, N, K)`` with ``(e, N)``."""
    (a_RK, a_scale_R), (b_eNK, b_scale_eN) = a, b
    if a_RK.device.type == "cuda":
        return torch._scaled_grouped_mm(
            a_RK,
            b_eNK.transpose(1, 2),
            a_scale_R,
            b_scale_eN,
            offsets_e,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    groups = zip(groups_of(offsets_e), b_eNK, b_scale_eN, strict=True)
    return torch.cat(
        [multiply_quantised((a_RK[rows], a_scale_R[rows]), (b_NK, b_scale_N)) for rows, b_NK, b_scale_N in groups]
    )


def _grouped_outer(a: Any, b: Any, offsets_e: Tensor) -> Tensor:
    """For each expert the product ``(N, K)`` in bfloat16 of values ``(N, R)`` and ``(K, R)`` over its rows.

    Scales are ``(e, N)`` and ``(e, K)``. What comes out for an expert without rows is not defined.
    """
    (a_NR, a_scale_eN), (b_KR, b_scale_eK) = a, b
    if a_NR.device.type == "cuda":
        return torch._scaled_grouped_mm(
            a_NR,
            b_KR.T,
            a_scale_eN.flatten(),
            b_scale_eK.flatten(),
            offsets_e,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    groups = zip(groups_of(offsets_e), a_scale_eN, b_scale_eK, strict=True)
    return torch.stack(
        [
            multiply_quantised((a_NR[:, rows], a_scale_N), (b_KR[:, rows], b_scale_K))
            for rows, a_scale_N, b_scale_K in groups
        ]
    )


def _contiguous(weights_R: Tensor | None) -> Tensor | None:
    return None if weights_R is None else weights_R.contiguous()
