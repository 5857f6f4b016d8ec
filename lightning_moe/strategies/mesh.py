"""The layout of processes: how many replicate, shard and hold experts, and the device meshes of a layout."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions. All processes read different data; experts are spread over some of them.

    Args:
        data_parallel_replicate_size: Copies of the whole (sharded) model.
        data_parallel_shard_size: Processes that dense parameters are sharded over.
        expert_parallel_size: Processes that hold different experts; it divides ``data_parallel_shard_size``.
    """

    data_parallel_replicate_size: int
    data_parallel_shard_size: int
    expert_parallel_size: int

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.data_parallel_replicate_size * self.data_parallel_shard_size

    @property
    def expert_data_parallel_shard_size(self) -> int:
        """Processes that hold the same experts, which are sharded over them."""
        return self.data_parallel_shard_size // self.expert_parallel_size

    def __str__(self) -> str:
        return (
            f"data parallel {self.data_parallel_replicate_size} x {self.data_parallel_shard_size}, "
            f"expert parallel {self.expert_parallel_size}"
        )


def resolve_layout(
    world_size: int,
    n_routed_experts: int,
    *,
    expert_parallel_size: int | Literal["auto"],
    data_parallel_replicate_size: int,
    data_parallel_shard_size: int | Literal["auto"],
) -> Layout:
    """Fills in what is ``"auto"`` and checks that the sizes fit together.

    Args:
        world_size: Number of processes.
        n_routed_experts: Routed experts of a MoE layer.
        expert_parallel_size: ``"auto"`` takes the largest size that divides both the experts and the shard group.
        data_parallel_replicate_size: Copies of the model.
        data_parallel_shard_size: ``"auto"`` takes all processes of a copy.

    Raises:
        ValueError: A size breaks a rule; the message names the field, the value, the rule and the nearest valid value.
    """
    prefix = "trainer.strategy."
    replicate = data_parallel_replicate_size
    if replicate < 1 or world_size % replicate:
        raise ValueError(
            f"{prefix}data_parallel_replicate_size is {replicate}, but it must divide the {world_size} processes. "
            f"The nearest that works: {_nearest_divisor(replicate, world_size)}."
        )
    shard = world_size // replicate if data_parallel_shard_size == "auto" else data_parallel_shard_size
    if replicate * shard != world_size:
        raise ValueError(
            f"{prefix}data_parallel_shard_size is {shard}, but with data_parallel_replicate_size {replicate} and "
            f"{world_size} processes it must be {world_size // replicate} (or auto)."
        )
    divisors = [size for size in range(1, shard + 1) if shard % size == 0 and n_routed_experts % size == 0]
    expert = divisors[-1] if expert_parallel_size == "auto" else expert_parallel_size
    if expert not in divisors:
        nearest = min(divisors, key=lambda size: abs(size - expert))
        raise ValueError(
            f"{prefix}expert_parallel_size is {expert}, but it must divide n_routed_experts ({n_routed_experts}) and "
            f"the {shard} processes that share one copy of the model. The nearest that works: {nearest}."
        )
    return Layout(replicate, shard, expert)


def _nearest_divisor(value: int, of: int) -> int:
    return min((d for d in range(1, of + 1) if of % d == 0), key=lambda d: abs(d - value))


class MoEMesh:
    """The device meshes of a layout; both span the same processes.

    Args:
        layout: The sizes.
        device_type: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, layout: Layout, device_type: str) -> None:
        self.layout = layout
        replicate = layout.data_parallel_replicate_size
        self.dense = init_device_mesh(
            device_type,
            (replicate, layout.data_parallel_shard_size),
            mesh_dim_names=("dp_replicate", "dp_shard"),
        )
        # Expert-parallel peers are neighbours: they exchange tokens in every layer.
        self.expert = init_device_mesh(
            device_type,
            (replicate, layout.expert_data_parallel_shard_size, layout.expert_parallel_size),
            mesh_dim_names=("dp_replicate", "expert_dp_shard", "ep"),
        )

    @property
    def dense_shards(self) -> DeviceMesh:
        """Mesh that dense parameters are sharded (and, with copies, replicated) over."""
        return self.dense if self.layout.data_parallel_replicate_size > 1 else self.dense["dp_shard"]

    @property
    def expert_shards(self) -> DeviceMesh:
        """Mesh that the experts of one expert-parallel rank are sharded (and replicated) over."""
        if self.layout.data_parallel_replicate_size > 1:
            return self.expert["dp_replicate", "expert_dp_shard"]
        return self.expert["expert_dp_shard"]

    @property
    def expert_parallel(self) -> DeviceMesh:
        """Mesh of the processes that hold different experts."""
        return self.expert["ep"]


def sum_over_processes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sum of a tensor over all processes; each of them reads data of its own."""
    summed = tensor.clone()
    dist.all_reduce(summed)
    return summed
