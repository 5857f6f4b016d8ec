"""What of the Trainer's settings works with ExpertParallelStrategy, and what is refused with a clear error."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_moe import AllToAllDispatcher, DeepSeekV3, ExpertParallelStrategy
from lightning_moe.dispatch.base import Dispatched
from lightning_moe.moe.router import RoutingPlan
from tests.models.test_module import CONFIG, Rows, make_trainer
from tests.strategies import processes
from tests.strategies.training import adamw


def fit(module: DeepSeekV3, strategy: dict[str, Any] | None = None, **kwargs: Any) -> Trainer:
    seed_everything(11, verbose=False)
    trainer = make_trainer(strategy=ExpertParallelStrategy(**(strategy or {})), **{"max_steps": 4, **kwargs})
    trainer.fit(module, DataLoader(Rows(8), batch_size=2), DataLoader(Rows(5), batch_size=2))
    return trainer


class Dtypes(Callback):
    """Notes the dtypes that a block sees, and those that the optimizer has."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.seen: dict[str, torch.dtype] = {}
        block = pl_module.model.layers["1"]
        router = block.mlp.router
        block.register_forward_pre_hook(lambda module, args: self.seen.update(block=args[0].dtype))
        block.register_forward_pre_hook(lambda module, args: self.seen.update(cos=args[1].cos.dtype))
        block.self_attn.o_proj.register_forward_hook(lambda module, args, out: self.seen.update(attention=out.dtype))
        router.register_forward_hook(lambda module, args, out: self.seen.update(scores=out.scores_TE.dtype))
        router.register_forward_hook(lambda module, args, out: self.seen.update(weights=out.weights_TK.dtype))

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.seen["masters"] = pl_module.model.layers["1"].self_attn.o_proj._parameters["weight"].dtype
        self.seen["bias"] = pl_module.model.layers["1"].mlp.router.e_score_correction_bias.dtype


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("settings", "compute", "masters"),
    [
        ({}, FP32, FP32),
        ({"precision": "32-true"}, FP32, FP32),
        ({"precision": "bf16-mixed"}, BF16, FP32),
        ({"precision": "bf16-true"}, BF16, BF16),
        ({"strategy": {"compute_dtype": "bfloat16"}}, BF16, FP32),
        ({"strategy": {"compute_dtype": "float32"}}, FP32, FP32),
    ],
)
def test_precision(settings: dict[str, Any], compute: torch.dtype, masters: torch.dtype) -> None:
    dtypes = Dtypes()
    fit(DeepSeekV3(CONFIG, adamw), callbacks=[dtypes], **settings)
    assert dtypes.seen == {
        "block": compute,
        "attention": compute,
        "cos": FP32,
        "scores": FP32,
        "weights": FP32,
        "bias": FP32,
        "masters": masters,
    }


def sharded_dtypes(folder: Path) -> None:
    dtypes = Dtypes()
    trainer = make_trainer(
        devices=2,
        strategy=ExpertParallelStrategy(expert_parallel_size=2, compute_dtype="bfloat16"),
        max_steps=1,
        callbacks=[dtypes],
    )
    seed_everything(11, verbose=False)
    trainer.fit(DeepSeekV3(CONFIG, adamw), DataLoader(Rows(8), batch_size=2))
    processes.save(folder / "dtypes.pt", dtypes.seen)


def test_precision_under_fsdp2(tmp_path: Path) -> None:
    processes.run(2, sharded_dtypes, tmp_path)
    seen = torch.load(tmp_path / "dtypes.pt")
    assert seen.pop("block") == seen.pop("attention") == BF16
    assert set(seen.values()) == {FP32}


@pytest.mark.parametrize(
    "settings",
    [
        {"fast_dev_run": True},
        {"overfit_batches": 2},
        {"limit_train_batches": 2, "max_epochs": 1},
        {"limit_val_batches": 1},
        {"val_check_interval": 2},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
        {"deterministic": True},
        {"profiler": "simple"},
        {"max_time": "00:00:00:30"},
        {"callbacks": [EarlyStopping("val/loss", patience=1), LearningRateMonitor()], "val_check_interval": 2},
    ],
    ids=str,
)
def test_settings_that_work(settings: dict[str, Any], tmp_path: Path) -> None:
    logger: dict[str, Any] = {"logger": True} if "callbacks" in settings else {}
    module = DeepSeekV3(CONFIG, adamw)
    trainer = fit(module, default_root_dir=tmp_path, **logger, **settings)
    assert trainer.state.finished
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    if not settings.get("fast_dev_run"):
        assert trainer.global_step == 4 - 2 * ("limit_train_batches" in settings)


def test_validate_then_fit_in_one_trainer(tmp_path: Path) -> None:
    plain = DeepSeekV3(CONFIG, adamw)
    fit(plain)
    module = DeepSeekV3(CONFIG, adamw)
    seed_everything(11, verbose=False)
    trainer = make_trainer(strategy=ExpertParallelStrategy(), max_steps=4, default_root_dir=tmp_path)
    loader = DataLoader(Rows(5), batch_size=2)
    before = trainer.validate(module, loader, verbose=False)[0]["val/loss"]
    trainer.fit(module, DataLoader(Rows(8), batch_size=2), loader)
    after = trainer.validate(module, loader, verbose=False)[0]["val/loss"]
    assert after < before
    for name, value in plain.state_dict().items():
        assert torch.equal(value, module.state_dict()[name]), name


def test_weight_averaging_on_one_process(tmp_path: Path) -> None:
    averaging = EMAWeightAveraging(decay=0.5)
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_last=True)
    module = DeepSeekV3(CONFIG, adamw)
    last = DeepSeekV3(CONFIG, adamw)
    fit(last)
    fit(module, val_check_interval=2, callbacks=[averaging, checkpoint], enable_checkpointing=True)
    name = "model.lm_head.weight"
    averaged = module.state_dict()[name]
    assert (averaged - last.state_dict()[name]).abs().max() > 1e-3
    assert torch.equal(DeepSeekV3.load_from_checkpoint(checkpoint.last_model_path).state_dict()[name], averaged)


def test_weight_averaging_on_several_processes_is_refused() -> None:
    processes.run(2, average_on_two)


def average_on_two() -> None:
    with pytest.raises(TypeError, match="EMAWeightAveraging.*one process"):
        fit(DeepSeekV3(CONFIG, adamw), devices=2, callbacks=[EMAWeightAveraging()])


class Counting(AllToAllDispatcher):
    """Tells whether it has been used since it was closed last."""

    open = False

    def dispatch(self, x_TD: torch.Tensor, plan: RoutingPlan) -> Dispatched:
        self.open = True
        return super().dispatch(x_TD, plan)

    def close(self) -> None:
        self.open = False


def fit_with_two_trainers() -> None:
    module = DeepSeekV3(CONFIG, adamw)
    for _ in range(2):
        trainer = fit(module, {"expert_parallel_size": 2, "dispatcher": Counting}, devices=2, max_steps=1)
        strategy: Any = trainer.strategy
        assert strategy.dispatcher_name == "Counting"
        assert [dispatcher.open for dispatcher in strategy.dispatchers] == [False]


def test_a_second_trainer_closes_the_dispatchers_that_it_finds() -> None:
    processes.run(2, fit_with_two_trainers)


class Manual(DeepSeekV3):
    automatic_optimization = False


class TwoOptimizers(DeepSeekV3):
    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers(), super().configure_optimizers()]


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (Manual, ValueError, "automatic_optimization of Manual is False(.|\\n)*parameter groups of one optimizer"),
        (TwoOptimizers, RuntimeError, "multiple optimizers is only supported with manual optimization"),
    ],
)
def test_ways_of_optimizing_that_are_refused(module: type[DeepSeekV3], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fit(module(CONFIG, adamw))


def test_model_checkpoint_keeps_directories_and_links_the_last(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(
        tmp_path, every_n_train_steps=1, save_last="link", monitor="step", mode="max", save_top_k=2
    )
    fit(DeepSeekV3(CONFIG, adamw), callbacks=[checkpoint], enable_checkpointing=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 3
    assert "last.ckpt" in names
    assert (tmp_path / "last.ckpt").is_symlink()
    loaded = DeepSeekV3.load_from_checkpoint(tmp_path / "last.ckpt")
    assert loaded.tokens_seen == 4 * 2 * 16


@pytest.mark.parametrize(
    ("strategy", "devices", "message"),
    [
        ({"expert_parallel_size": 2}, 1, r"expert_parallel_size is 2.*must divide.*nearest that works: 1"),
        ({"expert_parallel_size": 3}, 2, r"expert_parallel_size is 3.*n_routed_experts \(8\).*nearest that works: 2"),
        ({"expert_parallel_size": 0}, 2, r"expert_parallel_size is 0.*nearest that works: 1"),
        ({"expert_parallel_size": -1}, 2, r"expert_parallel_size is -1.*nearest that works: 1"),
        ({"expert_parallel_size": 16}, 16, r"expert_parallel_size is 16.*n_routed_experts \(8\).*works: 8"),
        ({"expert_parallel_size": 4, "data_parallel_replicate_size": 2}, 4, r"expert_parallel_size is 4.*works: 2"),
        ({"data_parallel_replicate_size": 3}, 4, r"data_parallel_replicate_size is 3.*4 processes.*works: 2"),
        ({"data_parallel_replicate_size": 0}, 4, r"data_parallel_replicate_size is 0.*works: 1"),
        ({"data_parallel_replicate_size": 8}, 4, r"data_parallel_replicate_size is 8.*works: 4"),
        ({"data_parallel_shard_size": 3}, 4, r"data_parallel_shard_size is 3.*must be 4"),
        ({"data_parallel_shard_size": 4, "data_parallel_replicate_size": 2}, 4, r"shard_size is 4.*must be 2"),
        ({"data_parallel_shard_size": 0}, 4, r"data_parallel_shard_size is 0.*must be 4"),
        ({"activation_checkpointing": "some"}, 1, r"activation_checkpointing is 'some'.*none, selective, full"),
        ({"compute_dtype": "fp8"}, 1, r"compute_dtype is 'fp8'.*auto, float32, bfloat16"),
        ({"dispatcher": "deepep"}, 1, r"dispatcher is 'deepep'.*auto, all_to_all"),
        ({"process_group_backend": "mpi2"}, 1, r"process_group_backend is 'mpi2'.*nccl, gloo"),
    ],
    ids=str,
)
def test_sizes_are_checked_before_process_groups_exist(
    strategy: dict[str, Any], devices: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_group(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process group was made")

    monkeypatch.setattr("lightning.pytorch.strategies.model_parallel._init_dist_connection", no_group)
    monkeypatch.setenv("LOCAL_RANK", "0")  # as a launcher does: no processes are started from here

    def start() -> None:
        trainer = make_trainer(devices=devices, strategy=ExpertParallelStrategy(**strategy), max_steps=1)
        trainer.fit(DeepSeekV3(CONFIG, adamw), DataLoader(Rows(8), batch_size=2))

    with pytest.raises(ValueError, match=message):
        start()


def test_modules_of_others_are_refused() -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel

    trainer = make_trainer(strategy=ExpertParallelStrategy(), max_steps=1)
    with pytest.raises(TypeError, match=r"MoELightningModule.*BoringModel"):
        trainer.fit(BoringModel())
