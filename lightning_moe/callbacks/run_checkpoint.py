"""The checkpoints of a run: the ``checkpoint:`` group of the command line."""

import os
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_moe.callbacks.averaging import averages_weights
from lightning_moe.callbacks.interrupt import INTERRUPTED


class RunCheckpoint(ModelCheckpoint):
    """Lightning's ``ModelCheckpoint`` with defaults for one run directory that is restarted many times.

    By default the last two checkpoints stay. The end of training is saved too. ``last.ckpt`` is a link that moves to a
    new checkpoint before an old one is removed, in one step, so that it never dangles. Names carry no version counter:
    a restarted run writes the same step to the same name. Where a metric decides, the newest checkpoint stays besides
    the best; a metric of the validation (``val…``) is that of the same step, and ranks no other one.

    Args:
        dirpath: Folder of the checkpoints; on the command line always ``<trainer.default_root_dir>/checkpoints``.
        filename: File name without extension, with metrics in braces.
        monitor: Metric that decides which checkpoints stay. ``step`` keeps the newest.
        mode: Whether a larger (``max``) or a smaller (``min``) value of ``monitor`` is better.
        save_top_k: How many checkpoints stay; -1 for all.
        save_last: ``link`` for a link ``last.ckpt`` to the newest checkpoint, true for a copy.
        every_n_train_steps: Optimizer steps between checkpoints. Without it and ``train_time_interval``: 1000.
        train_time_interval: Time between checkpoints, such as ``"0:30:00"``, instead of ``every_n_train_steps``.
        save_weights_only: Whether to leave out what resuming needs.
        save_on_exception: Whether to save when training fails; for one process.
        verbose: Whether to print each checkpoint's name.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        filename: str = "{step}",
        monitor: str | None = "step",
        mode: Literal["min", "max"] = "max",
        save_top_k: int = 2,
        save_last: bool | Literal["link"] = "link",
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        save_weights_only: bool = False,
        save_on_exception: bool = False,
        verbose: bool = False,
    ) -> None:
        if every_n_train_steps is None and train_time_interval is None:
            every_n_train_steps = 1000
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_last=save_last,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            save_weights_only=save_weights_only,
            save_on_exception=save_on_exception,
            verbose=verbose,
            enable_version_counter=False,
        )
        self._newest = ""  # where it is not among the best
        self._validated_step: int | None = None

    @property
    @override
    def state_key(self) -> str:
        # Without the intervals: what is tracked outlives a change of how often it is saved
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        # A resumed step is saved already. Lightning would save it again at the first micro-batch of the next window,
        # whose gradients no checkpoint holds
        self._last_global_step_saved = trainer.global_step
        self._forget_more_than_top_k(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Not Lightning's, which saves within steps and ranks by the validation before, or at some last batches never
        loop = trainer.fit_loop
        if loop._should_accumulate():  # a checkpoint would lack the gradients of this step so far
            return
        due = self._every_n_train_steps > 0 and trainer.global_step % self._every_n_train_steps == 0
        if self._train_time_interval is not None:
            elapsed = time.monotonic() - (self._last_time_checked or 0.0)
            due = trainer.strategy.broadcast(elapsed >= self._train_time_interval.total_seconds())
            if due:
                self._last_time_checked = time.monotonic()
        if not due or self._should_skip_saving_checkpoint(trainer):
            return
        if self._ranks_validations and loop.epoch_loop._should_check_val_fx(loop._data_fetcher):  # type: ignore[arg-type]
            self._defer_save_until_validation = True
        else:
            self._save(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._validated_step = trainer.global_step
        if self._defer_save_until_validation:
            self._defer_save_until_validation = False
            self._save(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # At the end of training averages have taken the place of the trained weights, from which a longer run goes on
        if averages_weights(trainer) and trainer.fit_loop.done:
            self._save(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)

    @property
    def _ranks_validations(self) -> bool:
        return self.monitor is not None and self.monitor.startswith("val")

    def _save(self, trainer: Trainer) -> None:
        """Saves among the best, if the metric is that of these weights, and else as the newest."""
        if self._should_skip_saving_checkpoint(trainer):
            return
        candidates = self._monitor_candidates(trainer)
        previous, self._newest = self._newest, ""
        present = self.monitor is None or self.monitor in candidates
        stale = self._ranks_validations and self._validated_step != trainer.global_step
        missing = not present and trainer.fit_loop.epoch_loop.val_loop._has_run  # an error of Lightning's names it
        if missing or (present and not stale):
            self._save_topk_checkpoint(trainer, candidates)
        if self.save_top_k != 0:
            if self._last_global_step_saved != trainer.global_step:
                self._newest = self.format_checkpoint_name(candidates)
                self._save_checkpoint(trainer, self._newest)
            kept = [self._newest, *self.best_k_models]
            if previous and previous not in kept and self._should_remove_checkpoint(trainer, previous, self._newest):
                self._remove_checkpoint(trainer, previous)
        self._save_last_checkpoint(trainer, candidates)

    def _forget_more_than_top_k(self, trainer: Trainer) -> None:
        """Removes what an earlier run kept and this one would not, but what it goes on from."""
        if self.save_top_k < 1 or len(self.best_k_models) <= self.save_top_k:
            return
        from_best = sorted(self.best_k_models, key=lambda path: self.best_k_models[path], reverse=self.mode == "max")
        resumed = None if trainer.ckpt_path is None else os.path.realpath(trainer.ckpt_path)
        for path in from_best[self.save_top_k :]:
            del self.best_k_models[path]
            if os.path.realpath(path) == resumed:
                self._newest = path
            else:
                self._remove_checkpoint(trainer, path)
        self.kth_best_model_path = from_best[self.save_top_k - 1]
        self.kth_value = self.best_k_models[self.kth_best_model_path]

    @override
    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        if self.save_last == "link":
            # Lightning removes the old checkpoint before it moves the link
            self._link_checkpoint(trainer, filepath, str(Path(filepath).parent / f"{self.CHECKPOINT_NAME_LAST}.ckpt"))
        if not self.save_weights_only:  # left by Ctrl-C, and older than what was just saved
            trainer.strategy.remove_checkpoint(Path(filepath).parent / INTERRUPTED)

    @override
    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        # Lightning keeps what a run was resumed from for ever: one checkpoint more with every restart
        if "://" in previous or self.dirpath is None:
            return super()._should_remove_checkpoint(trainer, previous, current)
        return previous != current and Path(self.dirpath).absolute() in Path(previous).absolute().parents

    @staticmethod
    @override
    def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            if os.path.isdir(linkpath) and not os.path.islink(linkpath):
                shutil.rmtree(linkpath)  # a copy of a distributed checkpoint, from `save_last: true`
            temporary = f"{linkpath}.{os.getpid()}.tmp"
            os.symlink(os.path.relpath(filepath, os.path.dirname(linkpath)), temporary)
            os.replace(temporary, linkpath)
        trainer.strategy.barrier()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "newest": self._newest}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        newest = state_dict.get("newest", "")
        self._newest = newest if os.path.exists(newest) else ""
        # Checkpoints that were removed by hand would count as kept
        self.best_k_models = {path: score for path, score in self.best_k_models.items() if os.path.exists(path)}
        if self.kth_best_model_path not in self.best_k_models:
            worst = max if self.mode == "min" else min
            self.kth_best_model_path = worst(self.best_k_models, key=lambda path: self.best_k_models[path], default="")
