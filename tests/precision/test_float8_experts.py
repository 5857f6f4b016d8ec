"""Experts in FP8 as one operator: kernels equal the plain casts, and the whole stays near float64 and near bfloat16."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_moe import Float8Precision
from lightning_moe.models.deepseek_v3 import DeepSeekV3Model
from lightning_moe.moe.experts import GroupedExperts
from lightning_moe.moe.layer import MoELayer
from lightning_moe.precision import plugin as plugin_module
from lightning_moe.precision.casting import cast_on_use
from lightning_moe.precision.conversion import recipe_of
from lightning_moe.precision.emulation import emulated_grouped_mm
from lightning_moe.precision.float8_casts import quantise_columns, quantise_rows
from lightning_moe.precision.float8_experts import float8_experts
from lightning_moe.precision.recipes import fp8_rowwise
from tests.models.tiny import tiny_config, tokens
from tests.precision.experts import NAMES, Case, run_experts
from tests.precision.sqnr import sqnr
from tests.precision.test_conversion import H200
from tests.triton_interpreter import run_interpreted

EXPERTS, HIDDEN, WIDTH = 4, 128, 96
OFFSETS = torch.tensor([16, 64, 64, 256], dtype=torch.int32)  # groups of 1 and 44 rows padded to 16, none, and many
PADDING = [*range(1, 16), *range(60, 64)]
run = partial(run_experts, OFFSETS)
EXACT = GroupedExperts(EXPERTS, HIDDEN, WIDTH)


def case(weighted: bool = True) -> Case:
    generator = torch.Generator().manual_seed(0)
    normal: Any = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()
    rows, grad = normal(256, HIDDEN), normal(256, HIDDEN)
    rows[PADDING] = 0.0
    gate_up, down = normal(EXPERTS, 2 * WIDTH, HIDDEN) / HIDDEN**0.5, normal(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5
    return rows, gate_up, down, torch.rand(256, generator=generator) if weighted else None, grad


_CHECK = """
import torch
from lightning_moe.precision import float8_casts, float8_kernel

def compare(name, actual, expected):
    if isinstance(expected, tuple):
        for one, other in zip(actual, expected, strict=True):
            compare(name, one, other)
    elif expected is not None and expected.dtype == torch.float8_e4m3fn:
        steps = (actual.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()
        # The exponential in SwiGLU rounds in another way, and so decides ties in another way.
        assert steps.sum() <= (2 if "swiglu" in name else 0), (name, steps.sum())
    elif expected is not None:
        # Scales are equal; gradients of weights are sums, and what is not quantised has that exponential too.
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6, equal_nan=True)

torch.manual_seed(0)
for ends, width in (([16, 16, 160, 176], 80), ([48], 16)):
    rows, offsets = ends[-1], torch.tensor(ends, dtype=torch.int32)
    x = torch.randn(rows, width).bfloat16()
    x[0], x[5, 5], x[3, 3] = 0.0, 1e-30, 448.0
    x[:, 2] *= 1000
    weight = torch.randn(3, 32, width).bfloat16()
    gate_up, grad, weights = 2 * torch.randn(rows, 2 * width), torch.randn(rows, width), torch.rand(rows)
    calls = [
        ("quantise_rows", (x,), {}),
        ("quantise_columns", (x, offsets), {"of_rows": True}),
        ("quantise_columns", (x.float() * 1e-38, offsets), {}),
        ("quantise_weight_columns", (weight,), {}),
        ("swiglu_rows", (gate_up, weights), {}),
        ("swiglu_rows", (gate_up, None), {}),
        ("swiglu_backward_rows", (grad, gate_up, weights), {}),
        ("swiglu_backward_columns", (grad, gate_up, weights, offsets), {}),
        ("swiglu_backward_columns", (grad, gate_up, None, offsets), {}),
    ]
    for name, arguments, options in calls:
        results = [getattr(casts, name)(*arguments, **options) for casts in (float8_kernel, float8_casts)]
        compare(name, *results)
    outs = [torch.full((len(ends), 24, 16), float("nan")) for _ in range(2)]
    for module, out in zip((float8_casts, float8_kernel), outs):
        module.zero_empty_groups(out, offsets)
    assert torch.equal(outs[0].isnan(), outs[1].isnan())
    x[1, 1], x[20, 4], gate_up[2, 3] = float("nan"), float("-inf"), float("nan")
    for module in (float8_casts, float8_kernel):
        (_, columns), (_, scales) = module.quantise_columns(x, offsets, of_rows=True)
        assert scales.isnan().nonzero().flatten().tolist() == [1, 20]
        assert sorted(set(columns.isnan().nonzero()[:, 1].tolist())) == [1, 4]
        assert module.swiglu_rows(gate_up, weights)[1].isnan().nonzero().flatten().tolist() == [2]
        _, (_, columns), (_, scales), _ = module.swiglu_backward_columns(grad, gate_up, weights, offsets)
        assert scales.isnan().nonzero().flatten().tolist() == [2]
        assert columns.isnan().sum() == 2  # of gate and of up
print("equal")
"""


def test_kernels_equal_the_plain_casts() -> None:
    pytest.importorskip("triton")
    run_interpreted(_CHECK)


def test_casts_by_hand() -> None:
    x = torch.tensor([[448.0, 1.0], [449.0, -224.5], [0.0, 0.0], [3.0, float("inf")]])
    values, scale = quantise_rows(x)
    assert scale[:3].tolist() == [1.0, 2.0, 2.0**-127]
    assert scale[3].isnan()
    assert (values.float() * scale[:, None])[:3].tolist() == [[448.0, 1.0], [448.0, -224.0], [0.0, 0.0]]
    (values, scale), rows = quantise_columns(x[:3], torch.tensor([1, 1, 3], dtype=torch.int32))
    assert rows is None
    assert values.shape == (2, 3)
    assert scale.tolist() == [[1.0, 2.0**-8], [0.0, 0.0], [2.0, 1.0]]
    assert (values.float()[:, 1:] * scale[2][:, None]).T.tolist() == [[448.0, -224.0], [0.0, 0.0]]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("in_high_precision", [False, True])
def test_near_float64(in_high_precision: bool, weighted: bool) -> None:
    given = case(weighted)
    actual = run(float8_experts(fp8_rowwise(wgrad_in_high_precision=in_high_precision)), given)
    expected = run(EXACT.compute, given, torch.float64)
    for name, value, reference in zip(NAMES, actual, expected, strict=False):
        assert sqnr(value, reference) > 23, name
    assert not actual[0][PADDING].any()
    for gradient in actual[2:4]:
        assert not gradient[2].any()  # the expert without rows
        assert gradient[0].any()
    if in_high_precision:  # one operand of each is computed from what was quantised before
        assert sqnr(actual[2], expected[2]) > 24.5


@pytest.mark.parametrize("in_high_precision", [False, True])
def test_the_separate_multiplications_agree_up_to_rounding_in_between(in_high_precision: bool) -> None:
    recipe, given = fp8_rowwise(wgrad_in_high_precision=in_high_precision), case()
    experts = copy.deepcopy(EXACT)
    experts.grouped_mm = emulated_grouped_mm(recipe)  # type: ignore[method-assign, assignment]
    for name, one, other in zip(NAMES, run(float8_experts(recipe), given), run(experts.compute, given), strict=True):
        assert sqnr(one, other) > 30, name


def test_outliers_leave_other_rows_as_they_are() -> None:
    given = case()
    given[0][70] *= 1e4
    given[4][80] *= 1e3
    actual, expected = run(float8_experts(fp8_rowwise()), given), run(EXACT.compute, given, torch.float64)
    rest = [row for row in range(256) if row not in (70, 80, *PADDING)]
    assert sqnr(actual[0][rest], expected[0][rest]) > 23
    assert sqnr(actual[1][rest], expected[1][rest]) > 23
    for name, value, reference in zip(NAMES[:4], actual, expected, strict=False):
        assert sqnr(value, reference) > 21, name
    assert sqnr(actual[4][rest], expected[4][rest]) > 23


@pytest.mark.parametrize("in_high_precision", [False, True])
@pytest.mark.parametrize("place", [0, 4])
def test_what_is_not_finite_stays_visible(place: int, in_high_precision: bool) -> None:
    given = case()
    given[place][70, 3] = float("nan") if place else float("inf")
    out, grad_rows, grad_gate_up, grad_down, _ = run(
        float8_experts(fp8_rowwise(wgrad_in_high_precision=in_high_precision)), given
    )
    assert out.isnan().any(dim=1).nonzero().flatten().tolist() == ([70] if place == 0 else [])
    assert grad_rows.isnan().all(dim=1).nonzero().flatten().tolist() == [70]
    assert grad_gate_up[3].isnan().any()
    assert grad_down[3].isnan().any()
    for gradient in (grad_gate_up, grad_down):
        assert gradient[:3].isfinite().all()


def test_no_rows() -> None:
    *inputs, weights, _ = case()
    leaves = [tensor.requires_grad_() for tensor in (inputs[0][:0].clone(), *inputs[1:])]
    offsets = torch.zeros(EXPERTS, dtype=torch.int32)
    assert weights is not None
    rows, gate_up, down = leaves
    out = float8_experts(fp8_rowwise())(rows, gate_up, down, offsets, weights[:0])
    assert out.shape == (0, HIDDEN)
    out.sum().backward()
    assert [leaf.grad.count_nonzero().item() for leaf in leaves if leaf.grad is not None] == [0, 0, 0]


def test_other_dtypes_are_cast_and_gradients_are_made_as_asked() -> None:
    given, compute = case(), float8_experts(fp8_rowwise())
    assert [tensor.dtype for tensor in run(compute, given, torch.float32)] == [torch.float32] * 5
    *inputs, weights, grad = given
    expected = run(compute, given)
    for wanted in range(3):
        leaves = [tensor.detach().requires_grad_(index == wanted) for index, tensor in enumerate(inputs)]
        rows, gate_up, down = leaves
        out = compute(rows, gate_up, down, OFFSETS, weights)
        (gradient,) = torch.autograd.grad(out, leaves[wanted], grad)
        assert torch.equal(gradient, expected[1 + wanted])
    with torch.inference_mode():
        rows, gate_up, down = inputs
        assert torch.equal(compute(rows, gate_up, down, OFFSETS, weights), expected[0])


def test_no_more_is_kept_than_rows_and_gate_and_up() -> None:
    *inputs, weights, _ = case()
    leaves = [tensor.requires_grad_() for tensor in inputs]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):  # type: ignore[func-returns-value]
        rows, gate_up, down = leaves
        float8_experts(fp8_rowwise())(rows, gate_up, down, OFFSETS, weights)
    assert kept[0] is leaves[0] or kept[0].data_ptr() == leaves[0].data_ptr()  # so that layers need not keep it
    given = sum(tensor.numel() for tensor in (*leaves, OFFSETS, weights) if tensor is not None)
    assert sum(tensor.numel() for tensor in kept) == given + 256 * 2 * WIDTH


@pytest.mark.parametrize("in_high_precision", [False, True])
def test_compiled_and_recomputed_it_is_the_same(in_high_precision: bool) -> None:
    compute, given = float8_experts(fp8_rowwise(wgrad_in_high_precision=in_high_precision)), case()
    expected = run(compute, given)
    recomputed: Any = lambda *inputs: checkpoint(compute, *inputs, use_reentrant=False)
    for other in (torch.compile(compute, fullgraph=True), recomputed):
        for name, value, reference in zip(NAMES, run(other, given), expected, strict=True):
            assert torch.equal(value, reference), name


def test_operators_are_registered_as_they_behave() -> None:
    rows, gate_up, down, weights, _ = case()
    leaves = [tensor.requires_grad_() for tensor in (rows, gate_up, down)]
    torch.library.opcheck(torch.ops.lightning_moe.float8_experts.default, (*leaves, OFFSETS, weights, False))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversion as on an H200, with emulation where torchao's kernels would be; its own operators run on a CPU."""
    monkeypatch.setattr(plugin_module, "probe", lambda device: H200)
    monkeypatch.setattr(plugin_module, "torchao_grouped_mm", emulated_grouped_mm)


CONFIG = tiny_config(moe_intermediate_size=64)


def layer_of(model: DeepSeekV3Model) -> MoELayer:
    return next(layer for _, layer in model.moe_layers())


def experts_of(model: DeepSeekV3Model) -> GroupedExperts:
    return layer_of(model).experts


def outcome(plugin: Float8Precision) -> str:
    assert plugin.report is not None
    (found,) = {result for place, _, result in plugin.report.entries if place == "mlp.experts"}
    return found


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("in_high_precision", [False, True])
def test_conversion_computes_as_one(in_high_precision: bool) -> None:
    model = DeepSeekV3Model(CONFIG)
    cast_on_use(model, torch.bfloat16)
    plugin = Float8Precision("bf16", "rowwise", wgrad_in_high_precision=in_high_precision)
    plugin.convert(model)
    experts = experts_of(model)
    kind = type(experts)
    assert outcome(plugin) == "fp8_rowwise, fused casts"
    assert layer_of(model).dispatcher.alignment == 16
    report = plugin.report
    plugin.convert(model)
    assert plugin.report is report
    assert type(experts) is kind
    recipe = fp8_rowwise(wgrad_in_high_precision=in_high_precision)
    assert recipe_of(experts) == recipe

    sizes = torch.tensor([32] + [0] * (experts.num_experts - 2) + [16])
    inputs = (torch.randn(48, CONFIG.hidden_size).bfloat16(), sizes.cumsum(0).to(torch.int32), torch.rand(48))
    out = experts(*inputs)
    weights = (experts.gate_up_proj, experts.down_proj)
    assert torch.equal(out, float8_experts(recipe)(inputs[0], *weights, *inputs[1:]))
    assert torch.equal(copy.deepcopy(experts)(*inputs), out)
    seen = []
    multiply = experts.grouped_mm
    experts.grouped_mm = lambda *args: seen.append(args) or multiply(*args)  # type: ignore
    assert sqnr(experts(*inputs), out) > 30  # what looks at the multiplications sees them
    assert len(seen) == 2


@pytest.mark.usefixtures("hopper")
def test_layers_make_rows_once_more_instead_of_keeping_them() -> None:
    results = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        model = DeepSeekV3Model(CONFIG)
        model.init_weights(0)
        Float8Precision("bf16", "rowwise").convert(model)
        layer = layer_of(model)
        layer.recomputed = recomputed
        x = torch.randn(2, 24, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
        cast_on_use(model, torch.bfloat16)
        shapes: list[torch.Size] = []
        make = layer.dispatcher.dispatch

        def watched(*args: Any, make: Any = make, shapes: list[torch.Size] = shapes) -> Any:
            dispatched = make(*args)

            def again() -> Any:
                shapes.append(dispatched.rows_RD.shape)
                return dispatched.make_rows_again()

            return dispatched._replace(make_rows_again=again)

        layer.dispatcher.dispatch = watched  # type: ignore[method-assign, assignment]
        out, _ = layer(x.requires_grad_(), balance=False)
        out.float().square().mean().backward()
        assert len(shapes) == (0 if recomputed else 1)
        results.append([out, x.grad, *(parameter.grad for parameter in layer.parameters())])
    for one, other in zip(*results, strict=True):
        assert one is other or torch.equal(one, other)


class Squared(GroupedExperts):
    def compute(self, *inputs: Any) -> Tensor:
        return super().compute(*inputs).square()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("in_high_precision", "expected"), [(False, "fp8_rowwise"), (True, "fp8_rowwise, emulated")])
def test_experts_with_a_compute_of_their_own_keep_it(in_high_precision: bool, expected: str) -> None:
    model = DeepSeekV3Model(CONFIG)
    for _, layer in model.moe_layers():
        layer.experts.__class__ = Squared
    plugin = Float8Precision("bf16", "rowwise", wgrad_in_high_precision=in_high_precision)
    plugin.convert(model)
    assert outcome(plugin) == expected
    assert type(experts_of(model)).compute is Squared.compute


@pytest.mark.usefixtures("hopper")
def test_a_model_trains_compiled() -> None:
    from lightning_moe.strategies.regions import apply_to_regions

    losses = []
    for compiled in (False, True):
        model = DeepSeekV3Model(CONFIG)
        model.init_weights(0)
        Float8Precision("bf16", "rowwise").convert(model)
        apply_to_regions(model, "none", compile_regions=compiled)
        cast_on_use(model, torch.bfloat16)
        ids = tokens(CONFIG, 2, 17)
        loss = model(ids[:, :-1], ids[:, 1:]).loss
        loss.backward()
        parameter = experts_of(model)._parameters["gate_up_proj"]
        assert parameter is not None
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_operators_without_rows_are_registered_as_they_behave() -> None:
    rows, gate_up, down, weights, _ = case()
    none = torch.zeros_like(OFFSETS)
    nothing, no_weights = rows[:0].detach(), weights[:0].detach()
    gate_up_of_rows = nothing.new_empty(0, gate_up.shape[1])
    for of_rows in (True, False):
        torch.library.opcheck(
            torch.ops.lightning_moe.float8_experts_backward.default,
            (
                nothing,
                nothing,
                gate_up_of_rows,
                gate_up.detach(),
                down.detach(),
                none,
                no_weights,
                False,
                of_rows,
                True,
            ),
            test_utils=("test_schema", "test_faketensor"),
        )
