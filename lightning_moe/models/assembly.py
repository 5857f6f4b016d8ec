"""What a strategy and a precision plugin make of a model, as far as it cannot be taken back."""

from typing import Any

import torch

# Recomputation, compilation, compute dtype and precision plugin
Assembly = tuple[Any, ...]
_NAMES = ("activation_checkpointing", "compile", "compute_dtype", "precision plugin")
# What leaves a model as it was built
PLAIN: Assembly = ("none", False, None, None)


def assembly_of(strategy: Any) -> Assembly:
    """Returns what a strategy, with its precision plugin, makes of a model."""
    plugin = getattr(strategy.precision_plugin, "assembly", None)
    return (*getattr(strategy, "assembly", PLAIN[:-1]), plugin)


def compute_dtype_of(strategy: Any) -> torch.dtype:
    """Returns the dtype that a model multiplies in under a strategy, with its precision plugin."""
    plugin = strategy.precision_plugin
    explicit = getattr(strategy, "assembly", PLAIN[:-1])[2] or getattr(plugin, "compute_dtype", None)
    if explicit is not None:
        return explicit
    device_type = strategy.root_device.type
    with plugin.forward_context():
        lowered = torch.is_autocast_enabled(device_type)
        return torch.get_autocast_dtype(device_type) if lowered else torch.get_default_dtype()


def spoken(assembly: Assembly) -> str:
    """Says it in words."""
    return ", ".join(f"{name} {value}" for name, value in zip(_NAMES, assembly, strict=True))


def distributes(strategy: Any) -> bool:
    """Whether a strategy assembles models, and can spread their experts over processes."""
    return callable(getattr(strategy, "assemble", None))
