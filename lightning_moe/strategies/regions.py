"""Recomputation and compilation of the regions of a block.

Regions are attention (``attend`` of a block), expert computation (``compute`` of the experts), and dense and shared
feed-forwards. Router, dispatch and combine stay outside, so that no token is routed, sent or counted twice, and nothing
is compiled across them. ``full`` recomputes one region more, ``apply_experts`` of a MoE layer: dispatch is then repeated
once in backward, with the choices that the router made in forward.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_moe.models.base import MoEModel
from lightning_moe.moe.experts import GroupedExperts
from lightning_moe.moe.feed_forward import GatedMLP
from lightning_moe.moe.layer import MoELayer

ActivationCheckpointing = Literal["none", "selective", "full"]


def apply_to_regions(model: MoEModel, activation_checkpointing: ActivationCheckpointing, compile_regions: bool) -> None:
    """Replaces the regions' methods by compiled and recomputing ones, in place.

    Args:
        model: The model.
        activation_checkpointing: ``"none"``, ``"selective"`` or ``"full"``.
        compile_regions: Whether to compile; applied before recomputation.
    """
    for _, block in model.blocks():
        for owner, method in _compute_regions(block):
            function = getattr(owner, method)
            if compile_regions:
                function = torch.compile(function)
            if activation_checkpointing != "none" and not _inside_experts(owner, activation_checkpointing):
                function = _recomputed(function)
            setattr(owner, method, function)
        if activation_checkpointing == "full":
            for module in block.modules():
                if isinstance(module, MoELayer):
                    module.apply_experts = _recomputed(module.apply_experts)  # type: ignore[method-assign]


def _compute_regions(block: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    if hasattr(block, "attend"):
        yield block, "attend"
    for module in block.modules():
        if isinstance(module, GroupedExperts):
            yield module, "compute"
        elif isinstance(module, GatedMLP):
            yield module, "forward"


def _inside_experts(owner: nn.Module, activation_checkpointing: ActivationCheckpointing) -> bool:
    """Whether a region is part of a larger one that is recomputed."""
    return activation_checkpointing == "full" and isinstance(owner, GroupedExperts)


def _recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
