from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_moe import DeepSeekV3, DeepSeekV3Config, ExpertParallelStrategy, TokenDataModule
from lightning_moe.cli import MoECLI, main

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


def test_there_is_a_file_for_every_preset() -> None:
    assert [path.stem for path in CONFIGS] == ["deepseek_v2_lite", "deepseek_v3_671b", "moonlight_16b", "tiny"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_equals_its_preset(path: Path) -> None:
    written = yaml.safe_load(path.read_text())
    assert list(written["model"]["init_args"]["config"]) == [field.name for field in fields(DeepSeekV3Config)]
    # These belong to the machine and to overlays
    assert not {"precision", "devices", "num_nodes", "plugins"} & set(written["trainer"])
    cli: Any = MoECLI(args=[f"--config={path}"], run=False)
    assert isinstance(cli.trainer.strategy, ExpertParallelStrategy)
    assert isinstance(cli.model, DeepSeekV3)
    assert cli.model.config == DeepSeekV3Config.preset(path.stem)
    assert isinstance(cli.datamodule, TokenDataModule)
    steps = cli.datamodule.total_steps()
    assert steps is not None
    assert steps > 0
    assert cli.trainer.default_root_dir.endswith(f"runs/{path.stem}")
    assert cli.model.schedule is not None
    cli.model.schedule.resolve(cli.datamodule.max_tokens)


def test_the_recipe_of_the_report() -> None:
    cli: Any = MoECLI(args=[f"--config={CONFIGS[1]}"], run=False)
    model, data = cli.model, cli.datamodule
    assert model.mtp_loss_weight == {0: 0.3, 10e12: 0.1}
    assert model.balancing.bias_update_speed == {0: 0.001, 14.3e12: 0.0}
    schedule = model.schedule.resolve(data.max_tokens)
    assert [round(2.2e-4 * schedule.multiplier(int(t)), 9) for t in (5e12, 14.5e12, 14.7e12)] == [
        2.2e-4,
        2.2e-5,
        7.3e-6,
    ]
    assert data.max_tokens == 14_800_000_000_000
    assert (data.global_batch_size[0], data.global_batch_size[469e9]) == (3072, 15360)


def test_a_store_has_to_be_named_for_the_large_ones(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["fit", f"--config={CONFIGS[2]}", "--trainer.accelerator=cpu", "--trainer.devices=1"]) == 2
    err = capfd.readouterr().err
    assert "/path/to/token_store" in err
    assert "lightning-moe prepare" in err
    assert len(err.splitlines()) <= 6 + 1  # and the line that a new run starts
