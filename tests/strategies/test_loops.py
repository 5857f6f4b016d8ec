"""Several processes skip, validate and resume together, and give what one process gives."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe import DeepSeekV3, ExpertParallelStrategy, TokenDataModule
from lightning_moe.tools.prepare import prepare
from tests.models.test_module import CONFIG, SEQUENCE, make_trainer
from tests.strategies import processes
from tests.strategies.training import Rows, adamw

SMALL = replace(CONFIG, vocab_size=258)


class PoisonOneRank(DeepSeekV3):
    """In the second optimizer step the gradient of one process is not finite."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.history: list[Any] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.global_step == 1 and processes.rank() == 1 else loss

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.history.append((processes.whole(self.state_dict()), self.tokens_seen))


def poisoned(folder: Path) -> None:
    seed_everything(11, verbose=False)
    module = PoisonOneRank(CONFIG, adamw)
    strategy = ExpertParallelStrategy(expert_parallel_size=2)
    trainer = make_trainer(devices=2, strategy=strategy, max_steps=3, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(Rows(2, 8), batch_size=4))
    torch.save((module.history, trainer.logged_metrics), folder / f"history-{processes.rank()}.pt")

    stopping = PoisonOneRank(CONFIG, adamw)
    stopping.nonfinite_gradients = "stop"
    strategy = ExpertParallelStrategy(expert_parallel_size=2)
    trainer = make_trainer(devices=2, strategy=strategy, max_steps=3, use_distributed_sampler=False)
    with pytest.raises(FloatingPointError, match="1 of the steps up to 2 were not finite") as error:
        trainer.fit(stopping, DataLoader(Rows(2, 8), batch_size=4))
    torch.save((str(error.value), len(stopping.history)), folder / f"stopped-{processes.rank()}.pt")


def test_a_gradient_that_is_not_finite_on_one_rank_makes_all_skip(tmp_path: Path) -> None:
    processes.run(2, poisoned, tmp_path)
    for rank in range(2):
        history, logged = torch.load(tmp_path / f"history-{rank}.pt")
        (first, _), (second, _), (third, tokens_seen) = history
        assert all(torch.equal(second[name], value) for name, value in first.items())
        assert not torch.equal(third["model.lm_head.weight"], first["model.lm_head.weight"])
        assert all(value.isfinite().all() for value in third.values())
        assert logged["train/skipped_steps"].item() == 1
        assert tokens_seen == 3 * 8 * SEQUENCE
        message, logged_steps = torch.load(tmp_path / f"stopped-{rank}.pt")
        assert "nonfinite_gradients: skip" in message
        assert logged_steps == 1


def data(store: Path) -> TokenDataModule:
    return TokenDataModule(str(store), SEQUENCE, 2, 8, max_tokens=10 * 8 * SEQUENCE, seed=7, progress_bar=False)


def train(world_size: int, layout: dict[str, Any] | None, store: Path, folder: Path, name: str, steps: int) -> None:
    torch.set_default_dtype(torch.float64)
    seed_everything(11, verbose=False)
    module = DeepSeekV3(SMALL, adamw)
    trainer = make_trainer(
        devices=world_size,
        strategy="auto" if layout is None else ExpertParallelStrategy(**layout),
        max_steps=steps,
        max_epochs=-1,
        val_check_interval=1.0,
    )
    resumed = folder / f"{name}.ckpt"
    trainer.fit(module, datamodule=data(store), ckpt_path=str(resumed) if resumed.exists() else None)
    loss = trainer.validate(module, datamodule=data(store), verbose=False)[0]["val/loss"]
    trainer.save_checkpoint(resumed)
    processes.save(folder / f"{name}.pt", (processes.whole(module.state_dict()), loss, module.tokens_seen))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"{number} bottles of beer on the wall, take {number} down. " * 6)
    output = folder / "store"
    options: dict[str, Any] = {"pattern": "*.txt", "num_workers": 1, "validation_fraction": 0.3, "progress_bar": False}
    prepare(str(folder), str(output), "byte", **options)
    return output


def test_ten_steps_are_five_and_five_under_another_layout(store: Path, tmp_path: Path) -> None:
    processes.run(1, train, 1, None, store, tmp_path, "straight", 10)
    processes.run(2, train, 2, {"expert_parallel_size": 2}, store, tmp_path, "parts", 5)
    processes.run(4, train, 4, {"expert_parallel_size": 2}, store, tmp_path, "parts", 10)
    expected, expected_loss, expected_tokens = torch.load(tmp_path / "straight.pt")
    weights, loss, tokens = torch.load(tmp_path / "parts.pt")
    assert tokens == expected_tokens == 10 * 8 * SEQUENCE
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-8, msg=name)
