"""The sum of squares of many tensors, as a Triton kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_BYTES_AT_ONCE = 4 * _BLOCK  # that a program has on their way
_MANY = 2**25  # elements


@triton.jit
def _sum_of_squares_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    source_ptr, out_ptr, size, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, AT_ONCE: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, BLOCKS, AT_ONCE):
        for block in tl.static_range(AT_ONCE):
            offsets = (program * BLOCKS + first + block) * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(source_ptr + offsets, mask=offsets < size, other=0.0).to(tl.float32)
            total += values * values
    tl.store(out_ptr + program, tl.sum(total, axis=0))


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Sums the squares of all elements in float32, in an order that depends on sizes alone.

    Args:
        tensors: Dense tensors of one device, in bfloat16 or float32.

    Returns:
        A float32 scalar.
    """
    # A program takes its blocks one after the other: of a small tensor each takes few, so that many work at once.
    blocks = [16 if tensor.numel() > _MANY else 2 for tensor in tensors]
    programs = [triton.cdiv(tensor.numel(), _BLOCK * count) for tensor, count in zip(tensors, blocks, strict=True)]
    partial = torch.empty(sum(programs), dtype=torch.float32, device=tensors[0].device)
    for tensor, count, per_program, out in zip(tensors, programs, blocks, partial.split(programs), strict=True):
        if count:
            _sum_of_squares_kernel[(count,)](
                tensor,
                out,
                tensor.numel(),
                BLOCK=_BLOCK,
                BLOCKS=per_program,
                AT_ONCE=_BYTES_AT_ONCE // (_BLOCK * tensor.element_size()),
            )
    return partial.sum()
