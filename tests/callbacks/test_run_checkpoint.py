import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lightning_moe.callbacks.run_checkpoint import RunCheckpoint
from lightning_moe.cli import MoECLI, main
from lightning_moe.run_directory import find_last_checkpoint, read_progress
from tests.callbacks.standins import arguments


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
