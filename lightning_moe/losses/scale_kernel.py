"""Triton kernel that multiplies a tensor by a scalar on the device, and leaves it alone where the scalar is 1."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
# Enough to fill the largest GPUs several times over; where the factor is 1 each of them ends at once.
_PROGRAMS = 2048


@triton.jit
def _scale_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    values_ptr,
    factor_ptr,
    out_ptr,
    size,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    factor = tl.load(factor_ptr).to(tl.float32)
    if IN_PLACE:  # noqa: SIM102 - what is compiled, and what is computed
        if factor == 1.0:
            return
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, size, tl.num_programs(0).to(tl.int64) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < size
        values = tl.load(values_ptr + offsets, mask=inside).to(tl.float32)
        tl.store(out_ptr + offsets, (values * factor).to(out_ptr.dtype.element_ty), mask=inside)


def scale_kernel(values: Tensor, factor: Tensor, out: Tensor) -> None:
    """Writes ``values * factor``, computed in float32; nothing is read or written where that changes nothing.

    Args:
        values: A dense tensor.
        factor: A scalar on the same device.
        out: ``values`` itself, or another tensor of its shape and strides.
    """
    size = values.numel()
    if size:
        _scale_kernel[(min(triton.cdiv(size, _BLOCK), _PROGRAMS),)](
            values, factor, out, size, IN_PLACE=out is values, BLOCK=_BLOCK, num_warps=8
        )
