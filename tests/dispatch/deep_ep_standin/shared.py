"""What both stand-ins need: exchanging over gloo, events, and the checks that are the same."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CALLS: list[str] = []
"""Calls of this process that all ranks take part in, in order."""

FAIL_IN: list[str] = []
"""Calls that are to fail as when another rank does not come."""


def exchange(group: dist.ProcessGroup, call: str, payload: Any) -> list[Any]:
    """What each rank gives; all must be in the same call."""
    if call in FAIL_IN:
        raise RuntimeError("DeepEP error: CPU recv timeout")
    CALLS.append(call)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (call, payload), group)
    calls = [other for other, _ in everyone]
    assert len(set(calls)) == 1, f"the ranks are in different calls: {calls}"
    return [theirs for _, theirs in everyone]


class Event:
    """Of an asynchronous call: its results hold other values until someone waits."""

    def __init__(self, *results: Any) -> None:
        self._real = [(result, result.clone()) for result in results if isinstance(result, Tensor)]
        for result, _ in self._real:
            result.copy_(poison_like(result))

    def current_stream_wait(self) -> None:
        for result, real in self._real:
            result.copy_(real)
        self._real = []


class NoEvent:
    """Of a synchronous call; there is nothing to wait for."""

    def current_stream_wait(self) -> None:
        raise AssertionError("this call was not asynchronous")


def poison_like(tensor: Tensor) -> Tensor:
    """Values that no one may read."""
    if tensor.dtype == torch.bool:
        return ~tensor
    if tensor.dtype == torch.uint8:
        return torch.full_like(tensor, 0x7F)  # NaN in E4M3
    return torch.full_like(tensor, float("nan") if tensor.is_floating_point() else -7777)


def check_deterministic_mode() -> None:
    """Both generations refuse to run while torch fills new tensors."""
    assert not (
        torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    )


def check_rows(x: Tensor) -> None:
    assert x.dim() == 2
    assert x.is_contiguous()
    assert x.dtype == torch.bfloat16
    assert x.shape[1] * x.element_size() % 16 == 0


def split_rows(x: Any) -> tuple[Tensor, Tensor | None]:
    """Rows to dispatch and, of those in E4M3, the scales; a row's bytes are copied whatever their meaning is."""
    if not isinstance(x, tuple):
        check_rows(x)
        return x, None
    values, scales = x
    assert values.dim() == 2
    assert values.is_contiguous()
    assert values.dtype == torch.float8_e4m3fn
    assert values.shape[1] % 128 == 0
    assert scales.dtype == torch.float32
    assert scales.shape == (values.shape[0], values.shape[1] // 128)
    assert scales.is_contiguous()
    return values.view(torch.uint8), scales


def join_rows(values: Tensor, scales: Tensor | None) -> Any:
    """The same kind as was given to :func:`split_rows`."""
    return values if scales is None else (values.view(torch.float8_e4m3fn), scales)


def check_choices(indices: Tensor, weights: Tensor, tokens: int, num_experts: int) -> None:
    assert indices.dtype == torch.int64
    assert weights.dtype == torch.float32
    assert indices.is_contiguous()
    assert weights.is_contiguous()
    assert indices.shape == weights.shape
    assert indices.shape[0] == tokens
    assert indices.shape[1] <= 32
    assert bool(((indices >= -1) & (indices < num_experts)).all())
