"""Triton kernels for SwiGLU with a routing weight whose results, and whose gradients, are written in E4M3.

Backward reads its input twice, for the largest magnitudes and to write, and stores in between nothing that it computes.
Shapes and results: see :mod:`.float8_casts`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_moe.moe.swiglu_kernel import gradients_of_swiglu
from lightning_moe.precision.float8_jit import (
    CASTS_IN_HARDWARE,
    groups_of_tile,
    locate,
    magnitude_of,
    scale_of,
    store_transposed,
    to_e4m3,
    warps_of,
    zeros_of,
)

_ROWS, _COLUMNS, _WARPS = 64, 64, 4  # a tile of the gate, and the same of what goes with it


@triton.jit
def _swiglu_rows_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr,
    weights_ptr,
    values_ptr,
    scale_ptr,
    width,
    WEIGHTED: tl.constexpr,
    CASTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up_ptr + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        out *= tl.load(weights_ptr + row).to(tl.float32)
    scale, inverse = scale_of(tl.max(magnitude_of(out), axis=0))
    tl.store(values_ptr + row * width + columns, to_e4m3(out * inverse, CASTS), mask=inside)
    tl.store(scale_ptr + row, scale)


def swiglu_rows(gate_up_R2F: Tensor, weights_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """See :func:`.float8_casts.swiglu_rows`."""
    rows, width = gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2
    values_RF = gate_up_R2F.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    scale_R = gate_up_R2F.new_empty(rows, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    _swiglu_rows_kernel[(rows,)](
        gate_up_R2F,
        gate_up_R2F if weights_R is None else weights_R,
        values_RF,
        scale_R,
        width,
        WEIGHTED=weights_R is not None,
        CASTS=CASTS_IN_HARDWARE,
        BLOCK=block,
        num_warps=warps_of(2 * block),
    )
    return values_RF, scale_R


@triton.jit
def _swiglu_backward_rows_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    gate_up_ptr,
    weights_ptr,
    out_ptr,
    grad_gate_up_ptr,
    values_ptr,
    scale_ptr,
    grad_weights_ptr,
    width,
    WEIGHTED: tl.constexpr,
    CASTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    first, second = row * 2 * width + columns, row * 2 * width + width + columns
    grad = tl.load(grad_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + second, mask=inside, other=0.0).to(tl.float32)
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights_ptr + row).to(tl.float32)
    plain, out, grad_gate, grad_up = gradients_of_swiglu(grad, gate, up, weight)
    if WEIGHTED:
        tl.store(grad_weights_ptr + row, tl.sum(grad * plain, axis=0).to(grad_weights_ptr.dtype.element_ty))
    element = out_ptr.dtype.element_ty
    tl.store(out_ptr + row * width + columns, out.to(element), mask=inside)
    tl.store(grad_gate_up_ptr + first, grad_gate.to(element), mask=inside)
    tl.store(grad_gate_up_ptr + second, grad_up.to(element), mask=inside)
    amax = tl.max(tl.maximum(magnitude_of(grad_gate), magnitude_of(grad_up)), axis=0)
    scale, inverse = scale_of(amax)
    tl.store(values_ptr + first, to_e4m3(grad_gate * inverse, CASTS), mask=inside)
    tl.store(values_ptr + second, to_e4m3(grad_up * inverse, CASTS), mask=inside)
    tl.store(scale_ptr + row, scale)


def swiglu_backward_rows(
    grad_RF: Tensor, gate_up_R2F: Tensor, weights_R: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor | None]:
    """See :func:`.float8_casts.swiglu_backward_rows`."""
    rows, width = grad_RF.shape
    out_RF, grad_gate_up = torch.empty_like(grad_RF), torch.empty_like(gate_up_R2F)
    values_R2F = torch.empty_like(gate_up_R2F, dtype=torch.float8_e4m3fn)
    scale_R = grad_RF.new_empty(rows, dtype=torch.float32)
    grad_weights = None if weights_R is None else torch.empty_like(weights_R)
    block = triton.next_power_of_2(width)
    _swiglu_backward_rows_kernel[(rows,)](
        grad_RF,
        gate_up_R2F,
        scale_R if weights_R is None else weights_R,
        out_RF,
        grad_gate_up,
        values_R2F,
        scale_R,
        scale_R if grad_weights is None else grad_weights,
        width,
        WEIGHTED=weights_R is not None,
        CASTS=CASTS_IN_HARDWARE,
        BLOCK=block,
        num_warps=warps_of(2 * block),
    )
    return out_RF, grad_gate_up, (values_R2F, scale_R), grad_weights


@triton.jit
def _load_swiglu(  # type: ignore[no-untyped-def]
    grad_ptr, gate_up_ptr, weights_ptr, first, first_column, in_rows, inside, r, c, width, WEIGHTED: tl.constexpr
):
    start = first.to(tl.int64) * width + first_column
    grad = tl.load(grad_ptr + start + r[:, None] * width + c[None, :], mask=inside, other=0.0)
    start = first.to(tl.int64) * 2 * width + first_column
    at = gate_up_ptr + start + r[:, None] * (2 * width) + c[None, :]
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + width, mask=inside, other=0.0)
    weight = 1.0 + tl.zeros_like(r).to(tl.float32)
    if WEIGHTED:
        weight = tl.load(weights_ptr + first + r, mask=in_rows, other=0.0).to(tl.float32)
    grad = grad.to(tl.float32)
    plain, out, grad_gate, grad_up = gradients_of_swiglu(grad, gate.to(tl.float32), up.to(tl.float32), weight[:, None])
    return grad * plain, out, grad_gate, grad_up


@triton.jit
def _swiglu_amax_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    gate_up_ptr,
    weights_ptr,
    offsets_ptr,
    row_amax_ptr,
    out_amax_ptr,
    column_amax_ptr,
    dots_ptr,
    rows,
    width,
    groups,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    group, group_start, within, end = locate(offsets_ptr, tl.program_id(1), groups, ROWS, GROUPS)
    first = group_start + within
    first_column = tl.program_id(0) * COLUMNS
    r, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    in_rows, in_columns = first + r < end, first_column + c < width
    inside = in_rows[:, None] & in_columns[None, :]
    products, out, grad_gate, grad_up = _load_swiglu(
        grad_ptr, gate_up_ptr, weights_ptr, first, first_column, in_rows, inside, r, c, width, WEIGHTED
    )
    if WEIGHTED:  # summed over the tiles of a row afterwards, in their order
        at = dots_ptr + tl.program_id(0).to(tl.int64) * rows + first + r
        tl.store(at, tl.sum(products, axis=1), mask=in_rows)
    column = first_column + c
    gate_bits, up_bits = magnitude_of(grad_gate), magnitude_of(grad_up)
    row_amax = tl.max(tl.maximum(gate_bits, up_bits), axis=1)
    tl.atomic_max(row_amax_ptr + first + r, row_amax, mask=in_rows, sem="relaxed")
    at = out_amax_ptr + group * width + column
    tl.atomic_max(at, tl.max(magnitude_of(out), axis=0), mask=in_columns, sem="relaxed")
    at = column_amax_ptr + group * 2 * width + column
    tl.atomic_max(at, tl.max(gate_bits, axis=0), mask=in_columns, sem="relaxed")
    tl.atomic_max(at + width, tl.max(up_bits, axis=0), mask=in_columns, sem="relaxed")


@triton.jit
def _swiglu_transpose_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    gate_up_ptr,
    weights_ptr,
    offsets_ptr,
    row_amax_ptr,
    out_amax_ptr,
    column_amax_ptr,
    values_ptr,
    scale_ptr,
    out_ptr,
    out_scale_ptr,
    transposed_ptr,
    column_scale_ptr,
    rows,
    width,
    groups,
    WEIGHTED: tl.constexpr,
    CASTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    group, group_start, within, end = locate(offsets_ptr, tl.program_id(1), groups, ROWS, GROUPS)
    first = group_start + within
    first_column = tl.program_id(0) * COLUMNS
    r, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    in_rows, in_columns = first + r < end, first_column + c < width
    inside = in_rows[:, None] & in_columns[None, :]
    _, out, grad_gate, grad_up = _load_swiglu(
        grad_ptr, gate_up_ptr, weights_ptr, first, first_column, in_rows, inside, r, c, width, WEIGHTED
    )
    scale, inverse = scale_of(tl.load(row_amax_ptr + first + r, mask=in_rows, other=0))
    tl.store(scale_ptr + first + r, scale, mask=in_rows & (first_column == 0))
    at = values_ptr + first.to(tl.int64) * 2 * width + first_column + r[:, None] * (2 * width) + c[None, :]
    tl.store(at, to_e4m3(grad_gate * inverse[:, None], CASTS), mask=inside)
    tl.store(at + width, to_e4m3(grad_up * inverse[:, None], CASTS), mask=inside)
    start, new = first.to(tl.int64), (within == 0) & (first < end)
    column = group * width + first_column + c
    store_transposed(
        out,
        out_ptr,
        out_amax_ptr,
        out_scale_ptr,
        column,
        in_columns,
        in_rows,
        start,
        rows,
        first_column,
        new,
        r,
        c,
        CASTS,
    )
    column = group * 2 * width + first_column + c
    store_transposed(
        grad_gate,
        transposed_ptr,
        column_amax_ptr,
        column_scale_ptr,
        column,
        in_columns,
        in_rows,
        start,
        rows,
        first_column,
        new,
        r,
        c,
        CASTS,
    )
    store_transposed(
        grad_up,
        transposed_ptr,
        column_amax_ptr,
        column_scale_ptr,
        column + width,
        in_columns,
        in_rows,
        start,
        rows,
        first_column + width,
        new,
        r,
        c,
        CASTS,
    )


def swiglu_backward_columns(
    grad_RF: Tensor, gate_up_R2F: Tensor, weights_R: Tensor | None, offsets_e: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor | None]:
    """See :func:`.float8_casts.swiglu_backward_columns`; groups are multiples of 16 rows."""
    (rows, width), groups = grad_RF.shape, len(offsets_e)
    row_amax, scale = zeros_of(1, rows, grad_RF)
    out_amax, out_scale = zeros_of(groups, width, grad_RF)
    column_amax, column_scale = zeros_of(groups, 2 * width, grad_RF)
    values, out, transposed = (
        grad_RF.new_empty(shape, dtype=torch.float8_e4m3fn)
        for shape in ((rows, 2 * width), (width, rows), (2 * width, rows))
    )
    weighted = weights_R is not None
    grid = (triton.cdiv(width, _COLUMNS), triton.cdiv(rows, _ROWS) + groups)
    dots = scale if weights_R is None else scale.new_empty(grid[0], rows)
    inputs = (grad_RF, gate_up_R2F, scale if weights_R is None else weights_R, offsets_e)
    tile = {
        "WEIGHTED": weighted,
        "ROWS": _ROWS,
        "COLUMNS": _COLUMNS,
        "GROUPS": groups_of_tile(groups),
        "num_warps": _WARPS,
    }
    _swiglu_amax_kernel[grid](*inputs, row_amax, out_amax, column_amax, dots, rows, width, groups, **tile)
    _swiglu_transpose_kernel[grid](
        *inputs,
        row_amax,
        out_amax,
        column_amax,
        values,
        scale,
        out,
        out_scale,
        transposed,
        column_scale,
        rows,
        width,
        groups,
        CASTS=CASTS_IN_HARDWARE,
        **tile,
    )
    grad_weights = None if weights_R is None else dots.sum(dim=0).to(weights_R.dtype)
    return (out, out_scale), (transposed, column_scale), (values, scale[0]), grad_weights
