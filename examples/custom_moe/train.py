"""Trains CustomMoE from plain Python, on one process or on several.

python train.py
torchrun --nproc-per-node 2 train.py
"""

import os

from custom_moe import CustomMoE, CustomMoEConfig
from lightning.pytorch import Trainer, seed_everything

from lightning_moe import AdamW, ExpertParallelStrategy, TokenDataModule, TokenSchedule


def main() -> None:
    """Trains, and saves a checkpoint that loads under any number of processes."""
    seed_everything(1337)
    model = CustomMoE(
        CustomMoEConfig(num_hidden_layers=3),
        optimizer=lambda params: AdamW(params, lr=3e-3),
        schedule=TokenSchedule(warmup=0.05),
    )
    data = TokenDataModule(sequence_length=128, micro_batch_size=4, global_batch_size=16, max_tokens=1e5)
    trainer = Trainer(
        strategy=ExpertParallelStrategy(expert_parallel_size="auto", activation_checkpointing="selective"),
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),  # processes that torchrun has started here
        max_epochs=-1,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        limit_val_batches=8,
        default_root_dir="runs/train",
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, data)
    trainer.save_checkpoint("runs/train/final.ckpt")


if __name__ == "__main__":
    main()
