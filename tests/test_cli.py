import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, RichProgressBar

from lightning_moe import AdamW, DeepSeekV3, DeepSeekV3Config
from lightning_moe.callbacks.progress_bar import TokenProgressBar
from lightning_moe.callbacks.run_checkpoint import RunCheckpoint
from lightning_moe.cli import MoECLI, main
from lightning_moe.config_loader import expand_arguments, load_yaml
from lightning_moe.run_directory import AtomicCheckpointIO
from tests.callbacks.standins import SMALL_MODEL, arguments


def _cli(*args: str) -> Any:
    return MoECLI(args=list(args), run=False)


def _optimizer(cli: Any) -> AdamW:
    cli.model.configure_model()
    optimizer = cli.model.configure_optimizers()
    assert isinstance(optimizer, AdamW)
    return optimizer


def test_overrides_on_the_command_line(tmp_path: Path) -> None:
    cli = _cli(
        *arguments(tmp_path),
        "--model.config.num_hidden_layers=3",
        "--model.init_args.config.v_head_dim",
        "4",
        "--model.optimizer.lr=1e-3",
        "--model.mtp_loss_weight={0: 0.3, 10e12: 0.1}",
        "--data.max_tokens=1e6",
        "--trainer.max_steps",
        "2e3",
    )
    assert isinstance(cli.model, DeepSeekV3)
    assert cli.model.config == DeepSeekV3Config(**{**SMALL_MODEL, "num_hidden_layers": 3, "v_head_dim": 4})
    assert cli.model.mtp_loss_weight == {0: 0.3, 10e12: 0.1}
    assert (cli.datamodule.max_tokens, cli.trainer.max_steps) == (1_000_000, 2000)
    assert {group["lr"] for group in _optimizer(cli).param_groups} == {1e-3}


def test_printed_configuration_loads_to_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments("runs/x", "--model.optimizer.lr=1e-3", "--model.balancing.bias_update_speed={0: 0.001, 1e12: 0}")
    assert main(["fit", *given, "--print_config"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "printed.yaml").write_text(printed)
    assert main(["fit", f"--config={tmp_path / 'printed.yaml'}", "--print_config"]) == 0
    assert capsys.readouterr().out == printed
    read = yaml.safe_load(printed)
    assert read["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 1e-3
    assert read["model"]["init_args"]["config"]["hidden_size"] == 16


HF_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "n_shared_experts": 1,
    **SMALL_MODEL,
}


def test_hugging_face_config_beside_the_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "config.json").write_text(json.dumps(HF_CONFIG))
    (tmp_path / "here.json").write_text(json.dumps({**HF_CONFIG, "vocab_size": 64}))
    data = "data: tests.callbacks.standins.RandomTokens\ntrainer: {accelerator: cpu}\n"
    model = "model: {class_path: lightning_moe.DeepSeekV3, init_args: {config: CONFIG, config.num_hidden_layers: 3}}\n"
    (tmp_path / "configs" / "a.yaml").write_text(data + model.replace("CONFIG", "config.json"))
    (tmp_path / "configs" / "b.yaml").write_text(data + model.replace("CONFIG", "here.json"))
    (tmp_path / "configs" / "c.yaml").write_text("model: {init_args: {config: {v_head_dim: 4}}}\n")
    expected = DeepSeekV3Config(**{**SMALL_MODEL, "num_hidden_layers": 3})
    monkeypatch.chdir(tmp_path)
    assert _cli("--config=configs/a.yaml").model.config == expected
    # A file that is not beside the YAML is looked for in the working directory
    assert _cli("--config=configs/b.yaml").model.config.vocab_size == 64
    later = _cli(
        "--config=configs/a.yaml", "--config=configs/c.yaml", "--model.config.num_hidden_layers=5"
    ).model.config
    assert (later.num_hidden_layers, later.v_head_dim, later.hidden_size) == (5, 4, 16)
    on_the_line = _cli("--config=configs/a.yaml", "--model.config", "here.json", "--model.config.v_head_dim=4").model
    assert (on_the_line.config.vocab_size, on_the_line.config.v_head_dim) == (64, 4)
    assert on_the_line.config.num_hidden_layers == 2


def test_presets_by_name(tmp_path: Path) -> None:
    cli = _cli(*arguments(tmp_path), "--model.config=tiny", "--model.config.num_hidden_layers=2")
    assert cli.model.config == DeepSeekV3Config.preset("tiny", num_hidden_layers=2)
    loaded = load_yaml("model: {init_args: {config: deepseek_v2_lite, config.vocab_size: 64}}")
    assert loaded["model"]["init_args"] == {
        "config": asdict(DeepSeekV3Config.preset("deepseek_v2_lite", vocab_size=64))
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e6", 1_000_000),
        ("14.8e12", 14_800_000_000_000),
        ("1.5e0", 1.5),
        ("2.0", 2.0),
        ("1e-4", 1e-4),
        ("2024-01-01", "2024-01-01"),
    ],
)
def test_numbers(text: str, value: object) -> None:
    loaded = load_yaml(f"a: {text}")["a"]
    assert loaded == value
    assert type(loaded) is type(value)


def test_numbers_on_the_command_line() -> None:
    given = ["--a=1e6", "--b", "14.8e12", "--c=1e-4", "--d", "2.0", "--e"]
    assert expand_arguments(given) == ["--a=1000000", "--b", "14800000000000", "--c=0.0001", "--d", "2.0", "--e"]


def test_float_keys_of_dictionaries() -> None:
    loaded = load_yaml("{0: 0.3, 10e12: 0.1}")
    assert loaded == {0: 0.3, 10_000_000_000_000: 0.1}


def test_what_the_trainer_gets(tmp_path: Path) -> None:
    trainer = _cli(
        *arguments(tmp_path / "run", "--trainer.callbacks+=lightning.pytorch.callbacks.LearningRateMonitor")
    ).trainer
    checkpoint = trainer.checkpoint_callback
    assert isinstance(checkpoint, RunCheckpoint)
    assert checkpoint.dirpath == str(tmp_path / "run" / "checkpoints")
    assert len([callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]) == 1
    assert [type(callback) for callback in trainer.callbacks if isinstance(callback, ProgressBar)] == [TokenProgressBar]
    assert trainer.loggers[0].log_dir == str(tmp_path / "run" / "logs")
    assert type(trainer.strategy.checkpoint_io) is AtomicCheckpointIO
    assert "LearningRateMonitor" in [type(callback).__name__ for callback in trainer.callbacks]


def test_overlays_append_callbacks(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "trainer: {callbacks+: {class_path: lightning.pytorch.callbacks.LearningRateMonitor}}\n"
    )
    (tmp_path / "b.yaml").write_text(
        "trainer: {callbacks+: {class_path: lightning.pytorch.callbacks.RichProgressBar}}\n"
    )
    trainer = _cli(*arguments(tmp_path), f"--config={tmp_path / 'a.yaml'}", f"--config={tmp_path / 'b.yaml'}").trainer
    names = [type(callback).__name__ for callback in trainer.callbacks]
    assert "LearningRateMonitor" in names
    # A progress bar of one's own replaces ours
    assert [type(c) for c in trainer.callbacks if isinstance(c, ProgressBar)] == [RichProgressBar]


def test_nothing_is_added_that_was_turned_off(tmp_path: Path) -> None:
    off = ["--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false", "--trainer.logger=false"]
    trainer = _cli(*arguments(tmp_path, *off)).trainer
    assert not trainer.checkpoint_callbacks
    assert not trainer.loggers
    assert not [callback for callback in trainer.callbacks if isinstance(callback, ProgressBar)]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("fit", "validate", "test", "prepare", "--debug"):
        assert f"  {name}" in text
    assert "predict" not in text
    assert main(["fit", "--help"]) == 0
    text = capsys.readouterr().out
    for name in ("--model", "--data", "--checkpoint.every_n_train_steps", "--ckpt_path"):
        assert name in text
    assert "'last' for the newest checkpoint" in " ".join(text.split())


def test_help_knows_the_classes_of_this_package() -> None:
    command = [sys.executable, "-m", "lightning_moe", "fit", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in ("ExpertParallelStrategy", "TokenDataModule", "MXFP8Precision", "PrecisionHealth"):
        assert f"lightning_moe.{name}" in text


def test_prepare_makes_a_store(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text. " * 200)
    command = ["prepare", f"--inputs=[{tmp_path / 'text.txt'}]", f"--output={tmp_path / 'store'}", "--tokenizer=byte"]
    assert main([*command, "--num_workers=1", "--progress_bar=false", "--validation_fraction=0"]) == 0
    assert any((tmp_path / "store").iterdir())


def test_class_of_ones_own_beside_the_user(tmp_path: Path) -> None:
    (tmp_path / "my_moe.py").write_text(
        "from lightning_moe import DeepSeekV3\n\n\nclass MyMoE(DeepSeekV3):\n"
        "    def on_train_start(self) -> None:\n        super().on_train_start()\n        print('mine')\n"
    )
    command = [sys.executable, "-m", "lightning_moe", "fit", *arguments("run"), "--model=my_moe.MyMoE"]
    command += [f"--model.config.{name}={value}" for name, value in SMALL_MODEL.items()]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--trainer.max_steps=1"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "mine" in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "step=1.ckpt").is_file()
    # A newcomer's screen: no warnings, no advertisements
    for noise in ("Warning", "Tip", "GPU available", "Seed set"):
        assert noise not in done.stderr


@pytest.mark.parametrize("module", ["lightning/pytorch/strategies", "jsonargparse"])
@pytest.mark.parametrize("started", ["-m", "script", "other"])
def test_ctrl_c_while_the_command_is_imported(module: str, started: str, tmp_path: Path) -> None:
    stub = tmp_path / "path" / f"{module}.py"
    stub.parent.mkdir(parents=True)
    stub.write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    for package in list(Path(module).parents)[:-1]:
        (tmp_path / "path" / package / "__init__.py").touch()
    script = tmp_path / "bin" / "lightning-moe"
    script.parent.mkdir()
    script.write_text("from lightning_moe.cli import main\n\nmain()\n")
    given = {"-m": ["-m", "lightning_moe"], "script": [str(script)], "other": ["-c", "import lightning_moe.cli"]}[
        started
    ]
    environment = {name: value for name, value in os.environ.items() if "RANK" not in name and "SLURM" not in name}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "path"), str(Path(__file__).parents[1])])

    def run(**more: str) -> tuple[int, str]:
        command = [sys.executable, *given, "fit"]
        done = subprocess.run(command, env={**environment, **more}, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stderr

    if started == "other":  # a program that imports the package is not ours to end
        status, text = run()
        assert status != 130
        assert text.rstrip().endswith("KeyboardInterrupt")
        return
    assert run() == (130, "Stopped by Ctrl-C.\n")
    assert run(RANK="1") == (130, "")
