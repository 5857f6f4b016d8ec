"""Triton kernels for what is said of the routing: the load of the experts, and the sequence-wise balance loss.

Scores are summed in a fixed order: each program sums a span of one row's tokens, then one program a row's spans.

Shapes: ``B`` batch, ``S`` sequence, ``E`` experts, ``K`` experts per token, ``C`` spans of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CELLS = 2048  # tokens times slots of a block
_PROGRAMS = 512
_SPAN_CELLS = 8192  # spans times slots that are summed at a time


def _spans(batch: int, sequence: int, slots: int) -> tuple[int, int, int]:
    """Tokens of a block, tokens of a span (a multiple of it), and spans of a row."""
    block = max(_CELLS // slots, 1)
    spans = max(min(triton.cdiv(sequence, block), _PROGRAMS // batch), 1)
    span = triton.cdiv(triton.cdiv(sequence, spans), block) * block
    return block, span, triton.cdiv(sequence, span)


@triton.jit
def _routing_counts_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    indices_ptr,
    counts_ptr,
    sequence,
    span,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * span
    experts = tl.arange(0, SLOTS)
    counts = tl.zeros((SLOTS, BLOCK), dtype=tl.int32)  # tokens last, where neighbouring threads read neighbours
    for start in range(first, tl.minimum(first + span, sequence), BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        for k in tl.static_range(TOP_K):
            places = indices_ptr + row * sequence * TOP_K + tokens * TOP_K + k
            index = tl.load(places, mask=tokens < sequence, other=-1).to(tl.int32)
            counts += (experts[:, None] == index[None, :]).to(tl.int32)
    # Integers: whatever the order, the sum is the same.
    total = tl.sum(counts, axis=1).to(tl.int64)
    tl.atomic_add(counts_ptr + row * EXPERTS + experts, total, mask=(experts < EXPERTS) & (total > 0), sem="relaxed")


def count_routed_kernel(indices_BSK: Tensor, n_routed_experts: int) -> Tensor:
    """Counts the tokens that each expert gets from each row; see :func:`lightning_moe.moe.balance.count_routed`.

    Args:
        indices_BSK: Chosen experts, int64, contiguous; -1 counts for none.
        n_routed_experts: Experts ``E``.

    Returns:
        Counts ``(B, E)``, int64.
    """
    batch, sequence, top_k = indices_BSK.shape
    counts_BE = torch.zeros(batch, n_routed_experts, dtype=torch.int64, device=indices_BSK.device)
    if indices_BSK.numel():
        slots = triton.next_power_of_2(n_routed_experts)
        block, span, spans = _spans(batch, sequence, slots)
        _routing_counts_kernel[(batch, spans)](
            indices_BSK,
            counts_BE,
            sequence,
            span,
            EXPERTS=n_routed_experts,
            TOP_K=top_k,
            SLOTS=slots,
            BLOCK=block,
        )
    return counts_BE


@triton.jit
def _routing_shares_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    scores_ptr,
    indices_ptr,
    sums_ptr,
    lengths_ptr,
    sequence,
    span,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * span
    experts = tl.arange(0, SLOTS)
    sums = tl.zeros((BLOCK, SLOTS), dtype=tl.float32)
    lengths = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(first, tl.minimum(first + span, sequence), BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        places = indices_ptr + row * sequence * TOP_K + tokens * TOP_K
        valid = tl.load(places, mask=tokens < sequence, other=-1) >= 0
        cells = row * sequence * EXPERTS + tokens[:, None] * EXPERTS + experts[None, :]
        scores = tl.load(scores_ptr + cells, mask=valid[:, None] & (experts < EXPERTS)[None, :], other=0.0)
        sums += tl.where(valid[:, None], scores * (1.0 / tl.sum(scores, axis=1))[:, None], 0.0)
        lengths += valid.to(tl.int32)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums_ptr + place * EXPERTS + experts, tl.sum(sums, axis=0), mask=experts < EXPERTS)
    tl.store(lengths_ptr + place, tl.sum(lengths, axis=0))


@triton.jit
def _routing_balance_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    sums_ptr,
    lengths_ptr,
    counts_ptr,
    slopes_ptr,
    losses_ptr,
    spans,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, SLOTS)
    exists = experts < EXPERTS
    sums = tl.zeros((BLOCK, SLOTS), dtype=tl.float32)
    lengths = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, spans, BLOCK):
        span = start + tl.arange(0, BLOCK)
        cells = (row * spans + span)[:, None] * EXPERTS + experts[None, :]
        sums += tl.load(sums_ptr + cells, mask=(span < spans)[:, None] & exists[None, :], other=0.0)
        lengths += tl.load(lengths_ptr + row * spans + span, mask=span < spans, other=0)
    counts = tl.load(counts_ptr + row * EXPERTS + experts, mask=exists, other=0).to(tl.float32)
    slopes = counts * (EXPERTS / TOP_K) / tl.maximum(tl.sum(lengths, axis=0), 1).to(tl.float32)
    tl.store(slopes_ptr + row * EXPERTS + experts, slopes, mask=exists)
    tl.store(losses_ptr + row, tl.sum(slopes * tl.sum(sums, axis=0), axis=0))


def sequence_balance_kernel(scores_BSE: Tensor, indices_BSK: Tensor, counts_BE: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row, whose sum is the balance loss; see :func:`lightning_moe.moe.balance.sequence_balance_loss`.

    Args:
        scores_BSE: Scores of all experts, float32, contiguous.
        indices_BSK: Chosen experts, int64, contiguous; -1 for a token that goes nowhere.
        counts_BE: Tokens that each expert gets from each row, int64, contiguous.

    Returns:
        Losses ``(B,)`` and their derivatives by the sums of normalised scores ``(B, E)``, float32.
    """
    batch, sequence, experts = scores_BSE.shape
    top_k = indices_BSK.shape[-1]
    losses_B, slopes_BE = scores_BSE.new_zeros(batch), scores_BSE.new_empty(batch, experts)
    if batch * sequence:
        slots = triton.next_power_of_2(experts)
        block, span, spans = _spans(batch, sequence, slots)
        sums_BCE = scores_BSE.new_empty(batch, spans, experts)
        lengths_BC = torch.empty(batch, spans, dtype=torch.int32, device=scores_BSE.device)
        sizes = {"EXPERTS": experts, "TOP_K": top_k, "SLOTS": slots}
        _routing_shares_kernel[(batch, spans)](
            scores_BSE, indices_BSK, sums_BCE, lengths_BC, sequence, span, **sizes, BLOCK=block
        )
        _routing_balance_kernel[(batch,)](
            sums_BCE,
            lengths_BC,
            counts_BE,
            slopes_BE,
            losses_B,
            spans,
            **sizes,
            BLOCK=max(min(_SPAN_CELLS // slots, triton.next_power_of_2(spans)), 1),
            num_warps=8,
        )
    return losses_B, slopes_BE


@triton.jit
def _routing_balance_backward_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    grad_ptr,
    scores_ptr,
    indices_ptr,
    slopes_ptr,
    grad_scores_ptr,
    sequence,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(sequence, BLOCK)
    row = tl.program_id(0).to(tl.int64) // blocks
    tokens = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    experts = tl.arange(0, SLOTS)
    exists = experts < EXPERTS
    inside = tokens < sequence
    valid = tl.load(indices_ptr + row * sequence * TOP_K + tokens * TOP_K, mask=inside, other=-1) >= 0
    cells = row * sequence * EXPERTS + tokens[:, None] * EXPERTS + experts[None, :]
    scores = tl.load(scores_ptr + cells, mask=valid[:, None] & exists[None, :], other=0.0)
    slopes = tl.load(slopes_ptr + row * EXPERTS + experts, mask=exists, other=0.0) * tl.load(grad_ptr)
    inverse = 1.0 / tl.sum(scores, axis=1)
    mean = tl.sum(scores * slopes[None, :], axis=1) * inverse
    grad_scores = tl.where(valid[:, None], (slopes[None, :] - mean[:, None]) * inverse[:, None], 0.0)
    tl.store(grad_scores_ptr + cells, grad_scores, mask=inside[:, None] & exists[None, :])


def sequence_balance_backward_kernel(
    grad: Tensor, scores_BSE: Tensor, indices_BSK: Tensor, slopes_BE: Tensor
) -> Tensor:
    """Backward of :func:`sequence_balance_kernel`.

    Args:
        grad: Gradient of the sum of the losses, a scalar.
        scores_BSE: Scores of all experts, contiguous.
        indices_BSK: Chosen experts, contiguous.
        slopes_BE: Derivatives of the losses by the sums of normalised scores.

    Returns:
        Gradient of the scores ``(B, S, E)``.
    """
    batch, sequence, experts = scores_BSE.shape
    grad_scores_BSE = torch.empty_like(scores_BSE)
    if batch * sequence:
        slots = triton.next_power_of_2(experts)
        block = max(_CELLS // slots, 1)
        _routing_balance_backward_kernel[(batch * triton.cdiv(sequence, block),)](  # other dimensions end at 65,535
            grad,
            scores_BSE,
            indices_BSK,
            slopes_BE,
            grad_scores_BSE,
            sequence,
            EXPERTS=experts,
            TOP_K=indices_BSK.shape[-1],
            SLOTS=slots,
            BLOCK=block,
        )
    return grad_scores_BSE
