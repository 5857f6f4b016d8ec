import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_moe.callbacks.interrupt import EXIT_STATUS, INTERRUPTED, TrainingInterrupted
from lightning_moe.cli import MoECLI, main
from tests.callbacks.standins import arguments


class _PressCtrlC(Callback):
    """Presses Ctrl-C at one moment of training."""

    def __init__(self, hook: str, batch_idx: int, times: int = 1) -> None:
        self.hook, self.batch_idx, self.times = hook, batch_idx, times

    def _press(self, hook: str, batch_idx: int) -> None:
        if hook == self.hook and batch_idx == self.batch_idx:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._press("train", batch_idx)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._press("validation", batch_idx)


def _fit(press: _PressCtrlC, run: Path, *more: str) -> None:
    cli: Any = MoECLI(args=arguments(run, *more), run=False)
    cli.trainer.callbacks.insert(0, press)
    cli.trainer.fit(cli.model, cli.datamodule)


@pytest.mark.parametrize(("batch_idx", "step"), [(1, 1), (4, 3), (5, 3)])
def test_saves_after_the_whole_step(tmp_path: Path, batch_idx: int, step: int) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(TrainingInterrupted, match=str(EXIT_STATUS)) as stopped:
        _fit(_PressCtrlC("train", batch_idx), tmp_path)
    assert stopped.value.code == 130
    assert f"Interrupted after step {step};" in stopped.value.message
    assert signal.getsignal(signal.SIGINT) is before
    saved = torch.load(tmp_path / "checkpoints" / INTERRUPTED, weights_only=True)
    assert (saved["global_step"], saved["tokens_seen"]) == (step, step * 32)


def test_during_validation(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # Two micro-batches a step: validation after step 2
    with pytest.raises(TrainingInterrupted):
        _fit(_PressCtrlC("validation", 0), tmp_path, "--trainer.val_check_interval=4")
    assert torch.load(tmp_path / "checkpoints" / INTERRUPTED, weights_only=True)["global_step"] == 2
    assert main(["fit", *arguments(tmp_path, "--ckpt_path=last", "--trainer.val_check_interval=4")]) == 0
    assert "Done after step 10" in capfd.readouterr().err
    # A newer checkpoint takes its place
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["last.ckpt", "step=10.ckpt"]


def test_validation_between_micro_batches_waits_for_the_step(tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted):
        _fit(_PressCtrlC("validation", 0), tmp_path, "--trainer.val_check_interval=3")
    assert torch.load(tmp_path / "checkpoints" / INTERRUPTED, weights_only=True)["global_step"] == 2


def test_does_not_save_a_saved_step_again(tmp_path: Path) -> None:
    more = ["--trainer.val_check_interval=4", "--checkpoint.every_n_train_steps=2"]
    with pytest.raises(TrainingInterrupted) as stopped:
        _fit(_PressCtrlC("validation", 0), tmp_path, *more)
    assert "saved already" in stopped.value.message
    assert not (tmp_path / "checkpoints" / INTERRUPTED).exists()


def test_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as stopped:
            _fit(_PressCtrlC("train", 2, times=2), tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning ignores Ctrl-C from here on
    assert not isinstance(stopped.value, TrainingInterrupted)
    assert not (tmp_path / "checkpoints").exists()


def test_losses_go_on_as_if_there_was_no_interrupt(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (tmp_path / "text.txt").write_text("".join(f"{number} bottles of beer on the wall. " for number in range(2000)))
    prepare = ["prepare", f"--inputs=[{tmp_path / 'text.txt'}]", f"--output={store}", "--tokenizer=byte"]
    assert main([*prepare, "--num_workers=1", "--progress_bar=false", "--validation_fraction=0"]) == 0

    def command(run: str) -> list[str]:
        more = ["--data=lightning_moe.TokenDataModule", f"--data.path={store}", "--data.sequence_length=8"]
        more += ["--data.micro_batch_size=2", "--data.global_batch_size=4", "--model.config.vocab_size=300"]
        more += ["--trainer.logger=true", "--trainer.log_every_n_steps=1"]
        return arguments(tmp_path / run, *more, "--trainer.max_steps=8", "--ckpt_path=last")

    assert main(["fit", *command("whole")]) == 0
    for batch_idx in (3, 9):
        cli_args = [argument for argument in command("parts") if not argument.startswith("--ckpt_path")]
        cli: Any = MoECLI(args=cli_args, run=False)
        cli.trainer.callbacks.insert(0, _PressCtrlC("train", batch_idx))
        saved = tmp_path / "parts" / "checkpoints" / INTERRUPTED
        with pytest.raises(TrainingInterrupted):
            cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=str(saved) if saved.exists() else None)
    assert main(["fit", *command("parts")]) == 0
    whole, parts = (
        torch.load(tmp_path / run / "checkpoints" / "step=8.ckpt", weights_only=True) for run in ("whole", "parts")
    )
    assert whole["global_step"] == parts["global_step"] == 8
    for name, value in whole["state_dict"].items():
        torch.testing.assert_close(parts["state_dict"][name], value, rtol=0, atol=0)
    logged = _logged(tmp_path / "whole")
    assert len(logged["train/loss"]) == 8
    assert _logged(tmp_path / "parts") == logged


def _logged(run: Path) -> dict[str, dict[int, float]]:
    """What a run logged, by name and step."""
    events = EventAccumulator(str(run / "logs"))
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if "per_second" not in name]
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in names}


def test_exit_status_and_lines_of_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_moe", "fit", *arguments(tmp_path / "run"), "--data.max_tokens=10000000"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    deadline = time.monotonic() + 120
    while not any(line.startswith("train  1/") for line in lines) and time.monotonic() < deadline:
        lines.append(process.stderr.readline())
    process.send_signal(signal.SIGINT)
    last = process.communicate(timeout=60)[1].splitlines()[-1]
    assert process.returncode == 130
    assert last.startswith("Interrupted after step ")
    assert last.endswith("(continue with --ckpt_path last).")
    assert (tmp_path / "run" / "checkpoints" / INTERRUPTED).is_file()
