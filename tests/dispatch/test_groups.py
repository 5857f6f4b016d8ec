"""Every dispatcher of a group keeps the contract, on one, two and four processes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.base import TokenDispatcher
from lightning_moe.dispatch.deep_ep.dispatcher import DeepEPDispatcher
from tests.dispatch import deep_ep_standin
from tests.dispatch.contract import WIDTH
from tests.dispatch.deep_ep_standin.shared import CALLS
from tests.dispatch.groups import check_contract, join
from tests.strategies import processes

DEEP_EP_WIDTH = 256


def shared(kind: Any, **settings: Any) -> Any:
    """One instance for each alignment, as layers share one."""
    made: dict[int, TokenDispatcher] = {}

    def make(num_experts: int, alignment: int) -> TokenDispatcher:
        if alignment not in made:
            made[alignment] = kind(num_experts, dist.group.WORLD, alignment, **settings)
        return made[alignment]

    return make, made


def keep_contract(generations: tuple[str, ...]) -> None:
    join()
    all_to_all, _ = shared(AllToAllDispatcher)
    check_contract(all_to_all, dtype=torch.float64, tolerance=1e-12)
    check_contract(all_to_all, dtype=torch.bfloat16, tolerance=3e-2, alignments=(1, 32), width=WIDTH)
    for generation in generations:
        for settings in ({}, {"asynchronous": True}):
            with pytest.MonkeyPatch.context() as patch:
                deep_ep_standin.install(patch, generation)
                make, made = shared(DeepEPDispatcher, **settings)
                alignments = (1, 16, 32, 128) if not settings else (1, 128)
                check_contract(make, dtype=torch.bfloat16, tolerance=3e-2, width=DEEP_EP_WIDTH, alignments=alignments)
                for dispatcher in made.values():
                    dispatcher.close()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, CALLS)
    assert len(CALLS) > 100 * len(generations)
    assert all(calls == CALLS for calls in everyone), "the ranks made different calls"


@pytest.mark.parametrize(("world_size", "generations"), [(1, ("V2",)), (2, ("V1", "V2")), (4, ("V1", "V2"))])
def test_contract(world_size: int, generations: tuple[str, ...]) -> None:
    processes.run(world_size, keep_contract, generations)
