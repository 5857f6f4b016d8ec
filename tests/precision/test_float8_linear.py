"""Linears in FP8 as one operator: kernels equal the plain casts, and all equals the emulated recipe."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moe import Float8Precision
from lightning_moe.models.deepseek_v3 import DeepSeekV3Model
from lightning_moe.precision import float8_linear as module
from lightning_moe.precision import plugin as plugin_module
from lightning_moe.precision.casting import cast_on_use
from lightning_moe.precision.conversion import multiplication_of, recipe_of
from lightning_moe.precision.emulation import emulated_linear
from lightning_moe.precision.float8_casts import quantise_rows, quantise_whole_columns
from lightning_moe.precision.float8_linear import float8_linear
from lightning_moe.precision.health import PrecisionHealth
from lightning_moe.precision.recipes import fp8_rowwise
from tests.models.tiny import tiny_config, tokens
from tests.precision.sqnr import linear_sqnr, sqnr
from tests.precision.test_conversion import H200
from tests.precision.test_health import CONFIG as HEALTH_CONFIG
from tests.precision.test_health import run as train
from tests.triton_interpreter import run_interpreted

INNER, OUTER = 64, 96
NAMES = ("forward", "input", "weight")
Case = tuple[Tensor, Tensor, Tensor]  # x, weight, gradient


def case(*leading: int) -> Case:
    generator = torch.Generator().manual_seed(0)
    shapes = ((*leading, INNER), (OUTER, INNER), (*leading, OUTER))
    x, weight, grad = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return x, 0.02 * weight, 1e-4 * grad


def run(multiply: Callable[[Tensor, Tensor], Tensor], given: Case) -> list[Tensor]:
    """The result and both gradients."""
    x, weight, grad = (tensor.detach() for tensor in given)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    out = multiply(*leaves)
    assert out.dtype == x.dtype
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


_CHECK = """
import torch
from lightning_moe.precision import float8_casts, float8_kernel
from lightning_moe.precision import float8_linear as module
from lightning_moe.precision.recipes import fp8_rowwise

def same(one, other):
    if one is None or other is None:
        return one is other
    if isinstance(one, tuple):
        return all(same(a, b) for a, b in zip(one, other, strict=True))
    assert one.dtype == other.dtype and one.shape == other.shape, (one.shape, other.shape)
    if one.dtype == torch.float8_e4m3fn:
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return torch.equal(one, other)

torch.manual_seed(0)
for rows, width in ((1, 16), (15, 48), (16, 144), (17, 16), (65, 32), (127, 272), (130, 64)):
    x = torch.randn(rows, width).bfloat16()
    x[:, 2] *= 1000
    x[0, 3] = 0.0
    x[rows // 2] = 0.0
    for of_rows in (False, True):
        one, other = (casts.quantise_whole_columns(x, of_rows=of_rows) for casts in (float8_kernel, float8_casts))
        assert same(one, other), (rows, width, of_rows)
    x[rows - 1, 1] = float("nan")
    (values, scale), (_, row_scale) = float8_kernel.quantise_whole_columns(x, of_rows=True)
    assert scale.isnan().nonzero().flatten().tolist() == [1]
    assert row_scale.isnan().nonzero().flatten().tolist() == [rows - 1]
    assert not values[:, rows:].view(torch.uint8).any()

def checked(a, b, scale_a, scale_b, out_dtype, use_fast_accum):
    # What torch demands on CUDA, and cuBLAS of addresses.
    (m, k), n = a.shape, b.shape[1]
    assert a.dtype == b.dtype == torch.float8_e4m3fn and scale_a.dtype == scale_b.dtype == torch.float32
    assert a.is_contiguous() and b.T.is_contiguous() and b.shape[0] == k
    assert k % 16 == 0 and n % 16 == 0, (m, k, n)
    assert scale_a.shape == (m, 1) and scale_b.shape == (1, n)
    assert scale_a.is_contiguous() and scale_b.is_contiguous()
    assert not any(tensor.data_ptr() % 16 for tensor in (a, b, scale_a, scale_b))
    assert use_fast_accum == (m != 80), m  # the gradient of the weight sums over all tokens
    calls.append((m, k, n))
    return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

calls = []
plain = module.casts_for, module.multiply_quantised
for rows in (1, 17, 48):
    x, weight, grad = torch.randn(rows, 32), torch.randn(80, 32), torch.randn(rows, 80)
    x, weight, grad = x.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), grad.bfloat16()
    for in_high_precision in (False, True):
        multiply = module.float8_linear(fp8_rowwise(wgrad_in_high_precision=in_high_precision))
        results = []
        for on_gpu in (False, True):
            if on_gpu:
                torch._scaled_mm, original = checked, torch._scaled_mm
                module.casts_for = lambda operand, blockwise: float8_kernel
                module.multiply_quantised = module._scaled_mm
            out = multiply(x, weight)
            results.append((out, *torch.autograd.grad(out, (x, weight), grad, retain_graph=True)))
            if on_gpu:  # and each gradient by itself
                results.append((out, *(torch.autograd.grad(multiply(x, weight.detach()), x, grad)),
                                *torch.autograd.grad(multiply(x.detach(), weight), weight, grad)))
                torch._scaled_mm, (module.casts_for, module.multiply_quantised) = original, plain
        assert same(results[0], results[1]) and same(results[0], results[2]), rows
assert (17, 80, 32) in calls and (80, 32, 32) in calls and (80, 16, 32) in calls
print("equal")
"""


def test_kernels_equal_the_plain_casts() -> None:
    pytest.importorskip("triton")
    run_interpreted(_CHECK)


def test_casts_by_hand() -> None:
    x = torch.tensor([[448.0, 1.0, 0.0], [449.0, -224.5, 0.0], [3.0, 0.5, float("nan")]])
    (values, scale), rows = quantise_whole_columns(x)
    assert rows is None
    assert values.shape == (3, 16)
    assert scale[:2].tolist() == [2.0, 1.0]
    assert scale[2].isnan()
    assert (values.float() * scale[:, None])[:2, :3].tolist() == [[448.0, 448.0, 3.0], [1.0, -224.0, 0.5]]
    assert not values[:, 3:].float().any()
    _, rows = quantise_whole_columns(x, of_rows=True)
    assert rows is not None
    assert rows[1][:2].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("rows", [1, 33])
def test_torch_multiplies_what_was_quantised(rows: int) -> None:
    """Torch has the operator for CPUs too, with the same layout."""
    x, weight, _ = case(rows)
    a, b = quantise_rows(x), quantise_rows(weight)
    try:
        actual = module._scaled_mm(a, b)
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"not in this torch: {error}")
    assert actual.shape == (rows, OUTER)
    assert sqnr(actual, module.multiply_quantised(a, b)) > 50


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 8191])
@pytest.mark.parametrize("in_high_precision", [False, True])
def test_near_float64_and_equal_to_emulation(in_high_precision: bool, rows: int) -> None:
    recipe, given = fp8_rowwise(wgrad_in_high_precision=in_high_precision), case(rows)
    noise = linear_sqnr(float8_linear(recipe), *given)
    for name, value in zip(NAMES, noise, strict=True):
        assert 27.5 < value < (60 if in_high_precision and name == "weight" else 45), name
    if in_high_precision:
        assert noise[2] > 48
    actual, expected = (run(make(recipe), given) for make in (float8_linear, emulated_linear))
    for name, one, other in zip(NAMES, actual, expected, strict=True):
        assert sqnr(one, other) > 50, name  # the order of summation, rounded to bfloat16


def test_outliers_leave_other_rows_as_they_are() -> None:
    x, weight, grad = case(200)
    x[70] *= 1e30
    grad[80] *= 1e20
    out, grad_x, grad_weight = run(float8_linear(fp8_rowwise()), (x, weight, grad))
    x64, weight64, grad64 = x.double(), weight.double(), grad.double()
    for name, actual, expected, row in (("out", out, x64 @ weight64.T, 70), ("grad", grad_x, grad64 @ weight64, 80)):
        rest = torch.arange(200) != row
        assert actual.isfinite().all(), name
        assert sqnr(actual[rest], expected[rest]) > 28, name
        assert sqnr(actual[row] * 1e-20, expected[row] * 1e-20) > 27, name
    assert grad_weight.isfinite().all()


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 3, 7)])
def test_any_leading_shape(leading: tuple[int, ...]) -> None:
    given = case(*leading)
    out, grad_x, grad_weight = run(float8_linear(fp8_rowwise()), given)
    assert out.shape == (*leading, OUTER)
    assert grad_x.shape == (*leading, INNER)
    x, weight, grad = given
    flat = run(float8_linear(fp8_rowwise()), (x.reshape(-1, INNER), weight, grad.reshape(-1, OUTER)))
    assert torch.equal(out.reshape(-1, OUTER), flat[0])
    assert torch.equal(grad_x.reshape(-1, INNER), flat[1])
    assert torch.equal(grad_weight, flat[2])


def test_layouts_in_memory_change_nothing() -> None:
    x, weight, grad = case(6)
    grad = grad[:1].expand(6, OUTER)
    expected = run(float8_linear(fp8_rowwise()), (x, weight, grad.contiguous()))
    given = (x.T.contiguous().T, weight.T.contiguous().T, grad)
    for name, one, other in zip(NAMES, run(float8_linear(fp8_rowwise()), given), expected, strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("in_high_precision", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_what_is_not_finite_stays_visible(bad: float, in_high_precision: bool) -> None:
    multiply = float8_linear(fp8_rowwise(wgrad_in_high_precision=in_high_precision))

    def places(operand: int, row: int, column: int) -> list[tuple[list[int], list[int]]]:
        """Rows and columns that are not finite as a whole, of the result and of both gradients."""
        given = case(20)
        given[operand][row, column] = bad
        found = []
        for tensor in run(multiply, given):
            whole = ~tensor.isfinite()
            rows, columns = whole.all(dim=1).nonzero().flatten(), whole.all(dim=0).nonzero().flatten()
            assert whole.sum() == len(rows) * tensor.shape[1] + len(columns) * tensor.shape[0]
            found.append((rows.tolist(), columns.tolist()))
        return found

    assert places(0, 3, 5) == [([3], []), ([], []), ([], [5])]
    assert places(1, 7, 5) == [([], [7]), ([], [5]), ([], [])]
    assert places(2, 3, 9) == [([], []), ([3], []), ([9], [])]


def test_zeros_are_exact() -> None:
    x, weight, grad = case(20)
    x[4], grad[7], x[:, 3], grad[:, 9] = 0.0, 0.0, 0.0, 0.0
    out, grad_x, grad_weight = run(float8_linear(fp8_rowwise()), (x, weight, grad))
    assert out.any(dim=1).logical_not().nonzero().flatten().tolist() == [4]
    assert grad_x.any(dim=1).logical_not().nonzero().flatten().tolist() == [7]
    assert grad_weight.any(dim=0).logical_not().nonzero().flatten().tolist() == [3]
    assert grad_weight.any(dim=1).logical_not().nonzero().flatten().tolist() == [9]


@pytest.mark.parametrize("in_high_precision", [False, True])
@pytest.mark.parametrize("leading", [(0,), (2, 0)])
def test_no_tokens(leading: tuple[int, ...], in_high_precision: bool) -> None:
    multiply = float8_linear(fp8_rowwise(wgrad_in_high_precision=in_high_precision))
    out, grad_x, grad_weight = run(multiply, case(*leading))
    assert out.shape == (*leading, OUTER)
    assert grad_x.shape == (*leading, INNER)
    assert grad_weight.shape == (OUTER, INNER)
    assert not grad_weight.any()


def kept_by(leaves: list[Tensor]) -> list[int]:
    """Where what is kept for backward lies in memory."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):  # type: ignore[func-returns-value]
        x, weight = leaves
        float8_linear(fp8_rowwise())(x, weight)
    return [tensor.data_ptr() for tensor in kept]


@pytest.mark.parametrize("in_high_precision", [False, True])
def test_gradients_are_made_as_asked_and_keep_what_they_need(in_high_precision: bool) -> None:
    multiply, given = float8_linear(fp8_rowwise(wgrad_in_high_precision=in_high_precision)), case(2, 9)
    expected = run(multiply, given)
    *inputs, grad = given
    for wanted in range(2):
        leaves = [tensor.detach().requires_grad_(index == wanted) for index, tensor in enumerate(inputs)]
        (gradient,) = torch.autograd.grad(multiply(*leaves), leaves[wanted], grad)
        assert torch.equal(gradient, expected[1 + wanted])
        assert kept_by(leaves) == [leaves[1 - wanted].data_ptr()]
    assert kept_by([tensor.detach().requires_grad_() for tensor in inputs]) == [tensor.data_ptr() for tensor in inputs]
    assert kept_by([tensor.detach() for tensor in inputs]) == []
    with torch.inference_mode():
        x, weight = inputs
        assert torch.equal(multiply(x, weight), expected[0])


def test_other_dtypes_are_cast() -> None:
    given = case(17)
    expected = run(float8_linear(fp8_rowwise()), given)
    x, weight, grad = (tensor.float() for tensor in given)
    for name, one, other in zip(NAMES, run(float8_linear(fp8_rowwise()), (x, weight, grad)), expected, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other.float()), name


@pytest.mark.parametrize("in_high_precision", [False, True])
def test_compiled_and_recomputed_it_is_the_same(in_high_precision: bool) -> None:
    multiply = float8_linear(fp8_rowwise(wgrad_in_high_precision=in_high_precision))
    recomputed: Any = lambda *inputs: checkpoint(multiply, *inputs, use_reentrant=False)
    compiled = torch.compile(multiply, fullgraph=True)
    for given in (case(3, 17), case(3, 20), case(3, 0)):
        expected = run(multiply, given)
        for other in (compiled, recomputed):
            for name, value, reference in zip(NAMES, run(other, given), expected, strict=True):
                assert torch.equal(value, reference), name


@pytest.mark.parametrize("rows", [0, 17])
def test_operators_are_registered_as_they_behave(rows: int) -> None:
    x, weight, grad = case(rows)
    ops: Any = torch.ops.lightning_moe
    if rows:
        leaves = (x.clone().requires_grad_(), weight.clone().requires_grad_())
        torch.library.opcheck(ops.float8_linear.default, (*leaves, False))
    for in_high_precision in (False, True):
        for operands in ((x, weight), (x, None), (None, weight)):
            torch.library.opcheck(
                ops.float8_linear_backward.default,
                (grad, *operands, in_high_precision),
                test_utils=("test_schema", "test_faketensor"),
            )


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversion as on an H200; the operators run on a CPU."""
    monkeypatch.setattr(plugin_module, "probe", lambda device: H200)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("in_high_precision", [False, True])
def test_conversion(in_high_precision: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 48, bias=False), nn.Linear(48, 24))
    plugin = Float8Precision("rowwise", "bf16", wgrad_in_high_precision=in_high_precision, emulate="never")
    plugin.convert(model)
    report = plugin.report
    assert report is not None
    outcomes = {shape: outcome for _, shape, outcome in report.entries}
    assert outcomes["64 -> 32"] == outcomes["32 -> 48"] == "fp8_rowwise, fused casts"
    assert outcomes["48 -> 24"] == "bfloat16: 48 x 24 is not a multiple of 16"
    assert not report.emulated
    recipe = fp8_rowwise(wgrad_in_high_precision=in_high_precision)
    first: Any = model[0]
    assert recipe_of(first) == recipe
    assert multiplication_of(first) is float8_linear(recipe)
    plugin.convert(model)
    assert plugin.report is report

    x = torch.randn(3, 5, 64)
    out = first(x)
    assert torch.equal(out, float8_linear(recipe)(x, first.weight) + first.bias)
    out.sum().backward()
    assert torch.equal(first.bias.grad, torch.full((32,), 15.0))
    assert first.weight.grad.any()
    assert torch.equal(copy.deepcopy(first)(x), out)

    Float8Precision("rowwise", "bf16", emulate="always").convert(other := nn.Linear(64, 32))
    assert multiplication_of(other) is emulated_linear(fp8_rowwise())


@pytest.mark.usefixtures("hopper")
def test_a_model_trains_compiled() -> None:
    from lightning_moe.strategies.regions import apply_to_regions

    config = tiny_config(q_lora_rank=64)
    ids, losses = tokens(config, 2, 17), []
    for compiled, mode in ((False, "none"), (False, "selective"), (True, "none")):
        model = DeepSeekV3Model(config)
        model.init_weights(0)
        Float8Precision("rowwise", "bf16").convert(model)
        apply_to_regions(model, mode, compile_regions=compiled)  # type: ignore[arg-type]
        cast_on_use(model, torch.bfloat16)
        loss = model(ids[:, :-1], ids[:, 1:]).loss
        loss.backward()
        for name in ("layers.0.self_attn.q_b_proj", "layers.0.mlp.down_proj"):
            parameter = model.get_submodule(name)._parameters["weight"]
            assert parameter is not None
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()
            assert parameter.grad.any()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(losses[2], rel=1e-3)


@pytest.mark.usefixtures("hopper")
def test_precision_health_measures_them_and_changes_nothing() -> None:
    health = PrecisionHealth(every_n_steps=2)
    seen = train(health, Float8Precision("rowwise", "bf16"), steps=2)
    expected = train(None, Float8Precision("rowwise", "bf16"), steps=2)
    linears = [name for name, part in seen.named_modules() if recipe_of(part) is not None]
    assert len(health.latest) == 3 * len(linears)
    assert len(linears) == 4 * HEALTH_CONFIG.num_hidden_layers + 4
    assert all(20 < value.sqnr < 45 for value in health.latest.values())
    for name, value in expected.state_dict().items():
        assert torch.equal(seen.state_dict()[name], value), name
