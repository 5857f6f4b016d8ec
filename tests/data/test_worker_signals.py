import os
import signal
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_moe.data.worker_signals import outlive_signals


class _Pids(Dataset[int]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def _worker(loader: DataLoader[Any]) -> tuple[Any, int]:
    batches = iter(loader)
    return batches, int(next(batches))


def test_a_worker_outlives_what_its_group_gets_once() -> None:
    batches, pid = _worker(DataLoader(_Pids(), num_workers=1, worker_init_fn=outlive_signals))
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(pid, signum)
    assert sum(1 for _ in batches) == 49


def test_without_it_training_ends_with_an_error() -> None:
    batches, pid = _worker(DataLoader(_Pids(), num_workers=1))
    os.kill(pid, signal.SIGTERM)
    batches._workers[0].join(timeout=10)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        list(batches)


def test_the_second_sigterm_ends_a_worker() -> None:
    batches, pid = _worker(DataLoader(_Pids(), num_workers=1, persistent_workers=True, worker_init_fn=outlive_signals))
    worker = batches._workers[0]
    assert worker.pid == pid
    os.kill(pid, signal.SIGTERM)
    worker.join(timeout=0.5)
    assert worker.is_alive()
    os.kill(pid, signal.SIGTERM)
    worker.join(timeout=10)
    assert worker.exitcode == 0
