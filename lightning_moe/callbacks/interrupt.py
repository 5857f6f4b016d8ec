"""Ctrl-C: finish the optimizer step, save, end."""

import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

EXIT_STATUS = 128 + signal.SIGINT
INTERRUPTED = "interrupted.ckpt"


class TrainingInterrupted(SystemExit):
    """Ends training after Ctrl-C; a script that does not catch it ends with status 130, as a shell expects of Ctrl-C.

    Args:
        message: One line about what was saved.
    """

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_STATUS)
        self.message = message


class SaveOnInterrupt(Callback):
    """At the first Ctrl-C, finishes the optimizer step, saves a checkpoint and ends; at the second, stops at once.

    A checkpoint is only written between optimizer steps, never between the micro-batches of one. During validation it
    is written at once, and validation ends there. With several processes Lightning's own handling stays in place.
    """

    def __init__(self) -> None:
        self._requested = False
        self._previous: Any = None
        self._step_before = -1
        self._between_steps = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._requested = False
        self._step_before = trainer.global_step
        self._between_steps = True
        if trainer.world_size == 1:
            try:
                self._previous = signal.signal(signal.SIGINT, self._handle)
            except ValueError:  # not the main thread: signals go elsewhere
                self._previous = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._between_steps = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._between_steps = trainer.global_step > self._step_before
        self._step_before = trainer.global_step
        self._stop_if_requested(trainer)

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._stop_if_requested(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore_handler()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore_handler()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._requested:
            self._restore_handler()
            raise KeyboardInterrupt
        self._requested = True
        # print() may be interrupted inside itself by a signal; a plain write may not
        os.write(2, b"\nCtrl-C: finishing this step and saving. Press Ctrl-C again to stop at once.\n")

    def _stop_if_requested(self, trainer: Trainer) -> None:
        if not (self._requested and self._between_steps and trainer.state.fn == TrainerFn.FITTING):
            return
        raise TrainingInterrupted(f"Interrupted after step {trainer.global_step}; {self._save(trainer)}.")

    def _save(self, trainer: Trainer) -> str:
        if getattr(trainer, "fast_dev_run", 0):
            return "nothing is saved under fast_dev_run"
        saved_steps = [
            callback._last_global_step_saved
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint) and not callback.save_weights_only
        ]
        if trainer.global_step == 0 or trainer.global_step in saved_steps:
            return "its checkpoint was saved already" if trainer.global_step else "there is nothing to save yet"
        checkpoint = trainer.checkpoint_callback
        folder = checkpoint.dirpath if isinstance(checkpoint, ModelCheckpoint) else None
        path = Path(folder or Path(trainer.default_root_dir, "checkpoints"), INTERRUPTED)
        trainer.save_checkpoint(path, weights_only=False)
        return f"saved {os.path.relpath(path)} (continue with --ckpt_path last)"

    def _restore_handler(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None
