"""AdamW in one pass over parameter, gradient and moments, as a Triton kernel.

It reads gradients as they are: not yet scaled, and in bfloat16 where they were computed so. The factor that scales and
clips them, and the decision to skip the step, are read on the device.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _adamw_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    param_ptr,
    grad_ptr,
    first_ptr,
    second_ptr,
    step_ptr,
    factor_ptr,
    skip_ptr,
    size,
    lr,
    decay,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    LOG_BETA1: tl.constexpr,
    LOG_BETA2: tl.constexpr,
    EPS: tl.constexpr,
    SCALED: tl.constexpr,
    SKIPPABLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if SKIPPABLE:  # noqa: SIM102 - what is compiled, and what is computed
        if tl.load(skip_ptr) != 0:
            return
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    grad = tl.load(grad_ptr + offsets, mask=inside).to(tl.float32)
    param = tl.load(param_ptr + offsets, mask=inside).to(tl.float32)
    first = tl.load(first_ptr + offsets, mask=inside).to(tl.float32)
    second = tl.load(second_ptr + offsets, mask=inside).to(tl.float32)
    if SCALED:
        grad *= tl.load(factor_ptr).to(tl.float32)
    step = tl.load(step_ptr).to(tl.float64)
    # 1 - beta ** step; in float64, as it is a small difference in the first steps
    correction1 = (1.0 - tl.exp(step * LOG_BETA1)).to(tl.float32)
    correction2 = (1.0 - tl.exp(step * LOG_BETA2)).to(tl.float32)
    first = BETA1 * first + (1.0 - BETA1) * grad
    second = BETA2 * second + (1.0 - BETA2) * grad * grad
    denominator = tl.sqrt(second) / tl.sqrt(correction2) + EPS
    param = param * (1.0 - decay) - lr / correction1 * (first / denominator)
    tl.store(param_ptr + offsets, param.to(param_ptr.dtype.element_ty), mask=inside)
    tl.store(first_ptr + offsets, first.to(first_ptr.dtype.element_ty), mask=inside)
    tl.store(second_ptr + offsets, second.to(second_ptr.dtype.element_ty), mask=inside)


def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    factor: Tensor | None,
    skip: Tensor | None,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Updates one parameter and its moments in place; computed in float32, whatever they are stored in.

    Args:
        param: Parameter; it and the moments are dense, with equal strides.
        grad: Gradient.
        exp_avg: First moment.
        exp_avg_sq: Second moment.
        step: Number of this step, a float32 scalar on the device, 1 for the first.
        factor: Factor on the gradient, a scalar on the device; ``None`` for 1.
        skip: Nothing changes where this scalar on the device is not 0; ``None`` never skips.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
    """
    if grad.stride() != param.stride():
        grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
    size = param.numel()
    if size == 0:
        return
    _adamw_kernel[(triton.cdiv(size, _BLOCK),)](
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        step,
        step if factor is None else factor,
        step if skip is None else skip,
        size,
        lr,
        lr * weight_decay,
        BETA1=betas[0],
        BETA2=betas[1],
        LOG_BETA1=math.log(betas[0]) if betas[0] > 0 else -math.inf,
        LOG_BETA2=math.log(betas[1]) if betas[1] > 0 else -math.inf,
        EPS=eps,
        SCALED=factor is not None,
        SKIPPABLE=skip is not None,
        BLOCK=_BLOCK,
    )
