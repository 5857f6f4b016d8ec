"""All spellings of the strategy on the command line and in YAML reach the class with its settings."""

from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from lightning_moe import ExpertParallelStrategy
from lightning_moe.cli import MoECLI
from tests.callbacks.standins import arguments


def strategy_of(folder: Path, *more: str) -> ExpertParallelStrategy:
    cli = MoECLI(args=[*arguments(folder), *more], run=False)
    assert isinstance(cli.trainer.strategy, ExpertParallelStrategy)
    return cli.trainer.strategy


@pytest.mark.parametrize("name", ["expert_parallel", "lightning_moe.ExpertParallelStrategy"])
@pytest.mark.parametrize("joined", [False, True])
def test_on_the_command_line(tmp_path: Path, name: str, joined: bool) -> None:
    alone = [f"--trainer.strategy={name}"] if joined else ["--trainer.strategy", name]
    assert strategy_of(tmp_path, *alone).activation_checkpointing == "none"
    with_setting = strategy_of(tmp_path, *alone, "--trainer.strategy.activation_checkpointing", "full")
    assert with_setting.activation_checkpointing == "full"


@pytest.mark.parametrize(
    "yaml",
    [
        "strategy: expert_parallel",
        "strategy: lightning_moe.ExpertParallelStrategy",
        "strategy: {class_path: lightning_moe.ExpertParallelStrategy}",
        "strategy: {class_path: lightning_moe.ExpertParallelStrategy, init_args: {timeout: '0:10:00'}}",
    ],
)
def test_in_yaml(tmp_path: Path, yaml: str) -> None:
    file = tmp_path / "more.yaml"
    file.write_text(f"trainer:\n  {yaml}\n")
    strategy_of(tmp_path, f"--config={file}")


def test_from_python() -> None:
    assert isinstance(
        Trainer(strategy="expert_parallel", accelerator="cpu", devices=1).strategy, ExpertParallelStrategy
    )
