"""A small training run that every layout can do, and what it leaves behind."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_moe import AdamW, DeepSeekV3
from lightning_moe.strategies.expert_parallel import ExpertParallelStrategy
from tests.models.test_module import CONFIG, SEQUENCE, make_trainer
from tests.strategies.processes import rank, save, whole


class Rows(Dataset):
    """The same global batch over and over; a process takes its share. Every row has its own valid tokens."""

    def __init__(self, world_size: int, batch: int, batches: int = 64) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(0, CONFIG.vocab_size, (batch, SEQUENCE + 1), generator=generator)
        share = batch // world_size
        self.mine = [rank() * share + i for _ in range(batches) for i in range(share)]

    def __len__(self) -> int:
        return len(self.mine)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.mine[index]
        labels = self.tokens[row, 1:].clone()
        labels[: (row * 5) % (SEQUENCE + 1)] = -100  # from no ignored label to all of them
        return {"input_ids": self.tokens[row, :-1], "labels": labels}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def adamw(params: Any) -> torch.optim.Optimizer:
    return AdamW(params, lr=1e-2)


class GradNorms(Callback):
    """Collects the norm of every step."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self._collect(trainer)

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        self._collect(trainer)

    def _collect(self, trainer: Trainer) -> None:
        if "train/grad_norm" in trainer.logged_metrics:
            self.by_step[trainer.global_step] = trainer.logged_metrics["train/grad_norm"].item()


def train(
    world_size: int,
    strategy: dict[str, Any] | None,
    *,
    optimizer: Any = sgd,
    steps: int = 2,
    batch: int = 8,
    micro_batch: int = 1,
    double: bool = True,
    ckpt_path: Path | None = None,
    module: type[DeepSeekV3] = DeepSeekV3,
    clip: float | None = None,
) -> tuple[Trainer, DeepSeekV3, list[float]]:
    """Trains a few steps on the same global batches, whatever the layout is."""
    seed_everything(11, verbose=False)
    torch.set_default_dtype(torch.float64 if double else torch.float32)
    norms = GradNorms()
    model = module(CONFIG, optimizer)
    trainer = make_trainer(
        devices=world_size,
        strategy="auto" if strategy is None else ExpertParallelStrategy(**strategy),
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=batch // world_size // micro_batch,
        use_distributed_sampler=False,
        gradient_clip_val=clip,
        callbacks=[norms],
    )
    loader = DataLoader(Rows(world_size, batch), batch_size=micro_batch)
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    torch.set_default_dtype(torch.float32)
    return trainer, model, list(norms.by_step.values())


def train_and_keep(
    world_size: int, layouts: list[dict[str, Any] | None], folder: Path, options: dict[str, Any]
) -> None:
    """Trains under several layouts, one after the other, and keeps the weights and the norms of each."""
    for number, layout in enumerate(layouts):
        trainer, model, norms = train(world_size, layout, **options)
        save(folder / f"{world_size}-{number}.pt", (whole(model.state_dict()), norms))
        trainer.strategy.barrier()
