"""The second half of the experts: SwiGLU, the routing weight, and the multiplication by the down projection.

One operator, so that only the input of SwiGLU is kept for backward, which computes its result once more.

Shapes: ``R`` rows ordered by expert, ``F`` expert width, ``D`` hidden size, ``e`` experts held here.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_moe.moe.grouped_mm import grouped_mm
from lightning_moe.moe.swiglu import swiglu_forward, swiglu_gradients


def swiglu_grouped_mm(gate_up_R2F: Tensor, weights_R: Tensor | None, b_eFD: Tensor, offsets_e: Tensor) -> Tensor:
    """Returns ``grouped_mm(swiglu(gate_up, weights), b, offsets)``.

    Args:
        gate_up_R2F: Gate and up of each row.
        weights_R: Routing weight of each row, or ``None`` for 1.
        b_eFD: One matrix per expert.
        offsets_e: End of each expert's rows, int32; the last one is R.

    Returns:
        The products ``(R, D)``.
    """
    if torch.is_autocast_enabled(gate_up_R2F.device.type):
        dtype = torch.get_autocast_dtype(gate_up_R2F.device.type)
        gate_up_R2F, b_eFD = gate_up_R2F.to(dtype), b_eFD.to(dtype)
    return torch.ops.lightning_moe.swiglu_grouped_mm(gate_up_R2F, weights_R, b_eFD, offsets_e)


@torch.library.custom_op("lightning_moe::swiglu_grouped_mm", mutates_args=())
def _swiglu_grouped_mm(gate_up_R2F: Tensor, weights_R: Tensor | None, b_eFD: Tensor, offsets_e: Tensor) -> Tensor:
    hidden_RF = swiglu_forward(gate_up_R2F, weights_R)
    return torch.ops.lightning_moe.grouped_mm(hidden_RF, b_eFD, offsets_e)


@_swiglu_grouped_mm.register_fake
def _(gate_up_R2F: Tensor, weights_R: Tensor | None, b_eFD: Tensor, offsets_e: Tensor) -> Tensor:
    return gate_up_R2F.new_empty(gate_up_R2F.shape[0], b_eFD.shape[2])


@torch.library.custom_op("lightning_moe::swiglu_backward", mutates_args=())
def _swiglu_backward(grad_RF: Tensor, gate_up_R2F: Tensor, weights_R: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The result of SwiGLU, the gradient of its input, and that of the weights (empty without weights)."""
    out_RF, grad_gate_up, grad_weights = swiglu_gradients(grad_RF, gate_up_R2F, weights_R, with_output=True)
    assert out_RF is not None
    return out_RF, grad_gate_up, gate_up_R2F.new_empty(0) if grad_weights is None else grad_weights


@_swiglu_backward.register_fake
def _(grad_RF: Tensor, gate_up_R2F: Tensor, weights_R: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    grad_weights = gate_up_R2F.new_empty(0) if weights_R is None else torch.empty_like(weights_R)
    return grad_RF.new_empty(grad_RF.shape), gate_up_R2F.new_empty(gate_up_R2F.shape), grad_weights


def _save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor | None, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
    gate_up_R2F, weights_R, b_eFD, offsets_e = ctx.saved_tensors
    grad_RD = grad_RD.contiguous()  # the library refuses expanded gradients, as those of a plain sum are
    grad_hidden_RF = grouped_mm(grad_RD, b_eFD.transpose(1, 2), offsets_e)
    hidden_RF, grad_gate_up, grad_weights = torch.ops.lightning_moe.swiglu_backward(
        grad_hidden_RF, gate_up_R2F, weights_R
    )
    grad_b = None
    if ctx.needs_input_grad[2]:
        # In the layout of the weight as it is stored, of which `b` is a transposed view.
        grad_b = torch.ops.lightning_moe.grouped_outer(grad_RD, hidden_RF, offsets_e).transpose(1, 2)
    return grad_gate_up, None if weights_R is None else grad_weights, grad_b, None


_swiglu_grouped_mm.register_autograd(_backward, setup_context=_save_inputs)
