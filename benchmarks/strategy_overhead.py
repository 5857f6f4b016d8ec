"""Training step of Lightning's own single-device strategy and of ExpertParallelStrategy with one process.

Both train the same module through ``Trainer.fit``, in rounds that alternate; on CUDA both compute in bfloat16 over
float32 master weights, plain Lightning by autocast (`precision: bf16-mixed`). Medians over the steps of all rounds.

    python benchmarks/strategy_overhead.py                              (CPU, the preset tiny)
    python benchmarks/strategy_overhead.py --preset deepseek_v2_lite --layers 4 --batch 4 --sequence 4096   (CUDA)
"""

import argparse
import gc
import logging
import statistics
import time
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from record import machine, save
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from lightning_moe import AdamW, DeepSeekV3, DeepSeekV3Config, ExpertParallelStrategy

PLAIN, OURS = "plain Lightning", "ExpertParallelStrategy"


class Steps(Callback):
    """Times optimizer steps from one start to the next; the device has finished each."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.seconds: list[float] = []
        self.since = 0.0

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if trainer.global_step > self.warmup:
            self.seconds.append(now - self.since)
        self.since = now


def round_of(system: str, arguments: argparse.Namespace) -> tuple[list[float], float]:
    """Trains one round; returns the seconds of its steps and the last loss."""
    cuda = torch.cuda.is_available()
    seed_everything(1, verbose=False)
    config = DeepSeekV3Config.preset(arguments.preset, num_hidden_layers=arguments.layers)
    module = DeepSeekV3(config, lambda params: AdamW(params, lr=1e-4))
    tokens = torch.randint(0, config.vocab_size, (arguments.batch, arguments.sequence + 1))
    batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    steps = Steps(arguments.warmup)
    options: dict[str, Any] = {"strategy": ExpertParallelStrategy()}
    if system == PLAIN:
        options = {"strategy": "auto", "precision": "bf16-mixed" if cuda else "32-true"}
    trainer = Trainer(
        accelerator="cuda" if cuda else "cpu",
        devices=1,
        max_steps=arguments.warmup + arguments.steps + 1,
        max_epochs=-1,
        log_every_n_steps=10**9,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[steps],
        gradient_clip_val=1.0,
        **options,
    )
    batches: Any = [batch] * (arguments.warmup + arguments.steps + 2)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    with torch.no_grad():
        loss = module.to("cuda" if cuda else "cpu").built_model(
            **{name: value.to(module.device) for name, value in batch.items()}, balance=False
        )
    assert loss.loss is not None
    last = float(loss.loss) / batch["labels"].numel()
    del module, trainer
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return steps.seconds, last


def main() -> None:
    """Measures, prints a table and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seconds: dict[str, list[float]] = {PLAIN: [], OURS: []}
    losses: dict[str, float] = {}
    for _ in range(arguments.rounds):
        for system, collected in seconds.items():
            steps, losses[system] = round_of(system, arguments)
            collected += steps
    medians = {system: statistics.median(values) for system, values in seconds.items()}
    table = Table("system", "median step, ms", "fastest, ms", "ratio of medians", "loss after the last step")
    for system, values in seconds.items():
        ratio = medians[system] / medians[PLAIN]
        table.add_row(
            system,
            f"{medians[system] * 1e3:.1f}",
            f"{min(values) * 1e3:.1f}",
            f"{ratio:.3f}",
            f"{losses[system]:.6f}",
        )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    path = save(
        f"strategy_overhead_{'cuda' if torch.cuda.is_available() else 'cpu'}",
        {
            **machine(torch.get_num_threads()),
            "device": device,
            "settings": vars(arguments),
            "ratio": medians[OURS] / medians[PLAIN],
            "median_step_ms": {system: value * 1e3 for system, value in medians.items()},
            "loss": losses,
        },
    )
    Console(width=120).print(table)
    print(f"{device}, torch {torch.__version__}; record: {path.name}")


if __name__ == "__main__":
    main()
