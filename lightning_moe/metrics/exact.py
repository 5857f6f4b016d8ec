from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric


class ExactMetric(Metric):
    """A metric whose states follow a module to its device and keep their dtype.

    ``module.to(torch.bfloat16)`` and ``set_dtype`` would otherwise turn sums and counts into a type that cannot hold
    them. States start at zero and are summed over processes.

    """

    full_state_update = False

    def _apply(self, fn: Callable, exclude_state: Sequence[str] = "") -> torch.nn.Module:
        def move(tensor: Tensor) -> Tensor:
            device = fn(tensor.new_empty(0)).device
            if tensor.is_meta:
                return torch.zeros_like(tensor, device=device)
            # MPS has no float64
            dtype = torch.float32 if device.type == "mps" and tensor.dtype == torch.float64 else tensor.dtype
            return tensor.to(device, dtype)

        return super()._apply(move, exclude_state)
