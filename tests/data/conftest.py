import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_moe.tools.prepare import prepare


def write_documents(path: Path, documents: int, characters: int = 120) -> Path:
    """Writes a JSONL file of documents that all differ."""
    draw = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(documents):
            text = f"{number}:" + "".join(draw.choices("abcdefgh ", k=characters))
            file.write(json.dumps({"text": text}) + "\n")
    return path


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level store: about 380 train samples and 50 validation samples of 32 tokens."""
    folder = tmp_path_factory.mktemp("data")
    text = write_documents(folder / "text.jsonl", 120)
    prepare([str(text)], str(folder / "store"), "byte", validation_fraction=0.1, num_workers=1, progress_bar=False)
    return folder / "store"


class Recorder(LightningModule):
    """A tiny language model that remembers the batches it saw, and after which batches it stepped."""

    def __init__(self, vocab_size: int = 258, fail_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(vocab_size, 4)
        self.head = torch.nn.Linear(4, vocab_size)
        self.fail_at = fail_at
        self.seen: list[list[list[int]]] = []
        self.windows: list[int] = []
        self.accumulations: list[int] = []
        self.validated: list[list[list[int]]] = []
        self.validated_at: list[int] = []
        self._pending = 0

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        if self.fail_at is not None and len(self.seen) == self.fail_at:
            raise RuntimeError("interrupted")
        self.seen.append(batch["input_ids"].tolist())
        self._pending += 1
        logits = self.head(self.embedding(batch["input_ids"]))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.validated.append(batch["input_ids"].tolist())
        self.validated_at.append(self.global_step)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.windows.append(self._pending)
        self.accumulations.append(self.trainer.accumulate_grad_batches)
        self._pending = 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    @property
    def samples(self) -> list[list[int]]:
        """All training samples in the order in which they were read."""
        return [sample for batch in self.seen for sample in batch]


def make_trainer(folder: Path, **settings: Any) -> Trainer:
    settings = {"max_epochs": -1, "num_sanity_val_steps": 0, "enable_checkpointing": False, **settings}
    return Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
