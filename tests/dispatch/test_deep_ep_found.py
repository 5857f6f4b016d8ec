"""Which DeepEP is found, what it cannot take, and which dispatcher `auto` chooses."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import lightning_moe
from lightning_moe import DeepEPDispatcher
from lightning_moe.cli import MoECLI
from lightning_moe.dispatch.deep_ep.found import find_deep_ep
from lightning_moe.dispatch.deep_ep.rules import broken_rule, estimate_buffer_bytes
from lightning_moe.models.deepseek_v3 import DeepSeekV3Model
from lightning_moe.strategies.dispatchers import distribute_experts
from lightning_moe.strategies.mesh import Layout, MoEMesh
from tests.callbacks.standins import arguments
from tests.dispatch import deep_ep_standin
from tests.dispatch.deep_ep_standin.signatures import SIGNATURES, parameters_of
from tests.dispatch.groups import join
from tests.models.test_module import CONFIG
from tests.strategies import processes


@pytest.mark.parametrize("generation", deep_ep_standin.GENERATIONS)
def test_generations_are_found_by_their_classes(generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = deep_ep_standin.install(monkeypatch, generation)
    vars(module)["__version__"] = "9.9"
    assert find_deep_ep() == (generation, module)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (["EPBuffer"], r"is DeepEP 2.5 \(EPBuffer\); supported are V1"),
        (["HybridEPBuffer", "Buffer"], r"is the HybridEP branch of DeepEP \(HybridEPBuffer\); supported are V1"),
        ([], "neither Buffer nor ElasticBuffer"),
    ],
)
def test_other_generations_are_named(classes: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("deep_ep")
    vars(module).update(dict.fromkeys(classes, object))
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    with pytest.raises(ImportError, match=message):
        find_deep_ep()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "assert False, 'Invalid NCCL versions: 2.27 and 2.30\\nmore'",
            "fails: AssertionError: Invalid NCCL versions: 2.27 and",
        ),
        ("raise OSError('libcudart.so.12: cannot open')", "fails: OSError: libcudart.so.12"),
        ("import deep_ep_cpp", "lacks deep_ep_cpp"),
        (None, "deep_ep is not installed; https://github.com/deepseek-ai/DeepEP"),
    ],
)
def test_any_failure_of_its_import_is_one_message(
    content: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "deep_ep.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    monkeypatch.setattr("lightning_moe.dispatch.deep_ep.dispatcher._has_cuda", lambda: True)
    reason = DeepEPDispatcher.why_not(256, 8, 7168, 8)
    assert reason is not None
    assert message in reason
    assert "\n" not in reason


FITS: dict[str, Any] = {
    "num_experts": 256,
    "group_size": 8,
    "hidden_size": 7168,
    "num_experts_per_tok": 8,
    "num_sms": 20,
}


@pytest.mark.parametrize(
    ("generation", "change", "message"),
    [
        ("V1", {}, None),
        ("V2", {}, None),
        ("V1", {"num_experts": 60}, "n_routed_experts is 60, but it must be a multiple of expert_parallel_size (8)."),
        ("V2", {"num_sms": 21}, "num_sms is 21, but DeepEP V2 needs an even number of at least 2, as in 20."),
        ("V1", {"num_experts_per_tok": 33}, "num_experts_per_tok is 33, but DeepEP V1 takes at most 32."),
        ("V1", {"hidden_size": 2056}, "2056, but DeepEP V1 needs a multiple of 16, as in 2048 or 2064."),
        ("V2", {"hidden_size": 2064}, "2064, but DeepEP V2 needs a multiple of 256, as in 2048 or 2304."),
        ("V1", {"hidden_size": 8192}, "hidden_size is 8192, but DeepEP V1 takes at most 8176."),
        ("V2", {"hidden_size": 8192}, None),
        ("V2", {"hidden_size": 128}, "128, but DeepEP V2 needs a multiple of 256, as in 256."),
        ("V2", {"group_size": 1}, None),
        ("V1", {"group_size": 1}, "expert_parallel_size is 1, but DeepEP V1 takes only 2, 4, 8, 16, 32,"),
        ("V1", {"group_size": 64}, None),
        ("V1", {"num_experts": 512, "group_size": 2}, "are 256 on each rank, but DeepEP V1 takes at most 128"),
        ("V1", {"hosts": ["a"] * 8}, None),
        ("V1", {"hosts": ["a"] * 4 + ["b"] * 4}, "ranks 0 to 7 of the expert-parallel group are on the hosts a, b,"),
        ("V1", {"group_size": 16, "hosts": ["a"] * 8 + ["b"] * 8}, None),
        ("V2", {"hosts": ["a"] * 4 + ["b"] * 4}, None),
    ],
    ids=str,
)  # fmt: skip
def test_rules(generation: Any, change: dict[str, Any], message: str | None) -> None:
    reason = broken_rule(generation, **{**FITS, **change})
    assert reason is None if message is None else message in str(reason)


def test_what_does_not_depend_on_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs a GPU" in str(DeepEPDispatcher.why_not(256, 8, 7168, 8))
    deep_ep_standin.install(monkeypatch, "V1")
    assert DeepEPDispatcher.why_not(256, 8, 7168, 8) is None
    assert "compute_dtype: bfloat16" in str(DeepEPDispatcher.why_not(256, 8, 7168, 8, dtype=torch.float32))


def test_estimated_buffers() -> None:
    sizes: dict[str, Any] = {"hidden_size": 7168, "num_experts_per_tok": 8, "num_sms": 20, "max_tokens_per_rank": 4096}
    config = deep_ep_standin.Buffer.get_dispatch_config(8)
    estimate = estimate_buffer_bytes("V1", group_size=8, **sizes)
    assert estimate == pytest.approx(config.get_nvl_buffer_size_hint(2 * 7168, 8), rel=1e-4)
    assert estimate == pytest.approx(336e6, rel=0.01)
    assert estimate_buffer_bytes("V2", group_size=8, **sizes) == pytest.approx(0.47e9, rel=0.02)
    assert estimate_buffer_bytes("V1", group_size=16, **sizes) is None


@pytest.mark.parametrize("generation", deep_ep_standin.GENERATIONS)
def test_stand_ins_have_the_real_signatures(generation: str) -> None:
    for path, recorded in SIGNATURES[generation].items():
        assert parameters_of(deep_ep_standin, path) == recorded, path


def test_settings_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = None
    with pytest.raises(ValueError, match="environment has PATH, but DeepEP's variables start with EP_"):
        DeepEPDispatcher(8, group, environment={"PATH": "/"})
    with pytest.raises(ValueError, match="max_tokens_per_rank is 0, but it must be at least 1"):
        DeepEPDispatcher(8, group, max_tokens_per_rank=0)
    monkeypatch.setenv("EP_DISABLE_GIN", "0")
    DeepEPDispatcher(8, group, environment={"EP_DISABLE_GIN": "1"})
    assert os.environ["EP_DISABLE_GIN"] == "1"


def test_in_yaml(tmp_path: Path) -> None:
    file = tmp_path / "more.yaml"
    file.write_text(
        """
trainer:
  strategy:
    class_path: lightning_moe.ExpertParallelStrategy
    init_args:
      dispatcher:
        class_path: lightning_moe.DeepEPDispatcher
        init_args: {num_sms: 24, max_tokens_per_rank: 512, environment: {EP_NIC_NAME: mlx5_1}}
"""
    )
    cli = MoECLI(args=[*arguments(tmp_path), f"--config={file}"], run=False)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, lightning_moe.ExpertParallelStrategy)
    make: Any = strategy.dispatcher
    dispatcher = make(256, SimpleNamespace(size=lambda: 8), 32)
    assert isinstance(dispatcher, DeepEPDispatcher)
    assert (dispatcher.num_experts, dispatcher.alignment) == (256, 32)
    assert (dispatcher.num_sms, dispatcher.max_tokens_per_rank) == (24, 512)
    assert os.environ.pop("EP_NIC_NAME") == "mlx5_1"


def choose_dispatchers() -> None:
    rank, _ = join()
    on_cpu = MoEMesh(Layout(1, 2, 2), "cpu")
    on_gpu: Any = SimpleNamespace(expert=SimpleNamespace(device_type="cuda"), expert_parallel=on_cpu.expert_parallel)
    config = CONFIG.preset("tiny", hidden_size=256, n_routed_experts=8)

    def chosen(mesh: Any, name: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[str, list[str]]:
        said: list[str] = []
        with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
            patch.setattr("lightning_moe.strategies.dispatchers.rank_zero_info", said.append)
            made = distribute_experts(DeepSeekV3Model(config), mesh, name, compute_dtype=dtype)
        return type(made[0]).__name__, said

    because = "Tokens go through AllToAllDispatcher, because DeepEP "
    assert chosen(on_cpu, "auto") == ("AllToAllDispatcher", [because + "needs GPUs, and this runs on the CPU."])
    assert chosen(on_cpu, "all_to_all") == ("AllToAllDispatcher", [])
    with pytest.raises(ValueError, match="trainer.strategy.dispatcher is deep_ep, but DeepEP needs GPUs"):
        chosen(on_cpu, "deep_ep")
    with pytest.MonkeyPatch.context() as patch:
        deep_ep_standin.install(patch, "V2")
        expected = "Tokens go through DeepEPDispatcher, which can serve it"
        assert chosen(on_gpu, "auto") == ("DeepEPDispatcher", [expected])
        assert chosen(on_gpu, "deep_ep") == ("DeepEPDispatcher", [])
        name, said = chosen(on_gpu, "auto", torch.float32)
        assert name == "AllToAllDispatcher"
        assert "moves bfloat16 tokens" in said[0]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            deep_ep_standin.install(patch, "V1")
        name, said = chosen(on_gpu, "auto")  # the ranks do as one, although one of them could
        assert name == "AllToAllDispatcher"
        assert "but not on all" in said[0]


def test_choice() -> None:
    processes.run(2, choose_dispatchers)
