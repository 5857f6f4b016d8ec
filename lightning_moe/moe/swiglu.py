"""SwiGLU with a weight for each row, in one pass over memory each way.

Shapes: ``R`` rows, ``F`` width of the gate.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe.kernels import has_kernels


def swiglu(gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
    """``silu(gate) * up`` of the two halves of the last dimension, times a weight for each row where there are some.

    Args:
        gate_up: Gate and up of each row ``(..., 2F)``; all that is kept for backward.
        weights: Weight of each row ``(...)``, or ``None`` for 1.

    Returns:
        ``(..., F)`` in the dtype of ``gate_up``.
    """
    return torch.ops.lightning_moe.swiglu(gate_up, weights)


def swiglu_plain(gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
    """What :func:`swiglu` computes, in differentiable operations."""
    gate, up = gate_up.chunk(2, dim=-1)
    if weights is None:
        return F.silu(gate) * up
    return (F.silu(gate) * up * weights[..., None]).to(gate_up.dtype)


def swiglu_forward(gate_up_R2F: Tensor, weights_R: Tensor | None) -> Tensor:
    """SwiGLU without autograd, contiguous: by the kernel where there is one."""
    if has_kernels(gate_up_R2F.device, gate_up_R2F.dtype):
        from lightning_moe.moe.swiglu_kernel import swiglu_kernel

        return swiglu_kernel(gate_up_R2F.contiguous(), _contiguous(weights_R))
    return swiglu_plain(gate_up_R2F, weights_R).contiguous()


def swiglu_gradients(
    grad_RF: Tensor, gate_up_R2F: Tensor, weights_R: Tensor | None, *, with_output: bool
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Backward of SwiGLU, by the kernel where there is one.

    Args:
        grad_RF: Gradient of the result.
        gate_up_R2F: Gate and up of each row.
        weights_R: Weight of each row, or ``None`` for 1.
        with_output: Whether to compute the result once more.

    Returns:
        The result or ``None``, the gradient of gate and up, and that of the weights or ``None``.
    """
    if has_kernels(gate_up_R2F.device, gate_up_R2F.dtype):
        from lightning_moe.moe.swiglu_kernel import swiglu_backward_kernel

        return swiglu_backward_kernel(
            grad_RF.contiguous(), gate_up_R2F.contiguous(), _contiguous(weights_R), with_output=with_output
        )
    dtype = gate_up_R2F.dtype
    out_RF, grad_gate_up_R2F, grad_weights_R = swiglu_gradients_plain(grad_RF, gate_up_R2F, weights_R)
    return out_RF.to(dtype) if with_output else None, grad_gate_up_R2F.to(dtype), grad_weights_R


def swiglu_gradients_plain(
    grad_RF: Tensor, gate_up_R2F: Tensor, weights_R: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What :func:`swiglu_gradients` computes, on any device; result and gradient are not rounded to the input's dtype.

    Args:
        grad_RF: Gradient of the result.
        gate_up_R2F: Gate and up of each row.
        weights_R: Weight of each row, or ``None`` for 1.

    Returns:
        The result and the gradient of gate and up in at least float32, and the gradient of the weights or ``None``.
    """
    accurate = torch.promote_types(gate_up_R2F.dtype, torch.float32)
    gate_RF, up_RF = gate_up_R2F.to(accurate).chunk(2, dim=-1)
    grad_RF = grad_RF.to(accurate)
    sigmoid_RF = gate_RF.sigmoid()
    silu_RF = gate_RF * sigmoid_RF
    out_RF = silu_RF * up_RF
    grad_weights_R = None
    if weights_R is not None:
        grad_weights_R = (grad_RF * out_RF).sum(dim=-1).to(weights_R.dtype)
        out_RF, grad_RF = out_RF * weights_R[:, None], grad_RF * weights_R[:, None]
    grad_gate_RF = grad_RF * up_RF * (sigmoid_RF + silu_RF * (1 - sigmoid_RF))
    return out_RF, torch.cat((grad_gate_RF, grad_RF * silu_RF), dim=-1), grad_weights_R


def _contiguous(weights_R: Tensor | None) -> Tensor | None:
    return None if weights_R is None else weights_R.contiguous()


def _rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])


@torch.library.custom_op("lightning_moe::swiglu", mutates_args=())
def _swiglu(gate_up: Tensor, weights: Tensor | None) -> Tensor:
    out_RF = swiglu_forward(_rows(gate_up), None if weights is None else weights.reshape(-1))
    return out_RF.view(*gate_up.shape[:-1], out_RF.shape[-1])


@_swiglu.register_fake
def _(gate_up: Tensor, weights: Tensor | None) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@torch.library.custom_op("lightning_moe::swiglu_grad", mutates_args=())
def _swiglu_grad(grad: Tensor, gate_up: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, and of the weights (empty without weights)."""
    weights_R = None if weights is None else weights.reshape(-1)
    _, grad_gate_up, grad_weights = swiglu_gradients(_rows(grad), _rows(gate_up), weights_R, with_output=False)
    if weights is None or grad_weights is None:
        return grad_gate_up.view(gate_up.shape), gate_up.new_empty(0)
    return grad_gate_up.view(gate_up.shape), grad_weights.view(weights.shape)


@_swiglu_grad.register_fake
def _(grad: Tensor, gate_up: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    grad_weights = gate_up.new_empty(0) if weights is None else weights.new_empty(weights.shape)
    return gate_up.new_empty(gate_up.shape), grad_weights


def _save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    gate_up, weights = ctx.saved_tensors
    grad_gate_up, grad_weights = torch.ops.lightning_moe.swiglu_grad(grad, gate_up, weights)
    return grad_gate_up, None if weights is None else grad_weights


_swiglu.register_autograd(_backward, setup_context=_save_inputs)
