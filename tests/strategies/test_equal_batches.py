"""Loaders that users bring, of which some end earlier, have other shapes, or are empty."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_moe import DeepSeekV3, ExpertParallelStrategy
from lightning_moe.strategies.equal_batches import _filled_up
from tests.models.test_module import CONFIG, make_trainer
from tests.strategies import processes
from tests.strategies.training import sgd

Batch = dict[str, Tensor]
SHAPES = [(2, 16), (3, 16), (2, 8), (1, 16)]


def batch(number: int) -> Batch:
    """Rows that only a number decides; some of their labels are ignored."""
    rows, columns = SHAPES[number % len(SHAPES)]
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, CONFIG.vocab_size, (rows, columns + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, : number % 5] = -100
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": labels}


def together(*numbers: int) -> Batch:
    """The same rows as one batch of one process, padded to its longest row."""
    parts = [batch(number) for number in numbers]
    columns = max(part["input_ids"].shape[1] for part in parts)
    filled = [_filled_up(part, part["input_ids"].shape[0] + 1, columns) for part in parts]
    return {name: torch.cat([part[name][:-1] for part in filled]) for name in ("input_ids", "labels", "valid")}


class Stream(IterableDataset):
    """Batches without a length."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def loader(batches: list[Batch], sized: bool) -> Any:
    return DataLoader(batches if sized else Stream(batches), batch_size=None)  # type: ignore[arg-type]


def train(
    world_size: int, batches: list[Batch], validation: list[Batch], more: list[Batch], sized: bool
) -> tuple[dict[str, Tensor], float, float]:
    """Trains and validates; returns the weights, and the losses of two validations."""
    seed_everything(11, verbose=False)
    torch.set_default_dtype(torch.float64)
    trainer = make_trainer(
        devices=world_size,
        strategy=ExpertParallelStrategy(),
        max_epochs=2,
        max_steps=-1,
        use_distributed_sampler=False,
        log_every_n_steps=1,
    )
    module = DeepSeekV3(CONFIG, sgd)
    trainer.fit(module, loader(batches, sized), loader(validation, sized))
    loss = trainer.callback_metrics["val/loss"].item()
    again = trainer.validate(module, loader(more, sized), verbose=False)[0]["val/loss"]
    torch.set_default_dtype(torch.float32)
    return processes.whole(module.state_dict()), loss, again


# Numbers of the batches of two processes: in training, in its validation (5 in all), and in one where one has none
PER_RANK = {0: [0, 1, 2], 1: [3]}, {0: [4, 5, 6], 1: [7, 8]}, {0: [9], 1: []}


def train_two(folder: Path) -> None:
    training, validation, more = ([batch(n) for n in part[processes.rank()]] for part in PER_RANK)
    for sized in (True, False):
        processes.save(folder / f"{sized}.pt", train(2, training, validation, more, sized))


def test_processes_without_batches_go_on_with_ones_that_count_for_nothing(tmp_path: Path) -> None:
    processes.run(2, train_two, tmp_path)
    validation = [batch(number) for number in range(4, 9)]
    expected, *losses = train(1, [together(0, 3), batch(1), batch(2)], validation, [batch(9)], sized=True)
    for sized in (True, False):
        state, *its_losses = torch.load(tmp_path / f"{sized}.pt")
        assert its_losses == pytest.approx(losses, rel=1e-10)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10, msg=name)


def test_what_is_missing_counts_for_nothing() -> None:
    whole = {**batch(2), "document_ids": torch.ones(2, 8, dtype=torch.int64), "position_ids": torch.arange(8)}
    filled = _filled_up(whole, 3, 10)
    assert {name: tuple(value.shape) for name, value in filled.items()} == {
        "input_ids": (3, 10),
        "labels": (3, 10),
        "document_ids": (3, 10),
        "position_ids": (10,),
        "valid": (3, 10),
    }
    assert torch.equal(filled["labels"][:2, :8], whole["labels"])
    assert (filled["labels"][2] == -100).all()
    assert (filled["labels"][:, 8:] == -100).all()
    assert filled["valid"].sum() == 2 * 8
    nothing = _filled_up(None, 2, 4)
    assert (nothing["labels"] == -100).all()
    assert not nothing["valid"].any()
    assert _filled_up(whole, 2, 8) is whole


def test_added_tokens_are_of_the_last_document() -> None:
    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 2, 3]])
    filled = _filled_up({"input_ids": torch.ones(2, 4, dtype=torch.int64), "document_ids": ids}, 3, 6)
    assert filled["document_ids"].tolist() == [[0, 0, 1, 1, 1, 1], [0, 1, 2, 3, 3, 3], [0] * 6]
    assert filled["valid"].int().tolist() == [[1, 1, 1, 1, 0, 0]] * 2 + [[0] * 6]
