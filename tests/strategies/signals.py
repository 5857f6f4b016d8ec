"""A training of two processes on a token store, and a callback that sends signals in the middle of it."""

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_moe.tools.prepare import prepare
from tests.callbacks.standins import arguments
from tests.data.conftest import write_documents

STEPS = 8


class SendSignal(Callback):
    """Sends one signal once, to one process (or the one that started it), before a micro-batch.

    Args:
        signum: The signal.
        rank: The process.
        step: Optimizer steps that are done by then.
        during: In which loop: ``"train"`` or ``"validation"``.
        to_parent: Whether the process that started the rank gets it instead.
    """

    def __init__(self, signum: int, rank: int, step: int, during: str = "train", to_parent: bool = False) -> None:
        self.signum, self.rank, self.step, self.during, self.to_parent = signum, rank, step, during, to_parent
        self.sent = False

    def _send(self, trainer: Trainer, during: str) -> None:
        now = (trainer.global_rank, trainer.global_step, during) == (self.rank, self.step, self.during)
        if now and not self.sent:
            self.sent = True
            os.kill(os.getppid() if self.to_parent else os.getpid(), self.signum)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._send(trainer, "train")

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._send(trainer, "validation")


def make_store(folder: Path) -> Path:
    """Prepares a small store of bytes."""
    text = write_documents(folder / "text.jsonl", 120)
    prepare([str(text)], str(folder / "store"), "byte", validation_fraction=0.1, num_workers=1, progress_bar=False)
    return folder / "store"


def fit(run: Path, store: Path, *more: str) -> list[str]:
    """The arguments of a training of :data:`STEPS` optimizer steps; two processes accumulate over two micro-batches."""
    return [
        "fit",
        *arguments(
            run,
            "--data=lightning_moe.TokenDataModule",
            f"--data.path={store}",
            "--data.sequence_length=16",
            "--data.micro_batch_size=2",
            "--data.global_batch_size=8",
            "--model.config.vocab_size=258",
            f"--trainer.max_steps={STEPS}",
            "--trainer.limit_val_batches=3",
            "--trainer.enable_progress_bar=false",
            "--trainer.strategy=expert_parallel",
            "--trainer.strategy.expert_parallel_size=2",
            "--ckpt_path=last",
        ),
        *more,
    ]


def send(**settings: Any) -> list[str]:
    """The arguments for :class:`SendSignal`."""
    init = [f"--trainer.callbacks.{name}={value}" for name, value in settings.items()]
    return ["--trainer.callbacks=tests.strategies.signals.SendSignal", *init]
