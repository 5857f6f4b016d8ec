"""Rounding to eight bits: exact values, edges of E8M0, blocks that end where a group ends, and values not finite."""

import math

import pytest
import torch
from torch import Tensor

from lightning_moe.precision.quantisation import quantise, quantise_groups, round_to_element, scale_of
from lightning_moe.precision.recipes import ElementFormat, ScaleRule


@pytest.mark.parametrize(("element", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_elements_are_those_of_the_library(element: ElementFormat, dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()].sort().values
    between = (every[1:] + every[:-1]) / 2  # ties
    near = torch.cat([between.nextafter(torch.tensor(math.inf)), between.nextafter(torch.tensor(-math.inf))])
    noise = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-10, 10).repeat(1000)
    limit = torch.finfo(dtype).max
    for values in (every, between, near, noise):
        assert torch.equal(round_to_element(values, element), values.clamp(-limit, limit).to(dtype).float())


# Largest magnitude of a block, exponents of the scale rounded up and rounded as in the specification.
ULP = 2.0**-23
E8M0 = [
    (448.0, 0, 0),
    (448.0 * (1 + ULP), 1, 0),  # the next float32: rounding up starts here
    (447.0, 0, 0),
    (1.0, -8, -8),
    (1.75, -8, -8),
    (1.75 + ULP, -7, -8),
    (2.0 - 2.0**-20, -7, -8),  # in bfloat16 this is 2, and the exponent another
    (2.0, -7, -7),
    (3.4028234663852886e38, 120, 119),  # the largest float32
    (448.0 * 2.0**-127, -127, -127),
    (2.0**-126, -127, -127),  # would be -134: no smaller scale exists
    (2.0**-149, -127, -127),  # the smallest float32
    (0.0, -127, -127),
]


@pytest.mark.parametrize(("amax", "up", "floor"), E8M0)
def test_exponents_of_power_of_two_scales(amax: float, up: int, floor: int) -> None:
    rules: list[tuple[ScaleRule, int]] = [("rceil", up), ("floor", floor)]
    for rule, exponent in rules:
        scale, inverse = scale_of(torch.tensor([amax]), rule)
        assert scale.item() == 2.0**exponent
        assert inverse.item() == 2.0**-exponent


def test_rounding_up_never_saturates_and_flooring_does() -> None:
    block = torch.full((1, 32), 1.0)
    block[0, 0] = 2.0 - 2.0**-20
    assert quantise(block, (1, 32), "rceil")[0, 0] == 2.0
    assert quantise(block, (1, 32), "floor")[0, 0] == 1.75  # 448 * 2**-8


@pytest.mark.parametrize("rule", ["rceil", "floor", "float32"])
def test_blocks_of_zeros_are_zero_and_tiny_ones_finite(rule: ScaleRule) -> None:
    x = torch.zeros(4, 64)
    x[1] = 2.0**-149
    x[2, 32:] = 3.0
    for rounded in (quantise(x, (1, 32), rule), quantise_groups(x.T, torch.tensor([32, 64]), 32, rule).T):
        assert rounded.isfinite().all()
        assert torch.equal(rounded[0], x[0])
        assert torch.equal(rounded[2], x[2])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", ["rceil", "floor", "float32"])
def test_what_is_not_finite_takes_its_block_and_no_other(rule: ScaleRule, bad: float) -> None:
    x = torch.ones(3, 96, dtype=torch.bfloat16)
    x[1, 40] = bad
    rounded = quantise(x, (1, 32), rule)
    expected = torch.zeros(3, 96, dtype=torch.bool)
    expected[1, 32:64] = True
    assert torch.equal(rounded.isnan(), expected)
    by_group = quantise_groups(x.T, torch.tensor([33, 96]), 32, rule)
    expected = torch.zeros(96, 3, dtype=torch.bool)
    expected[33:65, 1] = True  # the blocks of the second group start with it
    assert torch.equal(by_group.isnan(), expected)


def tile_amax(x: Tensor, tile: tuple[int, int], row: int, column: int) -> float:
    height, width = tile
    top, left = row // height * height, column // width * width
    return x[top : top + height, left : left + width].abs().max().item()


@pytest.mark.parametrize("tile", [(1, 128), (128, 128), (1, 32), (32, 1)])
def test_a_tile_shares_one_scale(tile: tuple[int, int]) -> None:
    """The shapes of the DeepSeek-V3 report among them, and 200 x 300: tiles at the edge are smaller."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 300, generator=generator) * torch.exp(torch.randn(200, 300, generator=generator))
    rounded = quantise(x, tile, "float32")
    assert rounded.shape == x.shape
    for row, column in ((0, 0), (127, 127), (128, 128), (130, 200), (199, 299)):
        scale = tile_amax(x, tile, row, column) / 448
        element = (x[row, column] / scale).to(torch.float8_e4m3fn).float()
        assert rounded[row, column].item() == pytest.approx((element * scale).item(), rel=1e-6)


def test_groups_are_rounded_as_if_each_was_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 16, generator=generator) * torch.logspace(-3, 3, 80)[:, None]
    offsets = torch.tensor([1, 45, 45, 80], dtype=torch.int32)  # 1, 44, 0 and 35 rows
    for block in (32, 128, 0):
        rounded = quantise_groups(x, offsets, block, "rceil")
        for start, end in ((0, 1), (1, 45), (45, 80)):
            assert torch.equal(rounded[start:end], quantise(x[start:end], (block or 0, 1), "rceil"))


def test_a_tensor_and_a_row_can_be_one_tile() -> None:
    x = torch.tensor([[448.0, 1.0], [2.0**-9, 2.0**-12]])
    assert torch.equal(quantise(x, (1, 0), "rceil"), torch.tensor([[448.0, 1.0], [2.0**-9, 2.0**-12]]))
    assert torch.equal(quantise(x, (0, 0), "float32"), torch.tensor([[448.0, 1.0], [2.0**-9, 0.0]]))
    assert quantise(x[:0], (1, 32), "rceil").shape == (0, 2)
    assert quantise_groups(x[:0], torch.tensor([0, 0]), 32, "rceil").shape == (0, 2)
