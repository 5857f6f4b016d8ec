"""Forward, gradient of the input and gradient of the weight of every recipe: bounds of the noise, edges, gradients."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moe.moe.experts import GroupedExperts
from lightning_moe.precision.conversion import candidates, replace_multiplication
from lightning_moe.precision.emulation import emulated_grouped_mm, emulated_linear
from lightning_moe.precision.quantisation import quantise
from lightning_moe.precision.recipes import Recipe, fp8_blockwise, fp8_rowwise, fp8_tensorwise, mxfp8
from tests.precision.sqnr import grouped_sqnr, linear_sqnr, sqnr

# Lowest SQNR in dB of forward, input gradient, weight gradient, for normal values and for ones with outliers.
Three = tuple[float, float, float]
BOUNDS: list[tuple[Recipe, Three, Three]] = [
    (mxfp8(), (28, 28, 28), (28, 28, 28)),
    (mxfp8(scale="floor"), (27, 27, 27), (26, 26, 26)),
    (fp8_rowwise(), (28, 28, 28), (28, 28, 28)),
    (fp8_tensorwise(), (28, 24, 24), (27, 23, 23)),
    (fp8_blockwise(), (28, 28, 28), (27.5, 27.5, 27.5)),
]
IDS = [f"{recipe.name}-{recipe.scale}" for recipe, *_ in BOUNDS]
GROUPS = torch.tensor([1, 45, 45, 240], dtype=torch.int32)  # 1, 44, 0 and 195 rows


def operands(outliers: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(*shape, generator=generator) for shape in ((240, 256), (192, 256), (240, 192)))
    if outliers:
        x[:, 7] *= 100  # a channel, as activations have them
        x[11] *= 30  # a token
        grad[5] *= 1000
    return x.to(dtype), (0.02 * weight).to(dtype), (1e-4 * grad).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize(("recipe", "plain", "with_outliers"), BOUNDS, ids=IDS)
def test_noise_of_linears(
    recipe: Recipe,
    plain: Three,
    with_outliers: Three,
    outliers: bool,
    dtype: torch.dtype,
) -> None:
    measured = linear_sqnr(emulated_linear(recipe), *operands(outliers, dtype))
    for value, bound in zip(measured, with_outliers if outliers else plain, strict=True):
        assert bound < value < 45  # noise there is: nothing was left out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize(
    ("recipe", "plain", "with_outliers"), [b for b in BOUNDS if b[0].name != "fp8_tensorwise"], ids=lambda value: ""
)
def test_noise_of_grouped_multiplications(
    recipe: Recipe,
    plain: Three,
    with_outliers: Three,
    outliers: bool,
    dtype: torch.dtype,
) -> None:
    x, weight, grad = operands(outliers, dtype)
    experts = torch.stack([weight, -weight, 2 * weight, weight.flip(0)])
    measured = grouped_sqnr(emulated_grouped_mm(recipe), x, experts, grad, GROUPS)
    for value, bound in zip(measured, with_outliers if outliers else plain, strict=True):
        assert bound < value < 45


def test_each_multiplication_quantises_along_what_it_sums_over() -> None:
    x, weight, grad = operands(False, torch.float64)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    out = emulated_linear(mxfp8())(x, weight)
    out.backward(grad)
    row, column = (1, 32), (32, 1)
    x, weight = x.detach().requires_grad_(False), weight.detach()

    def rounded(value: Tensor, tile: tuple[int, int]) -> Tensor:
        return quantise(value, tile, "rceil")

    torch.testing.assert_close(out.detach(), rounded(x, row) @ rounded(weight, row).T, rtol=1e-12, atol=0)
    expected = rounded(grad, row) @ rounded(weight, column)
    torch.testing.assert_close(grads(x, weight, grad)[0], expected, rtol=1e-12, atol=1e-18)
    expected = rounded(grad, column).T @ rounded(x, column)
    torch.testing.assert_close(grads(x, weight, grad)[1], expected, rtol=1e-12, atol=1e-18)


def grads(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    emulated_linear(mxfp8())(x, weight).backward(grad)
    assert x.grad is not None
    assert weight.grad is not None
    return x.grad, weight.grad


@pytest.mark.parametrize("recipe", [mxfp8(), fp8_rowwise(), fp8_blockwise()], ids=lambda r: r.name)
def test_groups_do_not_know_of_each_other(recipe: Recipe) -> None:
    """Values and gradients of an expert are those of a linear with its rows; an expert without rows gets zeros."""
    x, weight, grad = operands(True, torch.float32)
    experts = torch.stack([weight, -weight, 2 * weight, weight.flip(0)]).requires_grad_()
    rows = x.clone().requires_grad_()
    out = emulated_grouped_mm(recipe)(rows, experts.transpose(1, 2), GROUPS)
    out.backward(grad)
    assert rows.grad is not None
    assert experts.grad is not None
    start = 0
    for expert, end in enumerate(GROUPS.tolist()):
        group, own = x[start:end].clone().requires_grad_(), experts[expert].detach().clone().requires_grad_()
        expected = emulated_linear(recipe)(group, own)
        expected.backward(grad[start:end])
        assert group.grad is not None
        torch.testing.assert_close(out[start:end], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rows.grad[start:end], group.grad, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(experts.grad[expert], own.grad, rtol=1e-4, atol=1e-6)
        start = end
    assert not experts.grad[2].any()


@pytest.mark.parametrize("recipe", [r for r, *_ in BOUNDS], ids=IDS)
def test_a_weight_gradient_in_high_precision_has_no_noise(recipe: Recipe) -> None:
    high = dataclasses.replace(recipe, wgrad_in_high_precision=True)
    x, weight, grad = operands(False, torch.float32)
    assert linear_sqnr(emulated_linear(high), x, weight, grad)[2] > 120
    if recipe.name != "fp8_tensorwise":
        assert grouped_sqnr(emulated_grouped_mm(high), x, weight[None].repeat(4, 1, 1), grad, GROUPS)[2] > 120


@pytest.mark.parametrize("recipe", [r for r, *_ in BOUNDS], ids=IDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_reaches_output_and_gradients(recipe: Recipe, bad: float) -> None:
    x, weight, grad = operands(False, torch.float32)
    x[3, 5] = bad
    broken, fine = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = emulated_linear(recipe)(broken, fine)
    assert not out[3].isfinite().any()
    out.backward(grad)
    assert fine.grad is not None
    assert not fine.grad[:, 5].isfinite().all()
    x, weight, grad = operands(False, torch.float32)
    grad[3, 5] = bad
    fine_rows, weight = x.requires_grad_(), weight.requires_grad_()
    emulated_linear(recipe)(fine_rows, weight).backward(grad)
    assert fine_rows.grad is not None
    assert weight.grad is not None
    assert not fine_rows.grad[3].isfinite().any()
    assert not weight.grad[5].isfinite().any()


@pytest.mark.parametrize("recipe", [mxfp8(), fp8_rowwise(), fp8_blockwise()], ids=lambda r: r.name)
def test_a_gradient_that_saturates_is_finite_and_stays_in_its_block(recipe: Recipe) -> None:
    x, weight, grad = operands(False, torch.float32)
    grad[200, 3] = 1e30
    rows, experts = x.clone().requires_grad_(), weight[None].repeat(4, 1, 1).requires_grad_()
    emulated_grouped_mm(recipe)(rows, experts.transpose(1, 2), GROUPS).backward(grad)
    assert rows.grad is not None
    assert experts.grad is not None
    assert rows.grad.isfinite().all()
    assert experts.grad.isfinite().all()
    assert rows.grad[200].abs().max() > 1e26
    assert rows.grad[:200].abs().max() < 1  # other tokens
    assert experts.grad[1].abs().max() < 1  # other experts


def test_one_scale_for_several_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="use fp8_rowwise"):
        emulated_grouped_mm(fp8_tensorwise())


@pytest.mark.parametrize("rows", [0, 1, 44])
def test_experts_with_few_rows(rows: int) -> None:
    experts = GroupedExperts(2, 64, 32)
    (candidate,) = candidates(experts, None, None)
    replace_multiplication(candidate, emulated_grouped_mm(mxfp8()), mxfp8())
    x = torch.randn(rows, 64, requires_grad=True)
    experts(x, torch.tensor([rows, rows], dtype=torch.int32)).square().sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (rows, 64)
    assert isinstance(experts.gate_up_proj.grad, Tensor)
    assert not experts.gate_up_proj.grad[1].any()


def test_an_outlier_drowns_what_shares_its_scale_and_nothing_else() -> None:
    x, weight, _ = operands(False, torch.float32)
    x[0, 0] = 1e7
    expected = x[1:].double() @ weight.double().T
    for recipe, least, most in (
        (mxfp8(), 28, 45),
        (fp8_rowwise(), 28, 45),
        (fp8_blockwise(), 28, 45),
        (fp8_tensorwise(), -1, 1),
    ):
        assert least < sqnr(emulated_linear(recipe)(x, weight)[1:], expected) < most


def test_operators_keep_the_rules_of_the_library() -> None:
    x, weight, grad = operands(False, torch.float32)
    experts = weight.T[None].repeat(4, 1, 1)
    ops: Any = torch.ops.lightning_moe
    tiles = ((1, 32), (1, 32), "rceil", False)
    x, weight, experts = (tensor.requires_grad_() for tensor in (x, weight, experts))
    torch.library.opcheck(ops.quantised_mm.default, (x, weight, *tiles, "e4m3"))
    torch.library.opcheck(ops.quantised_grouped_mm.default, (x, experts, GROUPS, *tiles))
    torch.library.opcheck(ops.quantised_grouped_outer.default, (grad, x.detach(), GROUPS, 32, "rceil"))
