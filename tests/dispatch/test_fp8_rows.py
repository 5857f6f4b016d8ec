"""The format of rows that travel in eight bits, and its Triton kernels against the plain path."""

import pytest
import torch
from torch import Tensor

from lightning_moe.dispatch.fp8_rows import (
    check_hidden_size,
    expand_rows,
    fp8_rows_again,
    pack_rows,
    round_rows,
    row_bytes,
    unpack_rows,
)
from lightning_moe.dispatch.permute import copy_rows, plan_rows
from lightning_moe.precision.quantisation import quantise
from tests.triton_interpreter import run_interpreted

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def round_trip(x: Tensor) -> Tensor:
    return expand_rows(round_rows(x), x.dtype)[0]


def random_rows(rows: int = 9, hidden: int = 384, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    spread = torch.logspace(-6, 4, rows, dtype=torch.float64)[:, None]
    return (torch.randn(rows, hidden, generator=generator, dtype=torch.float64) * spread).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_those_of_the_emulated_format(dtype: torch.dtype) -> None:
    x = random_rows(dtype=dtype)
    rounded = round_trip(x)
    assert rounded.dtype == dtype
    assert torch.equal(rounded, quantise(x, (1, 128), "rceil"))
    assert not torch.equal(rounded, x)
    scales = round_rows(x).scales_MG
    assert torch.equal(scales.log2().round().exp2(), scales)
    assert torch.equal(round_trip(rounded), rounded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_value_is_within_half_a_step(dtype: torch.dtype) -> None:
    x = random_rows(dtype=dtype)
    error = (round_trip(x).double() - x.double()).abs()
    amax = x.double().abs().unflatten(1, (-1, 128)).amax(dim=2).repeat_interleave(128, dim=1)
    # 3 bits of mantissa, and below 2**-6 of the scale, which is less than amax / 224, steps of 2**-9
    assert bool((error <= torch.maximum(x.double().abs() / 16, amax / 224 / 2**10)).all())
    noise = error.pow(2).sum(dim=1) / x.double().pow(2).sum(dim=1)
    assert -10 * noise.log10().max() > 30


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_values_stay_finite_and_what_is_not_finite_is_seen(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = random_rows(4, dtype=dtype).div(1e4)
    x[0, 0], x[0, 130], x[0, 260] = largest, -largest, largest / 2
    x[1, 5], x[2, 200], x[3, 300] = float("nan"), float("inf"), -float("inf")
    back = round_trip(x)
    assert back[0].isfinite().all()
    reached = min(largest, torch.finfo(torch.float32).max)
    assert abs(back[0, 0].item() / reached - 1) < 2**-4
    assert abs(back[0, 130].item() / reached + 1) < 2**-4
    for row, tile in ((1, 0), (2, 1), (3, 2)):
        expected = torch.zeros(384, dtype=torch.bool)
        expected[tile * 128 : tile * 128 + 128] = True
        assert torch.equal(back[row].isnan(), expected)
        assert torch.equal(back[row].isfinite(), ~expected)


def test_zeros_and_the_smallest_values() -> None:
    x = torch.zeros(3, 128)
    x[1, 0], x[1, 1] = -0.0, 2.0**-149
    x[2, 0] = torch.finfo(torch.float32).tiny
    back = round_trip(x)
    assert torch.equal(back, torch.tensor([0.0, 0.0, torch.finfo(torch.float32).tiny])[:, None] * (x != 0))
    assert back[1, 0].signbit()
    assert round_rows(x).scales_MG.isfinite().all()


@pytest.mark.parametrize("rows", [0, 5])
def test_one_buffer_holds_values_and_scales_in_half_of_the_bytes(rows: int) -> None:
    x = random_rows(3, 7168, torch.bfloat16)
    index = torch.arange(rows) % 3
    packed = pack_rows(x, index)
    assert packed.shape == (rows, row_bytes(7168))
    assert (packed.dtype, packed.is_contiguous()) == (torch.uint8, True)
    assert row_bytes(7168) / (7168 * 2) < 0.52
    unpacked, expected = unpack_rows(packed), round_rows(x[index])
    assert torch.equal(unpacked.values_MD.view(torch.uint8), expected.values_MD.view(torch.uint8))
    assert torch.equal(unpacked.scales_MG, expected.scales_MG)
    assert torch.equal(expand_rows(unpacked, torch.bfloat16)[0], round_trip(x)[index])


def test_rows_in_the_order_of_experts() -> None:
    indices = torch.tensor([[0, 3], [-1, -1], [3, 1]])
    x, weights = random_rows(3), torch.rand(3, 2)
    plan = plan_rows(indices, 4, alignment=4)
    rows, row_weights = expand_rows(round_rows(x), x.dtype, plan, weights)
    assert torch.equal(rows, copy_rows(round_trip(x), plan))
    assert torch.equal(row_weights, torch.cat([weights.flatten(), torch.zeros(1)])[plan.choice_of_row_R])  # type: ignore[arg-type]
    again = fp8_rows_again(round_rows(x), x.dtype, plan)
    assert again is not None
    assert torch.equal(again(), rows)
    with torch.no_grad():
        assert fp8_rows_again(round_rows(x), x.dtype, plan) is None


@pytest.mark.parametrize(("hidden", "works"), [(2000, "1920 or 2048"), (64, "128"), (7169, "7168 or 7296")])
def test_hidden_size_is_a_multiple_of_the_tile(hidden: int, works: str) -> None:
    message = f"hidden_size is {hidden}, but fp8_dispatch needs a multiple of 128, as in {works}; fp8_dispatch: false"
    with pytest.raises(ValueError, match=message):
        check_hidden_size(hidden)
    with pytest.raises(ValueError, match=message):
        round_rows(torch.zeros(1, hidden))
    check_hidden_size(7168)


_CHECK = """
import torch
from lightning_moe.dispatch.fp8_rows import FP8Rows, expand_rows, pack_rows, round_rows, row_bytes, unpack_rows
from lightning_moe.dispatch.fp8_rows_kernel import expand_rows_kernel, round_rows_kernel
from lightning_moe.dispatch.permute import plan_rows


def same(ours, theirs):
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    number = ~theirs.isnan() if theirs.element_size() > 1 else torch.ones_like(theirs, dtype=torch.bool)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.view(integers)[number], theirs.view(integers)[number])


torch.manual_seed(0)
every_bfloat16 = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
largest = torch.finfo(torch.float32).max
odd = [0.0, -0.0, 2.0**-149, -(2.0**-133), 2.0**-126, largest, -largest, 1.75 * 2.0**127, 1.7500001, 448.0, 464.0]
ties = [(k + 0.5) * 2.0**-9 for k in range(8)] + [1 + (k + 0.5) / 8 for k in range(8)]
values = torch.tensor(odd + ties + [float("nan"), float("inf"), -float("inf")])
for dtype in (torch.bfloat16, torch.float32):
    wide = torch.randn(5, 1280) * torch.logspace(-30, 30, 5)[:, None]
    wide[:, :128] = 0
    mixed = torch.cat([values, torch.randn(128 - len(values))]).repeat(4, 3)
    # Each of the odd values in a tile of its own, with and without a larger one, so that none hides the others
    alone = torch.zeros(64, 128)
    alone[: len(values), 0] = values
    alone[32 : 32 + len(values), 0], alone[32:, 5] = values, 448.0
    sources = [wide, mixed, alone.view(8, 1024), torch.zeros(0, 256)]
    sources.append(every_bfloat16.float().sort().values.view(32, 2048))  # what is not finite is at the ends
    for source in sources:
        x = source.to(dtype)
        if dtype == torch.bfloat16:  # Triton's interpreter, unlike a GPU, converts its subnormal values to others
            x = x.where(~(x.abs() < torch.finfo(dtype).tiny) | (x == 0), 1.0)
        rows, hidden = x.shape
        expected = round_rows(x)
        found = FP8Rows(torch.empty_like(expected.values_MD), torch.empty_like(expected.scales_MG))
        round_rows_kernel(x, None, *found)
        same(found.values_MD, expected.values_MD)
        same(found.scales_MG, expected.scales_MG)
        index = torch.randint(0, max(rows, 1), (rows,))
        packed = torch.empty(rows, row_bytes(hidden), dtype=torch.uint8)
        round_rows_kernel(x, index, *unpack_rows(packed))
        same(unpack_rows(packed).values_MD, expected.values_MD.view(torch.uint8)[index].view(torch.float8_e4m3fn))
        same(unpack_rows(packed).scales_MG, expected.scales_MG[index])
        assert torch.equal(packed, pack_rows(x, index))
        same(expand_rows_kernel(*expected, dtype, None, 1)[0], expand_rows(expected, dtype)[0])
    for alignment, top_k in ((1, 1), (16, 3)):
        x, weights = torch.randn(9, 1280).to(dtype), torch.rand(9, top_k)
        indices = torch.stack([torch.randperm(4)[:top_k] for _ in range(9)])
        indices[::4] = -1
        plan = plan_rows(indices, 4, alignment)
        rows = unpack_rows(pack_rows(x, torch.arange(9)))
        for w in (None, weights):
            ours = expand_rows_kernel(*rows, dtype, plan.choice_of_row_R, top_k, w)
            theirs = expand_rows(rows, dtype, plan, w)
            same(ours[0], theirs[0])
            assert theirs[0].any() and (w is None) == (ours[1] is None)
            if w is not None:
                same(ours[1], theirs[1])
# Padding as DeepEP leaves it has scales of 0.
blank = FP8Rows(torch.zeros(2, 128).to(torch.float8_e4m3fn), torch.zeros(2, 1))
assert not expand_rows_kernel(*blank, torch.bfloat16, None, 1)[0].any()
assert not expand_rows(blank, torch.bfloat16)[0].any()
print("equal")
"""


def test_kernels_equal_the_plain_path_to_the_bit() -> None:
    pytest.importorskip("triton")
    run_interpreted(_CHECK)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_rounds_as_a_cpu(dtype: torch.dtype) -> None:
    every_bfloat16 = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float().sort().values
    for x in (every_bfloat16.view(32, 2048).to(dtype), random_rows(dtype=dtype), random_rows(0, 256, dtype)):
        expected, found = round_rows(x), round_rows(x.cuda())
        assert torch.equal(found.values_MD.cpu().view(torch.uint8), expected.values_MD.view(torch.uint8))
        assert torch.equal(found.scales_MG.cpu().view(torch.int32), expected.scales_MG.view(torch.int32))
        index = torch.arange(len(x)).flip(0)
        packed = pack_rows(x.cuda(), index.cuda())
        assert torch.equal(packed.cpu(), pack_rows(x, index))
        back = expand_rows(unpack_rows(packed), dtype)[0].cpu()
        torch.testing.assert_close(back, round_trip(x)[index], rtol=0, atol=0, equal_nan=True)
    indices = torch.tensor([[0, 3], [-1, -1], [3, 1]])
    x, weights = random_rows(3, dtype=dtype), torch.rand(3, 2)
    plan, plan_there = plan_rows(indices, 4, alignment=4), plan_rows(indices.cuda(), 4, alignment=4)
    theirs = expand_rows(round_rows(x.cuda()), dtype, plan_there, weights.cuda())
    for one, other in zip(theirs, expand_rows(round_rows(x), dtype, plan, weights), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one.cpu(), other)
