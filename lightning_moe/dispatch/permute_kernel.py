"""Triton kernels that bring rows back to their tokens, with their routing weights, in one pass each.

Shapes: ``T`` tokens, ``D`` hidden size, ``K`` experts per token, ``R`` rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_moe.kernels import ROUTED

_BLOCK = 1024


@triton.jit(do_not_specialize=ROUTED)
def _copy_rows_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    source_ptr,
    index_ptr,
    weights_ptr,
    out_ptr,
    out_weights_ptr,
    rows,
    hidden,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # By token and not by row: what goes to K rows is read once.
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    values = tl.load(source_ptr + token * hidden + columns, mask=inside, other=0.0)
    for k in tl.static_range(TOP_K):
        row = tl.load(index_ptr + token * TOP_K + k)
        present = row < rows  # a choice that goes nowhere has no row
        tl.store(out_ptr + row * hidden + columns, values, mask=inside & present)
        if WEIGHTED:  # noqa: SIM102 - what is compiled, and what is computed
            if tl.program_id(1) == 0:
                weight = tl.load(weights_ptr + token * TOP_K + k)
                tl.store(out_weights_ptr + row, weight, mask=present)


@triton.jit(do_not_specialize=ROUTED)
def _clear_padding_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    choice_ptr,
    out_ptr,
    out_weights_ptr,
    choices,
    hidden,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(choice_ptr + row) >= choices:  # a row of padding belongs to no token
        for start in range(0, hidden, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            zeros = tl.zeros((BLOCK,), dtype=out_ptr.dtype.element_ty)
            tl.store(out_ptr + row * hidden + columns, zeros, mask=columns < hidden)
        if WEIGHTED:
            tl.store(out_weights_ptr + row, 0.0)


def copy_rows_kernel(
    source_TD: Tensor,
    row_of_choice_TK: Tensor,
    choice_of_row_R: Tensor,
    weights_TK: Tensor | None = None,
    *,
    padded: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Copies tokens, and where there are some their weights, to rows; a row of padding is zero.

    Args:
        source_TD: Tokens, contiguous.
        row_of_choice_TK: Row of each choice, int64, contiguous; R or more for a choice that goes nowhere.
        choice_of_row_R: Choice ``t * K + k`` of each row, int64; T * K for a row of padding.
        weights_TK: Weight of each choice, contiguous, or ``None``.
        padded: Whether rows of padding can exist.

    Returns:
        ``(R, D)`` in the tokens' dtype, and ``(R,)`` in the weights'.
    """
    rows, (tokens, hidden) = choice_of_row_R.shape[0], source_TD.shape
    top_k = row_of_choice_TK.shape[1]
    out_RD = source_TD.new_empty(rows, hidden)
    out_weights = None if weights_TK is None else weights_TK.new_empty(rows)
    weights_of_rows = out_RD if out_weights is None else out_weights
    weighted = weights_TK is not None
    if tokens and rows:
        _copy_rows_kernel[(tokens, triton.cdiv(hidden, _BLOCK))](
            source_TD,
            row_of_choice_TK,
            source_TD if weights_TK is None else weights_TK,
            out_RD,
            weights_of_rows,
            rows,
            hidden,
            TOP_K=top_k,
            WEIGHTED=weighted,
            BLOCK=_BLOCK,
        )
    if rows and padded:
        _clear_padding_kernel[(rows,)](
            choice_of_row_R, out_RD, weights_of_rows, tokens * top_k, hidden, WEIGHTED=weighted, BLOCK=_BLOCK
        )
    return out_RD, out_weights


@triton.jit(do_not_specialize=ROUTED)
def _sum_rows_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    source_ptr,
    index_ptr,
    weights_ptr,
    out_ptr,
    values_ptr,
    picked_ptr,
    rows,
    hidden,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PICK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(index_ptr + token * TOP_K + k)
        present = row < rows  # a choice that goes nowhere has no row
        values = tl.load(source_ptr + row * hidden + columns, mask=inside & present, other=0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights_ptr + row, mask=present, other=0.0).to(tl.float32)
        total += values
        if PICK:  # noqa: SIM102 - what is compiled, and what is computed
            if tl.program_id(1) == 0:
                tl.store(picked_ptr + token * TOP_K + k, tl.load(values_ptr + row, mask=present, other=0.0))
    tl.store(out_ptr + token * hidden + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_rows_kernel(
    source_RD: Tensor, index_TK: Tensor, weights_R: Tensor | None, values_R: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Sums K (weighted) rows per token in float32; an index of R or more counts for nothing.

    Args:
        source_RD: Rows, contiguous.
        index_TK: Row of each choice, int64.
        weights_R: Weight of each row, or ``None`` for a plain sum.
        values_R: Something of each row to be picked for its choice, or ``None``.

    Returns:
        ``(T, D)`` in the rows' dtype, and the picked values ``(T, K)``.
    """
    tokens, top_k = index_TK.shape
    rows, hidden = source_RD.shape
    out_TD = torch.empty(tokens, hidden, dtype=source_RD.dtype, device=source_RD.device)
    picked_TK = None if values_R is None else values_R.new_empty(index_TK.shape)
    if out_TD.numel():
        _sum_rows_kernel[(tokens, triton.cdiv(hidden, _BLOCK))](
            source_RD,
            index_TK,
            source_RD if weights_R is None else weights_R,
            out_TD,
            source_RD if values_R is None else values_R,
            out_TD if picked_TK is None else picked_TK,
            rows,
            hidden,
            TOP_K=top_k,
            WEIGHTED=weights_R is not None,
            PICK=values_R is not None,
            BLOCK=_BLOCK,
        )
    return out_TD, picked_TK


@triton.jit(do_not_specialize=ROUTED)
def _spread_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    grad_ptr,
    y_ptr,
    weights_ptr,
    choice_ptr,
    grad_y_ptr,
    grad_weights_ptr,
    choices,
    hidden,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    choice = tl.load(choice_ptr + row)
    present = choice < choices  # a row of padding belongs to no token
    token = choice // TOP_K
    weight = tl.load(weights_ptr + row).to(tl.float32)
    dot = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, hidden, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < hidden
        grad = tl.load(grad_ptr + token * hidden + columns, mask=inside & present, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + row * hidden + columns, mask=inside & present, other=0.0).to(tl.float32)
        dot += grad * y
        tl.store(grad_y_ptr + row * hidden + columns, (grad * weight).to(grad_y_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_weights_ptr + row, tl.sum(dot, axis=0).to(grad_weights_ptr.dtype.element_ty))


def spread_kernel(
    grad_TD: Tensor, y_RD: Tensor, weights_R: Tensor, choice_of_row_R: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """Gradient of the weighted sum of rows with respect to the rows and to their weights.

    Args:
        grad_TD: Gradient of the sums, contiguous.
        y_RD: Rows, contiguous.
        weights_R: Weight of each row.
        choice_of_row_R: Choice ``t * K + k`` of each row, int64; T * K for a row of padding.
        top_k: Choices ``K`` of a token.

    Returns:
        ``(R, D)`` in the rows' dtype and ``(R,)`` in the weights' dtype.
    """
    rows, hidden = y_RD.shape
    grad_y_RD, grad_weights_R = torch.empty_like(y_RD), torch.empty_like(weights_R)
    if rows:
        _spread_kernel[(rows,)](
            grad_TD,
            y_RD,
            weights_R,
            choice_of_row_R,
            grad_y_RD,
            grad_weights_R,
            grad_TD.shape[0] * top_k,
            hidden,
            TOP_K=top_k,
            BLOCK=_BLOCK,
        )
    return grad_y_RD, grad_weights_R
