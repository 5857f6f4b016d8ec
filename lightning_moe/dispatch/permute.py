"""Permutation of tokens into the order of their experts, and back, on one device.

Both directions only gather, in forward and in backward, so they are deterministic and need no atomic additions.

Shapes: ``T`` tokens, ``D`` hidden size, ``E`` experts, ``K`` experts per token, ``R`` rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe.kernels import has_kernels


class RowPlan(NamedTuple):
    """Where each token's rows stand.

    Args:
        row_of_choice_TK: Row of each choice, int64; R for a choice that goes nowhere.
        choice_of_row_R: Choice ``t * K + k`` of each row, int64; T * K for a row of padding.
        offsets_E: End of each expert's rows, int32; the last one is R.
        padded: Whether choices without a row or rows without a choice can exist.
    """

    row_of_choice_TK: Tensor
    choice_of_row_R: Tensor
    offsets_E: Tensor
    padded: bool


@torch.no_grad()
def plan_rows(
    indices_TK: Tensor,
    num_experts: int,
    alignment: int = 1,
    *,
    all_valid: bool = False,
    num_choices: int | None = None,
    num_rows: int | None = None,
) -> RowPlan:
    """Plans the rows in the experts' order, each group padded to the alignment.

    The number of rows depends on shapes alone, so nothing waits for the device: T * K, and with an alignment enough
    for the worst case; what is left over belongs to the last expert.

    Args:
        indices_TK: Chosen experts, int64; -1 for none.
        num_experts: Experts ``E``.
        alignment: Rows to whose multiple each group is padded.
        all_valid: Whether it is known that no index is -1.
        num_choices: How many indices are not -1, where that is known on the host; otherwise as many as there are.
        num_rows: The number of rows, where the host knows how many choices each expert has; otherwise enough for the
            worst case.
    """
    choices = indices_TK.numel()
    device = indices_TK.device
    padded = alignment > 1 or not all_valid
    present = choices if num_choices is None else num_choices
    rows = choices
    if padded:
        rows = -(-(present + (alignment - 1) * min(num_experts, present)) // alignment) * alignment
    rows = rows if num_rows is None else num_rows
    if device.type == "cuda":
        from lightning_moe.dispatch.plan_kernel import plan_rows_kernel

        return RowPlan(*plan_rows_kernel(indices_TK.contiguous(), num_experts, alignment, rows, padded), padded)
    sort_keys = indices_TK.flatten() if all_valid else indices_TK.flatten() % (num_experts + 1)  # -1 sorts last
    sorted_keys, choice_in_order = sort_keys.sort(stable=True)
    experts = torch.arange(num_experts, device=device)
    ends_E = torch.searchsorted(sorted_keys, experts, right=True)
    if not padded:
        row_of_choice = torch.empty_like(choice_in_order).scatter_(
            0, choice_in_order, torch.arange(choices, device=device)
        )
        return RowPlan(row_of_choice.view_as(indices_TK), choice_in_order, ends_E.to(torch.int32), padded)

    starts_E = F.pad(ends_E[:-1], (1, 0))
    counts_E = ends_E - starts_E
    aligned_ends_E = ((counts_E + alignment - 1) // alignment * alignment).cumsum(0)
    aligned_starts_E = F.pad(aligned_ends_E[:-1], (1, 0))
    # The last entry sends the choices that go nowhere beyond the rows.
    shift_per_key = F.pad(aligned_starts_E - starts_E, (0, 1))
    row_in_order = torch.arange(choices, device=device) + shift_per_key[sorted_keys]
    row_in_order = row_in_order.where(sorted_keys < num_experts, rows)
    row_of_choice = torch.empty_like(row_in_order).scatter_(0, choice_in_order, row_in_order)
    choice_of_row = torch.full((rows + 1,), choices, dtype=torch.int64, device=device)
    choice_of_row.scatter_(0, row_in_order, choice_in_order)
    offsets_E = aligned_ends_E.masked_fill(experts == num_experts - 1, rows).to(torch.int32)
    return RowPlan(row_of_choice.view_as(indices_TK), choice_of_row[:rows], offsets_E, padded)


def permute(x_TD: Tensor, weights_TK: Tensor, plan: RowPlan) -> tuple[Tensor, Tensor]:
    """Copies tokens and routing weights to their rows; padding is zero.

    Returns:
        The rows ``(R, D)`` and their weights ``(R,)``, both differentiable.
    """
    rows_RD, weights_R = _Permute.apply(x_TD, weights_TK, plan)
    return rows_RD, weights_R


def copy_rows(x_TD: Tensor, plan: RowPlan) -> Tensor:
    """Copies tokens to their rows, without a gradient; padding is zero."""
    return _copy_rows(x_TD, plan.row_of_choice_TK, plan.choice_of_row_R, plan.padded)


def _copy_rows(x_TD: Tensor, row_of_choice_TK: Tensor, choice_of_row_R: Tensor, padded: bool) -> Tensor:
    if has_kernels(x_TD.device, x_TD.dtype):
        from lightning_moe.dispatch.permute_kernel import copy_rows_kernel

        return copy_rows_kernel(x_TD.contiguous(), row_of_choice_TK, choice_of_row_R, padded=padded)[0]
    # A row of padding has choice T * K, hence token T: past the end.
    return take_rows(x_TD, choice_of_row_R // row_of_choice_TK.shape[1], padded)


def rows_again(x_TD: Tensor, plan: RowPlan) -> Callable[[], Tensor] | None:
    """Returns a function that copies tokens to their rows once more, later.

    Args:
        x_TD: Tokens.
        plan: Where the rows stand.

    Returns:
        The function, which raises RuntimeError if the tokens have been changed in place since; ``None`` where nothing
        is kept for backward.
    """
    if not torch.is_grad_enabled():
        return None
    x_TD = x_TD.detach()
    version = x_TD._version

    def copy() -> Tensor:
        if x_TD._version != version:
            raise RuntimeError(
                "The input of a MoE layer was changed in place after its forward pass, which needs it in backward."
            )
        return copy_rows(x_TD, plan)

    return copy


def unpermute(y_RD: Tensor, weights_R: Tensor | None, plan: RowPlan) -> Tensor:
    """Sums for each token its rows times their weights, in at least float32.

    Args:
        y_RD: The rows.
        weights_R: Weight of each row; ``None`` for rows that have been weighted before.
        plan: Where the rows stand.

    Returns:
        ``(T, D)`` in the rows' dtype, differentiable in rows and weights.
    """
    if weights_R is None:
        return _Sum.apply(y_RD, plan)
    return _Unpermute.apply(y_RD, weights_R, plan)


def take_rows(source: Tensor, index: Tensor, padded: bool) -> Tensor:
    """Rows of ``source``; where padding can exist, an index past the end gives zeros."""
    if padded:
        source = torch.cat([source, source.new_zeros(1, *source.shape[1:])])
    return source.index_select(0, index)


def sum_rows(source_RD: Tensor, index_TK: Tensor, padded: bool, weights_R: Tensor | None = None) -> Tensor:
    """Sums K (weighted) rows per token."""
    if has_kernels(source_RD.device, source_RD.dtype):
        from lightning_moe.dispatch.permute_kernel import sum_rows_kernel

        weights_R = None if weights_R is None else weights_R.contiguous()
        return sum_rows_kernel(source_RD.contiguous(), index_TK, weights_R)[0]
    weights_TK = None
    if weights_R is not None:
        weights_TK = take_rows(weights_R, index_TK.flatten(), padded).view_as(index_TK)
    if source_RD.device.type == "cpu" and source_RD.dtype in (torch.float32, torch.float64):
        # One pass without a copy of the K rows.
        if padded:
            source_RD = torch.cat([source_RD, source_RD.new_zeros(1, source_RD.shape[1])])
        if weights_TK is not None:
            weights_TK = weights_TK.to(source_RD.dtype)
        return F.embedding_bag(index_TK, source_RD, mode="sum", per_sample_weights=weights_TK)
    rows_TKD = take_rows(source_RD, index_TK.flatten(), padded).unflatten(0, index_TK.shape)
    if weights_TK is None:
        return rows_TKD.sum(dim=1)
    return (rows_TKD * weights_TK[..., None]).sum(dim=1).to(source_RD.dtype)


def gather_rows(
    grad_rows_RD: Tensor, grad_weights_R: Tensor, row_of_choice_TK: Tensor, padded: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`permute`: sums over the rows of a token ``(T, D)``, and those of the weights ``(T, K)``."""
    if has_kernels(grad_rows_RD.device, grad_rows_RD.dtype):
        from lightning_moe.dispatch.permute_kernel import sum_rows_kernel

        grad_x, grad_weights = sum_rows_kernel(
            grad_rows_RD.contiguous(), row_of_choice_TK, None, grad_weights_R.contiguous()
        )
        assert grad_weights is not None
        return grad_x, grad_weights
    grad_x = sum_rows(grad_rows_RD.contiguous(), row_of_choice_TK, padded)
    grad_weights = take_rows(grad_weights_R, row_of_choice_TK.flatten(), padded).view_as(row_of_choice_TK)
    return grad_x, grad_weights


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, plan: RowPlan) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(plan.row_of_choice_TK)
        ctx.padded = plan.padded
        if has_kernels(x_TD.device, x_TD.dtype):
            from lightning_moe.dispatch.permute_kernel import copy_rows_kernel

            rows_RD, weights_R = copy_rows_kernel(
                x_TD.contiguous(),
                plan.row_of_choice_TK,
                plan.choice_of_row_R,
                weights_TK.contiguous(),
                padded=plan.padded,
            )
            assert weights_R is not None
            return rows_RD, weights_R
        return copy_rows(x_TD, plan), take_rows(weights_TK.flatten(), plan.choice_of_row_R, plan.padded)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (row_of_choice_TK,) = ctx.saved_tensors
        return *gather_rows(grads[0], grads[1], row_of_choice_TK, ctx.padded), None


class _Sum(torch.autograd.Function):
    """Rows that are weighted already; nothing but indices has to be kept for backward."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, plan: RowPlan) -> Tensor:
        ctx.save_for_backward(plan.row_of_choice_TK, plan.choice_of_row_R)
        ctx.padded = plan.padded
        return sum_rows(y_RD, plan.row_of_choice_TK, plan.padded)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        row_of_choice_TK, choice_of_row_R = ctx.saved_tensors
        return _copy_rows(grads[0], row_of_choice_TK, choice_of_row_R, ctx.padded), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weights_R: Tensor, plan: RowPlan) -> Tensor:
        ctx.save_for_backward(y_RD, weights_R, plan.choice_of_row_R)
        ctx.top_k = plan.row_of_choice_TK.shape[1]
        ctx.padded = plan.padded
        return sum_rows(y_RD, plan.row_of_choice_TK, plan.padded, weights_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("unpermute has no second derivative (create_graph=True).")
        y_RD, weights_R, choice_of_row_R = ctx.saved_tensors
        if has_kernels(y_RD.device, y_RD.dtype):
            from lightning_moe.dispatch.permute_kernel import spread_kernel

            grad_y, grad_weights = spread_kernel(
                grads[0].contiguous(), y_RD.contiguous(), weights_R.contiguous(), choice_of_row_R, ctx.top_k
            )
            return grad_y, grad_weights, None
        grad_rows_RD = take_rows(grads[0], choice_of_row_R // ctx.top_k, ctx.padded)
        grad_weights = torch.linalg.vecdot(grad_rows_RD.to(weights_R.dtype), y_RD.to(weights_R.dtype))
        grad_y = (grad_rows_RD * weights_R[:, None]).to(y_RD.dtype)
        return grad_y, grad_weights, None
