"""Stopping on signals: one process here, and two processes of which one gets the signal."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_moe import DeepSeekV3, Preemption
from lightning_moe.callbacks.interrupt import INTERRUPTED, TrainingInterrupted
from lightning_moe.cli import main
from lightning_moe.run_directory import find_last_checkpoint, read_progress
from lightning_moe.strategies.checkpointing import read_whole
from lightning_moe.strategies.expert_parallel import ExpertParallelStrategy
from tests.models.test_module import CONFIG, make_trainer, sgd
from tests.models.test_module import Rows as RandomRows
from tests.strategies import processes
from tests.strategies.processes import rank
from tests.strategies.signals import STEPS, SendSignal, fit, make_store, send
from tests.strategies.training import Rows

_TERM, _CTRL_C = int(signal.SIGTERM), int(signal.SIGINT)


def _steps(folder: Path, preemption: Preemption, step: int, signum: int = _TERM) -> Trainer:
    trainer = make_trainer(
        default_root_dir=folder,
        max_steps=6,
        max_epochs=-1,
        accumulate_grad_batches=2,
        callbacks=[SendSignal(signum, 0, step), preemption],
    )
    trainer.fit(DeepSeekV3(CONFIG, sgd), DataLoader(RandomRows(), batch_size=2))
    return trainer


def test_one_process_saves_after_the_whole_step(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(TrainingInterrupted) as stopped:
        _steps(tmp_path, Preemption(), step=2)
    assert stopped.value.code == 143
    assert torch.load(tmp_path / "checkpoints" / INTERRUPTED, weights_only=True)["global_step"] == 3
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_looks_only_every_few_steps(tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted):
        _steps(tmp_path, Preemption(every_n_steps=5), step=2)
    assert torch.load(tmp_path / "checkpoints" / INTERRUPTED, weights_only=True)["global_step"] == 5
    with pytest.raises(ValueError, match="every_n_steps is 0, but it must be at least 1"):
        Preemption(every_n_steps=0)


def test_a_handler_of_the_user_is_called_too(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: seen.append(signum))
    try:
        with pytest.raises(TrainingInterrupted):
            _steps(tmp_path, Preemption(), step=1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


def test_other_trainers_keep_what_lightning_has(tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted):
        _steps(tmp_path, Preemption(), step=1)
    trainer: Any = make_trainer()
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    for method in (loop._broadcast_sigterm_tensor, connector.register_signal_handlers):
        assert method.__module__.startswith("lightning.pytorch.")


# Two processes: one launch for all cases, of which each test looks at one

_CASES = {
    "term": send(signum=_TERM, rank=1, step=2),
    "term_first": send(signum=_TERM, rank=0, step=2),
    "ctrl_c": send(signum=_CTRL_C, rank=1, step=2),
    "validation": [*send(signum=_TERM, rank=1, step=2, during="validation"), "--trainer.val_check_interval=4"],
    # Validation between two micro-batches of a step: nothing can be saved there
    "within": [*send(signum=_TERM, rank=1, step=2, during="validation"), "--trainer.val_check_interval=5"],
}


def _run_cases(folder: Path, store: Path) -> None:
    two = ["--trainer.devices=2"]
    results: dict[str, tuple[int, int | None, int | None]] = {"whole": (main(fit(folder / "whole", store, *two)), 0, 0)}
    for name, more in _CASES.items():
        status = main(fit(folder / name, store, *two, *more))
        saved = find_last_checkpoint(folder / name)
        step = None if saved is None else read_progress(saved).global_step
        dist.barrier()
        resumed = main(fit(folder / name, store, *two)) if name in ("term", "validation") else None
        results[name] = (status, step, resumed)
    torch.save(results, folder / f"results-{rank()}.pt")


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preemption")
    processes.run(2, _run_cases, folder, make_store(folder))
    return folder


# A signal in the first micro-batch of step 3: sent to the others after the step, and known to all after the next
@pytest.mark.parametrize(
    ("case", "status", "step"),
    [("term", 143, 4), ("term_first", 143, 4), ("ctrl_c", 130, 4), ("validation", 143, 2), ("within", 143, 4)],
)
def test_a_signal_to_one_process_ends_all_with_a_checkpoint(
    two_processes: Path, case: str, status: int, step: int
) -> None:
    for process in range(2):
        results = torch.load(two_processes / f"results-{process}.pt")
        assert results[case][:2] == (status, step)


@pytest.mark.parametrize("case", ["term", "validation"])
def test_resuming_gives_what_an_uninterrupted_run_gives(two_processes: Path, case: str) -> None:
    assert torch.load(two_processes / "results-0.pt")[case][2] == 0
    whole, parts = (read_whole(two_processes / run / "checkpoints" / f"step={STEPS}.ckpt") for run in ("whole", case))
    assert whole["tokens_seen"] == parts["tokens_seen"] == STEPS * 8 * 16
    for name, value in whole["state_dict"].items():
        torch.testing.assert_close(parts["state_dict"][name], value, rtol=0, atol=0)
    assert not (two_processes / case / "checkpoints" / INTERRUPTED).exists()


class _CountCollectives(Callback):
    """Counts broadcasts, and all-reduces of CPU groups, from the first micro-batch to the last."""

    def __init__(self) -> None:
        self.broadcasts = 0
        self.agreements = 0

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        self.originals = broadcast, all_reduce = dist.broadcast, dist.all_reduce

        def counted_broadcast(*args: Any, **kwargs: Any) -> Any:
            self.broadcasts += 1
            return broadcast(*args, **kwargs)

        def counted_all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.agreements += kwargs.get("async_op", False)
            return all_reduce(tensor, *args, **kwargs)

        dist.broadcast, dist.all_reduce = counted_broadcast, counted_all_reduce

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        dist.broadcast, dist.all_reduce = self.originals


def _count(folder: Path) -> None:
    counts = {}
    for name, preemption in (("without", []), ("each", [Preemption()]), ("second", [Preemption(2)])):
        counter = _CountCollectives()
        trainer = make_trainer(
            devices=2,
            strategy=ExpertParallelStrategy(),
            max_steps=4,
            max_epochs=-1,
            accumulate_grad_batches=2,
            use_distributed_sampler=False,
            callbacks=[counter, *preemption],
        )
        trainer.fit(DeepSeekV3(CONFIG, sgd), DataLoader(Rows(2, 8), batch_size=2))
        counts[name] = (counter.broadcasts, counter.agreements)
    processes.save(folder / "counts.pt", counts)


def test_nothing_is_broadcast_in_a_step(tmp_path: Path) -> None:
    processes.run(2, _count, tmp_path)
    # Lightning alone broadcasts before each of the 8 micro-batches
    assert torch.load(tmp_path / "counts.pt") == {"without": (8, 0), "each": (0, 4), "second": (0, 2)}
