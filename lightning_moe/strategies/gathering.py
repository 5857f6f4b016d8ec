"""When gates that FSDP2 has sharded are gathered, and that no gathered weights are left behind."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_moe.models.base import MoEModel


def gather_gates_first(model: MoEModel) -> None:
    """Makes forward passes of a sharded model gather all gates before the first block.

    Gates are small and kept until backward. Gathered in their blocks, ranks would wait for one another there, and the
    host, which is not ahead of the device behind a dispatch between processes, would keep the device waiting.

    Args:
        model: The model, sharded.
    """
    gates = [layer.router for _, layer in model.moe_layers() if isinstance(layer.router, FSDPModule)]
    model.register_forward_pre_hook(partial(_gather, gates))


def release_without_backward(model: MoEModel) -> None:
    """Makes forward passes of a sharded model that no backward can follow leave nothing gathered.

    Args:
        model: The model, sharded.
    """
    model.register_forward_hook(partial(_release, sharded_modules(model)))


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Returns the modules of a model that are groups of FSDP2."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def release_gathered(sharded: Sequence[FSDPModule]) -> None:
    """Frees what a forward pass left gathered that no backward followed: copies that know of no change since."""
    for module in sharded:
        module.reshard()


def forget_gradients(sharded: Sequence[FSDPModule]) -> None:
    """Drops gradients that wait to be reduced, of an optimizer step that was not finished."""
    for module in sharded:
        group = module._get_fsdp_state()._fsdp_param_group
        for parameter in () if group is None else group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _gather(gates: Sequence[FSDPModule], model: nn.Module, args: Any) -> None:
    for gate in gates:
        gate.unshard()


def _release(sharded: Sequence[FSDPModule], model: nn.Module, args: Any, output: Any) -> None:
    if not torch.is_grad_enabled():
        release_gathered(sharded)
