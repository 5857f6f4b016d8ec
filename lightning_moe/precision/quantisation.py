"""Rounding to eight bits with a scale per tile, and back: the numbers that a low-precision multiplication sees.

In arithmetic on float32 and int32 alone, so that it runs, and gives the same numbers, on every device.

Shapes: ``R`` rows ordered by expert, ``N`` width, ``e`` experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe.precision.recipes import ElementFormat, ScaleRule, Tile

# Exponent of the largest value, which is 1.75 times that power of two; of the smallest normal; bits of the mantissa.
_FORMATS: dict[str, tuple[int, int, int]] = {"e4m3": (8, -6, 3), "e5m2": (15, -14, 2)}
_MANTISSA_BITS = 23  # of float32, as the others
_EXPONENT_BIAS = 127
_MANTISSA_OF_MAX = 0x600000  # of 1.75
_SMALLEST_AMAX = 1e-12


def quantise(x: Tensor, tile: Tile, scale: ScaleRule, element: ElementFormat = "e4m3") -> Tensor:
    """Rounds each tile of the last two dimensions.

    Args:
        x: Any floating dtype. Dimensions need not be multiples of the tile's.
        tile: Extent of a tile in the last two dimensions; 0 for all of a dimension.
        scale: How a tile's scale follows from its largest magnitude.
        element: Format of the elements.

    Returns:
        The rounded values in the dtype of ``x``. A tile with a value that is not finite becomes NaN as a whole.
    """
    if x.numel() == 0:
        return x.clone()
    rows, columns = x.shape[-2:]
    tiles, amax = tiled(x, tile)
    rounded = _round_with_scale(tiles, amax, scale, element).flatten(-2).flatten(-3, -2)
    return rounded[..., :rows, :columns]


def tiled(x: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """Cuts the last two dimensions into tiles, after padding with zeros.

    Returns:
        The tiles ``(..., rows of tiles, height, columns of tiles, width)``, and the largest magnitude of each, with
        height and width 1.
    """
    rows, columns = x.shape[-2:]
    height, width = tile[0] or rows, tile[1] or columns
    padded = F.pad(x, (0, -columns % width, 0, -rows % height))
    tiles = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
    return tiles, tiles.abs().amax(dim=(-3, -1), keepdim=True)


def quantise_groups(x_RN: Tensor, offsets_e: Tensor, block: int, scale: ScaleRule) -> Tensor:
    """Rounds each column of each group to E4M3, in blocks of rows that never reach into another group.

    Args:
        x_RN: Any floating dtype, rows ordered by expert.
        offsets_e: End of each expert's rows, int32; the last one is R.
        block: Rows that share a scale; 0 for all rows of a group.
        scale: How a block's scale follows from its largest magnitude.

    Returns:
        The rounded values in the dtype of ``x_RN``; as for :func:`quantise`, NaN stays visible.
    """
    rows = x_RN.shape[0]
    if rows == 0:
        return x_RN.clone()
    block = block or rows
    ends_e = offsets_e.long()
    starts_e = F.pad(ends_e[:-1], (1, 0))
    blocks_e = (ends_e - starts_e + block - 1) // block
    first_block_e = blocks_e.cumsum(0) - blocks_e
    row_R = torch.arange(rows, device=x_RN.device)
    group_R = torch.searchsorted(ends_e, row_R, right=True)
    block_R = first_block_e[group_R] + (row_R - starts_e[group_R]) // block
    # As many as there can be, which is known without asking the device.
    amax = x_RN.new_zeros(rows // block + len(offsets_e), x_RN.shape[1])
    amax.scatter_reduce_(0, block_R[:, None].expand_as(x_RN), x_RN.abs(), "amax")
    return _round_with_scale(x_RN, amax[block_R], scale, "e4m3")


def _round_with_scale(x: Tensor, amax: Tensor, rule: ScaleRule, element: ElementFormat) -> Tensor:
    scale, inverse = scale_of(amax.to(torch.float32), rule, element)
    return (round_to_element(x.to(torch.float32) * inverse, element) * scale).to(x.dtype)


def scale_of(amax: Tensor, rule: ScaleRule, element: ElementFormat = "e4m3") -> tuple[Tensor, Tensor]:
    """The scale of a tile, and its inverse.

    Powers of two are read off the bits of ``amax``: a logarithm rounds, and then misses the exponent next to a power
    of two. They are those of E8M0: no smaller than 2**-127, and not finite where ``amax`` is not.

    Args:
        amax: Largest magnitude of a tile, float32.
        rule: See :class:`~lightning_moe.precision.recipes.Recipe`.
        element: Format of the elements.
    """
    if rule == "float32":
        # Not below, because the inverse must be finite; a tile of zeros stays zero.
        scale = amax.clamp(min=_SMALLEST_AMAX) / largest_of(element)
        return scale, 1.0 / scale
    largest_exponent = _FORMATS[element][0]
    bits = amax.contiguous().view(torch.int32)
    exponent = (bits >> _MANTISSA_BITS) - largest_exponent
    if rule == "rceil":
        exponent = exponent + ((bits & ((1 << _MANTISSA_BITS) - 1)) > _MANTISSA_OF_MAX)
    exponent = exponent.clamp(min=0)
    scale = _power_of_two(exponent).where(amax.isfinite(), float("nan"))
    return scale, _power_of_two(2 * _EXPONENT_BIAS - exponent)


def largest_of(element: ElementFormat) -> float:
    """The largest value of a format: 448 or 57344."""
    return 1.75 * 2.0 ** _FORMATS[element][0]


def _power_of_two(biased_exponent: Tensor) -> Tensor:
    bits = (biased_exponent << _MANTISSA_BITS).where(biased_exponent > 0, 1 << (_MANTISSA_BITS - 1))
    return bits.to(torch.int32).view(torch.float32)


def round_to_element(x: Tensor, element: ElementFormat = "e4m3") -> Tensor:
    """Rounds float32 to the nearest value of a format, ties to even; what is larger saturates, NaN stays."""
    _, smallest_normal, mantissa_bits = _FORMATS[element]
    largest = largest_of(element)
    x = x.clamp(-largest, largest)
    exponent = (x.view(torch.int32) >> _MANTISSA_BITS) & 0xFF
    # The distance of neighbours, no finer than that of subnormals.
    exponent = exponent.clamp(min=smallest_normal + _EXPONENT_BIAS) - mantissa_bits
    step = (exponent << _MANTISSA_BITS).view(torch.float32)
    return torch.round(x / step) * step
