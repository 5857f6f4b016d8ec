"""The progress bar: one line with step, loss, validation loss, tokens per second and the time that is left."""

import math
import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from typing_extensions import override


class TokenProgressBar(ProgressBar):
    """Shows the optimizer step, the training and validation loss, tokens per second and the time that is left.

    On a terminal it is one line that stays in place and fits 80 columns. Elsewhere (a log file of a batch job) it
    prints a line at the first step, every ``log_seconds``, and after each validation.

    Args:
        refresh_seconds: Shortest time between two updates on a terminal.
        log_seconds: Shortest time between two lines where there is no terminal.
    """

    def __init__(self, refresh_seconds: float = 0.5, log_seconds: float = 30.0) -> None:
        super().__init__()
        self.refresh_seconds = refresh_seconds
        self.log_seconds = log_seconds
        self._console = Console(stderr=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._enabled = True
        self._shown_at = -math.inf
        self._measured: list[tuple[float, int, int]] = []  # (seconds, optimizer steps, tokens)
        self._warm = False
        self._rates: tuple[float, float] | None = None  # optimizer steps and tokens per second

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start("check", None)

    @override
    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._measured = [(time.monotonic(), trainer.global_step, _tokens_seen(pl_module))]
        self._warm = False
        self._start("train", total_steps(trainer))
        self._show(trainer, pl_module, "train", force=True)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > self._measured[-1][1]:
            # The rate is that of the last steps, without the first of all, which compiles and allocates
            kept = self._measured[-49:] if self._warm else []
            self._measured = [*kept, (time.monotonic(), trainer.global_step, _tokens_seen(pl_module))]
            self._show(trainer, pl_module, "train", force=not self._warm)
            self._warm = True

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
        if self._console.is_terminal:
            self._show(trainer, pl_module, f"val {batch_idx + 1}")

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._progress is None:
            self._start("val", None)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            # Validation is no time of training
            self._measured = [(time.monotonic(), trainer.global_step, _tokens_seen(pl_module))]
            self._show(trainer, pl_module, "train", force=True)
        elif trainer.state.fn != "fit":
            self._stop()

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start("test", None)

    @override
    def on_test_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if self._console.is_terminal:
            self._show(trainer, pl_module, "test")

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(trainer, pl_module, "done", force=True)
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _start(self, label: str, total: int | None) -> None:
        if not (self._enabled and self._console.is_terminal):
            return
        self._stop()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[facts]}"),
            console=self._console,
            auto_refresh=False,
            expand=True,
        )
        self._task = self._progress.add_task(label, total=total, facts="")
        self._progress.start()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress, self._task = None, None

    def _show(self, trainer: Trainer, pl_module: LightningModule, label: str, force: bool = False) -> None:
        period = self.refresh_seconds if self._console.is_terminal else self.log_seconds
        if not self._enabled or (not force and time.monotonic() - self._shown_at < period):
            return
        self._shown_at = time.monotonic()
        facts = "  ".join(self._facts(trainer))
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=label, completed=trainer.global_step, facts=facts)
            self._progress.refresh()
        elif not self._console.is_terminal and facts:
            self._console.print(f"{label}  {facts}", highlight=False, soft_wrap=True)

    def _facts(self, trainer: Trainer) -> list[str]:
        if trainer.state.fn != "fit":
            return []
        total = total_steps(trainer)
        facts = [f"{trainer.global_step}/{total}" if total else f"step {trainer.global_step}"]
        facts += _losses(trainer.callback_metrics)
        (start, first_step, first_tokens), (end, step, tokens) = self._measured[0], self._measured[-1]
        if step > first_step:
            self._rates = (step - first_step) / (end - start), (tokens - first_tokens) / (end - start)
        if self._rates is not None:
            steps_per_second, tokens_per_second = self._rates
            if tokens_per_second > 0:
                facts.append(f"{_short(tokens_per_second)} tok/s")
            if total is not None and total > trainer.global_step:
                facts.append(_clock((total - trainer.global_step) / steps_per_second))
        return facts


def _tokens_seen(pl_module: LightningModule) -> int:
    return int(getattr(pl_module, "tokens_seen", 0))


def total_steps(trainer: Trainer) -> int | None:
    """Returns the optimizer step at which training ends, by the data module or the trainer, or ``None``."""
    of_data = getattr(getattr(trainer, "datamodule", None), "total_steps", None)
    limits = [of_data() if callable(of_data) else None, trainer.max_steps]
    return min((limit for limit in limits if limit is not None and limit > 0), default=None)


def _losses(metrics: Mapping[str, Any]) -> list[str]:
    named = {"loss": "train/loss", "val": "val/loss"}
    return [f"{label} {float(metrics[name]):.3f}" for label, name in named.items() if name in metrics]


def _short(number: float) -> str:
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if suffix == 'k' else size):.1f}{suffix}"
    return f"{number:,.0f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}h"
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
