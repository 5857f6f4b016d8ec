"""Puts a model on the processes of a mesh: experts over the expert-parallel group, all else through FSDP2.

The model comes on the meta device. Block by block it is given memory and initial values, and is sharded at once, so
that a process never holds more than one whole block.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from lightning_moe.models.base import MoEModel, init_own_weights
from lightning_moe.models.head import Head
from lightning_moe.moe.experts import GroupedExperts
from lightning_moe.moe.layer import MoELayer
from lightning_moe.strategies.gathering import gather_gates_first, release_without_backward
from lightning_moe.strategies.mesh import MoEMesh


def shard_model(
    model: MoEModel,
    mesh: MoEMesh,
    device: torch.device,
    seed: int,
    *,
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Shards a model in place and gives it its initial weights, which do not depend on the mesh.

    Experts have been spread over the expert-parallel group before, by :func:`distribute_experts`.

    Gradients are summed over processes, never averaged: losses are sums, and the training module divides them once.

    Args:
        model: The model, on the meta device.
        mesh: The processes.
        device: Device of this process.
        seed: Seed of the initial weights.
        compute_dtype: Dtype that parameters are gathered in; gradients are reduced in float32. ``None`` keeps the
            parameters' own dtype.
        reshard_after_forward: Whether the gathered parameters of a block are released between forward and backward.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=None if compute_dtype is None else torch.float32,
        cast_forward_inputs=False,
    )
    unwrapped: set[nn.Parameter] = set()
    in_blocks: set[nn.Module] = set()
    for name, block in model.blocks():
        in_blocks.update(block.modules())
        _materialise(block, name, device, seed)
        for module in block.modules():
            if isinstance(module, MoELayer):
                unwrapped |= _shard_moe_layer(module, mesh, policy, reshard_after_forward)
        _fully_shard(block, mesh.dense_shards, policy, reshard_after_forward, ignored=unwrapped)
    _materialise(model, "", device, seed)
    # These are used at both ends of the step, and kept from forward to backward. The head is gathered last and its
    # gradient is the first to be reduced: apart from the others, both happen while blocks compute.
    for head in [module for module in model.modules() if isinstance(module, Head) and module not in in_blocks]:
        _fully_shard(head, mesh.dense_shards, policy, reshard_after_forward=False)
        register_fsdp_forward_method(head, "cross_entropies")
    _fully_shard(model, mesh.dense_shards, policy, reshard_after_forward=False, ignored=unwrapped)
    gather_gates_first(model)
    release_without_backward(model)


def _materialise(module: nn.Module, name: str, device: torch.device, seed: int) -> None:
    """Gives memory and initial values to what is still on the meta device."""
    for qualified, owner in module.named_modules(prefix=name):
        if any(tensor.is_meta for tensor in [*owner.parameters(recurse=False), *owner.buffers(recurse=False)]):
            owner.to_empty(device=device, recurse=False)
            init_own_weights(owner, seed, qualified)


def _shard_moe_layer(
    layer: MoELayer, mesh: MoEMesh, policy: MixedPrecisionPolicy, reshard_after_forward: bool
) -> set[nn.Parameter]:
    """Shards experts and gate in groups of their own; returns the expert parameters that are left as they are."""
    experts = layer.experts
    if mesh.expert_parallel.size() > 1:
        _mark_as_slices(experts, mesh)
    shards = mesh.expert_shards
    # With fewer experts here than processes, each expert is sharded instead, where FSDP2 can: in equal parts.
    equal = all(p.ndim > 1 and p.shape[1] % shards.size(-1) == 0 for p in experts.parameters())
    dim = 1 if experts.num_experts < shards.size(-1) and equal else 0
    _fully_shard(experts, shards, policy, reshard_after_forward, shard_dim=dim)
    # The gate is gathered in its own dtype: float32 whatever the compute dtype is. It is small enough to be kept.
    gate_policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    _fully_shard(layer.router, mesh.dense_shards, gate_policy, reshard_after_forward=False)
    return set(experts.parameters()) if shards.size() == 1 else set()


def _mark_as_slices(experts: GroupedExperts, mesh: MoEMesh) -> None:
    for name, parameter in list(experts.named_parameters(recurse=False)):
        whole = DTensor.from_local(parameter.data, mesh.expert_parallel, [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def _fully_shard(
    module: nn.Module,
    shards: DeviceMesh,
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool,
    shard_dim: int = 0,
    ignored: set[nn.Parameter] | None = None,
) -> None:
    if shards.size() == 1:
        return
    placement = (lambda parameter: Shard(shard_dim)) if shard_dim else None
    fully_shard(
        module,
        mesh=shards,
        mp_policy=policy,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=placement,
        ignored_params=ignored,
    )
    # A sum without a divide factor, which gloo could not do.
    module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
