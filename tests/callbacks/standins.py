"""A data module of random tokens, and the arguments of a training that takes a second."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

SMALL_MODEL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


class _Samples(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, length: int) -> None:
        self.ids = torch.randint(32, (count, length + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index, :-1], "labels": self.ids[index, 1:]}


class RandomTokens(LightningDataModule):
    """Random tokens: ``global_batch_size`` samples a step in micro-batches, one epoch of ``max_tokens``."""

    def __init__(
        self,
        path: str | None = None,
        sequence_length: int = 8,
        micro_batch_size: int = 2,
        global_batch_size: int = 4,
        max_tokens: int | None = 320,
    ) -> None:
        super().__init__()
        if global_batch_size % micro_batch_size:
            raise ValueError(
                f"global_batch_size is {global_batch_size}, but it must be a multiple of micro_batch_size "
                f"({micro_batch_size}). A value that works: global_batch_size={2 * micro_batch_size}."
            )
        self.path = path
        self.sequence_length = sequence_length
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.max_tokens = max_tokens

    def total_steps(self) -> int | None:
        return (
            None if self.max_tokens is None else -(-self.max_tokens // (self.sequence_length * self.global_batch_size))
        )

    def accumulation_at(self, step: int) -> int:
        return self.global_batch_size // self.micro_batch_size

    def setup(self, stage: str) -> None:
        if self.path is not None and not Path(self.path).is_dir():
            raise ValueError(f"data.path: there is no token store in {self.path}; make one with lightning-moe prepare")
        if self.trainer is not None and stage == "fit":
            trainer: Any = self.trainer
            trainer.accumulate_grad_batches = self.accumulation_at(0)
            limits = [limit for limit in (self.total_steps(), trainer.max_steps) if limit is not None and limit >= 0]
            trainer.fit_loop.epoch_loop.max_steps = min(limits, default=-1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(_Samples(400, self.sequence_length), batch_size=self.micro_batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(_Samples(4, self.sequence_length), batch_size=self.micro_batch_size)


def arguments(run_dir: Path | str, *more: str) -> list[str]:
    """The arguments of a training of ten steps."""
    config = [f"--model.config.{name}={value}" for name, value in SMALL_MODEL.items()]
    return [
        "--model=lightning_moe.DeepSeekV3",
        *config,
        "--data=tests.callbacks.standins.RandomTokens",
        f"--trainer.default_root_dir={run_dir}",
        "--trainer.accelerator=cpu",
        "--trainer.num_sanity_val_steps=0",
        "--trainer.log_every_n_steps=1",
        "--trainer.limit_val_batches=1",
        *more,
    ]
