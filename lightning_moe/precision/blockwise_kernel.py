"""Triton kernels that cast what is multiplied to E4M3 with a scale per tile or block of 128, in one pass each.

The functions and their results are those of :mod:`.blockwise_casts`, which says what each one does. Shapes: see there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_moe.moe.swiglu_kernel import gradients_of_swiglu
from lightning_moe.precision.blockwise_casts import TILE
from lightning_moe.precision.float8_jit import CASTS_IN_HARDWARE, magnitude_of, to_e4m3
from lightning_moe.precision.float8_kernel import zero_empty_groups

__all__ = [
    "quantise_rows",
    "quantise_weight",
    "quantise_weight_columns",
    "swiglu_backward_rows",
    "swiglu_rows",
    "zero_empty_groups",
]
_ROWS = 32  # of a program, each with one tile
_SMALLEST = tl.constexpr(0x2B8CBCCC)  # the bits of 1e-12, below which the inverse of a scale may not be finite


@triton.jit
def _scale_of(amax):  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    # Of the bits of a magnitude, because a maximum of floats would pass over NaN; with exactly rounded quotients.
    scale = tl.div_rn(tl.maximum(amax, _SMALLEST).to(tl.float32, bitcast=True), 448.0)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def _place(rows, ROWS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    # The rows of a program, which tile of them, its columns, and which of the rows exist.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    return row, tile, tile * TILE + tl.arange(0, TILE), row < rows


@triton.jit
def _store_tiles(  # type: ignore[no-untyped-def]
    x, values_ptr, scale_ptr, row, column, in_rows, tile, rows, width, CASTS: tl.constexpr
):
    # One tile of each row; `tile` counts them along the row.
    scale, inverse = _scale_of(tl.max(magnitude_of(x), axis=1))
    at = values_ptr + row[:, None] * width + column[None, :]
    tl.store(at, to_e4m3(x * inverse[:, None], CASTS), mask=in_rows[:, None])
    tl.store(scale_ptr + tile.to(tl.int64) * rows + row, scale, mask=in_rows)


@triton.jit
def _quantise_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, values_ptr, scale_ptr, rows, width, CASTS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    row, tile, column, in_rows = _place(rows, ROWS, TILE)
    x = tl.load(x_ptr + row[:, None] * width + column[None, :], mask=in_rows[:, None], other=0.0).to(tl.float32)
    _store_tiles(x, values_ptr, scale_ptr, row, column, in_rows, tile, rows, width, CASTS)


def quantise_rows(x_RK: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`.blockwise_casts.quantise_rows`."""
    values_RK, scale_kR = _empty_tiles(x_RK, x_RK.shape[1])
    _quantise_rows_kernel[_grid(x_RK, x_RK.shape[1])](
        x_RK, values_RK, scale_kR, *x_RK.shape, CASTS=CASTS_IN_HARDWARE, ROWS=_ROWS, TILE=TILE
    )
    return values_RK, scale_kR.T


@triton.jit
def _quantise_blocks_kernel(  # type: ignore[no-untyped-def]
    x_ptr, values_ptr, scale_ptr, rows, width, TRANSPOSED: tl.constexpr, CASTS: tl.constexpr, TILE: tl.constexpr
):
    weight, along = tl.program_id(0) // (rows // TILE), tl.program_id(0) % (rows // TILE)
    tile = tl.program_id(1)
    start = weight.to(tl.int64) * rows * width
    r, c = along * TILE + tl.arange(0, TILE), tile * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + start + r.to(tl.int64)[:, None] * width + c[None, :]).to(tl.float32)
    scale, inverse = _scale_of(tl.max(tl.max(magnitude_of(x), axis=1), axis=0))
    code = to_e4m3(x * inverse, CASTS)
    across = width // TILE
    if TRANSPOSED:
        tl.store(values_ptr + start + c.to(tl.int64)[:, None] * rows + r[None, :], tl.trans(code))
        tl.store(scale_ptr + (weight * across + tile) * (rows // TILE) + along, scale)
    else:
        tl.store(values_ptr + start + r.to(tl.int64)[:, None] * width + c[None, :], code)
        tl.store(scale_ptr + tl.program_id(0) * across + tile, scale)


def quantise_weight(weight_eNK: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`.blockwise_casts.quantise_weight`."""
    return _quantise_blocks(weight_eNK, transposed=False)


def quantise_weight_columns(weight_eNK: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`.blockwise_casts.quantise_weight_columns`."""
    return _quantise_blocks(weight_eNK, transposed=True)


def _quantise_blocks(weight_eNK: Tensor, *, transposed: bool) -> tuple[Tensor, Tensor]:
    experts, rows, width = weight_eNK.shape
    shape = (experts, width, rows) if transposed else (experts, rows, width)
    values = weight_eNK.new_empty(shape, dtype=torch.float8_e4m3fn)
    scale = weight_eNK.new_empty(experts, shape[1] // TILE, shape[2] // TILE, dtype=torch.float32)
    _quantise_blocks_kernel[(experts * (rows // TILE), width // TILE)](
        weight_eNK, values, scale, rows, width, TRANSPOSED=transposed, CASTS=CASTS_IN_HARDWARE, TILE=TILE, num_warps=8
    )
    return values, scale


@triton.jit
def _swiglu_rows_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr,
    weights_ptr,
    values_ptr,
    scale_ptr,
    rows,
    width,
    WEIGHTED: tl.constexpr,
    CASTS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    row, tile, column, in_rows = _place(rows, ROWS, TILE)
    at = gate_up_ptr + row[:, None] * (2 * width) + column[None, :]
    gate = tl.load(at, mask=in_rows[:, None], other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=in_rows[:, None], other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        out *= tl.load(weights_ptr + row, mask=in_rows, other=0.0).to(tl.float32)[:, None]
    _store_tiles(out, values_ptr, scale_ptr, row, column, in_rows, tile, rows, width, CASTS)


def swiglu_rows(gate_up_R2F: Tensor, weights_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """See :func:`.blockwise_casts.swiglu_rows`."""
    rows, width = gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2
    values_RF, scale_kR = _empty_tiles(gate_up_R2F, width)
    _swiglu_rows_kernel[_grid(gate_up_R2F, width)](
        gate_up_R2F,
        scale_kR if weights_R is None else weights_R,
        values_RF,
        scale_kR,
        rows,
        width,
        WEIGHTED=weights_R is not None,
        CASTS=CASTS_IN_HARDWARE,
        ROWS=_ROWS,
        TILE=TILE,
    )
    return values_RF, scale_kR.T


@triton.jit
def _swiglu_backward_rows_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    gate_up_ptr,
    weights_ptr,
    out_ptr,
    grad_gate_up_ptr,
    values_ptr,
    scale_ptr,
    dots_ptr,
    rows,
    width,
    WEIGHTED: tl.constexpr,
    CASTS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    row, tile, column, in_rows = _place(rows, ROWS, TILE)
    inside = in_rows[:, None]
    first, at = row[:, None] * width + column[None, :], row[:, None] * (2 * width) + column[None, :]
    grad = tl.load(grad_ptr + first, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + width, mask=inside, other=0.0).to(tl.float32)
    weight = 1.0 + tl.zeros_like(row).to(tl.float32)
    if WEIGHTED:
        weight = tl.load(weights_ptr + row, mask=in_rows, other=0.0).to(tl.float32)
    plain, out, grad_gate, grad_up = gradients_of_swiglu(grad, gate, up, weight[:, None])
    if WEIGHTED:  # summed over the tiles of a row afterwards, in their order
        tl.store(dots_ptr + tile.to(tl.int64) * rows + row, tl.sum(grad * plain, axis=1), mask=in_rows)
    element = out_ptr.dtype.element_ty
    tl.store(out_ptr + first, out.to(element), mask=inside)
    tl.store(grad_gate_up_ptr + at, grad_gate.to(element), mask=inside)
    tl.store(grad_gate_up_ptr + at + width, grad_up.to(element), mask=inside)
    _store_tiles(grad_gate, values_ptr, scale_ptr, row, column, in_rows, tile, rows, 2 * width, CASTS)
    _store_tiles(
        grad_up, values_ptr, scale_ptr, row, column + width, in_rows, tile + width // TILE, rows, 2 * width, CASTS
    )


def swiglu_backward_rows(
    grad_RF: Tensor, gate_up_R2F: Tensor, weights_R: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor | None]:
    """See :func:`.blockwise_casts.swiglu_backward_rows`."""
    rows, width = grad_RF.shape
    out_RF, grad_gate_up = torch.empty_like(grad_RF), torch.empty_like(gate_up_R2F)
    values_R2F, scale_kR = _empty_tiles(gate_up_R2F, 2 * width)
    dots = scale_kR if weights_R is None else scale_kR.new_empty(width // TILE, rows)
    _swiglu_backward_rows_kernel[_grid(grad_RF, width)](
        grad_RF,
        gate_up_R2F,
        scale_kR if weights_R is None else weights_R,
        out_RF,
        grad_gate_up,
        values_R2F,
        scale_kR,
        dots,
        rows,
        width,
        WEIGHTED=weights_R is not None,
        CASTS=CASTS_IN_HARDWARE,
        ROWS=_ROWS,
        TILE=TILE,
        num_warps=8,
    )
    grad_weights = None if weights_R is None else dots.sum(dim=0).to(weights_R.dtype)
    return out_RF, grad_gate_up, (values_R2F, scale_kR.T), grad_weights


def _empty_tiles(like: Tensor, width: int) -> tuple[Tensor, Tensor]:
    rows = like.shape[0]
    values = like.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    return values, like.new_empty(width // TILE, rows, dtype=torch.float32)


def _grid(rows: Tensor, width: int) -> tuple[int, int]:
    return triton.cdiv(rows.shape[0], _ROWS), width // TILE
