import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.checkpoint import FileSystemWriter

from lightning_moe.cli import main
from lightning_moe.run_directory import (
    AtomicCheckpointIO,
    compare_configurations,
    find_last_checkpoint,
    is_complete,
    lock,
    read_progress,
)
from lightning_moe.usage_errors import UsageError, explain_full_disk
from tests.callbacks.standins import arguments


def _checkpoint(path: Path, step: int, at: float, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"global_step": step, "callbacks": {}, "weight": torch.zeros(1000), **more}, path)
    os.utime(path, (at, at))
    return path


def test_newest_checkpoint_of_any_kind(tmp_path: Path) -> None:
    assert find_last_checkpoint(tmp_path / "none") is None
    regular = _checkpoint(tmp_path / "checkpoints" / "step=10.ckpt", 10, at=100)
    (tmp_path / "checkpoints" / "last.ckpt").symlink_to("step=10.ckpt")
    assert find_last_checkpoint(tmp_path) == regular
    requeued = _checkpoint(tmp_path / "hpc_ckpt_1.ckpt", 12, at=200)
    assert find_last_checkpoint(tmp_path) == requeued
    failed = _checkpoint(tmp_path / "on_exception.ckpt", 13, at=300, tokens_seen=416)
    assert find_last_checkpoint(tmp_path) == failed
    assert (read_progress(failed).global_step, read_progress(failed).tokens_seen) == (13, 416)


def test_half_written_checkpoints_are_passed_over(tmp_path: Path) -> None:
    whole = _checkpoint(tmp_path / "step=1.ckpt", 1, at=100)
    cut = _checkpoint(tmp_path / "step=2.ckpt", 2, at=200)
    cut.write_bytes(cut.read_bytes()[:-200])
    (tmp_path / "step=3.ckpt").write_bytes(b"")
    (tmp_path / "step=4.ckpt.123.tmp").write_bytes(whole.read_bytes())
    (tmp_path / "last.ckpt").symlink_to("gone.ckpt")
    torch.save({"state_dict": {}, "loops": {}, "global_step": 9}, tmp_path / "weights_only.ckpt")
    sharded = tmp_path / "step=5.ckpt"
    sharded.mkdir()
    _checkpoint(sharded / "meta.pt", 5, at=500)
    assert not is_complete(sharded)
    assert find_last_checkpoint(tmp_path) == whole
    (sharded / ".metadata").touch()
    assert find_last_checkpoint(tmp_path) == sharded
    assert read_progress(sharded).global_step == 5


def test_a_kill_while_saving_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.ckpt"
    AtomicCheckpointIO().save_checkpoint({"callbacks": {}, "global_step": 1}, path)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_moe.run_directory.os.fsync", die)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({"callbacks": {}, "global_step": 2}, path)
    assert read_progress(path).global_step == 1
    assert [file.name for file in tmp_path.iterdir()] == ["x.ckpt"]


def test_changes_between_configurations() -> None:
    saved = {
        "model": {
            "class_path": "M",
            "init_args": {"config": {"hidden_size": 1}, "mtp_loss_weight": {0: 0.3, 1e13: 0.1}},
        },
        "trainer": {"max_steps": 5, "default_root_dir": "a"},
        "seed_everything": 1,
    }
    present = {
        "model": {"class_path": "M", "init_args": {"config": {"hidden_size": 2}, "mtp_loss_weight": {0: 0.3}}},
        "trainer": {"max_steps": 6, "default_root_dir": "b"},
        "seed_everything": 1,
    }
    assert compare_configurations(saved, saved) == []
    changes = {change.key: change for change in compare_configurations(saved, present)}
    assert set(changes) == {"model.config.hidden_size", "model.mtp_loss_weight", "trainer.max_steps"}
    assert changes["model.config.hidden_size"].fixed_as == "the architecture"
    assert changes["model.mtp_loss_weight"].fixed_as is None
    assert (changes["trainer.max_steps"].saved, changes["trainer.max_steps"].present) == (5, 6)


def _names(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() or path.is_symlink())


def test_a_run_that_is_restarted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    command = [
        "fit",
        *arguments(run, "--ckpt_path=last", "--checkpoint.every_n_train_steps=2", "--model.optimizer.lr=1e-3"),
    ]
    assert main([*command, "--trainer.max_steps=5"]) == 0
    out = capfd.readouterr().err
    assert f"there is no checkpoint in {run} yet" in out
    assert re.search(r"global batch +│ 2 x 2 accumulated x 1 data rank = 4 sequences", out)
    assert re.search(r"parameters, .* active per token", out)
    names = [re.sub(r"tfevents.*", "tfevents", name) for name in _names(run)]
    assert names == [
        ".lock",
        "checkpoints/last.ckpt",
        "checkpoints/step=4.ckpt",
        "checkpoints/step=5.ckpt",
        "config.yaml",
        "logs/events.out.tfevents",
        "logs/hparams.yaml",
    ]
    assert os.readlink(run / "checkpoints" / "last.ckpt") == "step=5.ckpt"

    # At its end: one line, status 0, nothing written
    before = _names(run)
    assert main([*command, "--trainer.max_steps=5"]) == 0
    assert "is at its end already: 5 steps and 160 tokens. Nothing to do." in capfd.readouterr().err
    assert _names(run) == before
    assert main([*command, "--trainer.max_steps=5", "--trainer.log_every_n_steps=7"]) == 0
    out = capfd.readouterr().err
    assert "Nothing to do." in out
    assert "changed since" not in out

    # Other settings take effect and are named
    changed = ["--trainer.max_steps=7", "--model.optimizer.lr=5e-4", "--trainer.gradient_clip_val=1.0"]
    assert main([*command, *changed]) == 0
    out = capfd.readouterr().err
    assert "changed since the last run: model.optimizer.lr 0.001 -> 0.0005" in out
    assert "changed since the last run: trainer.max_steps 5 -> 7" in out
    assert "changed since the last run: trainer.gradient_clip_val null -> 1.0" in out
    assert re.search(r"resumed from +│ .*step=5.ckpt", out.replace("\n", ""))
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_steps"] == 7
    last = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 7
    assert {group["lr"] for group in last["optimizer_states"][0]["param_groups"]} == {5e-4}

    # What must not change is an error that names both values
    assert main([*command, "--model.config.hidden_size=32"]) == 2
    out = capfd.readouterr().err
    assert "step=7.ckpt" in out.splitlines()[0]
    assert "another architecture" in " ".join(out.split())
    assert "\n  model.config.hidden_size: 16 -> 32\n" in out
    assert f"--trainer.default_root_dir {run}-2" in out
    assert main([*command, "--seed_everything=3"]) == 2
    assert "seed_everything: 1337 -> 3" in capfd.readouterr().err

    # A second run is not written over the first
    assert main([argument for argument in command if argument != "--ckpt_path=last"]) == 2
    assert "already holds a run" in capfd.readouterr().err

    # The saved configuration is enough to go on, and to validate
    assert main(["validate", f"--config={run / 'config.yaml'}"]) == 0
    assert "val/loss" in capfd.readouterr().out
    assert main(["fit", f"--config={run / 'config.yaml'}"]) == 0
    assert "changed since" not in capfd.readouterr().err


def test_a_run_directory_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["fit", *arguments(tmp_path / "file" / "run")]) == 2
    assert capfd.readouterr().err.startswith(f"error: trainer.default_root_dir: {tmp_path / 'file' / 'run'} cannot be")


def test_settings_that_do_not_start_are_not_kept(tmp_path: Path) -> None:
    command = ["fit", *arguments(tmp_path, "--ckpt_path=last", "--trainer.max_steps=2")]
    assert main(command) == 0
    before = (tmp_path / "config.yaml").read_text()
    assert main([*command, "--trainer.max_steps=4", "--model.optimizer.lr=-1"]) == 2
    assert (tmp_path / "config.yaml").read_text() == before


def test_fast_dev_run_leaves_the_run_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ["fit", *arguments(run, "--ckpt_path=last", "--trainer.fast_dev_run=true")]
    assert main(command) == 0
    assert not run.exists()
    _checkpoint(run / "checkpoints" / "step=3.ckpt", 3, at=100)  # it could not be loaded
    assert main(command) == 0
    assert _names(run) == ["checkpoints/step=3.ckpt"]


@pytest.mark.parametrize("logger", ["false", "lightning.pytorch.loggers.CSVLogger"])
def test_loggers_of_lightning(tmp_path: Path, logger: str) -> None:
    run = tmp_path / "run"
    more = [] if logger == "false" else [f"--trainer.logger.save_dir={run}"]
    command = arguments(run, "--trainer.max_steps=1", f"--trainer.logger={logger}", *more)
    assert main(["fit", *command]) == 0
    assert not list(run.rglob("*tfevents*"))
    assert (run / "config.yaml").is_file()
    assert len(list(run.rglob("metrics.csv"))) == (logger != "false")


def test_a_second_training_in_the_same_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release = lock(tmp_path)
    assert main(["fit", *arguments(tmp_path, "--trainer.max_steps=1")]) == 2
    assert f"trainer.default_root_dir: another training runs in {tmp_path} now." in capsys.readouterr().err
    assert find_last_checkpoint(tmp_path) is None
    release()
    assert main(["fit", *arguments(tmp_path, "--trainer.max_steps=1")]) == 0
    assert main(["fit", *arguments(tmp_path, "--trainer.max_steps=2", "--ckpt_path=last")]) == 0


@pytest.mark.parametrize("reason", ["no space", "file size", "hidden by torch", "expert_parallel"])
def test_a_full_disk(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command = [
        "fit",
        *arguments(run, "--checkpoint.every_n_train_steps=2", "--trainer.max_steps=6", "--ckpt_path=last"),
    ]
    if reason == "expert_parallel":
        command.append("--trainer.strategy=expert_parallel")
    with monkeypatch.context() as patch:
        if reason == "no space":
            real = torch.save
            patch.setattr("lightning_moe.run_directory.torch.save", lambda what, _: _save_on_a_full_disk(real, what))
        elif reason == "hidden by torch":
            # As torch raises it where Python did not see the write fail
            hidden = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 52736 vs 52656")
            patch.setattr("lightning_moe.run_directory.torch.save", lambda *_: _raise(hidden))
        elif reason == "file size":
            error = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            patch.setattr("lightning_moe.run_directory.torch.save", lambda *_: _raise(error))
        else:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            patch.setattr(FileSystemWriter, "write_data", lambda *_: _raise(full))
        assert main(command) == 2
        with pytest.raises(UsageError, match="no space left"):
            main([*command, "--debug"])
    why = " (File too large)" if reason == "file size" else ""
    assert (
        f"error: no space left for {run}{why}. The checkpoints saved before are complete.\n"
        "Free some space and run the same command again with --ckpt_path last.\n"
    ) in _unwrapped(capfd.readouterr().err)
    assert main(command) == 0
    assert read_progress(Path(find_last_checkpoint(run) or "")).global_step == 6


def test_other_errors_of_files_keep_their_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = OSError(errno.EIO, os.strerror(errno.EIO))
    monkeypatch.setattr("lightning_moe.run_directory.torch.save", lambda *_: _raise(broken))
    with pytest.raises(OSError, match="Input/output error"):
        main(["fit", *arguments(tmp_path / "run")])


def test_a_message_about_another_full_disk_is_kept() -> None:
    error = OSError(errno.ENOSPC, "output: no space left for store")
    assert explain_full_disk(error, "run") == "output: no space left for store"
    elsewhere = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/cache/tokens.bin")
    assert str(explain_full_disk(elsewhere, "run")).startswith("no space left for /cache/tokens.bin. The")
    assert explain_full_disk(RuntimeError("unexpected pos"), "run") is None


def _save_on_a_full_disk(save: Any, what: Any) -> None:
    with open("/dev/full", "wb") as file:
        save(what, file)


def _raise(error: BaseException) -> None:
    raise error


def _unwrapped(text: str) -> str:
    return text.replace("\n  ", " ")
