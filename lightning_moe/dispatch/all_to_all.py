"""Dispatch over an expert-parallel group through all-to-all collectives (NCCL or gloo).

A token is sent once to each rank that holds any of its experts, not once for each expert, and comes back from each as
one row that is already summed over the experts there, as DeepEP does.

Shapes: ``T`` tokens of this rank, ``D`` hidden size, ``K`` experts per token, ``W`` ranks of the group, ``N`` tokens
sent by this rank, ``M`` tokens received by this rank.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe.dispatch.base import Dispatched, TokenDispatcher
from lightning_moe.dispatch.fp8_rows import (
    FP8Rows,
    check_hidden_size,
    expand_rows,
    fp8_rows_again,
    pack_rows,
    unpack_rows,
)
from lightning_moe.dispatch.permute import RowPlan, gather_rows, permute, plan_rows, rows_again, sum_rows, unpermute
from lightning_moe.moe.router import RoutingPlan


class _Exchange(NamedTuple):
    """Who sends which token where.

    Args:
        token_of_sent_N: Token of each sent row, ordered by destination rank, int64.
        rank_of_sent_N: Destination rank of each sent row, int64.
        destination_TK: Destination rank of each choice, int64; W for a choice that goes nowhere.
        row_of_choice_TK: Row that carries the token to the rank of a choice, int64; N for a choice that goes nowhere.
        row_once_TK: The same, but each row of a token stands once: N where an earlier choice has the same row.
        send_splits: Rows sent to each rank.
        receive_splits: Rows received from each rank.
        received_choices: Choices of experts here that the received rows make.
    """

    token_of_sent_N: Tensor
    rank_of_sent_N: Tensor
    destination_TK: Tensor
    row_of_choice_TK: Tensor
    row_once_TK: Tensor
    send_splits: list[int]
    receive_splits: list[int]
    received_choices: int


class _State(NamedTuple):
    exchange: _Exchange
    rows: RowPlan


class AllToAllDispatcher(TokenDispatcher):
    """Exchanges tokens within an expert-parallel group; rank r holds experts ``r * e`` to ``(r + 1) * e - 1``.

    The host waits for the device once in each dispatch, for the number of rows that travel between each pair of ranks.
    Every rank of the group takes part in every dispatch and combine, also without tokens.

    Args:
        num_experts: Experts ``E`` of the layer, a multiple of the group's size.
        group: The expert-parallel group.
        alignment: Rows to whose multiple each expert's group is padded.
        fp8_dispatch: Whether tokens travel to experts in E4M3 with a scale per 128 values, and so do the gradients of
            ``combine``; what comes back does not. The hidden size must be a multiple of 128. For backward, indices are
            kept and, where the rows are to be made again, the bytes that came: about half of bfloat16's.
    """

    communicates = True

    def __init__(
        self, num_experts: int, group: dist.ProcessGroup, alignment: int = 1, *, fp8_dispatch: bool = False
    ) -> None:
        super().__init__(num_experts, alignment)
        self.group = group
        self.fp8_dispatch = fp8_dispatch
        self.group_size = dist.get_world_size(group)
        if num_experts % self.group_size:
            raise ValueError(
                f"n_routed_experts is {num_experts}, but it must be a multiple of expert_parallel_size "
                f"({self.group_size})."
            )
        self.num_local_experts = num_experts // self.group_size

    def prepare(self, hidden_size: int, num_experts_per_tok: int, max_tokens: int | None = None) -> None:
        """Checks the hidden size where tokens travel in eight bits; otherwise there are no rules.

        Raises:
            ValueError: The hidden size is no multiple of 128.
        """
        if self.fp8_dispatch:
            check_hidden_size(hidden_size)

    def dispatch(self, x_TD: Tensor, plan: RoutingPlan) -> Dispatched:
        """Sends each token to the ranks of its experts and orders what arrives by local expert."""
        exchange = self._plan_exchange(plan.indices_TK)
        # The sender tells local expert ids, so that a receiver reads -1 for choices of other ranks.
        sent_choices_NK = plan.indices_TK[exchange.token_of_sent_N]
        here_NK = exchange.destination_TK[exchange.token_of_sent_N] == exchange.rank_of_sent_N[:, None]
        local_ids_NK = (sent_choices_NK % self.num_local_experts).where(here_NK, -1)
        local_ids_MK = _all_to_all(
            local_ids_NK.to(torch.int32), exchange.send_splits, exchange.receive_splits, self.group
        ).to(torch.int64)
        if self.fp8_dispatch:
            rows = self._plan_rows(local_ids_MK, exchange)
            rows_RD, weights_R, received = _SendInFP8.apply(x_TD, plan.weights_TK, here_NK, exchange, rows, self.group)
            again = fp8_rows_again(received, x_TD.dtype, rows)
        else:
            x_MD, weights_MK = _SendTokens.apply(x_TD, plan.weights_TK, here_NK, exchange, self.group)
            rows = self._plan_rows(local_ids_MK, exchange)
            rows_RD, weights_R = permute(x_MD, weights_MK, rows)
            again = rows_again(x_MD, rows)
        return Dispatched(rows_RD, weights_R, rows.offsets_E, _State(exchange, rows), again)

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Sums each token's weighted rows here, sends them home, and sums what each token gets back."""
        state: _State = dispatched.state
        if self.fp8_dispatch and dispatched.weights_R is None:
            return _ReturnForFP8.apply(y_RD, state.rows, state.exchange, self.group)
        partial_MD = unpermute(y_RD, dispatched.weights_R, state.rows)
        if self.fp8_dispatch:
            return _ReturnForFP8.apply(partial_MD, None, state.exchange, self.group)
        return _ReturnTokens.apply(partial_MD, state.exchange, self.group)

    def _plan_rows(self, local_ids_MK: Tensor, exchange: _Exchange) -> RowPlan:
        return plan_rows(local_ids_MK, self.num_local_experts, self.alignment, num_choices=exchange.received_choices)

    @torch.no_grad()
    def _plan_exchange(self, indices_TK: Tensor) -> _Exchange:
        tokens, device = indices_TK.shape[0], indices_TK.device
        # A choice of -1 has the rank past the last one.
        destination_TK = torch.where(indices_TK >= 0, indices_TK // self.num_local_experts, self.group_size)
        goes_TW = torch.zeros(tokens, self.group_size + 1, dtype=torch.bool, device=device)
        goes_TW.scatter_(1, destination_TK, True)
        goes_WT = goes_TW[:, : self.group_size].T
        choices_W = torch.zeros(self.group_size + 1, dtype=torch.int64, device=device)
        choices_W.scatter_add_(0, destination_TK.flatten(), torch.ones_like(destination_TK).flatten())
        send_counts_W2 = torch.stack((goes_WT.sum(dim=1), choices_W[: self.group_size]), dim=1)
        receive_counts_W2 = torch.empty_like(send_counts_W2)
        dist.all_to_all_single(receive_counts_W2, send_counts_W2, group=self.group)
        # The one place where the host waits: buffers cannot be sized otherwise.
        send_splits, receive_splits, received_choices = torch.stack(
            (send_counts_W2[:, 0], receive_counts_W2[:, 0], receive_counts_W2[:, 1])
        ).tolist()
        sent = sum(send_splits)
        # Rows that travel come first, ordered by rank and then by token.
        position_N = (~goes_WT.flatten()).to(torch.uint8).sort(stable=True).indices[:sent]
        row_WT = torch.full(((self.group_size + 1) * tokens,), sent, dtype=torch.int64, device=device)
        row_WT[position_N] = torch.arange(sent, device=device)
        row_of_choice_TK = row_WT.view(self.group_size + 1, tokens).T.gather(1, destination_TK)
        same_TKK = destination_TK[:, :, None] == destination_TK[:, None, :]
        repeated_TK = same_TKK.tril(diagonal=-1).any(dim=2)
        return _Exchange(
            token_of_sent_N=position_N % max(tokens, 1),
            rank_of_sent_N=position_N // max(tokens, 1),
            destination_TK=destination_TK,
            row_of_choice_TK=row_of_choice_TK,
            row_once_TK=row_of_choice_TK.masked_fill(repeated_TK, sent),
            send_splits=send_splits,
            receive_splits=receive_splits,
            received_choices=sum(received_choices),
        )


def _all_to_all(rows: Tensor, send_splits: list[int], receive_splits: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(receive_splits), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receive_splits, send_splits, group=group)
    return received


class _SendTokens(torch.autograd.Function):
    """Tokens and routing weights to the ranks of their experts; the gradients come back the same way."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, here_NK: Tensor, exchange: _Exchange, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        ctx.exchange, ctx.group = exchange, group
        x_ND = x_TD.index_select(0, exchange.token_of_sent_N)
        x_MD = _all_to_all(x_ND, exchange.send_splits, exchange.receive_splits, group)
        return x_MD, _send_weights(weights_TK, here_NK, exchange, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        return *_return_gradients(grads[0], grads[1], ctx.exchange, ctx.group), None, None, None


def _send_weights(weights_TK: Tensor, here_NK: Tensor, exchange: _Exchange, group: dist.ProcessGroup) -> Tensor:
    sent_weights_NK = weights_TK.index_select(0, exchange.token_of_sent_N).where(here_NK, 0.0)
    return _all_to_all(sent_weights_NK, exchange.send_splits, exchange.receive_splits, group)


def _return_gradients(
    grad_x_MD: Tensor, grad_weights_MK: Tensor, exchange: _Exchange, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    send, receive = exchange.send_splits, exchange.receive_splits
    grad_x_ND = _all_to_all(grad_x_MD, receive, send, group)
    grad_weights_NK = _all_to_all(grad_weights_MK, receive, send, group)
    grad_x_TD = sum_rows(grad_x_ND, exchange.row_once_TK, padded=True)
    # Each choice went to one rank: read its gradient from the row that went there.
    padded_NK = torch.cat([grad_weights_NK, grad_weights_NK.new_zeros(1, grad_weights_NK.shape[1])])
    return grad_x_TD, padded_NK.gather(0, exchange.row_of_choice_TK)


class _ReturnTokens(torch.autograd.Function):
    """Rows back to the ranks of their tokens, summed there."""

    @staticmethod
    def forward(ctx: Any, partial_MD: Tensor, exchange: _Exchange, group: dist.ProcessGroup) -> Tensor:
        ctx.exchange, ctx.group = exchange, group
        back_ND = _all_to_all(partial_MD, exchange.receive_splits, exchange.send_splits, group)
        return sum_rows(back_ND, exchange.row_once_TK, padded=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        exchange: _Exchange = ctx.exchange
        grad_ND = grads[0].index_select(0, exchange.token_of_sent_N)
        return _all_to_all(grad_ND, exchange.send_splits, exchange.receive_splits, ctx.group), None, None


class _SendInFP8(torch.autograd.Function):
    """Rounded tokens to the ranks of their experts, where they are expanded in the experts' order.

    The gradients come back as they are: rounding counts as the identity.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor,
        here_NK: Tensor,
        exchange: _Exchange,
        rows: RowPlan,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor | None, FP8Rows]:
        ctx.exchange, ctx.group = exchange, group
        ctx.save_for_backward(rows.row_of_choice_TK)
        ctx.padded = rows.padded
        received = _exchange_in_fp8(x_TD, exchange, group)
        weights_MK = _send_weights(weights_TK, here_NK, exchange, group)
        return *expand_rows(received, x_TD.dtype, rows, weights_MK), received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (row_of_choice_TK,) = ctx.saved_tensors
        grad_x_MD, grad_weights_MK = gather_rows(grads[0], grads[1], row_of_choice_TK, ctx.padded)
        return *_return_gradients(grad_x_MD, grad_weights_MK, ctx.exchange, ctx.group), None, None, None, None


class _ReturnForFP8(torch.autograd.Function):
    """Rows back to the ranks of their tokens as they are; their gradients come rounded.

    With a plan, rows of a token are summed first. It saves nothing, so that the recomputation of a region ends before
    it; the plan is that of the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, rows: RowPlan | None, exchange: _Exchange, group: dist.ProcessGroup) -> Tensor:
        ctx.rows, ctx.exchange, ctx.group = rows, exchange, group
        partial_MD = y_RD if rows is None else sum_rows(y_RD, rows.row_of_choice_TK, rows.padded)
        back_ND = _all_to_all(partial_MD, exchange.receive_splits, exchange.send_splits, group)
        return sum_rows(back_ND, exchange.row_once_TK, padded=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        received = _exchange_in_fp8(grads[0], ctx.exchange, ctx.group)
        return expand_rows(received, grads[0].dtype, ctx.rows)[0], None, None, None


def _exchange_in_fp8(x_TD: Tensor, exchange: _Exchange, group: dist.ProcessGroup) -> FP8Rows:
    packed_NB = pack_rows(x_TD, exchange.token_of_sent_N)
    return unpack_rows(_all_to_all(packed_NB, exchange.send_splits, exchange.receive_splits, group))
