"""Which dispatcher moves the tokens of a layout, and giving it to the layers of a model."""

from collections.abc import Callable
from typing import Literal

import torch.distributed as dist

from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.base import TokenDispatcher
from lightning_moe.dispatch.local import LocalDispatcher
from lightning_moe.models.base import MoEModel
from lightning_moe.strategies.mesh import MoEMesh

# What a dispatcher is made from: the experts of a layer, the expert-parallel group, and the alignment of its groups.
DispatcherCallable = Callable[[int, dist.ProcessGroup, int], TokenDispatcher]
DispatcherName = Literal["auto", "all_to_all"]


def distribute_experts(
    model: MoEModel, mesh: MoEMesh, dispatcher: DispatcherName | DispatcherCallable, max_tokens: int | None = None
) -> list[TokenDispatcher]:
    """Leaves each process its slice of the experts, and gives the MoE layers the dispatcher that reaches them all.

    Layers of the same experts share one dispatcher, and with it its communication buffers.

    Args:
        model: The model, on the meta device.
        mesh: The processes.
        dispatcher: What moves tokens where experts are spread: a name, or a class or function that makes it.
        max_tokens: Most tokens of one process in a forward pass, where that is known.

    Returns:
        The dispatchers that were made; to be closed before the process groups end.

    Raises:
        TypeError: What was made is no dispatcher.
    """
    group = mesh.expert_parallel
    make = _local if group.size() == 1 else _resolve(dispatcher)
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


def _resolve(dispatcher: DispatcherName | DispatcherCallable) -> DispatcherCallable:
    return AllToAllDispatcher if isinstance(dispatcher, str) else dispatcher
