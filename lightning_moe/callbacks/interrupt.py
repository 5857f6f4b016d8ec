"""How a training that is asked to stop ends: what is saved, and the exit status."""

import os
import signal
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

EXIT_STATUS = 128 + signal.SIGINT
INTERRUPTED = "interrupted.ckpt"


class TrainingInterrupted(SystemExit):
    """Ends training that was asked to stop; a script that does not catch it ends with this status.

    Args:
        message: One line about what was saved.
        status: Exit status: 128 and the number of the signal, as shells have it.
    """

    def __init__(self, message: str, status: int = EXIT_STATUS) -> None:
        super().__init__(status)
        self.message = message
        self.status = status


def save_interrupted(trainer: Trainer) -> str:
    """Saves a checkpoint that ``ckpt_path: last`` finds, unless this step is saved already; a collective.

    Args:
        trainer: A trainer between two optimizer steps.

    Returns:
        What was saved, to be printed.
    """
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
