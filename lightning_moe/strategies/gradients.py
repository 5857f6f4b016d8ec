"""What happens to the gradients once per optimizer step: scale, norm, clip, and the decision to skip."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_moe.kernels import has_kernels


@torch.no_grad()
def scale_and_clip(
    parameters: Iterable[nn.Parameter],
    scale: Tensor,
    max_norm: float | None,
    sum_over_ranks: Callable[[Tensor], Tensor],
    optimizer: Optimizer | None = None,
) -> Tensor:
    """Scales all gradients and clips their one global norm.

    The norm is that of the whole gradient, over all meshes that parameters are sharded on, and equal on all ranks.
    Our AdamW applies the factor in its own pass over the gradients, which are then left as they are.

    Args:
        parameters: Parameters; those without a gradient are left out.
        scale: Factor on the gradients, a scalar.
        max_norm: Largest norm after scaling; ``None`` for no clipping.
        sum_over_ranks: Sums a tensor over all processes.
        optimizer: The optimizer, where it may be left to it to apply the factor.

    Returns:
        The norm of the scaled gradients before clipping, a scalar; 0 when there are no gradients.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = sum_over_ranks(_squared_norm_here(grads, scale)).sqrt() * scale
    factor = scale
    if max_norm is not None:
        factor = scale * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if getattr(optimizer, "takes_gradient_factor", False):
        optimizer.gradient_factor = factor  # type: ignore[union-attr]
    elif grads:
        torch._foreach_mul_([_local(grad) for grad in grads], factor)
    return norm


def _squared_norm_here(grads: list[Tensor], like: Tensor) -> Tensor:
    """This rank's share of the squared norm: an element that several ranks hold counts for a part in each."""
    alike: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        alike[_copies(grad), grad.dtype].append(_local(grad))
    squared = torch.zeros_like(like)
    for (copies, dtype), local in alike.items():
        squared += _sum_of_squares(local, dtype).to(squared.dtype) / copies
    return squared


def _sum_of_squares(grads: list[Tensor], dtype: torch.dtype) -> Tensor:
    if has_kernels(grads[0].device, dtype):
        from lightning_moe.strategies.norm_kernel import sum_of_squares

        return sum_of_squares(grads)
    norms = torch._foreach_norm(grads, 2, torch.promote_types(dtype, torch.float32))
    return torch.stack(norms).square().sum()


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _copies(grad: Tensor) -> int:
    if not isinstance(grad, DTensor):
        return 1
    sizes = zip(grad.device_mesh.shape, grad.placements, strict=True)
    return math.prod(size for size, placement in sizes if isinstance(placement, Replicate))


def skip_step_unless(finite: Tensor, optimizer: Optimizer, *, on_device: bool = True) -> None:
    """Makes the coming step of the optimizer change nothing when ``finite`` is False.

    A fused optimizer reads the decision on the device. For others the host has to wait for it, and then the gradients
    are dropped, which makes the step of every optimizer of PyTorch leave weights and moments as they are.

    Args:
        finite: A scalar bool tensor, equal on all ranks.
        optimizer: The optimizer.
        on_device: Whether a fused optimizer may read the decision on the device.
    """
    # A fused SGD that is skipped on the device at its first step keeps momentum that was never initialised.
    on_device = on_device and not isinstance(optimizer, torch.optim.SGD)
    if on_device and all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
    elif not bool(finite):
        optimizer.zero_grad(set_to_none=True)
