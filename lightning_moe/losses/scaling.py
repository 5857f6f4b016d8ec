"""Scaling of gradients that were computed ahead of backward, by the gradient that comes from above."""

import torch
from torch import Tensor


def scaled(values: Tensor, factor: Tensor, dtype: torch.dtype, *, in_place: bool) -> Tensor:
    """Returns ``values * factor``, multiplied before it is rounded: 0.3 itself is 0.26% off in bfloat16.

    On CUDA a factor of exactly 1, which only the device knows, costs nothing in place.

    Args:
        values: A dense tensor.
        factor: A scalar of at least float32 on the same device.
        dtype: Of the result.
        in_place: Whether ``values`` may be overwritten and given back.
    """
    if values.device.type == "cuda" and values.dtype != torch.float64:
        from lightning_moe.losses.scale_kernel import scale_kernel

        out = values if in_place and values.dtype == dtype else torch.empty_like(values, dtype=dtype)
        scale_kernel(values, factor, out)
        return out
    if in_place and values.dtype == factor.dtype:
        return values.mul_(factor).to(dtype)
    return (values.to(factor.dtype) * factor).to(dtype)


def graph_is_kept() -> bool:
    """Whether the backward that is running was asked to keep the graph, so that it may run again.

    While it is being compiled nobody knows, so it is.
    """
    return torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()
