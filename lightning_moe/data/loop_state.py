"""Makes the counters of Lightning's loops follow the data position when a run is resumed.

Lightning counts micro-batches, and restores those counts from the checkpoint. They are wrong when the checkpoint was
made inside an accumulation window (that window begins again) or when the micro-batch size, the number of data ranks or
the batch plan have changed. So the counters in the checkpoint are replaced, before Lightning reads them, by those of a
run that has just finished its last complete optimizer step. Written against lightning 2.6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

if TYPE_CHECKING:
    from lightning_moe.data.datamodule import TokenDataModule


# what the state of a TokenDataModule always has
_POSITION_FIELDS = {"step", "samples_consumed", "store", "tokenizer", "seed", "sequence_length"}


@dataclass(frozen=True)
class LoopPosition:
    """Where training stands between two optimizer steps.

    Args:
        step: Complete optimizer steps.
        epoch: Lightning epochs (phases of the batch plan) before the current one.
        batches: Micro-batches done in the current epoch.
        total_batches: Micro-batches done in all epochs.
    """

    step: int
    epoch: int
    batches: int
    total_batches: int


def rewrite_loop_state(fit_loop: dict[str, Any], position: LoopPosition) -> None:
    """Replaces the counters in a checkpoint's ``loops["fit_loop"]``.

    Inside an epoch they are left as a checkpoint from ``on_train_batch_end`` has them (processed, not yet completed):
    Lightning then completes the batch and does not validate again.
    """
    inside = position.batches > 0
    epoch = {"ready": position.epoch + inside, "started": position.epoch + inside}
    epoch |= {"processed": position.epoch, "completed": position.epoch}
    fit_loop["epoch_progress"] = {"total": dict(epoch), "current": dict(epoch)}

    def counters(done: int) -> dict[str, int]:
        return {"ready": done, "started": done, "processed": done, "completed": done - inside}

    fit_loop["epoch_loop.batch_progress"] = {
        "total": counters(position.total_batches),
        "current": counters(position.batches),
        "is_last_batch": False,
    }
    # counts the step when it completes the batch
    fit_loop["epoch_loop.state_dict"] = {
        **fit_loop.get("epoch_loop.state_dict", {}),
        "_batches_that_stepped": position.step - inside,
    }
    # a validation that was cut short is not continued in the middle
    validation = fit_loop.get("epoch_loop.val_loop.batch_progress")
    if validation is not None:
        for name in ("total", "current"):
            validation[name] = dict.fromkeys(validation[name], 0)
        validation["is_last_batch"] = False


class FollowDataPosition(Callback):
    """Resumes Lightning's loops at the data module's position; the data module adds it to the trainer."""

    def __init__(self, datamodule: TokenDataModule) -> None:
        self.datamodule = datamodule
        self._position: LoopPosition | None = None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not trainer.training and trainer.state.fn != "fit":
            return
        # Lightning finds a data module's state by the name of its class, which may have been another one
        if type(self.datamodule).__qualname__ not in checkpoint:
            for state in checkpoint.values():
                if isinstance(state, dict) and state.keys() >= _POSITION_FIELDS:
                    self.datamodule.load_state_dict(state)
        self._position = self.datamodule.resume_at(int(checkpoint["global_step"]))
        rewrite_loop_state(checkpoint["loops"]["fit_loop"], self._position)
        # a loader made before (`trainer.estimated_stepping_batches` does that) may belong to another phase
        trainer.fit_loop._combined_loader = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._position is not None and self._position.batches == 0:
            # between two epochs nothing is left to continue: the next one begins as in an uninterrupted run
            trainer.fit_loop.epoch_loop.restarting = False
        self._position = None
