"""What of torchao runs on a CPU computes what ours emulates; the rest is found where this version has it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moe.precision import torchao_ops
from lightning_moe.precision.emulation import emulated_grouped_mm, emulated_linear
from lightning_moe.precision.recipes import Recipe, ScaleRule, fp8_blockwise, fp8_rowwise, fp8_tensorwise, mxfp8
from lightning_moe.precision.torchao_ops import keep_nonfinite, torchao_grouped_mm, torchao_linear, torchao_version
from tests.precision.sqnr import sqnr
from tests.torch_version import fp8_rows_on_cpu

pytest.importorskip("torchao")

GROUPS = torch.tensor([32, 32, 96], dtype=torch.int32)


def run(multiply: Callable[..., Tensor], rows: int = 96, *rest: Tensor) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shape = (96, 64) if not rest else (3, 96, 64)
    x, weight, grad = (torch.randn(*size, generator=generator).bfloat16() for size in ((rows, 64), shape, (rows, 96)))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    out = multiply(x, weight.transpose(1, 2) if rest else weight, *rest)
    out.backward(grad)
    assert x.grad is not None
    assert weight.grad is not None
    return out.detach(), x.grad, weight.grad


@fp8_rows_on_cpu
@pytest.mark.parametrize("rows", [96, 50])
@pytest.mark.parametrize("in_high_precision", [False, True])
def test_rowwise_linears_are_bit_equal(in_high_precision: bool, rows: int) -> None:
    recipe = fp8_rowwise(wgrad_in_high_precision=in_high_precision)
    for actual, expected in zip(run(torchao_linear(recipe), rows), run(emulated_linear(recipe), rows), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("in_high_precision", [False, True])
def test_tensorwise_linears_differ_by_rounding_to_bfloat16(in_high_precision: bool) -> None:
    recipe = fp8_tensorwise(wgrad_in_high_precision=in_high_precision)
    for actual, expected in zip(run(torchao_linear(recipe)), run(emulated_linear(recipe)), strict=True):
        assert sqnr(actual, expected) > 48


@pytest.mark.parametrize("in_high_precision", [False, True])
@pytest.mark.parametrize("scale", ["rceil", "floor"])
def test_our_mxfp8_is_bit_equal_to_that_of_torchao(scale: ScaleRule, in_high_precision: bool) -> None:
    recipe = mxfp8(scale=scale, wgrad_in_high_precision=in_high_precision)
    options = torchao_ops._mx_options(recipe)
    options["kernel_preference"] = type(options["kernel_preference"]).EMULATED
    theirs = torchao_ops._find("_to_mxfp8_then_scaled_mm", "moe_training.mxfp8_linear", "mx_formats.mx_linear")
    actual = run(lambda x, weight: theirs(x, weight, **options))
    for value, expected in zip(actual, run(emulated_linear(recipe)), strict=True):
        assert torch.equal(value, expected)
    grouped = torchao_ops._find("_to_mxfp8_then_scaled_grouped_mm", "moe_training.mxfp8_grouped_mm")
    actual = run(lambda a, b, offsets: grouped(a, b, offs=offsets, **options), 96, GROUPS)
    for value, expected in zip(actual, run(emulated_grouped_mm(recipe), 96, GROUPS), strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize("recipe", [mxfp8(), mxfp8(scale="floor"), fp8_rowwise()], ids=lambda r: r.name)
def test_functions_are_found(recipe: Recipe) -> None:
    assert callable(torchao_linear(recipe))
    assert torchao_linear(recipe) is torchao_linear(recipe)
    assert callable(torchao_grouped_mm(recipe))


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="has no _no_such_function") as error:
        torchao_ops._find("_no_such_function", "moe_training.mxfp8_linear", "torchao.nowhere")
    assert "torchao.prototype.moe_training.mxfp8_linear" in str(error.value)
    assert "emulate to always" in str(error.value)
    monkeypatch.setattr(torchao_ops, "torchao_version", lambda: None)
    with pytest.raises(RuntimeError, match="pip install"):
        torchao_ops._find("Float8Linear", "torchao.float8")


def test_version_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.19.0.dev20260821+cu130")
    assert torchao_version() == (0, 19)


@pytest.mark.parametrize("recipe", [pytest.param(fp8_rowwise(), marks=fp8_rows_on_cpu), fp8_tensorwise()])
def test_compiled_graphs_have_no_breaks(recipe: Recipe) -> None:
    multiply = torchao_linear(recipe)
    compiled = torch.compile(multiply, fullgraph=True)
    for actual, expected in zip(run(compiled, 50), run(multiply, 50), strict=True):
        assert torch.equal(actual, expected)


def test_blockwise_functions_are_found_with_triton() -> None:
    pytest.importorskip("triton")
    if (torchao_version() or (0, 0)) < (0, 18):
        pytest.skip("torchao has them since 0.18")
    assert callable(torchao_linear(fp8_blockwise()))
    assert callable(torchao_grouped_mm(fp8_blockwise()))


def test_blockwise_experts_stay_out_of_compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    tracing = []

    def function(a: Tensor, b: Tensor, *, offs: Tensor, **options: Any) -> Tensor:
        tracing.append(torch.compiler.is_compiling())
        sizes = torch.diff(offs, prepend=offs.new_zeros(1)).tolist()  # as torchao reads them
        return torch.cat([rows @ b[expert] for expert, rows in enumerate(a.split(sizes))])

    monkeypatch.setattr(torchao_ops, "_find", lambda *args: function)
    multiply = torchao_grouped_mm.__wrapped__(fp8_blockwise())
    compiled = torch.compile(lambda a, b, offsets: multiply(a * 2, b, offsets) + 1)
    a, b = torch.randn(6, 4, dtype=torch.bfloat16), torch.randn(2, 4, 3, dtype=torch.bfloat16)
    for first in (2, 3):
        offsets = torch.tensor([first, 6], dtype=torch.int32)
        expected = torch.cat([2 * a[:first] @ b[0], 2 * a[first:] @ b[1]]) + 1
        assert torch.equal(compiled(a, b, offsets), expected)
    assert tracing == [False, False]


def test_values_that_are_not_finite_stay_visible_in_both_directions() -> None:
    a = torch.randn(4, 6, dtype=torch.bfloat16)
    a[1, 2], a[2, 0], a[2, 1] = float("nan"), float("inf"), float("-inf")
    a.requires_grad_()
    product = torch.randn(4, 5, dtype=torch.bfloat16).requires_grad_()
    kept = keep_nonfinite(product, a)
    assert kept.isnan().all(dim=1).tolist() == [False, True, True, False]
    assert torch.equal(kept[[0, 3]], product[[0, 3]])
    above = torch.ones(4, 5, dtype=torch.bfloat16)
    above[3, 4] = float("inf")
    kept.backward(above)
    assert product.grad is not None
    assert a.grad is not None
    assert torch.equal(product.grad, above)
    assert a.grad.isnan().all(dim=1).tolist() == [False, False, False, True]
    assert not a.grad[:3].any()
