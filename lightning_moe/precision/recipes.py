"""What a low-precision multiplication is: how its operands are cut into tiles, and how a tile gets its scale.

Each of the three multiplications of a layer (forward, gradient of the input, gradient of
the weight) quantises both operands anew, with tiles along the dimension that this multiplication sums over.
"""

from dataclasses import dataclass
from typing import Literal

# Extent across and along the dimension that is summed over; 0 stands for all of it.
Tile = tuple[int, int]
ElementFormat = Literal["e4m3", "e5m2"]
ScaleRule = Literal["rceil", "floor", "float32"]
Kind = Literal["linear", "grouped"]
RecipeName = Literal["mxfp8", "fp8_rowwise", "fp8_tensorwise", "fp8_blockwise"]


@dataclass(frozen=True)
class Recipe:
    """How the operands of multiplications are quantised.

    Args:
        name: The format.
        activation_tile: Elements of an activation or gradient that share a scale.
        weight_tile: Elements of a weight that share a scale.
        scale: How a tile's scale follows from its largest magnitude: a power of two, rounded up (``"rceil"``) or such
            that the largest power of two below fits (``"floor"``), or the exact quotient (``"float32"``).
        wgrad_in_high_precision: Whether the gradient of the weight is multiplied without quantisation.
        gradient: Format of the elements of gradients; those of activations and weights are E4M3.
    """

    name: RecipeName
    activation_tile: Tile
    weight_tile: Tile
    scale: ScaleRule
    wgrad_in_high_precision: bool = False
    gradient: ElementFormat = "e4m3"


def mxfp8(*, scale: ScaleRule = "rceil", wgrad_in_high_precision: bool = False) -> Recipe:
    """MXFP8 of the OCP Microscaling specification 1.0: blocks of 32 with E8M0 scales."""
    return Recipe("mxfp8", (1, 32), (1, 32), scale, wgrad_in_high_precision)


def fp8_rowwise(*, wgrad_in_high_precision: bool = False) -> Recipe:
    """FP8 with one power-of-two scale per row and column of a product."""
    return Recipe("fp8_rowwise", (1, 0), (1, 0), "rceil", wgrad_in_high_precision)


def fp8_tensorwise(*, wgrad_in_high_precision: bool = False) -> Recipe:
    """FP8 with one scale per tensor, and gradients in E5M2, whose range a single scale needs; for linears only."""
    return Recipe("fp8_tensorwise", (0, 0), (0, 0), "float32", wgrad_in_high_precision, gradient="e5m2")


def fp8_blockwise(*, wgrad_in_high_precision: bool = False) -> Recipe:
    """The framework of the DeepSeek-V3 report, section 3.3.2: 1x128 tiles of activations, 128x128 blocks of weights."""
    return Recipe("fp8_blockwise", (1, 128), (128, 128), "float32", wgrad_in_high_precision)
