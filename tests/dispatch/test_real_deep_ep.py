"""The contract on the real kernels of an installed DeepEP.

Run by pytest where there is one, or with more output and settings by ``python -m tests.dispatch.test_real_deep_ep``.
With fewer GPUs than processes the processes share one over a gloo group, which V1 can do; nothing is timed.
"""

import argparse
import os
import socket
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.base import TokenDispatcher
from lightning_moe.dispatch.deep_ep.dispatcher import DeepEPDispatcher
from lightning_moe.dispatch.deep_ep.found import find_deep_ep
from lightning_moe.dispatch.fp8_rows import TILE
from lightning_moe.moe.router import RoutingPlan
from lightning_moe.precision.quantisation import quantise
from tests.dispatch.contract import CASES, EXPERTS, TOP_K
from tests.dispatch.deep_ep_standin.signatures import SIGNATURES, parameters_of
from tests.dispatch.groups import check_contract


class Settings(argparse.Namespace):
    """How to run; see the command's help."""

    processes: int = 2
    width: int = 512
    num_sms: int = 8
    skip: tuple[str, ...] = ()


def run(settings: Settings) -> None:
    """Starts the processes and checks the contract on them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_process, args=(port, settings), nprocs=settings.processes)


def _process(rank: int, port: int, settings: Settings) -> None:
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % gpus)
    device = torch.device("cuda", rank % gpus)
    own_gpus = gpus >= settings.processes
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(
        "nccl" if own_gpus else "gloo",
        rank=rank,
        world_size=settings.processes,
        device_id=device if own_gpus else None,
    )
    generation = find_deep_ep().generation
    start = time.monotonic()

    def report(passed: str) -> None:
        if rank == 0:
            print(f"{time.monotonic() - start:6.1f} s  {passed}", flush=True)

    if rank == 0:
        print(f"DeepEP {generation}, {settings.processes} processes on {min(gpus, settings.processes)} GPU of type")
        print(f"{torch.cuda.get_device_name()}, hidden size {settings.width}, {settings.num_sms} SMs", flush=True)
    check = partial(
        check_contract,
        dtype=torch.bfloat16,
        tolerance=3e-2,
        width=settings.width,
        device=str(device),
        cases=[case for case in CASES if case.name not in settings.skip],
        report=report,
    )
    asynchronous, fp8 = {"asynchronous": True}, {"fp8_dispatch": True}
    kinds: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
        ("synchronous calls", (1, 16, 32, 128), {}),
        ("asynchronous calls", (1, 128), asynchronous),
    ]
    if settings.width % TILE == 0:
        kinds += [
            ("synchronous calls in FP8", (1, 16, 32, 128), fp8),
            ("asynchronous calls in FP8", (1, 128), {**asynchronous, **fp8}),
        ]
    for kind, alignments, options in kinds:
        report(kind)
        for alignment in alignments:
            dispatcher = DeepEPDispatcher(EXPERTS, _world(), alignment, num_sms=settings.num_sms, **options)
            rounding = _rounding if dispatcher.fp8_dispatch else None
            check(partial(_same, dispatcher), alignments=(alignment,), rounding=rounding)
            dispatcher.close()
    for fp8_dispatch in dict.fromkeys((False, settings.width % TILE == 0)):
        _check_recomputation(settings, device, generation, fp8_dispatch)
        report(f"recomputation of the whole region{', in FP8' * fp8_dispatch}")
        torch.use_deterministic_algorithms(True)
        _check_recomputation(settings, device, generation, fp8_dispatch)
        torch.use_deterministic_algorithms(False)
        report("the same in deterministic mode")
    if own_gpus and settings.width % TILE == 0:
        report("all-to-all through NCCL in FP8")
        dispatchers = {alignment: AllToAllDispatcher(EXPERTS, _world(), alignment, **fp8) for alignment in (1, 32)}
        check(lambda _, alignment: dispatchers[alignment], alignments=(1, 32), rounding=_rounding)
    dist.destroy_process_group()


def _rounding(x: Tensor) -> Tensor:
    return quantise(x, (1, TILE), "rceil")


def _same(dispatcher: TokenDispatcher, num_experts: int, alignment: int) -> TokenDispatcher:
    return dispatcher


def _check_recomputation(settings: Settings, device: torch.device, generation: str, fp8_dispatch: bool) -> None:
    """Gradients are those without recomputation: to the bit where rows arrive in one order."""
    dispatcher = DeepEPDispatcher(EXPERTS, _world(), 16, num_sms=settings.num_sms, fp8_dispatch=fp8_dispatch)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(64, settings.width, generator=generator).bfloat16().to(device).requires_grad_()
    weights = torch.rand(64, TOP_K, generator=generator).to(device).requires_grad_()
    indices = torch.rand(64, EXPERTS, generator=generator).topk(TOP_K).indices.to(device)

    def apply(x: Tensor, weights: Tensor) -> Tensor:
        plan = RoutingPlan(indices, weights, torch.zeros(64, EXPERTS, device=device), all_valid=True)
        dispatched = dispatcher.dispatch(x, plan)
        return dispatcher.combine(torch.tanh(dispatched.rows_RD) * 3, dispatched)

    plain = torch.autograd.grad(apply(x, weights).float().pow(2).sum(), (x, weights))
    recomputed = torch.autograd.grad(
        checkpoint(apply, x, weights, use_reentrant=False).float().pow(2).sum(), (x, weights)
    )
    for one, other in zip(plain, recomputed, strict=True):
        if generation == "V1" or torch.are_deterministic_algorithms_enabled():
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-2)
    dispatcher.close()


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "no GPU"
    try:
        generation = find_deep_ep().generation
    except ImportError as error:
        return str(error)
    if generation == "V2" and torch.cuda.device_count() < 2:
        return "DeepEP V2 needs a GPU for each process"
    return None


real = pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))


@real
def test_contract_on_real_kernels() -> None:
    run(Settings())


@real
def test_recorded_signatures_are_the_real_ones() -> None:
    generation, module = find_deep_ep()
    for path, recorded in SIGNATURES[generation].items():
        assert parameters_of(module, path) == recorded, path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=Settings.processes)
    parser.add_argument("--width", type=int, default=Settings.width, help="hidden size")
    parser.add_argument("--num-sms", type=int, default=Settings.num_sms)
    parser.add_argument("--skip", nargs="*", default=(), help="cases to leave out, as in first_rank_without_tokens")
    run(parser.parse_args(namespace=Settings()))
