"""Loss curves of the preset ``tiny`` on real text in several precisions, from the same weights and the same batches.

python benchmarks/precision_curves.py export STORE tokens.npz       (a token store, such as that of configs/tiny.yaml)
python benchmarks/precision_curves.py train tokens.npz bf16 mxfp8
python benchmarks/precision_curves.py plot docs/images/precision_curves.png

A run on a GPU has a record of its own: ``plot docs/images/precision_curves_cuda.png --record precision_curves_cuda``.
"""

import argparse
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from record import RESULTS, machine, save
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_moe import (
    AdamW,
    BF16Precision,
    BlockwiseFP8Precision,
    DeepSeekV3,
    DeepSeekV3Config,
    ExpertParallelStrategy,
    Float8Precision,
    MoEPrecision,
    MXFP8Precision,
    TokenSchedule,
)
from lightning_moe.data.store import TokenBlocks

SEQUENCE, BATCH, LAST_STEPS = 256, 4, 100
PLUGINS: dict[str, Callable[[], MoEPrecision]] = {
    "bf16": BF16Precision,
    "mxfp8": MXFP8Precision,
    "float8": lambda: Float8Precision(linears="rowwise", grouped_mm="rowwise"),
    "float8_tensorwise": lambda: Float8Precision(linears="tensorwise", grouped_mm="rowwise"),
    "blockwise_fp8": BlockwiseFP8Precision,
}


class Blocks(Dataset[dict[str, Tensor]]):
    """Batches of consecutive blocks of tokens."""

    def __init__(self, blocks: np.ndarray) -> None:
        self.blocks = torch.from_numpy(blocks.astype(np.int64))

    def __len__(self) -> int:
        return len(self.blocks) // BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rows = self.blocks[index * BATCH : (index + 1) * BATCH]
        return {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


class Losses(Callback):
    """Collects the loss of every step, which is logged by the start of the next."""

    def __init__(self) -> None:
        self.train: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step:
            self.train.append(float(trainer.logged_metrics["train/loss"]))

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        self.train.append(float(trainer.logged_metrics["train/loss"]))


def export(store: Path, file: Path, steps: int) -> None:
    """Saves blocks of a store in an order drawn once, so that machines without the store can train on them."""
    arrays: dict[str, Any] = {}
    for split, wanted in (("train", steps * BATCH), ("validation", 32 * BATCH)):
        blocks = TokenBlocks(store, split, SEQUENCE)
        order = np.random.default_rng(0).permutation(len(blocks))[:wanted]
        arrays[split] = blocks.read(np.sort(order))[np.argsort(np.argsort(order))].astype(np.uint16)
    np.savez_compressed(file, **arrays)
    print({name: array.shape for name, array in arrays.items()})


def train(file: Path, precision: str, steps: int) -> dict[str, Any]:
    """Trains in one precision and returns its losses."""
    arrays = np.load(file)
    seed_everything(1337, verbose=False)
    steps = min(steps, len(arrays["train"]) // BATCH)
    total = steps * BATCH * SEQUENCE
    module = DeepSeekV3(
        DeepSeekV3Config.preset("tiny"),
        lambda params: AdamW(params, lr=3e-3),
        TokenSchedule(
            warmup=max(total // 20, 2), decay_start=total * 6 // 10, decay_end=max(total, 4), final_ratio=0.1
        ),
        mtp_loss_weight=0.3,
    )
    losses = Losses()
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        strategy=ExpertParallelStrategy(),
        plugins=[PLUGINS[precision]()],
        max_steps=steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[losses],
    )
    start = time.perf_counter()
    trainer.fit(module, DataLoader(Blocks(arrays["train"]), batch_size=None))
    seconds = time.perf_counter() - start
    values = trainer.validate(module, DataLoader(Blocks(arrays["validation"]), batch_size=None), verbose=False)[0]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(
        f"{precision}: {steps} steps in {seconds:.0f} s on {device}, validation loss {values['val/loss']:.4f}",
        flush=True,
    )
    return {"loss": losses.train, "validation_loss": values["val/loss"], "seconds": seconds, "device": device}


def plot(picture: Path, record: str) -> None:
    """Draws the curves of a record."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = json.loads((RESULTS / f"{record}.json").read_text())["curves"]
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 5), dpi=110, sharex=True, gridspec_kw={"height_ratios": [3, 1.3]}
    )
    window = 25
    smooth = {name: _smooth(curve["loss"], window) for name, curve in curves.items()}
    for number, (name, values) in enumerate(smooth.items()):
        color = f"C{number}"
        above.plot(range(window, window + len(values)), values, linewidth=1.2, color=color, label=name)
        if name != "bf16" and "bf16" in smooth:
            gap = [a - b for a, b in zip(values, smooth["bf16"], strict=True)]
            below.plot(range(window, window + len(gap)), gap, linewidth=1, color=color)
    above.set(ylabel=f"loss, mean of {window} steps", title="tiny on Python's standard library")
    below.set(xlabel="step", ylabel="gap to bf16")
    above.legend(frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)


def _smooth(values: list[float], window: int) -> list[float]:
    return [statistics.fmean(values[end - window : end]) for end in range(window, len(values) + 1)]


def main() -> None:
    """Exports tokens, trains on them, or draws the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["export", "train", "plot"])
    parser.add_argument(
        "paths", nargs="+", help="of export: store and file; of train: file and precisions; of plot: picture"
    )
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--record", help="to write or to draw; by default precision_curves, or on a GPU with _cuda")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    first, *rest = arguments.paths
    record = arguments.record or ("precision_curves_cuda" if torch.cuda.is_available() else "precision_curves")
    if arguments.command == "export":
        export(Path(first), Path(rest[0]), arguments.steps)
    elif arguments.command == "plot":
        plot(Path(first), record)
    else:
        curves: dict[str, Any] = {}
        for precision in rest:
            curves[precision] = train(Path(first), precision, arguments.steps)
            save(record, {**machine(torch.get_num_threads()), "curves": curves})
        for name, curve in curves.items():
            last = statistics.fmean(curve["loss"][-LAST_STEPS:])
            base = curves[rest[0]]
            gap = last - statistics.fmean(base["loss"][-LAST_STEPS:])
            print(
                f"{name}: mean loss of the last {LAST_STEPS} steps {last:.4f} ({gap:+.4f}), "
                f"validation {curve['validation_loss']:.4f} ({curve['validation_loss'] - base['validation_loss']:+.4f})"
            )


if __name__ == "__main__":
    main()
