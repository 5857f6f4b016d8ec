"""The table at the start of training: what is about to run."""

import os
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_moe.callbacks.progress_bar import total_steps


class RunTable(Callback):
    """Prints one table at fit start: model size, layout, batch, length of training, precision and run directory.

    What a model or data module of one's own does not tell is left out.

    Args:
        resumed_from: The checkpoint that the run continues from.
        global_step: Its optimizer steps; at fit start the trainer does not know them yet.
    """

    def __init__(self, resumed_from: str | None = None, global_step: int = 0) -> None:
        self.resumed_from = resumed_from
        self.global_step = global_step

    @override
    @rank_zero_only
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        table = Table(show_header=False, title="lightning-moe", title_justify="left", title_style="bold")
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self.rows(trainer, pl_module):
            table.add_row(name, value)
        Console(stderr=True).print(table)

    def rows(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[tuple[str, str]]:
        """Yields the rows: a name and a value each."""
        yield "model", _parameters(pl_module)
        yield "layout", _layout(trainer)
        yield from _batch(trainer, self.global_step)
        yield from _length(trainer)
        backend = getattr(pl_module, "attention_backend", None)
        if callable(backend):
            yield "attention", str(backend())
        yield "dispatcher", str(getattr(trainer.strategy, "dispatcher_name", "local"))
        yield "precision", str(trainer.precision)
        yield "run directory", _folder(trainer)
        yield (
            "resumed from",
            f"{self.resumed_from} (step {self.global_step:,})" if self.resumed_from else "nothing, new run",
        )


def _parameters(pl_module: LightningModule) -> str:
    name = type(pl_module).__name__
    counts = getattr(pl_module, "parameter_counts", None)
    if callable(counts):
        numbers = counts()
        return f"{name}: {_size(numbers['total'])} parameters, {_size(numbers['activated'])} active per token"
    return f"{name}: {_size(sum(parameter.numel() for parameter in pl_module.parameters()))} parameters"


def _layout(trainer: Trainer) -> str:
    ranks = trainer.world_size
    device = trainer.strategy.root_device.type
    sizes = getattr(trainer.strategy, "layout", None)
    detail = type(trainer.strategy).__name__ + (f": {sizes}" if ranks > 1 and sizes is not None else "")
    return f"{ranks} {device} device{'s' if ranks > 1 else ''} ({detail})"


def _batch(trainer: Trainer, global_step: int) -> Iterator[tuple[str, str]]:
    data: Any = getattr(trainer, "datamodule", None)
    micro, sequence = getattr(data, "micro_batch_size", None), getattr(data, "sequence_length", None)
    accumulation_at = getattr(data, "accumulation_at", None)
    if micro is None:
        yield "accumulation", f"{trainer.accumulate_grad_batches} batches per step"
        return
    accumulation = accumulation_at(global_step) if accumulation_at else trainer.accumulate_grad_batches
    ranks = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
    batch = micro * accumulation * ranks
    ramp = isinstance(getattr(data, "global_batch_size", None), dict)
    yield (
        "global batch",
        f"{micro} x {accumulation} accumulated x {ranks} data rank{'s' if ranks > 1 else ''} = {batch} sequences"
        + (" (at this step; grows)" if ramp else ""),
    )
    if sequence is not None:
        yield "tokens per step", f"{batch * sequence:,}"


def _length(trainer: Trainer) -> Iterator[tuple[str, str]]:
    max_tokens = getattr(getattr(trainer, "datamodule", None), "max_tokens", None)
    steps = total_steps(trainer)
    if max_tokens is not None:
        yield "max_tokens", _size(max_tokens)
    if steps is not None:
        yield "steps", f"{steps:,}"


def _folder(trainer: Trainer) -> str:
    if getattr(trainer, "fast_dev_run", 0):
        return "not used (fast_dev_run)"
    relative = os.path.relpath(trainer.default_root_dir)
    return trainer.default_root_dir if relative.startswith("..") else relative


def _size(number: float) -> str:
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.4g}{suffix}"
    return f"{number:,.0f}"
