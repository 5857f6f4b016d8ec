"""Dispatch and combine alone, and what the DeepEP adapter adds to DeepEP's own calls, in ``expert_parallel.py``.

Shapes: ``T`` tokens of this rank, ``D`` hidden size, ``E`` experts, ``K`` experts per token, ``W`` ranks.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ep_overlap import BARRIER, EXCHANGES, communication_kind, profiled
from ep_processes import Worker
from torch import Tensor

from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.base import TokenDispatcher
from lightning_moe.dispatch.deep_ep.dispatcher import DeepEPDispatcher
from lightning_moe.dispatch.deep_ep.found import find_deep_ep
from lightning_moe.dispatch.fp8_rows import TILE, row_bytes
from lightning_moe.models.deepseek_v3 import DeepSeekV3Config
from lightning_moe.moe.router import Router, RoutingPlan

ALL_TO_ALL, DEEP_EP = "all_to_all", "deep_ep"
ALL_TO_ALL_FP8, DEEP_EP_FP8 = "all-to-all, FP8", "DeepEP, FP8"  # FP8 is what tokens travel in to experts
IN_FP8 = {ALL_TO_ALL: ALL_TO_ALL_FP8, DEEP_EP: DEEP_EP_FP8}
_PROFILED = 3
_WARMUP = 3
_NAME_LENGTH = 100
_FEW_TOKENS = 256  # so few that the host's time is what is seen


@dataclass(frozen=True)
class DispatchShape:
    """Tokens on the way to experts.

    Args:
        config: The architecture.
        tokens: Tokens of each rank.
    """

    config: DeepSeekV3Config
    tokens: int


DISPATCH_SHAPES = {
    "16b": DispatchShape(DeepSeekV3Config.preset("deepseek_v2_lite"), 16384),
    "671b": DispatchShape(DeepSeekV3Config.preset("deepseek_v3_671b"), 4096),
    # To try the script on a CPU.
    "tiny": DispatchShape(DeepSeekV3Config.preset("tiny", hidden_size=256), 64),
}


def why_no_deep_ep() -> str | None:
    """Why DeepEP is left out, or ``None`` where it is installed."""
    try:
        find_deep_ep()
    except ImportError as error:
        return str(error)
    return None


def takes_fp8(config: DeepSeekV3Config) -> bool:
    """Whether tokens of a model can travel in eight bits."""
    return config.hidden_size % TILE == 0


def measure_dispatch(worker: Worker, arguments: argparse.Namespace) -> None:
    """Times each dispatcher on each shape, and then the adapter."""
    systems: list[tuple[str, int | None, Callable[..., TokenDispatcher]]] = [(ALL_TO_ALL, None, AllToAllDispatcher)]
    if why_no_deep_ep() is None:
        for num_sms in arguments.num_sms:
            adapter = partial(DeepEPDispatcher, num_sms=num_sms, **arguments.dispatcher_arguments)
            systems.append((DEEP_EP, num_sms, adapter))
    systems += [(IN_FP8[system], num_sms, partial(make, fp8_dispatch=True)) for system, num_sms, make in systems]
    for system, num_sms, make in systems:
        in_fp8 = system in IN_FP8.values()
        for name in arguments.dispatch_shapes:
            if in_fp8 and not takes_fp8(DISPATCH_SHAPES[name].config):
                continue
            row = {"part": "dispatch", "system": system, "num_sms": num_sms, "shape": name}
            row |= _measure(worker, make, DISPATCH_SHAPES[name], arguments, in_fp8)
            shown = "dispatch {shape}, {system}, {num_sms} SMs: forward {forward_ms:.3f} ms, backward {backward_ms:.3f}"
            worker.send(row, shown.format(**row))
    if why_no_deep_ep() is None:
        generation, module = find_deep_ep()
        if generation == "V1":
            row = {"part": "overhead", **_overhead(worker, module, arguments)}
            worker.send(row, f"adapter adds {row['forward_us'] - row['raw_forward_us']:.0f} us to forward")
        else:
            worker.say(f"adapter's own overhead: measured against V1 only, and this is {generation}")


def _plan(worker: Worker, shape: DispatchShape, tokens: int, seed: int) -> tuple[Tensor, RoutingPlan]:
    """Random tokens, and where a router with random weights sends them."""
    config = shape.config
    torch.manual_seed(seed)  # one router for all ranks
    router = Router(
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        n_group=config.n_group,
        topk_group=config.topk_group,
        scoring_func=config.scoring_func,
        group_score="top2" if config.topk_method == "noaux_tc" else "max",
        norm_topk_prob=config.norm_topk_prob,
        routed_scaling_factor=config.routed_scaling_factor,
    ).to(worker.device)
    torch.manual_seed(seed + 1 + worker.rank)
    x_TD = torch.randn(tokens, config.hidden_size, device=worker.device).bfloat16()
    with torch.no_grad():
        plan = router(x_TD)
    return x_TD.requires_grad_(), plan._replace(weights_TK=plan.weights_TK.detach().requires_grad_())


def _measure(
    worker: Worker,
    make: Callable[..., TokenDispatcher],
    shape: DispatchShape,
    arguments: argparse.Namespace,
    in_fp8: bool,
) -> dict[str, Any]:
    config = shape.config
    x_TD, plan = _plan(worker, shape, shape.tokens, arguments.seed)
    dispatcher = make(config.n_routed_experts, dist.group.WORLD, 1)
    dispatcher.prepare(config.hidden_size, config.num_experts_per_tok, shape.tokens)
    times = [_times(worker, dispatcher, x_TD, plan) for _ in range(arguments.dispatch_steps + _WARMUP)][_WARMUP:]
    largest = worker.largest([ms for step in times for ms in step])
    parts = dict(zip(("dispatch", "combine", "backward"), (largest[i::3] for i in range(3)), strict=True))
    parts["forward"] = [sum(pair) for pair in zip(parts["dispatch"], parts["combine"], strict=True)]
    row: dict[str, Any] = {f"{name}_ms": statistics.median(values) for name, values in parts.items()}
    kernels = profiled(lambda: _repeat(_PROFILED, lambda: _times(worker, dispatcher, x_TD, plan)))
    moving = sum(kernel.duration for kernel in kernels if communication_kind(kernel) in EXCHANGES) / 1e3 / _PROFILED
    dispatcher.close()
    sent, received = _rows(worker, plan.indices_TK, config.n_routed_experts)
    # Dispatch takes out what is sent, and combine what was received; backward does the same again.
    bytes_to_experts = row_bytes(config.hidden_size) if in_fp8 else 2 * config.hidden_size
    bytes_out = sent * bytes_to_experts + received * 2 * config.hidden_size
    gigabytes = max(worker.largest([float(bytes_out)])) / 1e9
    return row | {
        "tokens_per_gpu": shape.tokens,
        "rows_sent": sent,
        "rows_received": received,
        "bytes_of_row_to_experts": bytes_to_experts,
        "gb_out_each_direction": gigabytes,
        "forward_gb_per_s": gigabytes / row["forward_ms"] * 1e3,
        "backward_gb_per_s": gigabytes / row["backward_ms"] * 1e3,
        "communication_kernels_ms": moving or None,
        "kernels_gb_per_s": 2 * gigabytes / moving * 1e3 if moving else None,
        "kernels": sum(communication_kind(kernel) != BARRIER for kernel in kernels) / _PROFILED,
        "raw_ms": parts,
    }


def _times(worker: Worker, dispatcher: TokenDispatcher, x_TD: Tensor, plan: RoutingPlan) -> tuple[float, float, float]:
    """Milliseconds of dispatch, combine and backward, with nothing in the place of the experts."""
    x_TD.grad = plan.weights_TK.grad = None
    grad_TD = torch.ones_like(x_TD)
    worker.wait_for_all()
    marks = [_mark(worker)]
    dispatched = dispatcher.dispatch(x_TD, plan)
    marks.append(_mark(worker))
    # The experts apply the weights, as in a MoE layer.
    out_TD = dispatcher.combine(dispatched.rows_RD, dispatched._replace(weights_R=None))
    marks.append(_mark(worker))
    weights_R = dispatched.weights_R
    assert weights_R is not None
    torch.autograd.backward((out_TD, weights_R), (grad_TD, torch.ones_like(weights_R)))
    marks.append(_mark(worker))
    if not worker.on_cuda:
        first, second, third, fourth = marks
        return (second - first) * 1e3, (third - second) * 1e3, (fourth - third) * 1e3
    torch.cuda.synchronize()
    first, second, third, fourth = marks
    return first.elapsed_time(second), second.elapsed_time(third), third.elapsed_time(fourth)


def _mark(worker: Worker) -> Any:
    if not worker.on_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _rows(worker: Worker, indices_TK: Tensor, num_experts: int) -> tuple[int, int]:
    """Rows that this rank sends to others and receives from others: one for a token and rank."""
    rank_TK = indices_TK // (num_experts // worker.world_size)
    goes_TW = torch.zeros(indices_TK.shape[0], worker.world_size, dtype=torch.bool, device=worker.device)
    goes_TW.scatter_(1, rank_TK, True)
    counts_W = goes_TW.sum(dim=0)
    counts_W[worker.rank] = 0
    everyone_WW = [torch.empty_like(counts_W) for _ in range(worker.world_size)]
    dist.all_gather(everyone_WW, counts_W)
    return int(counts_W.sum()), int(sum(theirs[worker.rank] for theirs in everyone_WW))


def _overhead(worker: Worker, module: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Host time and kernels of forward and backward, by DeepEP's own calls and through the adapter, on few tokens."""
    shape, num_sms = DISPATCH_SHAPES[arguments.dispatch_shapes[0]], arguments.num_sms[0]
    config, group = shape.config, dist.group.WORLD
    assert group is not None
    x_TD, plan = _plan(worker, shape, min(shape.tokens, _FEW_TOKENS), arguments.seed)
    raw = _RawCalls(module, group, config, num_sms)
    raw_times, raw_kernels = _host_cost(worker, partial(raw.forward, x_TD.detach(), plan), arguments.dispatch_steps)
    raw.buffer.destroy()
    adapter = DeepEPDispatcher(config.n_routed_experts, group, num_sms=num_sms, **arguments.dispatcher_arguments)

    def outputs() -> list[Tensor]:
        dispatched = adapter.dispatch(x_TD, plan)
        out_TD = adapter.combine(dispatched.rows_RD, dispatched._replace(weights_R=None))
        assert dispatched.weights_R is not None
        return [out_TD, dispatched.weights_R]

    grads = [torch.ones_like(output) for output in outputs()]

    def forward() -> Callable[[], None]:
        return partial(torch.autograd.backward, outputs(), grads)

    times, kernels = _host_cost(worker, forward, arguments.dispatch_steps)
    adapter.close()
    more = kernels - raw_kernels
    return {
        "shape": arguments.dispatch_shapes[0],
        "num_sms": num_sms,
        "tokens_per_gpu": x_TD.shape[0],
        "raw_forward_us": raw_times[0],
        "raw_backward_us": raw_times[1],
        "forward_us": times[0],
        "backward_us": times[1],
        "raw_kernels": sum(raw_kernels.values()),
        "extra_kernels": sum(more.values()),
        "extra_kernels_by_name": dict(more.most_common()),
    }


def _host_cost(
    worker: Worker, forward: Callable[[], Callable[[], None]], steps: int
) -> tuple[tuple[float, float], Counter[str]]:
    """Median microseconds of forward and of backward on the slowest rank, and the kernels of both."""
    times = [_host_times(worker, forward) for _ in range(steps + _WARMUP)][_WARMUP:]
    largest = worker.largest([us for step in times for us in step])
    kernels = Counter(kernel.name[:_NAME_LENGTH] for kernel in profiled(lambda: forward()()))
    return (statistics.median(largest[0::2]), statistics.median(largest[1::2])), kernels


def _host_times(worker: Worker, forward: Callable[[], Callable[[], None]]) -> tuple[float, float]:
    """Microseconds until the calls of forward and of backward return."""
    worker.wait_for_all()
    start = time.perf_counter()
    backward = forward()
    middle = time.perf_counter()
    worker.wait_for_all()
    again = time.perf_counter()
    backward()
    return (middle - start) * 1e6, (time.perf_counter() - again) * 1e6


class _RawCalls:
    """What a dispatch and combine take with DeepEP V1 itself, as its README shows it."""

    def __init__(self, module: Any, group: dist.ProcessGroup, config: DeepSeekV3Config, num_sms: int) -> None:
        self.num_experts = config.n_routed_experts
        module.Buffer.set_num_sms(num_sms)
        self.ways = module.Buffer.get_dispatch_config(group.size()), module.Buffer.get_combine_config(group.size())
        size = max(way.get_nvl_buffer_size_hint(config.hidden_size * 2, group.size()) for way in self.ways)
        self.buffer = module.Buffer(group, num_nvl_bytes=size, explicitly_destroy=True)

    def forward(self, x_TD: Tensor, plan: RoutingPlan) -> Callable[[], None]:
        """Dispatch and combine; returns their backward."""
        per_rank, per_host, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(plan.indices_TK, self.num_experts)
        x_MD, _, weights_MK, _, handle, _ = self.buffer.dispatch(
            x_TD,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_host,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=plan.indices_TK,
            topk_weights=plan.weights_TK.detach(),
            config=self.ways[0],
        )
        self.buffer.combine(x_MD, handle, config=self.ways[1])

        def backward() -> None:
            grad_MD, *_ = self.buffer.dispatch(x_TD, handle=handle, config=self.ways[0])
            self.buffer.combine(grad_MD, handle, topk_weights=weights_MK, config=self.ways[1])

        return backward


def _repeat(times: int, work: Callable[[], object]) -> None:
    for _ in range(times):
        work()
