"""The checkpoints of a run: the ``checkpoint:`` group of the command line."""

import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from typing_extensions import override

from lightning_moe.callbacks.interrupt import INTERRUPTED


class RunCheckpoint(ModelCheckpoint):
    """Lightning's ``ModelCheckpoint`` with defaults for one run directory that is restarted many times.

    By default the last two checkpoints stay. The end of training is saved too. ``last.ckpt`` is a link that moves to a
    new checkpoint before an old one is removed, in one step, so that it never dangles. Names carry no version counter:
    a restarted run writes the same step to the same name.

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

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        # At the end of training averages have taken the place of the trained weights, from which a longer run goes on
        averages = any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        if averages and trainer.fit_loop.done:
            self.on_train_end(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)

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
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # Checkpoints that were removed by hand would count as kept
        self.best_k_models = {path: score for path, score in self.best_k_models.items() if os.path.exists(path)}
        if self.kth_best_model_path not in self.best_k_models:
            worst = max if self.mode == "min" else min
            self.kth_best_model_path = worst(self.best_k_models, key=lambda path: self.best_k_models[path], default="")
