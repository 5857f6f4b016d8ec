"""The contract of dispatchers on the processes of a group."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_moe.dispatch.base import TokenDispatcher
from tests.dispatch.contract import (
    ALIGNMENTS,
    CASES,
    WIDTH,
    Case,
    Rounding,
    check_dispatcher,
    check_exact_on_integers,
)
from tests.strategies.processes import rank


def join() -> tuple[int, int]:
    """Starts the gloo group of the processes of a test; rank and number of processes."""
    world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank(), world_size=world_size)
    return rank(), world_size


def check_contract(
    make: Callable[[int, int], TokenDispatcher],
    *,
    dtype: torch.dtype,
    tolerance: float,
    width: int = WIDTH,
    device: str = "cpu",
    alignments: Sequence[int] = ALIGNMENTS,
    cases: Sequence[Case] = CASES,
    rounding: Rounding | None = None,
    report: Callable[[str], None] = lambda passed: None,
) -> None:
    """All cases and alignments, one after the other; an error names its case.

    The experts apply the weights with the alignments 16 and 128, and the dispatcher with the others.
    """
    options: dict[str, Any] = {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "dtype": dtype,
        "width": width,
        "device": device,
    }
    for alignment in alignments:
        for case in cases:
            with _named(case.name, alignment):
                check_dispatcher(
                    make,
                    case,
                    alignment,
                    tolerance=tolerance,
                    weighted_before=alignment in (16, 128),
                    rounding=rounding,
                    **options,
                )
            report(f"{case.name}, alignment {alignment}")
        with _named("integers", alignment):
            check_exact_on_integers(make, alignment, **options)
        report(f"integers to the bit, alignment {alignment}")


@contextmanager
def _named(case: str, alignment: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{case}, alignment {alignment}: {error}") from error
