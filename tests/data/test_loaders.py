from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_moe.data.batch_plan import Phase
from lightning_moe.data.loaders import TokenBatches, TrainLoader, ValidationLoader, make_batch
from lightning_moe.data.store import TokenBlocks

BOS, EOS = 0, 1


def test_labels_are_the_next_tokens() -> None:
    batch = make_batch(torch.tensor([[0, 5, 1, 0, 7]]), BOS, document_mask=False)
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].tolist() == [[0, 5, 1, 0]]
    assert batch["labels"].tolist() == [[5, 1, 0, 7]]


def test_document_ids_count_from_zero_in_each_row() -> None:
    blocks = torch.tensor([[0, 5, 1, 0, 7, 1, 0], [4, 1, 0, 0, 9, 9, 9], [3, 3, 3, 3, 3, 3, 3]])
    batch = make_batch(blocks, BOS, document_mask=True)
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 1, 2, 2, 2], [0] * 6]
    # a label that is a bos belongs to the next document
    assert batch["labels"].tolist() == [[5, 1, -100, 7, 1, -100], [1, -100, -100, 9, 9, 9], [3] * 6]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_cover_each_step_once(num_ranks: int) -> None:
    phase = Phase(first_step=2, last_step=4, first_sample=100, batch_size=8)
    loaders = [TrainLoader(None, phase, lambda: 0, 2, rank, num_ranks, 0) for rank in range(num_ranks)]  # type: ignore
    read = [list(loader.indices(3)) for loader in loaders]
    assert sorted(sum(sum(read, []), [])) == list(range(108, 116))
    assert all(len(batches) == 8 // (2 * num_ranks) for batches in read)
    assert len(loaders[0]) == 2 * 8 // (2 * num_ranks)


def test_begins_where_training_is_when_first_asked(store: Path) -> None:
    step = 0
    batches = TokenBatches(TokenBlocks(store, "train", 8), None, 256, False)
    iterator = iter(TrainLoader(batches, Phase(0, 9, 0, 2), lambda: step, 2, 0, 1, 0))
    step = 4
    assert next(iterator)["input_ids"].tolist() == batches[[8, 9]]["input_ids"].tolist()


@pytest.mark.parametrize(("micro", "num_ranks"), [(4, 1), (3, 2), (7, 3), (64, 2)])
def test_validation_counts_every_sample_once_on_any_ranks(store: Path, micro: int, num_ranks: int) -> None:
    blocks = TokenBlocks(store, "validation", 32)
    dataset = TokenBatches(blocks, None, 256, False)
    per_rank = [list(ValidationLoader(dataset, micro, rank, num_ranks, 0)) for rank in range(num_ranks)]
    # the filler of the last batch shares no memory between tokens and labels
    assert all((batch["input_ids"] >= 0).all() for batches in per_rank for batch in batches)
    assert len({len(batches) for batches in per_rank}) == 1
    counted = [row.tolist() for batches in per_rank for batch in batches for row in batch["labels"] if row[0] != -100]
    expected = blocks.read(np.arange(len(blocks)))[:, 1:].tolist()
    assert sorted(counted) == sorted(expected)
    for batch in (batch for batches in per_rank for batch in batches):
        # all that is left out of the losses is left out of the routing too
        if (batch["labels"] == -100).all():
            assert batch["valid"].tolist() == [[False] * 32]
        else:
            assert set(batch) == {"input_ids", "labels"}


def test_workers_leave_the_global_random_numbers_alone(store: Path) -> None:
    loader = ValidationLoader(TokenBatches(TokenBlocks(store, "validation", 32), None, 256, False), 4, 0, 1, 0)
    before = torch.random.get_rng_state()
    next(iter(loader))
    assert torch.equal(before, torch.random.get_rng_state())
