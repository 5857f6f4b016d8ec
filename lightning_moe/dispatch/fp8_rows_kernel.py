"""Triton kernels that round rows to E4M3 with a scale per tile of 128, and bring them back, in one pass each.

E4M3 is written and read by integer arithmetic: GPUs without the format run them too, and the bytes are those of the
plain path. Shapes: see :mod:`.fp8_rows`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_moe.kernels import ROUTED
from lightning_moe.precision.float8_jit import e4m3_code, magnitude_of, scale_of

_TILE = 128
_TILES = 8  # of a program
_FIRST_PAST_FINITE = 0x7F800000  # magnitudes of float32 that are not finite, as integers


@triton.jit
def _round_rows_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    source_ptr,
    index_ptr,
    values_ptr,
    scales_ptr,
    tiles,
    values_stride,
    scales_stride,
    INDEXED: tl.constexpr,
    NOT_FINITE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = row
    if INDEXED:
        source = tl.load(index_ptr + row)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    inside = tile < tiles
    columns = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    x = tl.load(source_ptr + source * tiles * TILE + columns, mask=inside[:, None], other=0.0).to(tl.float32)
    amax = tl.max(magnitude_of(x), axis=1)
    scale, inverse = scale_of(amax)
    tl.store(scales_ptr + row * scales_stride + tile, scale, mask=inside)
    code = tl.where((amax < NOT_FINITE)[:, None], e4m3_code(x * inverse[:, None]), 0x7F)
    tl.store(values_ptr + row * values_stride + columns, code.to(tl.uint8), mask=inside[:, None])


def round_rows_kernel(x_TD: Tensor, index_N: Tensor | None, values_ND: Tensor, scales_NG: Tensor) -> None:
    """Rounds rows into given memory.

    Args:
        x_TD: bfloat16 or float32, contiguous.
        index_N: Which row of ``x_TD`` stands where, int64; ``None`` for all in their order.
        values_ND: float8_e4m3fn, contiguous within a row.
        scales_NG: float32, contiguous within a row.
    """
    rows, tiles = scales_NG.shape
    if rows:
        _round_rows_kernel[(rows, triton.cdiv(tiles, _TILES))](
            x_TD,
            x_TD if index_N is None else index_N,
            values_ND.view(torch.uint8),
            scales_NG,
            tiles,
            values_ND.stride(0),
            scales_NG.stride(0),
            INDEXED=index_N is not None,
            NOT_FINITE=_FIRST_PAST_FINITE,
            TILE=_TILE,
            TILES=_TILES,
        )


@triton.jit(do_not_specialize=ROUTED)
def _expand_rows_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    values_ptr,
    scales_ptr,
    choice_ptr,
    weights_ptr,
    out_ptr,
    out_weights_ptr,
    choices,
    tiles,
    values_stride,
    scales_stride,
    largest,
    TOP_K: tl.constexpr,
    PLANNED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    choice = row
    if PLANNED:
        choice = tl.load(choice_ptr + row)
    present = choice < choices  # a row of padding belongs to no token
    source = choice // TOP_K
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    inside = tile < tiles
    columns = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    code = tl.load(values_ptr + source * values_stride + columns, mask=inside[:, None] & present, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + source * scales_stride + tile, mask=inside & present, other=0.0)
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    x = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal) * scale[:, None]
    x = tl.where(x > largest, largest, x)  # a comparison leaves NaN, which a minimum would not
    signed = (x.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    tl.store(out_ptr + row * tiles * TILE + columns, signed.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    if WEIGHTED:  # noqa: SIM102 - what is compiled, and what is computed
        if tl.program_id(1) == 0:
            tl.store(out_weights_ptr + row, tl.load(weights_ptr + choice, mask=present, other=0.0))


def expand_rows_kernel(
    values_MD: Tensor,
    scales_MG: Tensor,
    dtype: torch.dtype,
    choice_of_row_R: Tensor | None,
    top_k: int,
    weights_MK: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Brings rounded rows back, each to where the plan wants it, with their weights; a row of padding is zero.

    Args:
        values_MD: float8_e4m3fn, contiguous within a row.
        scales_MG: float32, contiguous within a row.
        dtype: Of the result, bfloat16 or float32.
        choice_of_row_R: Choice ``m * K + k`` of each row, int64, M * K for a row of padding; ``None`` for rows in their
            own order.
        top_k: Choices ``K`` of a row that came.
        weights_MK: Weight of each choice, or ``None``.

    Returns:
        ``(R, D)``, and ``(R,)`` in the weights' dtype.
    """
    arrived, tiles = scales_MG.shape
    rows = arrived if choice_of_row_R is None else choice_of_row_R.shape[0]
    out_RD = torch.empty(rows, tiles * _TILE, dtype=dtype, device=scales_MG.device)
    out_weights = None if weights_MK is None else weights_MK.new_empty(rows)
    if rows:
        _expand_rows_kernel[(rows, triton.cdiv(tiles, _TILES))](
            values_MD.view(torch.uint8),
            scales_MG,
            scales_MG if choice_of_row_R is None else choice_of_row_R,
            scales_MG if weights_MK is None else weights_MK.contiguous(),
            out_RD,
            out_RD if out_weights is None else out_weights,
            arrived * top_k,
            tiles,
            values_MD.stride(0),
            scales_MG.stride(0),
            torch.finfo(dtype).max,
            TOP_K=top_k,
            PLANNED=choice_of_row_R is not None,
            WEIGHTED=weights_MK is not None,
            TILE=_TILE,
            TILES=_TILES,
        )
    return out_RD, out_weights
