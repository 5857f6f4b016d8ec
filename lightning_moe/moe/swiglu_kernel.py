"""Triton kernels for SwiGLU with a weight for each row, one pass over memory each way.

Shapes: ``R`` rows, ``F`` width of the gate.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _swiglu_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    gate_up_ptr,
    weights_ptr,
    out_ptr,
    width,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up_ptr + row * 2 * width + columns, mask=inside).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + columns, mask=inside).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        out *= tl.load(weights_ptr + row).to(tl.float32)
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def swiglu_kernel(gate_up_R2F: Tensor, weights_R: Tensor | None) -> Tensor:
    """``silu(gate) * up`` of the two halves of each row, times the row's weight; computed in float32.

    Args:
        gate_up_R2F: Rows, contiguous.
        weights_R: Weight of each row, or ``None`` for 1.

    Returns:
        ``(R, F)`` in the rows' dtype.
    """
    rows, width = gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2
    out_RF = gate_up_R2F.new_empty(rows, width)
    if rows:
        _swiglu_kernel[(rows, triton.cdiv(width, _BLOCK))](
            gate_up_R2F,
            gate_up_R2F if weights_R is None else weights_R,
            out_RF,
            width,
            WEIGHTED=weights_R is not None,
            BLOCK=_BLOCK,
        )
    return out_RF


@triton.jit
def gradients_of_swiglu(grad, gate, up, weight):  # type: ignore[no-untyped-def]
    # The result before and after its weight, and the gradients of gate and up.
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    out = silu * up
    weighted = grad * weight
    return out, out * weight, weighted * up * (sigmoid + silu * (1.0 - sigmoid)), weighted * silu


@triton.jit
def _swiglu_backward_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    grad_ptr,
    gate_up_ptr,
    weights_ptr,
    out_ptr,
    grad_gate_up_ptr,
    grad_weights_ptr,
    width,
    span,
    WEIGHTED: tl.constexpr,
    WITH_OUTPUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * span
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights_ptr + row).to(tl.float32)
    dot = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(first, first + span, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        grad = tl.load(grad_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_up_ptr + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
        plain, out, grad_gate, grad_up = gradients_of_swiglu(grad, gate, up, weight)
        if WEIGHTED:
            dot += grad * plain
        element = grad_gate_up_ptr.dtype.element_ty
        if WITH_OUTPUT:
            tl.store(out_ptr + row * width + columns, out.to(element), mask=inside)
        tl.store(grad_gate_up_ptr + row * 2 * width + columns, grad_gate.to(element), mask=inside)
        tl.store(grad_gate_up_ptr + row * 2 * width + width + columns, grad_up.to(element), mask=inside)
    if WEIGHTED:
        tl.store(grad_weights_ptr + row, tl.sum(dot, axis=0).to(grad_weights_ptr.dtype.element_ty))


def swiglu_backward_kernel(
    grad_RF: Tensor, gate_up_R2F: Tensor, weights_R: Tensor | None, *, with_output: bool = True
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Backward of :func:`swiglu_kernel`, which it can compute once more on the way.

    Args:
        grad_RF: Gradient of the result, contiguous.
        gate_up_R2F: Rows, contiguous.
        weights_R: Weight of each row, or ``None`` for 1.
        with_output: Whether to store the result too.

    Returns:
        The result itself or ``None``, the gradient of the rows, and that of the weights.
    """
    rows, width = grad_RF.shape
    out_RF = torch.empty_like(grad_RF) if with_output else None
    grad_gate_up_R2F = torch.empty_like(gate_up_R2F)
    grad_weights_R = None if weights_R is None else torch.empty_like(weights_R)
    if rows:
        # The gradient of a weight is a sum over its whole row.
        span = width if weights_R is not None else _BLOCK
        _swiglu_backward_kernel[(rows, triton.cdiv(width, span))](
            grad_RF,
            gate_up_R2F,
            gate_up_R2F if weights_R is None else weights_R,
            grad_gate_up_R2F if out_RF is None else out_RF,
            grad_gate_up_R2F,
            gate_up_R2F if grad_weights_R is None else grad_weights_R,
            width,
            span,
            WEIGHTED=weights_R is not None,
            WITH_OUTPUT=with_output,
            BLOCK=_BLOCK,
        )
    return out_RF, grad_gate_up_R2F, grad_weights_R
