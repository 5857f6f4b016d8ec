"""Where the Triton kernels of this package take the place of plain PyTorch."""

import torch

# Arguments of kernels that change with the routing. Triton must not specialise on them: it would compile a kernel once
# more in mid-training, for multiples of 16 and for others.
ROUTED = ("choices", "rows", "blocks")


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether kernels for bfloat16 and float32 run on tensors of a device and dtype.

    Args:
        device: Where the tensors are.
        dtype: Of the tensors.
    """
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float32)
