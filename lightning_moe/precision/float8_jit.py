"""What the Triton kernels of FP8 share: scales, E4M3, tiles that stay within a group, and transposed stores."""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton's interpreter rounds casts to E4M3 wrongly, so there integers do it; a GPU rounds to nearest and saturates.
CASTS_IN_HARDWARE = os.environ.get("TRITON_INTERPRET", "0") != "1"


@triton.jit
def scale_of(amax):  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    # The least power of two by which 448 = 1.75 * 2**8 holds the magnitude of these bits, no smaller than 2**-127; NaN
    # for magnitudes that are not finite, which are the largest as integers. And its inverse.
    exponent = tl.maximum((amax >> 23) - 8 + ((amax & 0x7FFFFF) > 0x600000).to(tl.int32), 0)
    scale = tl.where(exponent > 0, exponent << 23, 1 << 22)
    scale = tl.where(amax < 0x7F800000, scale, 0x7FC00000)
    return scale.to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def magnitude_of(x):  # type: ignore[no-untyped-def]
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def to_e4m3(x, CASTS: tl.constexpr):  # type: ignore[no-untyped-def]
    if CASTS:  # noqa: SIM108 - what is compiled, and what is computed
        code = x.to(tl.float8e4nv)
    else:
        code = e4m3_code(x).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return code


@triton.jit
def e4m3_code(x):  # type: ignore[no-untyped-def]
    # By integers, to nearest; finite values saturate.
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 448.0)
    kept = magnitude.to(tl.int32, bitcast=True)
    # Ties to even: 3 bits of the mantissa stay; below 2**-6 adding 2**14 leaves steps of 2**-9.
    normal = ((kept + 0x7FFFF + ((kept >> 20) & 1)) >> 20) - 960
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude < 0.015625, subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit
def locate(offsets_ptr, tile, groups, ROWS: tl.constexpr, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    # Tiles begin anew in each group: the group of a tile, its first row, and where tile and group begin and end. What
    # is beyond the last tile has no rows.
    index = tl.arange(0, GROUPS)
    present = index < groups
    ends = tl.load(offsets_ptr + index, mask=present, other=0)
    starts = tl.load(offsets_ptr + index - 1, mask=present & (index > 0), other=0)
    tiles = (ends - starts + ROWS - 1) // ROWS
    last = tl.cumsum(tiles, axis=0)
    mine = (last - tiles <= tile) & (tile < last)
    group = tl.sum(tl.where(mine, index, 0), axis=0)
    # Groups begin at multiples of 16; said by arithmetic, because hints are lost when functions are inlined.
    group_start = tl.sum(tl.where(mine, starts, 0), axis=0) // 16 * 16
    within = tl.sum(tl.where(mine, tile - last + tiles, 0), axis=0) * ROWS
    end = tl.sum(tl.where(mine, ends, 0), axis=0) // 16 * 16
    return group, group_start, within, end


@triton.jit
def store_transposed(  # type: ignore[no-untyped-def]
    x,
    transposed_ptr,
    amax_ptr,
    scale_ptr,
    column,
    in_columns,
    in_rows,
    start,
    stride,
    first_column,
    first_of_group,
    r,
    c,
    CASTS: tl.constexpr,
):
    # `column` counts through all groups, `first_column` from the first row of the transposed tensor.
    scale, inverse = scale_of(tl.load(amax_ptr + column, mask=in_columns, other=0))
    tl.store(scale_ptr + column, scale, mask=in_columns & first_of_group)
    at = transposed_ptr + start + first_column.to(tl.int64) * stride + c[:, None] * stride + r[None, :]
    tl.store(at, tl.trans(to_e4m3(x * inverse[None, :], CASTS)), mask=in_columns[:, None] & in_rows[None, :])


def zeros_of(groups: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Two of ``(groups, width)``, for the bits of magnitudes and for scales, in one launch."""
    amax, scale = like.new_zeros(2, groups, width, dtype=torch.int32)
    return amax, scale.view(torch.float32)


def groups_of_tile(groups: int) -> int:
    """How many groups :func:`locate` looks at."""
    return max(triton.next_power_of_2(groups), 16)


def warps_of(block: int) -> int:
    """So many that each thread has 16 elements of a row, which stay in its registers."""
    return min(max(block // 512, 4), 32)
