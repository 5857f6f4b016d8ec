"""Where the Triton kernels of this package take the place of plain PyTorch."""

import torch


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether kernels for bfloat16 and float32 run on tensors of a device and dtype.

    Args:
        device: Where the tensors are.
        dtype: Of the tensors.
    """
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float32)
