"""Starting with torchrun, SLURM's variables and Lightning's launcher; what ends when one process is lost."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch import Trainer

from lightning_moe import ExpertParallelStrategy
from lightning_moe.callbacks.interrupt import INTERRUPTED
from lightning_moe.cli import main
from lightning_moe.run_directory import find_last_checkpoint, read_progress
from lightning_moe.strategies.checkpointing import read_whole
from lightning_moe.strategies.launching import (
    brings_cluster_environment,
    check_launch,
    choose_devices,
    is_requeued,
    read_launch,
)
from tests.callbacks.standins import arguments
from tests.strategies.signals import STEPS, fit, make_store, send

_TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}
_SLURM = {"SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train"}


@pytest.mark.parametrize(
    ("environment", "devices", "num_nodes", "expected"),
    [
        ({}, "auto", 1, ("auto", 1)),
        ({}, 3, 2, (3, 2)),
        ({}, "-1", 1, ("-1", 1)),
        ({}, "2,", 1, ("2,", 1)),
        ({}, [0, 3], 1, ([0, 3], 1)),
        (_TORCHRUN, "auto", 1, (4, 2)),
        (_TORCHRUN, -1, 1, (4, 2)),
        (_TORCHRUN, "-1", 2, (4, 2)),
        (_TORCHRUN, 4, 2, (4, 2)),
        (_TORCHRUN, [4, 5, 6, 7], 1, ([4, 5, 6, 7], 2)),
        (_TORCHRUN, "0,1,2,3", 1, ("0,1,2,3", 2)),
        ({**_TORCHRUN, "GROUP_WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "1"}, "auto", 1, (1, 8)),
        (_SLURM, "auto", 1, (8, 2)),
        (_SLURM, "8", 2, ("8", 2)),
        ({"SLURM_NTASKS": "1"}, "auto", 1, (1, 1)),
        # torchrun inside SLURM: one task on each node, which starts the processes
        ({**_TORCHRUN, "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2"}, "auto", 1, (4, 2)),
        # A shell that SLURM has given: Lightning's own launcher
        ({**_SLURM, "SLURM_JOB_NAME": "interactive"}, "auto", 1, ("auto", 1)),
    ],
)
def test_devices_and_nodes_are_read(
    environment: dict[str, str], devices: Any, num_nodes: int, expected: tuple[Any, int]
) -> None:
    assert choose_devices(devices, num_nodes, environment) == expected


@pytest.mark.parametrize(
    ("environment", "devices", "num_nodes", "words"),
    [
        (_TORCHRUN, 2, 1, ["trainer.devices is 2", "LOCAL_WORLD_SIZE=4", "--nproc-per-node=2"]),
        (_TORCHRUN, [0], 1, ["trainer.devices is 1", "LOCAL_WORLD_SIZE=4"]),
        (_TORCHRUN, "0,1", 1, ["trainer.devices is 2", "LOCAL_WORLD_SIZE=4"]),
        ({}, 0, 1, ["trainer.devices is 0", "at least 1"]),
        (_TORCHRUN, -3, 1, ["trainer.devices is -3", "-1"]),
        (_TORCHRUN, [], 1, ["trainer.devices is []", "a list"]),
        (_TORCHRUN, "auto", 4, ["trainer.num_nodes is 4", "WORLD_SIZE=8", "2 nodes", "--nnodes=4"]),
        (_SLURM, 4, 1, ["trainer.devices is 4", "SLURM_NTASKS_PER_NODE=8", "--ntasks-per-node=4"]),
        (_SLURM, 8, 3, ["trainer.num_nodes is 3", "SLURM_NNODES=2", "--nodes=3"]),
        ({"SLURM_NTASKS": "1"}, 2, 1, ["trainer.devices is 2", "SLURM_NTASKS=1"]),
        ({"SLURM_NTASKS": "4", "SLURM_NNODES": "2"}, "auto", 1, ["SLURM_NTASKS=4", "--ntasks-per-node=2"]),
        ({**_SLURM, "SLURM_NTASKS": "12"}, "auto", 1, ["SLURM_NTASKS=12", "2 nodes", "SLURM_NTASKS_PER_NODE=8"]),
        ({**_TORCHRUN, "WORLD_SIZE": "6"}, "auto", 1, ["WORLD_SIZE=6", "2 nodes", "LOCAL_WORLD_SIZE=4"]),
        ({**_TORCHRUN, "WORLD_SIZE": "many"}, "auto", 1, ["WORLD_SIZE", "'many'"]),
        ({"TORCHELASTIC_RUN_ID": "none"}, "auto", 1, ["LOCAL_WORLD_SIZE", "''"]),
    ],
)
def test_a_contradiction_names_both_values(
    environment: dict[str, str], devices: Any, num_nodes: int, words: list[str]
) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are checked
        choose_devices(devices, num_nodes, environment)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert len(str(error.value).splitlines()) <= 4


def test_the_strategy_checks_when_the_trainer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**_TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    settings: Any = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    with pytest.raises(ValueError, match=r"trainer.devices is 2, but torchrun started 4 .*LOCAL_WORLD_SIZE=4"):
        Trainer(strategy=ExpertParallelStrategy(), devices=2, num_nodes=2, **settings)
    with pytest.raises(ValueError, match=r"trainer.num_nodes is 1, but torchrun started 4 .* 2 nodes"):
        Trainer(strategy=ExpertParallelStrategy(), devices=4, **settings)
    assert Trainer(strategy=ExpertParallelStrategy(), devices=4, num_nodes=2, **settings).world_size == 8
    assert not torch.distributed.is_initialized()


def test_an_environment_of_the_users_own_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert brings_cluster_environment({"plugins": [LightningEnvironment()], "strategy": "auto"})
    assert brings_cluster_environment({"plugins": LightningEnvironment()})
    assert not brings_cluster_environment({"plugins": None, "strategy": ExpertParallelStrategy()})
    check_launch(2, 1, LightningEnvironment(), _TORCHRUN)
    with pytest.raises(ValueError, match="trainer.devices is 2"):
        check_launch(2, 1, SLURMEnvironment(), _SLURM)


def test_a_requeued_job_is_known() -> None:
    assert is_requeued({"SLURM_RESTART_COUNT": "1"})
    assert not is_requeued({"SLURM_RESTART_COUNT": "0"})
    assert not is_requeued({})
    assert read_launch({}) is None


# What follows starts processes

_NOT_INHERITED = ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "PL_GLOBAL_SEED")


def _start(*command: str, **environment: str) -> "subprocess.Popen[str]":
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        env={**inherited, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", **environment},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def _end(process: "subprocess.Popen[str]", seconds: float = 120) -> tuple[int, str]:
    try:
        text = process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"it did not end:\n{process.communicate()[1]}")
    return process.returncode, text


def _torchrun(*arguments: str) -> list[str]:
    return ["torch.distributed.run", "--nproc-per-node=2", "-m", "lightning_moe", *arguments]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _step(run: Path) -> int | None:
    saved = find_last_checkpoint(run)
    return None if saved is None else read_progress(saved).global_step


def _assert_same_weights(run: Path, other: Path) -> None:
    one, two = (read_whole(folder / "checkpoints" / f"step={STEPS}.ckpt") for folder in (run, other))
    assert one["tokens_seen"] == two["tokens_seen"] == STEPS * 8 * 16
    for name, value in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][name], value, rtol=0, atol=0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("launching"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """An uninterrupted run of two processes, which gives neither devices nor nodes."""
    run = tmp_path_factory.mktemp("whole") / "run"
    status, text = _end(_start(*_torchrun(*fit(run, store))))
    assert status == 0, text
    return run


def test_torchrun_ends_after_a_sigterm_to_one_process(tmp_path: Path, store: Path) -> None:
    status, text = _end(_start(*_torchrun(*fit(tmp_path / "run", store, *send(signum=15, rank=1, step=2)))))
    assert status == 1  # torchrun's, for any status of a process but 0
    assert "SIGTERM (rank 1): finishing this step and saving." in text
    assert "Interrupted after step 4; saved " in text
    assert "exitcode  : 143" in text
    assert _step(tmp_path / "run") == 4


def test_ctrl_c_on_torchrun(tmp_path: Path, store: Path) -> None:
    ctrl_c = send(signum=2, rank=0, step=2, to_parent="true")
    status, text = _end(_start(*_torchrun(*fit(tmp_path / "run", store, "--trainer.max_steps=100000", *ctrl_c))))
    assert status == 1
    assert "Interrupted after step " in text
    assert (tmp_path / "run" / "checkpoints" / INTERRUPTED).is_dir()


def test_ctrl_c_with_lightnings_own_launcher(tmp_path: Path, store: Path) -> None:
    more = ["--trainer.devices=2", *send(signum=2, rank=1, step=2)]
    status, text = _end(_start("lightning_moe", *fit(tmp_path / "run", store, *more)))
    assert status == 130, text
    assert "Interrupted after step 4; saved " in text
    assert _step(tmp_path / "run") == 4


def test_two_nodes_end_when_a_process_is_killed_and_resume(tmp_path: Path, store: Path, whole: Path) -> None:
    """Two torchrun agents on one host, as two nodes of one process each."""

    def run(*more: str) -> list[tuple[int, str]]:
        meet = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{_free_port()}"]
        training = fit(tmp_path / "run", store, "--checkpoint.every_n_train_steps=2", *more)
        command = ["torch.distributed.run", *meet, "--rdzv-id=test", "-m", "lightning_moe", *training]
        return [_end(process) for process in [_start(*command), _start(*command)]]

    ended = run(*send(signum=9, rank=1, step=5))
    assert [status for status, _ in ended] == [1, 1]
    assert "error: rank 0 of 2 ends because a collective failed; lost: rank 1." in "".join(text for _, text in ended)
    assert _step(tmp_path / "run") == 4
    assert [status for status, _ in run()] == [0, 0]
    _assert_same_weights(tmp_path / "run", whole)


def _start_tasks(*arguments: str, **environment: str) -> list["subprocess.Popen[str]"]:
    """Two processes as ``srun`` starts them: SLURM's variables, and nothing that watches over them."""
    shared = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    shared |= {"SLURM_JOB_ID": "1234", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(_free_port()), **environment}
    ranks = [{"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]
    return [_start("lightning_moe", *arguments, **shared, **rank) for rank in ranks]


def test_a_process_that_hangs_is_named_after_the_timeout(tmp_path: Path, store: Path) -> None:
    more = ["--trainer.strategy.timeout=0:00:10", *send(signum=int(signal.SIGSTOP), rank=1, step=2)]
    first, second = _start_tasks(*fit(tmp_path / "run", store, *more))
    status, text = _end(first)
    second.kill()
    second.communicate()
    assert status == 1
    assert "error: rank 0 of 2 ends because a collective failed; lost: rank 1." in text


def test_slurm_requeues_after_its_signal_to_one_process(tmp_path: Path, store: Path) -> None:
    """SLURM's variables and a stand-in for ``scontrol``; no cluster takes part."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    scontrol.chmod(0o755)
    training = fit(tmp_path / "run", store, *send(signum=int(signal.SIGUSR1), rank=1, step=2))
    tasks = _start_tasks(*training, PATH=f"{scontrol.parent}:{os.environ['PATH']}")
    ended = [_end(process) for process in tasks]
    assert [status for status, _ in ended] == [138, 138], ended
    assert "requeued job 1234" in ended[0][1]
    assert (tmp_path / "requeued").read_text() == "requeue 1234\n"
    assert _step(tmp_path / "run") == 4


def test_a_requeued_job_goes_on_without_being_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["fit", *arguments(tmp_path, "--trainer.enable_progress_bar=false")]
    assert main([*command, "--trainer.max_steps=2"]) == 0
    assert main(command) == 2  # a run stands there already
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert main(command) == 0
    assert "Done after step 10" in capfd.readouterr().err
