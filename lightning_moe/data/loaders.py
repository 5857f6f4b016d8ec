"""Batches of a token store, as loaders for Lightning's loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_moe.data.batch_plan import Phase
from lightning_moe.data.order import SampleOrder
from lightning_moe.data.store import TokenBlocks
from lightning_moe.data.worker_signals import outlive_signals

IGNORE_INDEX = -100


def make_batch(blocks: torch.Tensor, bos_id: int, document_mask: bool) -> dict[str, torch.Tensor]:
    """Makes a batch of blocks of tokens.

    Args:
        blocks: Tokens ``(B, S + 1)``, int64.
        bos_id: The id that begins a document.
        document_mask: Whether to tell documents apart: then ``document_ids`` are added, counted from 0 in each row
            with a new one at each bos, and labels that would cross into another document are -100.

    Returns:
        ``input_ids`` and ``labels`` ``(B, S)`` int64, and ``document_ids`` ``(B, S)`` int64 with ``document_mask``.
    """
    inputs, labels = blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous()
    if not document_mask:
        return {"input_ids": inputs, "labels": labels}
    documents = (inputs == bos_id).cumsum(1)
    labels = labels.masked_fill(labels == bos_id, IGNORE_INDEX)
    return {"input_ids": inputs, "labels": labels, "document_ids": documents - documents[:, :1]}


class TokenBatches(Dataset[dict[str, torch.Tensor]]):
    """Batches by lists of sample indices; read in the process that asks.

    Args:
        blocks: The samples of a split.
        order: Turns global sample indices into positions in the store; None where indices are positions.
        bos_id: The id that begins a document.
        document_mask: Whether batches tell documents apart, see :func:`make_batch`.
    """

    def __init__(self, blocks: TokenBlocks, order: SampleOrder | None, bos_id: int, document_mask: bool) -> None:
        self.blocks = blocks
        self.order = order
        self.bos_id = bos_id
        self.document_mask = document_mask

    def __getitem__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        wanted = np.asarray(indices, dtype=np.int64)
        positions = wanted if self.order is None else self.order.store_indices(wanted)
        return make_batch(torch.from_numpy(self.blocks.read(positions)), self.bos_id, self.document_mask)


def _data_loader(dataset: TokenBatches, batches: Iterator[list[int]], num_workers: int) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=batches,  # type: ignore[arg-type]  # any iterable of keys serves
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=outlive_signals,
        # a generator of its own: workers must not take a number from the global one, which dropout uses
        generator=torch.Generator(),
    )


class TrainLoader:
    """The micro-batches of one phase of the batch plan, from the optimizer step that is next when it is iterated.

    ``len`` counts the whole phase, also when iteration begins inside it: that is what Lightning's counters expect of a
    resumed epoch. It has an (empty) state, since the position is the data module's, so that Lightning does not warn of
    a loader that cannot resume.

    Args:
        dataset: Reads batches by global sample indices.
        phase: The phase; its ``last_step`` is set.
        next_step: Returns the optimizer step to begin with; called when the first batch is asked for.
        micro_batch_size: Samples of one micro-batch of one data rank.
        rank: This data rank.
        num_ranks: Number of data ranks.
        num_workers: Worker processes.
    """

    equal_on_all_ranks = True

    def __init__(
        self,
        dataset: TokenBatches,
        phase: Phase,
        next_step: Callable[[], int],
        micro_batch_size: int,
        rank: int,
        num_ranks: int,
        num_workers: int,
    ) -> None:
        self.dataset = dataset
        self.phase = phase
        self.next_step = next_step
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.num_ranks = num_ranks
        self.num_workers = num_workers

    def __len__(self) -> int:
        assert self.phase.last_step is not None
        micro_batches = self.phase.batch_size // (self.micro_batch_size * self.num_ranks)
        return (self.phase.last_step - self.phase.first_step) * micro_batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        # a generator: nothing is read, and no worker started, before Lightning asks for the first batch
        yield from _data_loader(self.dataset, self.indices(self.next_step()), self.num_workers)

    def indices(self, step: int) -> Iterator[list[int]]:
        """Yields the global sample indices of this rank's micro-batches from optimizer step ``step`` on."""
        assert self.phase.last_step is not None
        stride = self.micro_batch_size * self.num_ranks
        for current in range(step, self.phase.last_step):
            first = self.phase.first_sample + (current - self.phase.first_step) * self.phase.batch_size
            for start in range(first + self.rank * self.micro_batch_size, first + self.phase.batch_size, stride):
                yield list(range(start, start + self.micro_batch_size))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """There is nothing to load: the data module's state holds the position."""


class ValidationLoader:
    """A split in store order, every sample once, the last batch smaller.

    All data ranks yield the same number of batches. A rank that has no sample left for the last one yields a sample
    whose labels are all -100 and that is not ``valid``: it is neither routed nor counted.

    Args:
        dataset: Reads batches by positions in the store.
        micro_batch_size: Samples of one batch of one data rank.
        rank: This data rank.
        num_ranks: Number of data ranks.
        num_workers: Worker processes.
    """

    equal_on_all_ranks = True

    def __init__(
        self, dataset: TokenBatches, micro_batch_size: int, rank: int, num_ranks: int, num_workers: int
    ) -> None:
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.num_ranks = num_ranks
        self.num_workers = num_workers

    def __len__(self) -> int:
        return -(-len(self.dataset.blocks) // (self.micro_batch_size * self.num_ranks))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        total = len(self.dataset.blocks)
        starts = range(
            self.rank * self.micro_batch_size,
            len(self) * self.micro_batch_size * self.num_ranks,
            self.micro_batch_size * self.num_ranks,
        )
        batches = (list(range(start, min(start + self.micro_batch_size, total))) or [0] for start in starts)
        for start, batch in zip(starts, _data_loader(self.dataset, batches, self.num_workers), strict=True):
            if start >= total:
                batch["labels"] = torch.full_like(batch["labels"], IGNORE_INDEX)  # may share memory with input_ids
                batch["valid"] = torch.zeros_like(batch["labels"], dtype=torch.bool)
            yield batch
