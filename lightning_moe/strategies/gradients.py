"""What happens to the gradients once per optimizer step: scale, norm, clip, and the decision to skip."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@torch.no_grad()
def scale_and_clip(parameters: Iterable[nn.Parameter], scale: Tensor, max_norm: float | None) -> Tensor:
    """Scales all gradients and clips their global norm, in one pass over them.

    Args:
        parameters: Parameters; those without a gradient are left out.
        scale: Factor on the gradients, a scalar.
        max_norm: Largest norm after scaling; ``None`` for no clipping.

    Returns:
        The norm of the scaled gradients before clipping, a scalar; 0 when there are no gradients.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros_like(scale)
    norm = torch.nn.utils.get_total_norm(grads).to(scale.dtype) * scale
    factor = scale
    if max_norm is not None:
        factor = scale * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, factor)
    return norm


def skip_step_unless(finite: Tensor, optimizer: Optimizer) -> None:
    """Makes the coming step of the optimizer change nothing when ``finite`` is False.

    A fused optimizer reads the decision on the device. For others the host has to wait for it, and then the gradients
    are dropped, which makes the step of every optimizer of PyTorch leave weights and moments as they are.

    Args:
        finite: A scalar bool tensor.
        optimizer: The optimizer.
    """
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
    elif not bool(finite):
        optimizer.zero_grad(set_to_none=True)
