"""Computing in a lower precision over master weights, for parameters that no FSDP group gathers.

FSDP2 casts parameters when it gathers them. A process that holds whole parameters has nothing to gather, so they are
cast where a module reads them; the values, gradients and state dictionaries are the same.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from lightning_moe.moe.experts import GroupedExperts
from lightning_moe.moe.router import Router


def cast_on_use(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes every module but the routers read its floating-point parameters in another dtype, in place.

    The parameters stay as they are: names, optimizer and checkpoints see the master weights, which get the gradients.

    Args:
        model: The model; nothing changes if it has been called for it before.
        dtype: Dtype that parameters are read in.
    """
    for module in model.modules():
        if isinstance(module, Router) or getattr(type(module), "_reads_parameters_in", None) == dtype:
            continue
        names = [name for name, parameter in module.named_parameters(recurse=False) if parameter.dtype != dtype]
        if names:
            module.__class__ = _casting_class(type(module), tuple(names), dtype)  # type: ignore[arg-type]


@functools.cache
def _casting_class(original: type[nn.Module], names: tuple[str, ...], dtype: torch.dtype) -> type[nn.Module]:
    # One class for all modules of a kind, so that torch.compile takes them for the same.
    members: dict[str, object] = {name: _reader(name, dtype) for name in names}
    if issubclass(original, nn.Embedding):  # the rows that are looked up, not the whole table

        def forward(self: nn.Embedding, input: Tensor) -> Tensor:
            return original.forward(self, input).to(dtype)

        members = {"forward": forward}
    members |= {"__module__": original.__module__, "_reads_parameters_in": dtype}
    return type(original.__name__, (original,), members)


def _reader(name: str, dtype: torch.dtype) -> property:
    def read(self: nn.Module) -> Tensor:
        parameter = self._parameters[name]
        assert parameter is not None
        if isinstance(self, GroupedExperts):
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # not a recomputation in backward
                parameter._pending_reads = getattr(parameter, "_pending_reads", 0) + 1  # type: ignore[attr-defined]
            return _Lowered.apply(parameter, dtype)
        return parameter.to(dtype)

    return property(read)


def keep_gradients_lowered(model: nn.Module, keep: bool = True) -> None:
    """Leaves the experts' gradients in the dtype that they are computed in, where the optimizer can read them so.

    They are the same values with half the memory and traffic. What a second micro-batch or a second use in one forward
    pass adds, is added in the parameters' dtype. Experts alone, as they are most of a model.

    Args:
        model: A model after :func:`cast_on_use`.
        keep: False takes it back.
    """
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            for parameter in module.parameters(recurse=False):
                if hasattr(parameter, "grad_dtype"):  # PyTorch has it since 2.10
                    parameter.grad_dtype = None if keep else parameter.dtype


class _Lowered(torch.autograd.Function):
    """The cast of a parameter that may take its first gradient as it comes."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.parameter = parameter
        return parameter.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        parameter: Any = ctx.parameter
        reads = getattr(parameter, "_pending_reads", 1)
        parameter._pending_reads = max(reads - 1, 0)
        if parameter.grad is None and reads <= 1 and getattr(parameter, "grad_dtype", parameter.dtype) is None:
            return grads[0], None
        if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
            parameter.grad = parameter.grad.to(parameter.dtype)
        return grads[0].to(parameter.dtype), None
