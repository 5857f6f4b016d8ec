"""Which dispatcher moves the tokens of a layout, and giving it to the layers of a model."""

import socket
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info

from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.base import TokenDispatcher
from lightning_moe.dispatch.deep_ep.dispatcher import DeepEPDispatcher
from lightning_moe.dispatch.local import LocalDispatcher
from lightning_moe.models.base import MoEModel
from lightning_moe.strategies.mesh import MoEMesh

# What a dispatcher is made from: the experts of a layer, the expert-parallel group, and the alignment of its groups.
DispatcherCallable = Callable[[int, dist.ProcessGroup, int], TokenDispatcher]
DispatcherName = Literal["auto", "all_to_all", "deep_ep"]


def distribute_experts(
    model: MoEModel,
    mesh: MoEMesh,
    dispatcher: DispatcherName | DispatcherCallable,
    max_tokens: int | None = None,
    compute_dtype: torch.dtype | None = None,
) -> list[TokenDispatcher]:
    """Leaves each process its slice of the experts, and gives the MoE layers the dispatcher that reaches them all.

    Layers of the same experts share one dispatcher, and with it its communication buffers.

    Args:
        model: The model, on the meta device.
        mesh: The processes.
        dispatcher: What moves tokens where experts are spread: a name, or a class or function that makes it.
        max_tokens: Most tokens of one process in a forward pass, where that is known.
        compute_dtype: Dtype of the tokens; ``None`` for that of the parameters.

    Returns:
        The dispatchers that were made; to be closed before the process groups end.

    Raises:
        TypeError: What was made is no dispatcher.
        ValueError: The dispatcher cannot serve the model here; the message names the rule.
    """
    group = mesh.expert_parallel
    make = _local if group.size() == 1 else _resolve(dispatcher, model, mesh, compute_dtype)
    made: dict[tuple[int, int], TokenDispatcher] = {}
    for _, layer in model.moe_layers():
        experts = layer.experts
        kind = (experts.num_experts, layer.dispatcher.alignment)
        if kind not in made:
            made[kind] = make(experts.num_experts, group.get_group(), layer.dispatcher.alignment)
            if not isinstance(made[kind], TokenDispatcher):
                raise TypeError(
                    f"trainer.strategy.dispatcher made a {type(made[kind]).__name__}, but it must make a "
                    "lightning_moe TokenDispatcher."
                )
            made[kind].prepare(experts.hidden_size, layer.router.num_experts_per_tok, max_tokens)
        layer.dispatcher = made[kind]
        if group.size() > 1:
            experts.keep_slice(group.get_local_rank(), group.size())
    return list(made.values())


def _local(num_experts: int, group: dist.ProcessGroup, alignment: int) -> LocalDispatcher:
    return LocalDispatcher(num_experts, alignment)


def _resolve(
    dispatcher: DispatcherName | DispatcherCallable, model: MoEModel, mesh: MoEMesh, compute_dtype: torch.dtype | None
) -> DispatcherCallable:
    if callable(dispatcher):
        return dispatcher
    if dispatcher == "all_to_all":
        return AllToAllDispatcher
    reason = _why_not_deep_ep(model, mesh, compute_dtype)
    if dispatcher == "auto":
        chosen = "DeepEPDispatcher, which can serve it" if reason is None else f"AllToAllDispatcher, because {reason}"
        rank_zero_info(f"Tokens go through {chosen}")
    elif reason is not None:
        raise ValueError(f"trainer.strategy.dispatcher is deep_ep, but {reason}")
    return DeepEPDispatcher if reason is None else AllToAllDispatcher


def _why_not_deep_ep(model: MoEModel, mesh: MoEMesh, compute_dtype: torch.dtype | None) -> str | None:
    """Why some expert-parallel group cannot use DeepEP; all ranks get the same answer."""
    if mesh.expert.device_type != "cuda":
        return "DeepEP needs GPUs, and this runs on the CPU."
    group = mesh.expert_parallel.get_group()
    hosts = _gather(socket.gethostname(), group)
    own = [
        DeepEPDispatcher.why_not(
            layer.experts.num_experts,
            group.size(),
            layer.experts.hidden_size,
            layer.router.num_experts_per_tok,
            dtype=compute_dtype or layer.experts.gate_up_proj.dtype,
            hosts=hosts,
        )
        for _, layer in model.moe_layers()
    ]
    answers = _gather((socket.gethostname(), next(filter(None, own), None)), None)
    reasons = [reason for _, reason in answers]
    for host, reason in answers:
        if reason is not None:
            return f"{reason} (On {host}, but not on all.)" if None in reasons else reason
    return None


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone
