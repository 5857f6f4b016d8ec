"""Triton kernels that plan the rows of the experts: a stable counting sort in three launches.

Blocks of choices are counted by expert; each expert sums its counts over the blocks; then every choice knows its row:
where its expert begins, plus the choices of that expert in earlier blocks, plus those before it in its own.

Shapes: ``C`` choices in order, ``E`` experts (``P`` the next power of two), ``B`` blocks, ``R`` rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_moe.kernels import ROUTED

_MOST_CELLS = 16384  # of the table of a block's choices by expert
_SCAN = 1024


@triton.jit(do_not_specialize=ROUTED)
def _count_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    indices_ptr, counts_ptr, choices, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(indices_ptr + offsets, mask=offsets < choices, other=-1).to(tl.int32)
    experts = tl.arange(0, EXPERTS)
    counts = tl.sum((chosen[:, None] == experts[None, :]).to(tl.int32), axis=0)
    tl.store(counts_ptr + block * EXPERTS + experts, counts)


@triton.jit(do_not_specialize=ROUTED)
def _scan_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    counts_ptr, totals_ptr, blocks, EXPERTS: tl.constexpr, SCAN: tl.constexpr
):
    """Turns the counts of one expert into sums over the blocks before, in place."""
    expert = tl.program_id(0)
    total = 0
    for start in range(0, blocks, SCAN):
        block = start + tl.arange(0, SCAN)
        inside = block < blocks
        places = counts_ptr + block.to(tl.int64) * EXPERTS + expert
        counts = tl.load(places, mask=inside, other=0)
        tl.store(places, total + tl.cumsum(counts, axis=0) - counts, mask=inside)
        total += tl.sum(counts, axis=0)
    tl.store(totals_ptr + expert, total)


@triton.jit(do_not_specialize=ROUTED)
def _place_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    indices_ptr,
    before_ptr,
    totals_ptr,
    row_of_choice_ptr,
    choice_of_row_ptr,
    offsets_ptr,
    choices,
    rows,
    num_experts,
    ALIGNMENT: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    totals = tl.load(totals_ptr + experts)
    aligned = (totals + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    ends = tl.cumsum(aligned, axis=0)
    if block == 0:
        # The last expert takes what is left over.
        tl.store(offsets_ptr + experts, tl.where(experts == num_experts - 1, rows, ends), mask=experts < num_experts)
    first_here = ends - aligned + tl.load(before_ptr + block * EXPERTS + experts)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < choices
    chosen = tl.load(indices_ptr + offsets, mask=inside, other=-1).to(tl.int32)
    matches = chosen[:, None] == experts[None, :]
    earlier = tl.cumsum(matches.to(tl.int32), axis=0) - 1
    row = tl.sum(tl.where(matches, earlier + first_here[None, :], 0), axis=1)
    present = chosen >= 0
    tl.store(row_of_choice_ptr + offsets, tl.where(present, row, rows).to(tl.int64), mask=inside)
    tl.store(choice_of_row_ptr + row, offsets, mask=inside & present)


def plan_rows_kernel(
    indices_TK: Tensor, num_experts: int, alignment: int, rows: int, padded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Plans the rows in the experts' order; see :func:`lightning_moe.dispatch.permute.plan_rows`.

    Args:
        indices_TK: Chosen experts, any integer dtype, contiguous; -1 for none.
        num_experts: Experts ``E``.
        alignment: Rows to whose multiple each group is padded.
        rows: Number of rows.
        padded: Whether there can be rows without a choice.

    Returns:
        Row of each choice ``(T, K)`` int64, choice of each row ``(R,)`` int64, end of each expert's rows ``(E,)``
        int32.
    """
    choices, device = indices_TK.numel(), indices_TK.device
    experts = triton.next_power_of_2(num_experts)
    block = max(min(_MOST_CELLS // experts, 1024), 16)
    blocks = max(triton.cdiv(choices, block), 1)
    counts = torch.empty(blocks, experts, dtype=torch.int32, device=device)
    totals = torch.empty(experts, dtype=torch.int32, device=device)
    row_of_choice = torch.empty(indices_TK.shape, dtype=torch.int64, device=device)
    choice_of_row = torch.full((rows,), choices, dtype=torch.int64, device=device) if padded else None
    if choice_of_row is None:
        choice_of_row = torch.empty(rows, dtype=torch.int64, device=device)
    offsets = torch.empty(num_experts, dtype=torch.int32, device=device)
    _count_kernel[(blocks,)](indices_TK, counts, choices, EXPERTS=experts, BLOCK=block)
    _scan_kernel[(experts,)](counts, totals, blocks, EXPERTS=experts, SCAN=_SCAN)
    _place_kernel[(blocks,)](
        indices_TK,
        counts,
        totals,
        row_of_choice,
        choice_of_row,
        offsets,
        choices,
        rows,
        num_experts,
        ALIGNMENT=alignment,
        EXPERTS=experts,
        BLOCK=block,
    )
    return row_of_choice, choice_of_row, offsets
