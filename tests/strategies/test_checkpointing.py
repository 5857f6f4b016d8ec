"""Checkpoint directories load under any layout, optimizer states included, and are whole or not there."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_moe import AdamW, DeepSeekV3
from lightning_moe.run_directory import find_last_checkpoint
from lightning_moe.strategies.checkpointing import (
    SafeReader,
    _load_numbered_state,
    _make_optimizer_state,
    is_checkpoint_directory,
    load_directory,
    load_file,
    save_directory,
)
from tests.models.test_module import CONFIG
from tests.strategies import processes
from tests.strategies.training import adamw, train


def moments(trainer: Any, model: DeepSeekV3) -> dict[str, torch.Tensor]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = trainer.optimizers[0].state
    return processes.whole({f"{names[p]}.{key}": value for p, values in state.items() for key, value in values.items()})


def train_and_save(world_size: int, layout: dict[str, Any] | None, folder: Path, name: str, resume: str | None) -> None:
    ckpt_path = None if resume is None else folder / resume
    steps = 2 if resume is None else 4
    trainer, model, norms = train(world_size, layout, optimizer=adamw, steps=steps, ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / name)
    processes.save(
        folder / f"{name}.pt", (processes.whole(model.state_dict()), moments(trainer, model), norms, model.tokens_seen)
    )


def straight(folder: Path) -> None:
    trainer, model, norms = train(1, None, optimizer=adamw, steps=4)
    processes.save(folder / "straight.pt", (processes.whole(model.state_dict()), moments(trainer, model), norms))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps with expert-parallel size 2, and four straight ones of one process."""
    folder = tmp_path_factory.mktemp("saved")
    processes.run(1, straight, folder)
    processes.run(2, train_and_save, 2, {"expert_parallel_size": 2}, folder, "ep2", None)
    processes.run(1, train_and_save, 1, None, folder, "auto", None)
    return folder


def test_a_directory_holds_all_experts_and_their_moments(saved: Path) -> None:
    assert is_checkpoint_directory(saved / "ep2")
    assert not (saved / "ep2.tmp").exists()
    stored: Any = SafeReader(saved / "ep2").read_metadata().state_dict_metadata
    experts = CONFIG.n_routed_experts
    name = "model.layers.1.mlp.experts.down_proj"
    for key in (f"state_dict.{name}", f"optimizer_0.{name}.exp_avg", f"optimizer_0.{name}.exp_avg_sq"):
        assert stored[key].size[0] == experts


@pytest.mark.parametrize(
    ("resume", "world_size", "layout"),
    [
        ("ep2", 2, {"expert_parallel_size": 2}),
        ("ep2", 2, {"expert_parallel_size": 1}),
        ("ep2", 4, {"expert_parallel_size": 4}),
        ("ep2", 4, {"expert_parallel_size": 2}),
        ("ep2", 1, {}),
        ("auto", 2, {"expert_parallel_size": 2}),
        ("auto", 1, {}),
    ],
)
def test_two_and_two_steps_under_another_layout_are_four(
    saved: Path, resume: str, world_size: int, layout: dict[str, Any]
) -> None:
    name = f"{resume}-{world_size}-{layout.get('expert_parallel_size', 0)}"
    processes.run(world_size, train_and_save, world_size, layout, saved, name, resume)
    expected, expected_moments, expected_norms = torch.load(saved / "straight.pt")
    weights, states, norms, tokens_seen = torch.load(saved / f"{name}.pt")
    assert norms == pytest.approx(expected_norms[2:], rel=1e-8)
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-8, msg=key)
    assert states.keys() == expected_moments.keys()
    for key, value in expected_moments.items():
        torch.testing.assert_close(states[key], value, rtol=1e-6, atol=1e-10, msg=key)
    assert tokens_seen == 4 * 8 * 16


def low_moments(params: Any) -> torch.optim.Optimizer:
    return AdamW(params, lr=1e-2, moments="bfloat16")


def train_with_low_moments(world_size: int, layout: dict[str, Any] | None, folder: Path, steps: int) -> None:
    resumed = folder / "low" if steps > 2 and layout is not None else None
    trainer, model, _ = train(world_size, layout, optimizer=low_moments, steps=steps, ckpt_path=resumed)
    dtypes = {state["exp_avg_sq"].dtype for state in trainer.optimizers[0].state.values()}
    if layout is not None:
        trainer.save_checkpoint(folder / "low")
    processes.save(folder / f"low-{steps}-{layout is None}.pt", (processes.whole(model.state_dict()), dtypes))


def test_bfloat16_moments_are_sharded_and_load_under_another_layout(tmp_path: Path) -> None:
    processes.run(1, train_with_low_moments, 1, None, tmp_path, 3)
    processes.run(4, train_with_low_moments, 4, {"expert_parallel_size": 2}, tmp_path, 2)
    stored: Any = SafeReader(tmp_path / "low").read_metadata().state_dict_metadata
    assert stored["optimizer_0.model.layers.1.mlp.experts.down_proj.exp_avg"].properties.dtype == torch.bfloat16
    processes.run(2, train_with_low_moments, 2, {"expert_parallel_size": 2}, tmp_path, 3)
    expected, _ = torch.load(tmp_path / "low-3-True.pt")
    weights, dtypes = torch.load(tmp_path / "low-3-False.pt")
    assert dtypes == {torch.bfloat16}
    for name, value in expected.items():
        # Where sums in another order round a moment the other way, 2^-8 of a step of 1e-2
        difference = (weights[name] - value).abs()
        assert difference.max() < 1e-4, name
        assert difference.mean() < 1e-6, name


def test_load_from_checkpoint_reads_a_directory_in_one_process(saved: Path) -> None:
    weights, _, _, tokens_seen = torch.load(saved / "ep2.pt")
    torch.set_default_dtype(torch.float64)
    try:
        module = DeepSeekV3.load_from_checkpoint(saved / "ep2")
    finally:
        torch.set_default_dtype(torch.float32)
    assert module.tokens_seen == tokens_seen
    for name, value in module.state_dict().items():
        assert torch.equal(value, weights[name]), name


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("executed",))


def test_an_index_with_foreign_classes_is_not_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"builtins.print.*not loaded"):
        SafeReader(tmp_path).read_metadata()
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["os", "torch", "dataclass", "field"])
def test_an_index_names_classes_only_and_no_function_or_module_beside_them(tmp_path: Path, name: str) -> None:
    # Protocol 0: the global, and nothing else.
    (tmp_path / ".metadata").write_bytes(f"ctorch.distributed.checkpoint.metadata\n{name}\n.".encode())
    with pytest.raises(ValueError, match=rf"metadata.{name}.*not loaded"):
        SafeReader(tmp_path).read_metadata()


def load_into_shards(folder: Path) -> None:
    dist.init_process_group("gloo", rank=processes.rank(), world_size=2)
    sharded = distribute_tensor(torch.zeros(4, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(ValueError, match=r"w has shape \[6, 3\] there, but the model needs \[4, 3\]"):
        load_file(folder / "larger.ckpt", {"w": sharded}, [])


def test_a_file_with_a_larger_weight_is_not_cut_to_fit(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(6, 3)}}, tmp_path / "larger.ckpt")
    processes.run(2, load_into_shards, tmp_path)


def test_optimizer_groups_of_other_sizes_are_refused() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    one = torch.optim.Adam(parameters)
    two = torch.optim.Adam([{"params": parameters[:2]}, {"params": parameters[2:]}])
    with pytest.raises(ValueError, match=r"groups of \[3\] parameters, but this one of \[2, 1\]"):
        _load_numbered_state(two, one.state_dict())


@pytest.mark.parametrize("fused", [True, False])
def test_step_counts_are_made_where_the_optimizer_wants_them(fused: bool) -> None:
    module = nn.Linear(2, 2, bias=False, device="meta")
    optimizer = torch.optim.Adam(module.parameters())
    optimizer.param_groups[0]["fused"] = fused
    metadata = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([]), [])
    stored = {"optimizer_0.weight.step": metadata}
    made = _make_optimizer_state(module, optimizer, stored, "optimizer_0.", {"groups": [{}]})
    assert made["weight.step"].device.type == ("meta" if fused else "cpu")
    saved = {"param_groups": [{"params": [0]}], "state": {0: {"step": torch.tensor(3.0)}}}
    _load_numbered_state(optimizer, saved)
    assert optimizer.state[module.weight]["step"].device.type == ("meta" if fused else "cpu")


def test_a_folder_with_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    with pytest.raises(ValueError, match=r"mine is a folder that holds something else"):
        save_directory(tmp_path / "mine", {"w": torch.ones(2)}, [], {}, lambda: None)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "kept"


def test_a_kill_between_the_renames_leaves_a_checkpoint_to_resume_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(value: float) -> None:
        save_directory(tmp_path / "x.ckpt", {"w": torch.full((2,), value)}, [], {"callbacks": {}}, lambda: None)

    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.name == "x.ckpt.tmp":
            raise KeyboardInterrupt
        return rename(self, target)

    save(1.0)
    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        save(2.0)
    monkeypatch.undo()
    found = find_last_checkpoint(tmp_path)
    assert found is not None
    weights = {"w": torch.zeros(2)}
    load_directory(found, weights, [])
    assert torch.equal(weights["w"], torch.ones(2))
    save(3.0)
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]
