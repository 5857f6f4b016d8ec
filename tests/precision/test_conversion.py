"""Conversion changes classes and nothing else: names, parameters, copies and files stay; each refusal has a reason."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moe import BF16Precision, BlockwiseFP8Precision, Float8Precision, MXFP8Precision
from lightning_moe.models.deepseek_v3 import DeepSeekV3Model
from lightning_moe.moe.experts import GroupedExperts
from lightning_moe.precision import plugin as plugin_module
from lightning_moe.precision.capability import Machine
from lightning_moe.precision.casting import cast_on_use
from lightning_moe.precision.conversion import (
    Candidate,
    can_compute_as_one,
    candidates,
    multiplication_of,
    replace_multiplication,
)
from lightning_moe.precision.emulation import emulated_grouped_mm, emulated_linear
from lightning_moe.precision.plugin import QuantisedPrecision
from lightning_moe.precision.recipes import fp8_rowwise, mxfp8
from tests.models.tiny import random_model, tiny_config, tokens

CONFIG = tiny_config(q_lora_rank=64, qk_rope_head_dim=32, num_nextn_predict_layers=1)
B200 = Machine(
    "NVIDIA B200",
    (10, 0),
    (13, 0),
    (0, 18),
    triton=True,
    mx_kernels=True,
    modules=frozenset({"cutlass", "tvm_ffi", "cuda.bindings"}),
)
H200 = Machine("NVIDIA H200", (9, 0), (13, 0), (0, 18), triton=True, blockwise_mm=True)


def converted_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if multiplication_of(module) is not None}


def loss(model: DeepSeekV3Model) -> Tensor:
    ids = tokens(CONFIG, 2, 17)
    output = model(ids[:, :-1], ids[:, 1:])
    return output.loss + output.mtp_losses[0]


def outcome(plugin: QuantisedPrecision, place: str) -> str:
    assert plugin.report is not None
    (found,) = [result for at, _, result in plugin.report.entries if at == place]
    return found


def test_parameters_copies_and_files_are_as_before(tmp_path: Path) -> None:
    model = random_model(CONFIG)
    plain = copy.deepcopy(model)
    parameters, classes = list(model.parameters()), [type(module).__name__ for module in model.modules()]
    MXFP8Precision().convert(model)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert [type(module).__name__ for module in model.modules()] == classes
    assert {name: type(value) for name, value in model.state_dict().items()} == {
        name: type(value) for name, value in plain.state_dict().items()
    }
    expected = loss(model)
    assert expected.item() != loss(plain).item()
    assert expected.item() == pytest.approx(loss(plain).item(), rel=0.02)

    torch.save(model.state_dict(), tmp_path / "weights.pt")
    restored = random_model(CONFIG, seed=1)
    MXFP8Precision().convert(restored)
    restored.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(loss(restored), expected)
    plain.load_state_dict(model.state_dict())

    expected.backward()
    copied = copy.deepcopy(model)  # after a step, as weight averaging does
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(loss(copied), expected)
    with torch.inference_mode():
        assert torch.equal(loss(copied), expected)


def test_what_is_converted_by_default() -> None:
    model = DeepSeekV3Model(CONFIG)
    MXFP8Precision().convert(model)
    in_block = {"self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj"}
    dense = in_block | {"mlp.gate_up_proj", "mlp.down_proj"}
    moe = in_block | {"mlp.experts", "mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj"}
    assert converted_names(model) == (
        {f"layers.0.{name}" for name in dense}
        | {f"layers.{layer}.{name}" for layer in (1, 2) for name in moe}
        | {f"mtp_layers.3.block.{name}" for name in moe}
    )
    experts = model.get_submodule("layers.1.mlp.experts")
    assert multiplication_of(experts) is emulated_grouped_mm(mxfp8())
    assert multiplication_of(model.get_submodule("layers.0.mlp.down_proj")) is emulated_linear(mxfp8())


def test_choice_by_kind_and_by_name() -> None:
    def names(**options: Any) -> set[str]:
        model = DeepSeekV3Model(CONFIG)
        MXFP8Precision(**options).convert(model)
        return converted_names(model)

    experts = {"layers.1.mlp.experts", "layers.2.mlp.experts", "mtp_layers.3.block.mlp.experts"}
    assert names(linears="bf16") == experts
    assert not names(grouped_mm="bf16") & experts
    assert names(include=["*.experts"]) == experts
    assert names(include=["*.o_proj"], exclude=["*mtp*"]) == {f"layers.{i}.self_attn.o_proj" for i in range(3)}
    # What is left out for safety, and what is outside of blocks, can be asked for; the head never multiplies itself.
    assert names(include=["*eh_proj", "lm_head"], exclude=[]) == {"mtp_layers.3.eh_proj"}
    assert {n.rpartition(".")[2] for n in names(exclude=[])} - {n.rpartition(".")[2] for n in names()} == {
        "kv_a_proj_with_mqa"
    }


def test_reasons_are_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = DeepSeekV3Model(tiny_config(q_lora_rank=48, num_nextn_predict_layers=1))
    plugin = MXFP8Precision(grouped_mm="bf16")
    plugin.convert(model)
    plugin.convert(model)
    err = " ".join(capsys.readouterr().err.split())
    assert err.count("precision: mxfp8") == 1
    assert err.count("EMULATED: mxfp8 linears") == 1
    assert outcome(plugin, "mlp.experts") == "bfloat16: as asked for"
    assert outcome(plugin, "self_attn.q_a_proj") == "bfloat16: 128 x 48 is not a multiple of 32"
    assert outcome(plugin, "self_attn.kv_a_proj_with_mqa") == "bfloat16: excluded"
    assert outcome(plugin, "self_attn.o_proj") == "mxfp8, emulated"
    assert outcome(plugin, "lm_head") == "bfloat16: the loss reads the head's weight itself"
    assert plugin.state_dict() == {"recipe": "mxfp8", "emulated": True, "converted": 16, "skipped": 17}


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_linears_of_other_models() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), Doubling(32, 32))
    MXFP8Precision().convert(model)
    assert converted_names(model) == {"0"}
    reasons = {c.name: c.excluded for c in candidates(model, None, None)}
    assert reasons == {"0": None, "2": "Doubling has a forward of its own"}
    x = torch.randn(3, 5, 64)
    first: Any = model[0]
    assert torch.equal(first(x), emulated_linear(mxfp8())(x, first.weight) + first.bias)


def test_another_precision_on_top_is_refused() -> None:
    model = DeepSeekV3Model(CONFIG)
    MXFP8Precision().convert(model)
    MXFP8Precision().convert(model)
    with pytest.raises(ValueError, match="layers.0.self_attn.q_a_proj has been converted"):
        BlockwiseFP8Precision().convert(model)
    BF16Precision().convert(model)


@pytest.mark.parametrize("first", ["convert", "cast"])
def test_casts_and_conversion_go_together_in_either_order(first: str) -> None:
    model = random_model(CONFIG)
    steps = {"convert": lambda: MXFP8Precision().convert(model), "cast": lambda: cast_on_use(model, torch.bfloat16)}
    steps.pop(first)()
    steps.popitem()[1]()
    classes = [type(module) for module in model.modules()]
    cast_on_use(model, torch.bfloat16)
    MXFP8Precision().convert(model)
    assert [type(module) for module in model.modules()] == classes
    linear: Any = model.get_submodule("layers.0.mlp.down_proj")
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    expected = emulated_linear(mxfp8())(x, linear._parameters["weight"].bfloat16())
    assert torch.equal(linear(x), expected)
    loss(model).backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_kernels_are_taken_where_they_run_and_dispatchers_pad_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def grouped(recipe: Any) -> Any:
        return f"torchao {recipe.name}"

    monkeypatch.setattr(plugin_module, "torchao_linear", grouped)
    monkeypatch.setattr(plugin_module, "torchao_grouped_mm", grouped)

    def alignments(machine: Machine, plugin: QuantisedPrecision) -> set[int]:
        monkeypatch.setattr(plugin_module, "probe", lambda device: machine)
        model = DeepSeekV3Model(tiny_config(moe_intermediate_size=128))
        plugin.convert(model, tokens=4096)
        return {layer.dispatcher.alignment for _, layer in model.moe_layers()}

    plugin: QuantisedPrecision = MXFP8Precision()
    assert alignments(B200, plugin) == {128}
    assert outcome(plugin, "mlp.experts") == "mxfp8"
    assert plugin.state_dict()["emulated"] is False
    assert plugin.precision == "mxfp8"
    assert alignments(B200, MXFP8Precision(grouped_mm="bf16")) == {1}
    assert alignments(B200, MXFP8Precision(emulate="always")) == {1}
    assert alignments(H200, MXFP8Precision()) == {1}
    assert alignments(H200, Float8Precision(linears="tensorwise", grouped_mm="rowwise")) == {16}
    plugin = Float8Precision()
    assert alignments(H200, plugin) == {1}
    assert outcome(plugin, "mlp.experts") == "bfloat16: not measured to be faster here"
    assert plugin.state_dict()["converted"] == 0
    plugin = BlockwiseFP8Precision()
    assert alignments(H200, plugin) == {1}  # no DeepGEMM: experts are emulated, linears are not
    assert outcome(plugin, "mlp.experts") == "fp8_blockwise, emulated"
    assert outcome(plugin, "self_attn.o_proj") == "fp8_blockwise"


@pytest.mark.parametrize(
    ("tokens_per_rank", "size", "expected"),
    [(65536, 1, "bfloat16"), (65536, 32, "fp8_rowwise"), (8192, 32, "fp8_rowwise"), (4096, 32, "bfloat16")],
)
def test_auto_knows_the_rows_of_an_expert(
    tokens_per_rank: int, size: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 of 256 experts: a rank of 32 has 8 experts, and each on average its tokens once."""
    monkeypatch.setattr(plugin_module, "probe", lambda device: H200)
    monkeypatch.setattr(plugin_module, "torchao_linear", lambda recipe: recipe)
    monkeypatch.setattr(plugin_module, "torchao_grouped_mm", lambda recipe: recipe)
    with torch.device("meta"):
        model = DeepSeekV3Model(
            tiny_config(
                hidden_size=7168,
                moe_intermediate_size=2048,
                n_routed_experts=256,
                num_experts_per_tok=8,
                n_group=8,
                topk_group=4,
                num_hidden_layers=2,
            )
        )
    plugin = Float8Precision()
    plugin.convert(model, torch.device("cuda"), tokens=tokens_per_rank, expert_parallel_size=size)
    assert outcome(plugin, "mlp.experts").startswith(expected)


def test_never_names_what_is_missing_and_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_module, "probe", lambda device: H200)
    model = DeepSeekV3Model(CONFIG)
    with pytest.raises(ValueError, match="MXFP8Precision cannot run mxfp8 for layers.0.self_attn.q_a_proj") as error:
        MXFP8Precision(emulate="never").convert(model)
    assert "compute capability 10.x" in str(error.value)
    assert "Here Float8Precision runs" in str(error.value)
    assert len(str(error.value).splitlines()) <= 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MXFP8Precision(emulate="sometimes"), "emulate is 'sometimes'"),  # type: ignore[arg-type]
        (lambda: MXFP8Precision(linears="fp8"), "linears is 'fp8', but it must be one of mxfp8, bf16"),  # type: ignore[arg-type]
        (lambda: MXFP8Precision(scale_rounding="ceil"), "rceil, floor"),  # type: ignore[arg-type]
        (lambda: Float8Precision(grouped_mm="tensorwise"), "auto, rowwise, bf16"),  # type: ignore[arg-type]
        (lambda: BlockwiseFP8Precision(grouped_mm="rowwise"), "blockwise, bf16"),  # type: ignore[arg-type]
    ],
)
def test_wrong_values(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_experts_that_differ_in_what_computes_them_alone_are_not_taken_for_converted() -> None:
    experts = GroupedExperts(2, 32, 32)
    candidate = Candidate("experts", "experts", experts, "grouped", ((32, 64), (32, 32)), None)
    recipe = fp8_rowwise()

    def multiply(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
        return a

    def compute(*arguments: Any) -> Any:
        return arguments[0]

    replace_multiplication(candidate, multiply, recipe, compute)
    replace_multiplication(candidate, multiply, recipe, compute)
    with pytest.raises(ValueError, match="experts has been converted to another precision before"):
        replace_multiplication(candidate, multiply, recipe)
    assert can_compute_as_one(experts)
    cast_on_use(experts, torch.bfloat16)
    assert can_compute_as_one(experts)


class Gained(GroupedExperts):
    """Experts of one's own: with a factor for each channel, a bias for each expert, and a scalar."""

    def __init__(self) -> None:
        super().__init__(2, 32, 64)
        self.gain = nn.Parameter(torch.ones(32))
        self.bias = nn.Parameter(torch.zeros(2, 32))
        self.scale = nn.Parameter(torch.ones(()))


def test_only_the_matrices_of_experts_are_multiplied() -> None:
    found = list(candidates(Gained(), None, None))
    assert [candidate.weights for candidate in found] == [((32, 128), (64, 32))]
