"""Triton kernels that cast what is multiplied to E4M3 with power-of-two scales, each in as few passes as there are.

The functions and their results are those of :mod:`.float8_casts`, which says what each one does. What is summed over
rows is quantised by columns within a group, and written transposed: one pass for the largest magnitudes, by atomic
maxima of integers, which have the same result in any order, and one that writes. Shapes: see :mod:`.float8_casts`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_moe.precision.float8_casts import ROW_MULTIPLE
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
from lightning_moe.precision.float8_swiglu_kernel import swiglu_backward_columns, swiglu_backward_rows, swiglu_rows

__all__ = [
    "quantise_columns",
    "quantise_rows",
    "quantise_weight",
    "quantise_weight_columns",
    "quantise_whole_columns",
    "swiglu_backward_columns",
    "swiglu_backward_rows",
    "swiglu_rows",
    "zero_empty_groups",
]
_ROWS, _COLUMNS, _WARPS = 64, 128, 4  # a tile
_ZEROED = 8192  # elements of a program


@triton.jit
def _quantise_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, values_ptr, scale_ptr, width, CASTS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    scale, inverse = scale_of(tl.max(magnitude_of(x), axis=0))
    tl.store(values_ptr + row * width + columns, to_e4m3(x * inverse, CASTS), mask=inside)
    tl.store(scale_ptr + row, scale)


def quantise_rows(x_RK: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`.float8_casts.quantise_rows`."""
    rows, width = x_RK.shape
    values_RK = torch.empty_like(x_RK, dtype=torch.float8_e4m3fn)
    scale_R = x_RK.new_empty(rows, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    _quantise_rows_kernel[(rows,)](
        x_RK, values_RK, scale_R, width, CASTS=CASTS_IN_HARDWARE, BLOCK=block, num_warps=warps_of(block)
    )
    return values_RK, scale_R


@triton.jit
def _amax_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    offsets_ptr,
    row_amax_ptr,
    column_amax_ptr,
    rows,
    width,
    groups,
    OF_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    group, group_start, within, end = locate(offsets_ptr, tl.program_id(1), groups, ROWS, GROUPS)
    first = group_start + within
    r, c = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = first + r < tl.minimum(end, rows), c < width
    at = x_ptr + first.to(tl.int64) * width + r[:, None] * width + c[None, :]
    x = tl.load(at, mask=in_rows[:, None] & in_columns[None, :], other=0.0).to(tl.float32)
    bits = magnitude_of(x)
    tl.atomic_max(column_amax_ptr + group * width + c, tl.max(bits, axis=0), mask=in_columns, sem="relaxed")
    if OF_ROWS:
        tl.atomic_max(row_amax_ptr + first + r, tl.max(bits, axis=1), mask=in_rows, sem="relaxed")


@triton.jit
def _transpose_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    offsets_ptr,
    row_amax_ptr,
    column_amax_ptr,
    values_ptr,
    scale_ptr,
    transposed_ptr,
    column_scale_ptr,
    rows,
    width,
    stride,
    groups,
    OF_ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    CASTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    group, group_start, within, end = locate(offsets_ptr, tl.program_id(1), groups, ROWS, GROUPS)
    first = group_start + within
    first_column = tl.program_id(0) * COLUMNS
    r, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    in_columns = first_column + c < width
    in_rows = first + r < tl.minimum(end, rows)  # what is transposed has more, of zeros
    inside = in_rows[:, None] & in_columns[None, :]
    place = first.to(tl.int64) * width + first_column
    x = tl.load(x_ptr + place + r[:, None] * width + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if OF_ROWS:
        scale, inverse = scale_of(tl.load(row_amax_ptr + first + r, mask=in_rows, other=0))
        values = to_e4m3(x * inverse[:, None], CASTS)
        tl.store(values_ptr + place + r[:, None] * width + c[None, :], values, mask=inside)
        tl.store(scale_ptr + first + r, scale, mask=in_rows & (first_column == 0))
    start = first.to(tl.int64)
    if GROUPED:
        start = group_start.to(tl.int64) * width + within
    store_transposed(
        x,
        transposed_ptr,
        column_amax_ptr,
        column_scale_ptr,
        group * width + first_column + c,
        in_columns,
        first + r < end,
        start,
        stride,
        first_column,
        (within == 0) & (first < end),
        r,
        c,
        CASTS,
    )


def quantise_columns(
    x_RN: Tensor, offsets_e: Tensor, *, of_rows: bool = False
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """See :func:`.float8_casts.quantise_columns`; groups are multiples of 16 rows."""
    rows, width = x_RN.shape
    return _quantise_tiles(x_RN, offsets_e, x_RN.new_empty(width, rows, dtype=torch.float8_e4m3fn), of_rows)


def quantise_whole_columns(
    x_MN: Tensor, *, of_rows: bool = False
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """See :func:`.float8_casts.quantise_whole_columns`; there must be rows."""
    rows, width = x_MN.shape
    padded = triton.cdiv(rows, ROW_MULTIPLE) * ROW_MULTIPLE
    end = torch.full((1,), padded, dtype=torch.int32, device=x_MN.device)
    transposed_NM = x_MN.new_empty(width, padded, dtype=torch.float8_e4m3fn)
    (_, scale_1N), of = _quantise_tiles(x_MN, end, transposed_NM, of_rows)
    return (transposed_NM, scale_1N[0]), of


def quantise_weight(weight_eNK: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`.float8_casts.quantise_weight`."""
    values, scale = quantise_rows(weight_eNK.flatten(0, 1))
    return values.view(weight_eNK.shape), scale.view(weight_eNK.shape[:2])


def quantise_weight_columns(weight_eNK: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`.float8_casts.quantise_weight_columns`."""
    experts, rows, width = weight_eNK.shape
    ends_e = torch.arange(rows, experts * rows + 1, rows, dtype=torch.int32, device=weight_eNK.device)
    transposed_eKN = weight_eNK.new_empty(experts, width, rows, dtype=torch.float8_e4m3fn)
    return _quantise_tiles(weight_eNK.flatten(0, 1), ends_e, transposed_eKN, False)[0]


def _quantise_tiles(
    x_RN: Tensor, offsets_e: Tensor, transposed: Tensor, of_rows: bool
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    (rows, width), groups = x_RN.shape, len(offsets_e)
    column_amax, column_scale = zeros_of(groups, width, x_RN)
    row_amax, values, scale_R = offsets_e, x_RN, column_scale
    if of_rows:
        # Of whole multiples, so that the scales, which come after the magnitudes, begin where libraries can read them.
        row_amax, scale_R = zeros_of(1, triton.cdiv(rows, ROW_MULTIPLE) * ROW_MULTIPLE, x_RN)
        scale_R = scale_R[0, :rows]
        values = torch.empty_like(x_RN, dtype=torch.float8_e4m3fn)
    grid = (triton.cdiv(width, _COLUMNS), triton.cdiv(rows, _ROWS) + groups)
    tile = {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "GROUPS": groups_of_tile(groups), "num_warps": _WARPS}
    _amax_kernel[grid](x_RN, offsets_e, row_amax, column_amax, rows, width, groups, OF_ROWS=of_rows, **tile)
    _transpose_kernel[grid](
        x_RN,
        offsets_e,
        row_amax,
        column_amax,
        values,
        scale_R,
        transposed,
        column_scale,
        rows,
        width,
        transposed.shape[-1],
        groups,
        OF_ROWS=of_rows,
        GROUPED=transposed.dim() == 3,
        CASTS=CASTS_IN_HARDWARE,
        **tile,
    )
    return (transposed, column_scale), (values, scale_R) if of_rows else None


@triton.jit
def _zero_empty_kernel(  # type: ignore[no-untyped-def]
    out_ptr, offsets_ptr, size, BLOCK: tl.constexpr
):
    group = tl.program_id(1)
    end = tl.load(offsets_ptr + group)
    start = tl.load(offsets_ptr + group - 1, mask=group > 0, other=0)
    if start == end:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), dtype=out_ptr.dtype.element_ty)
        tl.store(out_ptr + group.to(tl.int64) * size + at, zeros, mask=at < size)


def zero_empty_groups(out_eNK: Tensor, offsets_e: Tensor) -> None:
    """See :func:`.float8_casts.zero_empty_groups`."""
    size = out_eNK.shape[1] * out_eNK.shape[2]
    _zero_empty_kernel[(triton.cdiv(size, _ZEROED), len(offsets_e))](out_eNK, offsets_e, size, BLOCK=_ZEROED)
