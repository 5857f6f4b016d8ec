"""Multiplication of each expert's rows by its matrix.

Shapes: ``R`` rows ordered by expert, ``K`` and ``N`` inner and outer width, ``e`` experts held here.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Public in newer versions of PyTorch; the same operator has stood under the private name before.
_library_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm


def grouped_mm(a_RK: Tensor, b_eKN: Tensor, offsets_e: Tensor) -> Tensor:
    """Multiplies each group of rows by the matrix of its expert.

    Args:
        a_RK: Rows, ordered by expert.
        b_eKN: One matrix per expert.
        offsets_e: End of each expert's rows, int32; the last one is R. Groups may be empty.

    Returns:
        The products ``(R, N)``.
    """
    if torch.is_autocast_enabled(a_RK.device.type):  # autocast does not know this operator
        dtype = torch.get_autocast_dtype(a_RK.device.type)
        a_RK, b_eKN = a_RK.to(dtype), b_eKN.to(dtype)
    return torch.ops.lightning_moe.grouped_mm(a_RK, b_eKN, offsets_e)


# An operator of our own around the library's, because that one cannot be traced by torch.compile in other dtypes than
# bfloat16, does not take float64, and returns the weights' gradient in a layout that costs a slow copy.
@torch.library.custom_op("lightning_moe::grouped_mm", mutates_args=())
def _grouped_mm(a_RK: Tensor, b_eKN: Tensor, offsets_e: Tensor) -> Tensor:
    if a_RK.dtype != torch.float64:
        return _library_grouped_mm(a_RK, b_eKN, offs=offsets_e)
    groups = _groups(offsets_e)
    return torch.cat([a_RK[group] @ b for group, b in zip(groups, b_eKN.unbind(), strict=True)])


@_grouped_mm.register_fake
def _(a_RK: Tensor, b_eKN: Tensor, offsets_e: Tensor) -> Tensor:
    return a_RK.new_empty(a_RK.shape[0], b_eKN.shape[2])


@torch.library.custom_op("lightning_moe::grouped_outer", mutates_args=())
def _grouped_outer(a_RK: Tensor, g_RN: Tensor, offsets_e: Tensor) -> Tensor:
    """For each expert, the sum over its rows of the outer products of ``a`` and ``g``: ``(e, K, N)``."""
    if a_RK.dtype != torch.float64:
        return _library_grouped_mm(a_RK.T, g_RN, offs=offsets_e)
    return torch.stack([a_RK[group].T @ g_RN[group] for group in _groups(offsets_e)])


@_grouped_outer.register_fake
def _(a_RK: Tensor, g_RN: Tensor, offsets_e: Tensor) -> Tensor:
    return a_RK.new_empty(offsets_e.shape[0], a_RK.shape[1], g_RN.shape[1])


def _groups(offsets_e: Tensor) -> list[slice]:
    ends = offsets_e.tolist()  # float64 is for tests, on the CPU
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a_RK, b_eKN, offsets_e = ctx.saved_tensors
    # The library refuses expanded gradients, as those of a plain sum are.
    grad_RN = grad_RN.contiguous()
    grad_a = grouped_mm(grad_RN, b_eKN.transpose(1, 2), offsets_e) if ctx.needs_input_grad[0] else None
    grad_b = None
    if ctx.needs_input_grad[1]:
        # In the layout of the weight as it is stored, (e, N, K), of which `b` is a transposed view.
        grad_b = torch.ops.lightning_moe.grouped_outer(grad_RN, a_RK, offsets_e).transpose(1, 2)
    return grad_a, grad_b, None


_grouped_mm.register_autograd(_backward, setup_context=_save_inputs)
