"""Recomputation and compilation of the regions of a block.

Regions are attention (``attend`` of a block), expert computation (``compute`` of the experts), and dense and shared
feed-forwards. Router, dispatch and combine stay outside, so that no token is routed, sent or counted twice, and
nothing is compiled across them; routers are compiled by themselves, and never recomputed.

``full`` recomputes one region more, ``apply_experts`` of a MoE layer: dispatch is then
repeated once in backward, with the choices that the router made in forward.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_moe.models.base import MoEModel
from lightning_moe.moe.experts import GroupedExperts
from lightning_moe.moe.feed_forward import GatedMLP
from lightning_moe.moe.layer import MoELayer
from lightning_moe.moe.router import Router

ActivationCheckpointing = Literal["none", "selective", "full"]


def apply_to_regions(model: MoEModel, activation_checkpointing: ActivationCheckpointing, compile_regions: bool) -> None:
    """Replaces the regions' methods by compiled and recomputing ones, in place.

    Args:
        model: The model.
        activation_checkpointing: ``"none"``, ``"selective"`` or ``"full"``.
        compile_regions: Whether to compile; applied before recomputation.

    Raises:
        TypeError: A block has no method ``attend``, so that its attention would be left out without a word.
    """
    if activation_checkpointing == "none" and not compile_regions:
        return
    for name, block in model.blocks():
        if not callable(getattr(block, "attend", None)):
            raise TypeError(
                f"{type(block).__name__} ({name}) must have a method attend() with all that comes before its router: "
                "the region that activation_checkpointing and compile work on."
            )
        for module in block.modules() if compile_regions else ():
            if isinstance(module, Router):
                module.forward = _compiled(module.forward)  # type: ignore[method-assign]
        for owner, method in _compute_regions(block):
            function = getattr(owner, method)
            if compile_regions:
                function = _compiled(function)
            if activation_checkpointing != "none" and not _inside_experts(owner, activation_checkpointing):
                function = _recomputed(function)
            setattr(owner, method, function)
        for module in block.modules() if activation_checkpointing != "none" else ():
            if isinstance(module, MoELayer):
                module.recomputed = True
                if activation_checkpointing == "full":
                    module.apply_experts = _recomputed(module.apply_experts)  # type: ignore[method-assign]


def _compute_regions(block: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    yield block, "attend"
    for module in block.modules():
        if isinstance(module, GroupedExperts):
            yield module, "compute"
        elif isinstance(module, GatedMLP):
            yield module, "forward"


def _inside_experts(owner: nn.Module, activation_checkpointing: ActivationCheckpointing) -> bool:
    """Whether a region is part of a larger one that is recomputed."""
    return activation_checkpointing == "full" and isinstance(owner, GroupedExperts)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(function, MethodType):
        return torch.compile(function)
    # Bound again afterwards, so that a copy of the module computes with its own weights.
    return MethodType(torch.compile(function.__func__), function.__self__)


def _recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    return partial(checkpoint, function, use_reentrant=False)  # with the random state, for models with dropout
