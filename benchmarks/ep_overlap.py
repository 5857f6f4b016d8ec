"""Kernels of profiled work in ``expert_parallel.py``: which communicate, and what runs while they do."""

import bisect
import itertools
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import Kernel, kernels_of, read_events

SHARED_EXPERT = "shared expert"
COMMUNICATION = [  # the first that matches
    ("DeepEP layout and counts", r"deep_ep.*(layout|notify)"),
    ("DeepEP dispatch", r"deep_ep.*dispatch"),
    ("DeepEP combine", r"deep_ep.*combine"),
    ("NCCL all-to-all", r"nccl.*(SendRecv|AllToAll)"),
    ("NCCL collectives", r"nccl"),
]
EXCHANGES = tuple(kind for kind, _ in COMMUNICATION[:4])
BARRIER = "NCCL collectives"  # where no model is trained, only barriers are such


def communication_kind(kernel: Kernel) -> str | None:
    """What a kernel communicates by, or ``None``."""
    return next((kind for kind, pattern in COMMUNICATION if re.search(pattern, kernel.name, re.IGNORECASE)), None)


def profiled(work: Callable[[], None]) -> list[Kernel]:
    """Runs something under the profiler and returns its kernels."""
    with torch.profiler.profile() as profiler:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return kernels_of(read_events(path))


def overlaps(kernels: list[Kernel], steps: int) -> list[dict[str, Any]]:
    """Tells how much of the time of communication other kernels run.

    Args:
        kernels: Those of all profiled steps.
        steps: How many were profiled.

    Returns:
        For each kind of communication: kernels and milliseconds a step, and of these the milliseconds in which any
        other kernel runs, and in which one of the shared experts does.
    """
    kinds: dict[str, list[Kernel]] = defaultdict(list)
    computing = []
    for kernel in kernels:
        kind = communication_kind(kernel)
        if kind is None:
            computing.append(kernel)
        else:
            kinds[kind].append(kernel)
    others = _Union(computing)
    shared = _Union([kernel for kernel in computing if kernel.part == SHARED_EXPERT])
    return [
        {
            "communication": kind,
            "kernels": len(kinds[kind]) / steps,
            "ms": sum(kernel.duration for kernel in kinds[kind]) / 1e3 / steps,
            "overlapped_ms": sum(map(others.shared_with, kinds[kind])) / 1e3 / steps,
            "overlapped_by_shared_expert_ms": sum(map(shared.shared_with, kinds[kind])) / 1e3 / steps,
        }
        for kind, _ in COMMUNICATION
        if kind in kinds
    ]


class _Union:
    """The time in which any of some kernels runs."""

    def __init__(self, kernels: list[Kernel]) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        for kernel in sorted(kernels, key=lambda kernel: kernel.start):
            end = kernel.start + kernel.duration
            if self._ends and kernel.start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(kernel.start)
                self._ends.append(end)
        lengths = (end - start for start, end in zip(self._starts, self._ends, strict=True))
        self._until = list(itertools.accumulate(lengths, initial=0.0))

    def shared_with(self, kernel: Kernel) -> float:
        """Microseconds of a kernel that lie in this time."""
        return self._before(kernel.start + kernel.duration) - self._before(kernel.start)

    def _before(self, time: float) -> float:
        index = bisect.bisect_right(self._starts, time)
        if index == 0:
            return 0.0
        return self._until[index] - max(self._ends[index - 1] - time, 0.0)
