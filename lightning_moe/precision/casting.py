"""Computing in a lower precision over master weights, for parameters that no FSDP group gathers.

FSDP2 casts parameters when it gathers them. A process that holds whole parameters has nothing to gather, so they are
cast where a module reads them; the values, gradients and state dictionaries are the same.
"""

import functools

import torch
from torch import Tensor, nn

from lightning_moe.moe.router import Router


def cast_on_use(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes every module but the routers read its floating-point parameters in another dtype, in place.

    The parameters stay as they are: names, optimizer and checkpoints see the master weights, which get the gradients.

    Args:
        model: The model.
        dtype: Dtype that parameters are read in.
    """
    for module in model.modules():
        if isinstance(module, Router):
            continue
        names = [name for name, parameter in module.named_parameters(recurse=False) if parameter.dtype != dtype]
        if names:
            module.__class__ = _casting_class(type(module), tuple(names), dtype)  # type: ignore[arg-type]


@functools.cache
def _casting_class(original: type[nn.Module], names: tuple[str, ...], dtype: torch.dtype) -> type[nn.Module]:
    # One class for all modules of a kind, so that torch.compile takes them for the same.
    members = {name: _reader(name, dtype) for name in names}
    return type(original.__name__, (original,), {"__module__": original.__module__, **members})


def _reader(name: str, dtype: torch.dtype) -> property:
    def read(self: nn.Module) -> Tensor:
        parameter = self._parameters[name]
        assert parameter is not None
        return parameter.to(dtype)

    return property(read)
