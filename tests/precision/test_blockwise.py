"""Blockwise FP8 with weight gradients in bfloat16: kernels equal the plain casts, and operators the emulated recipe."""

import copy
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moe import BlockwiseFP8Precision
from lightning_moe.models.deepseek_v3 import DeepSeekV3Model
from lightning_moe.moe.experts import GroupedExperts
from lightning_moe.precision import blockwise_mm as module
from lightning_moe.precision import plugin as plugin_module
from lightning_moe.precision.blockwise_casts import dequantise, quantise_rows, quantise_weight, quantise_weight_columns
from lightning_moe.precision.casting import cast_on_use
from lightning_moe.precision.conversion import multiplication_of
from lightning_moe.precision.emulation import emulated_grouped_mm, emulated_linear
from lightning_moe.precision.float8_experts import float8_experts
from lightning_moe.precision.float8_linear import float8_linear, has_operator
from lightning_moe.precision.quantisation import quantise
from lightning_moe.precision.recipes import fp8_blockwise, fp8_rowwise, mxfp8
from tests.models.tiny import tiny_config, tokens
from tests.precision.experts import NAMES, Case, run_experts
from tests.precision.sqnr import linear_sqnr, sqnr
from tests.precision.test_conversion import H200
from tests.triton_interpreter import run_interpreted

RECIPE = fp8_blockwise(wgrad_in_high_precision=True)
EXPERTS, HIDDEN, WIDTH = 4, 256, 128
OFFSETS = torch.tensor([128, 256, 256, 512], dtype=torch.int32)  # groups of 1 and 44 rows padded to 128, none, and many
PADDING = [*range(1, 128), *range(172, 256)]
run = partial(run_experts, OFFSETS)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def case(weighted: bool = True) -> Case:
    rows, grad = normal(512, HIDDEN, seed=1), normal(512, HIDDEN, seed=2)
    rows[PADDING] = 0.0
    gate_up, down = normal(EXPERTS, 2 * WIDTH, HIDDEN) / HIDDEN**0.5, normal(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5
    weights = torch.rand(512, generator=torch.Generator().manual_seed(3)) if weighted else None
    return rows, gate_up, down, weights, grad


_CHECK = """
import torch
from lightning_moe.precision import blockwise_casts, blockwise_kernel

def compare(name, actual, expected):
    if isinstance(expected, tuple):
        for one, other in zip(actual, expected, strict=True):
            compare(name, one, other)
    elif expected is not None and expected.dtype == torch.float8_e4m3fn:
        steps = (actual.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()
        # The exponential in SwiGLU rounds in another way, and so decides ties in another way.
        assert steps.sum() <= (2 if "swiglu" in name else 0), (name, steps.sum())
    elif expected is not None and "swiglu" in name:  # sums, and that exponential
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-5)
    elif expected is not None:
        assert torch.equal(actual, expected), name
        assert "rows" not in name or actual.stride() == (1, len(actual)), name

torch.manual_seed(0)
for rows, width in ((80, 256), (32, 128)):
    x = torch.randn(rows, width).bfloat16()
    x[0], x[5, 5], x[3, 3] = 0.0, 1e-30, 448.0
    x[:, 2] *= 1000
    weight = torch.randn(3, 256, width).bfloat16()
    weight[0, :128, :128] = 0.0
    gate_up, grad, weights = 2 * torch.randn(rows, 2 * width), torch.randn(rows, width), torch.rand(rows)
    calls = [
        ("quantise_rows", (x,)),
        ("quantise_rows", (x.float() * 1e-13,)),
        ("quantise_weight", (weight,)),
        ("quantise_weight_columns", (weight,)),
        ("swiglu_rows", (gate_up, weights)),
        ("swiglu_rows", (gate_up, None)),
        ("swiglu_backward_rows", (grad, gate_up, weights)),
        ("swiglu_backward_rows", (grad, gate_up, None)),
    ]
    for name, arguments in calls:
        compare(name, *(getattr(casts, name)(*arguments) for casts in (blockwise_kernel, blockwise_casts)))
    x[1, 1], x[20, 4], gate_up[2, 3], weight[1, 130, 5] = float("nan"), float("-inf"), float("nan"), float("inf")
    for casts in (blockwise_casts, blockwise_kernel):
        for found, shape, rows in (
            (casts.quantise_rows(x), x.shape, [1, 20]),
            (casts.swiglu_rows(gate_up, weights), x.shape, [2]),
            (casts.swiglu_backward_rows(grad, gate_up, weights)[2], gate_up.shape, [2]),
        ):
            whole = blockwise_casts.dequantise(*found)
            assert whole.shape == shape
            assert (~whole.isfinite()).any(dim=1).nonzero().flatten().tolist() == rows
            assert not whole[rows, :128].isfinite().any()
        whole = blockwise_casts.dequantise(*casts.quantise_weight(weight))
        assert not whole[1, 128:, :128].isfinite().any()
        assert (~whole.isfinite()).sum() == 128 * 128
print("equal")
"""


def test_kernels_equal_the_plain_casts() -> None:
    pytest.importorskip("triton")
    run_interpreted(_CHECK)


def test_casts_are_those_of_the_recipe() -> None:
    x = normal(5, 256).float()
    x[0, :128], x[1, 130] = 0.0, 1000.0
    values, scale = quantise_rows(x)
    assert scale.shape == (5, 2)
    assert scale.stride() == (1, 5)  # as DeepGEMM wants them
    assert scale[1, 1].item() == pytest.approx(1000 / 448)
    assert torch.equal(dequantise(values, scale), quantise(x, (1, 128), "float32"))
    weight = normal(2, 256, 384).float()
    values, scale = quantise_weight(weight)
    assert scale.shape == (2, 2, 3)
    assert torch.equal(dequantise(values, scale), quantise(weight, (128, 128), "float32"))
    assert torch.equal(dequantise(*quantise_weight_columns(weight)), dequantise(values, scale).transpose(1, 2))


def test_which_recipes_have_operators() -> None:
    recipes = (fp8_rowwise(), RECIPE, fp8_blockwise(), mxfp8())
    assert [has_operator(recipe) for recipe in recipes] == [True, True, False, False]


def test_deep_gemm_gets_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def multiply(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out_RN: Tensor, group_R: Tensor) -> None:
        calls.append(group_R)
        assert a[0].dtype == b[0].dtype == torch.float8_e4m3fn
        assert a[1].stride() == (1, a[0].shape[0])
        assert b[0].is_contiguous()
        assert b[1].is_contiguous()
        assert group_R.dtype == torch.int32
        out_RN.copy_(torch.einsum("rk,rnk->rn", dequantise(*a), dequantise(*b)[group_R]))

    rows, gate_up, *_ = case()
    a, b = quantise_rows(rows), quantise_weight(gate_up)
    expected = module.blockwise_grouped_mm(a, b, OFFSETS)
    for name in ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous"):
        monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(**{name: multiply}))
        module._deep_gemm_function.cache_clear()
        assert sqnr(module._by_deep_gemm(a, b, OFFSETS), expected) > 60
    module._deep_gemm_function.cache_clear()
    assert [group.bincount(minlength=4).tolist() for group in calls] == [[128, 128, 0, 256]] * 2
    assert (calls[0].diff() >= 0).all()


@pytest.mark.parametrize("rows", [1, 44, 128, 300])
def test_linears_equal_the_emulated_recipe(rows: int) -> None:
    given = normal(rows, HIDDEN, seed=1), 0.02 * normal(384, HIDDEN, seed=2), normal(rows, 384, seed=3)
    multiply = float8_linear(RECIPE)
    forward, grad_x, grad_weight = linear_sqnr(multiply, *given)
    assert forward > 27.5
    assert grad_x > 27.5
    assert grad_weight > 50
    results = []
    for function in (multiply, emulated_linear(RECIPE), torch.compile(multiply, fullgraph=True)):
        leaves = [tensor.clone().requires_grad_() for tensor in given[:2]]
        out = function(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, given[2])])
    for one, emulated, compiled in zip(*results, strict=True):
        assert sqnr(one, emulated) > 45  # which rounds operands to bfloat16 once more
        assert torch.equal(one, compiled)


def test_linears_without_rows_and_without_one_gradient() -> None:
    x, weight = normal(0, HIDDEN).requires_grad_(), normal(128, HIDDEN).requires_grad_()
    out = float8_linear(RECIPE)(x, weight)
    out.sum().backward()
    assert out.shape == (0, 128)
    assert weight.grad is not None
    assert not weight.grad.any()
    x = normal(3, 5, HIDDEN)
    both = float8_linear(RECIPE)(x.requires_grad_(), weight)
    (grad_x,) = torch.autograd.grad(both.float().square().sum(), x)
    alone = float8_linear(RECIPE)(x, weight.detach())
    assert torch.equal(torch.autograd.grad(alone.float().square().sum(), x)[0], grad_x)


@pytest.mark.parametrize("weighted", [True, False])
def test_experts_near_float64_and_near_separate_multiplications(weighted: bool) -> None:
    given = case(weighted)
    exact = GroupedExperts(EXPERTS, HIDDEN, WIDTH)
    emulated = copy.deepcopy(exact)
    emulated.grouped_mm = emulated_grouped_mm(RECIPE)  # type: ignore[method-assign, assignment]
    actual, expected = run(float8_experts(RECIPE), given), run(exact.compute, given, torch.float64)
    apart = run(emulated.compute, given)
    for name, value, reference, separate in zip(NAMES, actual, expected, apart, strict=False):
        assert sqnr(value, reference) > 23, name
        assert sqnr(value, separate) > 30, name
    assert not actual[0][PADDING].any()
    for gradient in actual[2:4]:
        assert not gradient[2].any()  # the expert without rows
        assert gradient[0].any()


@pytest.mark.parametrize("place", [0, 4])
def test_what_is_not_finite_stays_visible(place: int) -> None:
    given = case()
    given[place][300, 3] = float("nan") if place else float("inf")
    out, grad_rows, grad_gate_up, grad_down, _ = run(float8_experts(RECIPE), given)
    assert out.isnan().any(dim=1).nonzero().flatten().tolist() == ([300] if place == 0 else [])
    assert grad_rows.isnan().all(dim=1).nonzero().flatten().tolist() == [300]
    for gradient in (grad_gate_up, grad_down):
        assert gradient[3].isnan().any()
        assert gradient[:3].isfinite().all()


def test_outliers_leave_other_tiles_as_they_are() -> None:
    given = case()
    given[0][:, 3] *= 1e3  # a channel
    weight, x = given[1], given[0]
    out = float8_linear(RECIPE)(x[300:], weight[3])
    rest = float8_linear(RECIPE)(torch.cat((torch.zeros(212, 128), x[300:, 128:]), 1).bfloat16(), weight[3])
    expected = x[300:, 128:].double() @ weight[3, :, 128:].double().T
    assert sqnr(rest, expected) > 28
    assert sqnr(out, x[300:].double() @ weight[3].double().T) > 28


def test_operators_are_registered_as_they_behave() -> None:
    rows, gate_up, down, weights, grad = case()
    leaves = [tensor.requires_grad_() for tensor in (rows, gate_up, down)]
    ops = torch.ops.lightning_moe
    torch.library.opcheck(ops.float8_experts.default, (*leaves, OFFSETS, weights, True, True))
    torch.library.opcheck(ops.float8_linear.default, (rows, gate_up[0].detach().requires_grad_(), True, True))


CONFIG = tiny_config(hidden_size=128, intermediate_size=256, moe_intermediate_size=128, q_lora_rank=None)


def test_conversion_and_training(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(H200, modules=frozenset({"deep_gemm"}))
    monkeypatch.setattr(plugin_module, "probe", lambda device: machine)
    gradients = []
    for emulate in ("never", "always"):
        model = DeepSeekV3Model(CONFIG)
        model.init_weights(0)
        plugin = BlockwiseFP8Precision(wgrad_in_high_precision=True, emulate=emulate)  # type: ignore[arg-type]
        plugin.convert(model)
        assert plugin.report is not None
        outcomes = {place: result for place, _, result in plugin.report.entries}
        alignments = {layer.dispatcher.alignment for _, layer in model.moe_layers()}
        if emulate == "never":
            assert outcomes["mlp.experts"] == outcomes["self_attn.o_proj"] == "fp8_blockwise, fused casts"
            assert outcomes["mlp.shared_experts.gate_up_proj"] == "fp8_blockwise, fused casts"
            assert alignments == {128}
            linear = dict(model.named_modules())["layers.0.self_attn.o_proj"]
            assert isinstance(linear, nn.Linear)
            assert multiplication_of(linear) is float8_linear(RECIPE)
        else:
            assert outcomes["mlp.experts"] == "fp8_blockwise, emulated"
            assert alignments == {1}
        cast_on_use(model, torch.bfloat16)
        ids = tokens(CONFIG, 2, 17)
        model(ids[:, :-1], ids[:, 1:], balance=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    ours, emulated = gradients
    assert ours.keys() == emulated.keys()
    for name, gradient in ours.items():
        assert sqnr(gradient, emulated[name]) > 12, name


class Squared(GroupedExperts):
    def compute(self, *inputs: Any) -> Tensor:
        return super().compute(*inputs).square()


def test_without_deep_gemm_and_with_a_compute_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_module, "probe", lambda device: H200)
    with pytest.raises(ValueError, match="DeepGEMM"):
        BlockwiseFP8Precision(wgrad_in_high_precision=True, emulate="never").convert(DeepSeekV3Model(CONFIG))
    monkeypatch.setattr(plugin_module, "probe", lambda device: replace(H200, modules=frozenset({"deep_gemm"})))
    model = DeepSeekV3Model(CONFIG)
    for _, layer in model.moe_layers():
        layer.experts.__class__ = Squared
    plugin = BlockwiseFP8Precision(linears="bf16", wgrad_in_high_precision=True)
    plugin.convert(model)
    assert plugin.report is not None
    assert ("mlp.experts", "fp8_blockwise, emulated") in {(place, result) for place, _, result in plugin.report.entries}
