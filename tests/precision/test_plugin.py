"""Training with a precision plugin: any strategy on one device, logs, checkpoints, compiled regions, configurations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe import (
    AdamW,
    BF16Precision,
    BlockwiseFP8Precision,
    DeepSeekV3,
    ExpertParallelStrategy,
    Float8Precision,
    MoEPrecision,
    MXFP8Precision,
)
from lightning_moe.cli import MoECLI
from tests.models.test_module import make_trainer
from tests.models.tiny import tiny_config
from tests.strategies.training import Rows

CONFIG = tiny_config(vocab_size=64, num_hidden_layers=2, num_nextn_predict_layers=1, q_lora_rank=64)
CONFIGS = Path(__file__).parents[2] / "configs"
PLUGINS = [MXFP8Precision, Float8Precision, BlockwiseFP8Precision, BF16Precision]


def train(plugin: MoEPrecision | None, strategy: Any = "auto", steps: int = 4, **kwargs: Any) -> tuple[Trainer, Any]:
    torch.manual_seed(0)
    module = DeepSeekV3(CONFIG, optimizer=lambda params: AdamW(params, lr=1e-3))
    trainer = make_trainer(
        strategy=strategy,
        plugins=None if plugin is None else [plugin],
        max_steps=steps,
        use_distributed_sampler=False,
        **kwargs,
    )
    trainer.fit(module, DataLoader(Rows(1, 4), batch_size=4))
    return trainer, module


@pytest.mark.parametrize("plugin", PLUGINS)
def test_it_learns_the_same_with_and_without_our_strategy(plugin: type[MoEPrecision]) -> None:
    results = [train(plugin(), strategy) for strategy in ("auto", ExpertParallelStrategy())]
    (trainer, module), (ours, other) = results
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    for (name, value), expected in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name
    reference, _ = train(None)
    assert trainer.logged_metrics["train/loss"] == ours.logged_metrics["train/loss"]
    loss, expected_loss = trainer.logged_metrics["train/loss"], reference.logged_metrics["train/loss"]
    assert loss != expected_loss
    assert loss.item() == pytest.approx(expected_loss.item(), rel=5e-3)
    emulated = plugin is not BF16Precision
    assert str(trainer.precision).endswith("emulated") == emulated


def test_parameters_are_read_in_bfloat16_and_the_gate_is_not() -> None:
    seen: dict[str, set[torch.dtype]] = {"linear": set(), "gate": set()}

    class Watched(DeepSeekV3):
        def on_train_start(self) -> None:
            super().on_train_start()
            model = self.built_model
            attention: Any = model.get_submodule("layers.0.self_attn.kv_a_proj_with_mqa")  # left out of conversion
            attention.register_forward_hook(lambda module, args, out: seen["linear"].add(out.dtype))
            router: Any = model.get_submodule("layers.1.mlp.router")
            router.register_forward_hook(lambda module, args, plan: seen["gate"].add(plan.scores_TE.dtype))

    trainer = make_trainer(plugins=[MXFP8Precision()], max_steps=1)
    trainer.fit(Watched(CONFIG), DataLoader(Rows(1, 4), batch_size=4))
    assert seen == {"linear": {torch.bfloat16}, "gate": {torch.float32}}


def test_emulation_is_written_to_log_and_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    trainer, module = train(MXFP8Precision(), logger=logger)
    expected = {"recipe": "mxfp8", "emulated": True, "converted": 20, "skipped": 5}
    logged = (tmp_path / "hparams.yaml").read_text()
    assert "recipe: mxfp8" in logged
    assert "emulated: true" in logged
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    checkpoint = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert checkpoint["MXFP8Precision"] == expected
    assert set(checkpoint["state_dict"]) == set(keys())

    # It loads without a plugin, and in another precision of the same kind, which is said.
    loaded = DeepSeekV3.load_from_checkpoint(tmp_path / "run.ckpt", config=CONFIG)
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    with caplog.at_level("INFO"):
        resume(MXFP8Precision(linears="bf16"), tmp_path / "run.ckpt")
    assert "converted 20 -> 2" in caplog.text


def keys() -> list[str]:
    module = DeepSeekV3(CONFIG)
    module.configure_model()
    return list(module.state_dict())


def resume(plugin: MoEPrecision, path: Path) -> dict[str, Tensor]:
    module = DeepSeekV3(CONFIG, optimizer=lambda params: AdamW(params, lr=1e-3))
    trainer = make_trainer(plugins=[plugin], max_steps=6, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(Rows(1, 4), batch_size=4), ckpt_path=path, weights_only=True)
    return module.state_dict()


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    trainer, _ = train(MXFP8Precision())
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    _, straight = train(MXFP8Precision(), steps=6)
    resumed = resume(MXFP8Precision(), tmp_path / "run.ckpt")
    for name, value in straight.state_dict().items():
        assert torch.equal(resumed[name], value), name


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_changes_nothing(mode: Any) -> None:
    _, expected = train(MXFP8Precision(), ExpertParallelStrategy())
    _, module = train(MXFP8Precision(), ExpertParallelStrategy(activation_checkpointing=mode))
    for name, value in module.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name


def test_compute_dtype_of_the_strategy_wins_where_it_is_given() -> None:
    dtypes = set()

    class Watched(DeepSeekV3):
        def on_train_start(self) -> None:
            super().on_train_start()
            linear: Any = self.built_model.get_submodule("layers.0.self_attn.o_proj")
            linear.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))

    trainer = make_trainer(
        plugins=[MXFP8Precision()], strategy=ExpertParallelStrategy(compute_dtype="float32"), max_steps=1
    )
    trainer.fit(Watched(CONFIG), DataLoader(Rows(1, 4), batch_size=4))
    assert dtypes == {torch.float32}


@pytest.mark.parametrize(
    ("name", "plugin"),
    [
        ("mxfp8", MXFP8Precision),
        ("float8", Float8Precision),
        ("blockwise_fp8", BlockwiseFP8Precision),
        ("bf16", BF16Precision),
    ],
)
def test_overlays_append(name: str, plugin: type[MoEPrecision]) -> None:
    arguments = [f"--config={CONFIGS / 'tiny.yaml'}", f"--config={CONFIGS / 'precision' / f'{name}.yaml'}"]
    cli: Any = MoECLI(args=[*arguments, "--trainer.strategy=expert_parallel"], run=False)
    written = cli.trainer.precision_plugin
    assert type(written) is plugin
    defaults: Any = plugin()
    for field in ("converts", "choices", "recipe", "recipes", "include", "exclude", "emulate"):
        assert getattr(written, field, None) == getattr(defaults, field, None), field
