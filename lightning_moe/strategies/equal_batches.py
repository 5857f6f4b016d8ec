"""Batches of loaders that run out earlier on some processes than on others.

Every process takes part in every forward pass, as experts of one serve the tokens of all. A process that has no batch
left goes on with one that counts for nothing.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

_IGNORED_LABEL = -100


class _AroundLoader:
    """Passes on what is asked of it, such as samplers, which Lightning looks for."""

    loader: Any

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


class EqualBatches(_AroundLoader):
    """Gives each process as many batches as the process with most has, and all of one shape.

    What is missing in a batch, or all of it, is filled with tokens whose labels are -100 and that are not ``valid``:
    they are neither routed nor counted in losses and means. The processes agree before each batch, on the host.

    Args:
        loader: The loader of this process.
        group: A group of all processes that works on the host.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup | None) -> None:
        self.loader = loader
        self.group = group
        longest, unknown = self._agree(*_length(loader))
        self.length = None if unknown else longest

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"a {type(self.loader).__name__} of one process has no length")
        return self.length

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        while True:
            batch = next(batches, None)
            some_have_one, *shape = self._agree(int(batch is not None), *_shape(batch))
            if not some_have_one:
                return
            yield _filled_up(batch, *shape)

    def _agree(self, *numbers: int) -> list[int]:
        """The largest of each number on any process."""
        largest = torch.tensor(numbers)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest.tolist()


class BeforePrefetched(_AroundLoader):
    """A loader without a length whose saved position is the one before a batch that has been read ahead.

    Lightning reads one batch ahead where it does not know how many there are: that one has not been trained on.

    Args:
        loader: A loader with ``state_dict``.
        reads_ahead: Tells whether a batch that is read waits until the next one is.
    """

    def __init__(self, loader: Any, reads_ahead: Callable[[], bool]) -> None:
        self.loader = loader
        self.reads_ahead = reads_ahead
        self._position: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        while True:
            self._position = self.loader.state_dict() if self.reads_ahead() else None
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The loader's state after the last batch that has been trained on."""
        return self.loader.state_dict() if self._position is None else self._position

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Gives the loader a state."""
        self._position = None
        self.loader.load_state_dict(state_dict)


class StatefulEqualBatches(EqualBatches):
    """The same, around a loader that saves its position."""

    def state_dict(self) -> dict[str, Any]:
        """The states of the loaders of all processes; a collective, as one of them alone writes the checkpoint."""
        states: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(states, self.loader.state_dict(), group=self.group)
        return {"of_ranks": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Gives the loader of this process its state.

        Raises:
            ValueError: The checkpoint is of another number of processes.
        """
        loader = self.loader.loader if isinstance(self.loader, BeforePrefetched) else self.loader
        states, processes = state_dict.get("of_ranks", [state_dict]), dist.get_world_size(self.group)
        if len(states) != processes:
            raise ValueError(
                f"The checkpoint holds the positions of {type(loader).__name__} on {len(states)} processes, but "
                f"now there are {processes}; go on with {len(states)}, or with a loader that saves no position."
            )
        self.loader.load_state_dict(states[dist.get_rank(self.group)])


def equal_batches(loader: Any, group: dist.ProcessGroup | None) -> Any:
    """Wraps a loader, unless it says itself that it is equal on all processes; a collective.

    Args:
        loader: The loader of this process.
        group: A group of all processes that works on the host.
    """
    if getattr(loader, "equal_on_all_ranks", False):
        return loader
    return (StatefulEqualBatches if _is_stateful(loader) else EqualBatches)(loader, group)


def before_prefetched(loader: Any, reads_ahead: Callable[[], bool]) -> Any:
    """Wraps a loader that saves its position and has no length.

    Args:
        loader: The loader of this process.
        reads_ahead: Tells whether a batch that is read waits until the next one is.
    """
    return BeforePrefetched(loader, reads_ahead) if _is_stateful(loader) and _length(loader)[1] else loader


def _is_stateful(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _length(loader: Any) -> tuple[int, int]:
    """Number of batches, and whether it is unknown."""
    try:
        return len(loader), 0
    except (TypeError, NotImplementedError):
        return 0, 1


def _shape(batch: Any) -> tuple[int, int]:
    tokens = batch.get("input_ids") if isinstance(batch, dict) else None
    return (tokens.shape[0], tokens.shape[1]) if isinstance(tokens, Tensor) and tokens.dim() == 2 else (0, 0)


def _filled_up(batch: Any, rows: int, columns: int) -> Any:
    if batch is None:
        tokens = torch.zeros(rows, columns, dtype=torch.int64)
        return {
            "input_ids": tokens,
            "labels": torch.full_like(tokens, _IGNORED_LABEL),
            "valid": torch.zeros_like(tokens, dtype=torch.bool),
        }
    here = _shape(batch)
    if here in ((rows, columns), (0, 0)):  # what is no batch of tokens is left for the module to refuse
        return batch
    filled = {"valid": torch.ones(here, dtype=torch.bool), **batch}
    fillers = {"labels": _IGNORED_LABEL}
    for name, value in filled.items():
        if isinstance(value, Tensor) and value.shape == here:
            padding = (0, columns - here[1], 0, rows - here[0])
            filled[name] = F.pad(value, padding, value=fillers.get(name, 0))
            if name == "document_ids":  # the same document goes on: else the label of its last token would be dropped
                filled[name][: here[0], here[1] :] = value[:, -1:]
        elif isinstance(value, Tensor) and value.shape == here[1:]:
            filled[name] = F.pad(value, (0, columns - here[1]))  # positions of all rows
    return filled
