import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_moe import DeepSeekV3
from lightning_moe.callbacks.run_checkpoint import RunCheckpoint
from lightning_moe.cli import MoECLI, main
from lightning_moe.run_directory import find_last_checkpoint, read_progress
from tests.callbacks.standins import arguments
from tests.models.test_module import CONFIG, Rows, make_trainer


def _kept(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_keeps_the_last_two_and_a_link(tmp_path: Path) -> None:
    assert main(["fit", *arguments(tmp_path, "--checkpoint.every_n_train_steps=3", "--trainer.max_steps=9")]) == 0
    assert _kept(tmp_path) == ["last.ckpt", "step=6.ckpt", "step=9.ckpt"]
    assert (tmp_path / "checkpoints" / "last.ckpt").resolve().name == "step=9.ckpt"


def test_resuming_does_not_save_inside_a_step(tmp_path: Path) -> None:
    command = ["fit", *arguments(tmp_path, "--checkpoint.every_n_train_steps=2", "--ckpt_path=last")]
    assert main([*command, "--trainer.max_steps=2"]) == 0
    written = (tmp_path / "checkpoints" / "step=2.ckpt").stat().st_mtime_ns
    assert main([*command, "--trainer.max_steps=3"]) == 0
    # Lightning would write step=2 again after the first of two micro-batches of step 3
    assert (tmp_path / "checkpoints" / "step=2.ckpt").stat().st_mtime_ns == written
    assert _kept(tmp_path) == ["last.ckpt", "step=2.ckpt", "step=3.ckpt"]


def test_what_is_kept_survives_a_restart_with_another_interval(tmp_path: Path) -> None:
    command = ["fit", *arguments(tmp_path, "--ckpt_path=last")]
    assert main([*command, "--trainer.max_steps=4", "--checkpoint.every_n_train_steps=2"]) == 0
    assert main([*command, "--trainer.max_steps=6", "--checkpoint.every_n_train_steps=1"]) == 0
    assert _kept(tmp_path) == ["last.ckpt", "step=5.ckpt", "step=6.ckpt"]


def test_restarts_leave_no_more_checkpoints(tmp_path: Path) -> None:
    command = ["fit", *arguments(tmp_path, "--ckpt_path=last", "--checkpoint.every_n_train_steps=1")]
    for steps in (2, 4, 6):
        assert main([*command, f"--trainer.max_steps={steps}"]) == 0
    assert _kept(tmp_path) == ["last.ckpt", "step=5.ckpt", "step=6.ckpt"]


def test_a_metric_decides_what_is_kept(tmp_path: Path) -> None:
    more = ["--checkpoint.monitor=train/tokens_seen", "--checkpoint.mode=min", "--checkpoint.save_top_k=1"]
    assert (
        main(["fit", *arguments(tmp_path, *more, "--checkpoint.every_n_train_steps=1", "--trainer.max_steps=3")]) == 0
    )
    last = (tmp_path / "checkpoints" / "last.ckpt").resolve()
    assert last.is_file()
    assert find_last_checkpoint(tmp_path) == last


def test_link_moves_before_the_old_checkpoint_is_removed(tmp_path: Path) -> None:
    class Watch(RunCheckpoint):
        dangling: list[bool] = []

        def _remove_checkpoint(self, trainer: object, filepath: str) -> None:
            super()._remove_checkpoint(trainer, filepath)  # type: ignore[arg-type]
            self.dangling.append(not os.path.exists(Path(filepath).parent / "last.ckpt"))

    cli: Any = MoECLI(args=arguments(tmp_path, "--trainer.max_steps=4"), run=False)
    watch = Watch(str(tmp_path / "checkpoints"), every_n_train_steps=1)
    cli.trainer.callbacks = [
        callback if not isinstance(callback, RunCheckpoint) else watch for callback in cli.trainer.callbacks
    ]
    cli.trainer.fit(cli.model, cli.datamodule)
    assert watch.dangling == [False, False]


def test_a_kill_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "lightning_moe", "fit", *arguments(run, "--checkpoint.every_n_train_steps=1")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--data.max_tokens=1000000"], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while find_last_checkpoint(run) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    last = find_last_checkpoint(run)
    assert last is not None
    assert torch.load(last, weights_only=True)["global_step"] == read_progress(last).global_step > 0
    assert main(["fit", *arguments(run, "--ckpt_path=last", "--trainer.max_steps=1")]) == 0


_LOSSES = {4: 3.0, 8: 2.0, 12: 9.0, 16: 2.5, 20: 8.0}


class Validates(Callback):
    """Gives the validation after each step a loss that is known."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("val/known", _LOSSES.get(trainer.global_step, 100.0))


def _train(folder: Path, steps: int, resumed: bool = False, **options: Any) -> RunCheckpoint:
    checkpoint = RunCheckpoint(str(folder), every_n_train_steps=2, **options)
    trainer = make_trainer(
        max_steps=steps,
        max_epochs=-1,
        callbacks=[Validates(), checkpoint],
        enable_checkpointing=True,
        val_check_interval=8,  # micro-batches: after each fourth step
        check_val_every_n_epoch=None,
        accumulate_grad_batches=2,
    )
    rows = DataLoader(Rows(), batch_size=4)
    trainer.fit(DeepSeekV3(CONFIG), rows, rows, ckpt_path=folder / "last.ckpt" if resumed else None)
    return checkpoint


def test_a_validation_ranks_the_weights_that_it_was_of(tmp_path: Path) -> None:
    checkpoint = _train(tmp_path, 22, monitor="val/known", mode="min", save_top_k=2)
    scores = {Path(path).name: score.item() for path, score in checkpoint.best_k_models.items()}
    assert scores == {"step=8.ckpt": 2.0, "step=16.ckpt": 2.5}
    assert Path(checkpoint.best_model_path).name == "step=8.ckpt"
    # The newest stays too, to go on from, and the end of training is saved
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "last.ckpt",
        "step=16.ckpt",
        "step=22.ckpt",
        "step=8.ckpt",
    ]
    assert (tmp_path / "last.ckpt").resolve().name == "step=22.ckpt"


def test_there_is_a_checkpoint_before_the_first_validation(tmp_path: Path) -> None:
    _train(tmp_path, 2, monitor="val/known", mode="min")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=2.ckpt"]
    _train(tmp_path, 10, resumed=True, monitor="val/known", mode="min", save_top_k=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=10.ckpt", "step=8.ckpt"]


def test_a_restart_that_keeps_fewer_removes_the_others(tmp_path: Path) -> None:
    _train(tmp_path, 6, save_top_k=3)
    assert len(list(tmp_path.glob("step=*"))) == 3
    _train(tmp_path, 10, resumed=True, save_top_k=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=10.ckpt"]


def test_nothing_is_saved_within_a_step(tmp_path: Path) -> None:
    class Watch(RunCheckpoint):
        micro_batches: list[int] = []

        def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
            super()._save_checkpoint(trainer, filepath)
            self.micro_batches.append(trainer.fit_loop.epoch_loop.batch_progress.total.ready)

    watch = Watch(str(tmp_path), train_time_interval=timedelta(0))
    trainer = make_trainer(max_steps=3, callbacks=[watch], enable_checkpointing=True, accumulate_grad_batches=4)
    trainer.fit(DeepSeekV3(CONFIG), DataLoader(Rows(16), batch_size=1))
    assert watch.micro_batches == [4, 8, 12]
