"""Load balancing: the bias update without an auxiliary loss, and the sequence-wise balance loss.

Shapes: ``B`` batch, ``S`` sequence, ``T`` = B * S tokens, ``E`` experts, ``K`` experts per token.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_moe.kernels import has_kernels
from lightning_moe.optim.schedules import TokenValue, check_token_value


@dataclass(frozen=True)
class Balancing:
    """How the load of the experts is kept even (DeepSeek-V3 report, sections 2.1.2 and 4.2).

    Args:
        bias_update_speed: Step of the selection bias after each optimizer step: ``{from this token: value}`` or one
            number. The report uses 0.001 for the first 14.3T tokens, then 0.
        sequence_loss_weight: Weight alpha of the sequence-wise balance loss (0.0001 in the report); 0 leaves it out.
    """

    bias_update_speed: TokenValue = field(default_factory=lambda: {0: 0.001, 14.3e12: 0.0})
    sequence_loss_weight: float = 1e-4

    def __post_init__(self) -> None:
        check_token_value("balancing.bias_update_speed", self.bias_update_speed, minimum=0.0)
        if not self.sequence_loss_weight >= 0:
            raise ValueError(
                f"balancing.sequence_loss_weight is {self.sequence_loss_weight}, but it must not be negative; "
                "0 turns the loss off, the report uses 0.0001."
            )


@torch.no_grad()
def count_routed(indices_BSK: Tensor, n_routed_experts: int) -> Tensor:
    """Counts the tokens that each expert gets from each row.

    Args:
        indices_BSK: Chosen experts, int64; -1 counts for none.
        n_routed_experts: Experts ``E``.

    Returns:
        Counts ``(B, E)``, int64.
    """
    if indices_BSK.is_cuda:
        from lightning_moe.moe.balance_kernel import count_routed_kernel

        return count_routed_kernel(indices_BSK.contiguous(), n_routed_experts)
    batch = indices_BSK.shape[0]
    # A column more than there are experts takes the -1.
    width = n_routed_experts + 1
    rows = torch.arange(batch, device=indices_BSK.device)[:, None] * width
    cells = (indices_BSK.flatten(1) % width + rows).flatten()
    counts = torch.zeros(batch * width, dtype=torch.int64, device=indices_BSK.device)
    counts.scatter_add_(0, cells, torch.ones_like(cells))
    return counts.view(batch, width)[:, :n_routed_experts]


def sequence_balance_loss(
    scores_BSE: Tensor,
    indices_BSK: Tensor,
    *,
    counts_BE: Tensor | None = None,
    document_ids_BS: Tensor | None = None,
) -> Tensor:
    r"""The sequence-wise balance loss of the DeepSeek-V3 report (equations 17 to 20), without its weight alpha.

    For one sequence of T tokens it is :math:`\sum_i f_i P_i` with :math:`f_i = E / (K T) \cdot` (tokens that chose
    expert i) and :math:`P_i` the mean over tokens of the scores divided by their sum over experts; it is 1 when the
    load is even. Returned is the sum over sequences of length times loss, so that dividing by the number of tokens of a
    whole optimizer step gives the token-weighted mean. Tokens with index -1 are left out. A sequence is a row, or a
    document where document ids are given.

    Args:
        scores_BSE: Scores of all experts.
        indices_BSK: Chosen experts, int64; -1 for a token that goes nowhere.
        counts_BE: :func:`count_routed` of the indices, if at hand.
        document_ids_BS: Document of each token, int64, counted from 0 in each row.

    Returns:
        A scalar of the scores' dtype; its gradient flows through the scores only. The kernels, which compute it on
        CUDA, have no second derivative.
    """
    batch, sequence, experts = scores_BSE.shape
    top_k = indices_BSK.shape[-1]
    by_kernels = scores_BSE.dtype == torch.float32 and has_kernels(scores_BSE.device, scores_BSE.dtype)
    if by_kernels and document_ids_BS is None:
        counts_BE = count_routed(indices_BSK, experts) if counts_BE is None else counts_BE
        return torch.ops.lightning_moe.sequence_balance(scores_BSE, indices_BSK, counts_BE)[0]
    valid_BS1 = indices_BSK[..., :1] >= 0
    shares_BSE = (scores_BSE / scores_BSE.sum(dim=-1, keepdim=True)).where(valid_BS1, 0.0)
    if document_ids_BS is None:
        counts_BE = count_routed(indices_BSK, experts) if counts_BE is None else counts_BE
        lengths_B = valid_BS1.sum(dim=(1, 2)).clamp(min=1)
        per_row = (counts_BE * shares_BSE.sum(dim=1)).sum(dim=-1) / lengths_B
        return per_row.sum() * (experts / top_k)
    # Document d of row b is segment b * S + d: at most as many segments as tokens, known without looking at the ids.
    segments_T = (torch.arange(batch, device=scores_BSE.device)[:, None] * sequence + document_ids_BS).flatten()
    counts_ZE = torch.zeros(batch * sequence, experts + 1, dtype=torch.int64, device=scores_BSE.device)
    columns_TK = indices_BSK.flatten(0, 1) % (experts + 1)
    counts_ZE.view(-1).index_add_(
        0, (segments_T[:, None] * (experts + 1) + columns_TK).flatten(), torch.ones_like(columns_TK).flatten()
    )
    counts_ZE = counts_ZE[:, :experts]
    lengths_Z = (counts_ZE.sum(dim=-1).to(scores_BSE.dtype) / top_k).clamp(min=1)
    frequency_TE = (counts_ZE / lengths_Z[:, None])[segments_T]
    return (frequency_TE * shares_BSE.flatten(0, 1)).sum() * (experts / top_k)


@torch.library.custom_op("lightning_moe::sequence_balance", mutates_args=())
def _sequence_balance(scores_BSE: Tensor, indices_BSK: Tensor, counts_BE: Tensor) -> tuple[Tensor, Tensor]:
    """The balance loss, and its derivatives by the sums of normalised scores ``(B, E)``, which backward needs."""
    from lightning_moe.moe.balance_kernel import sequence_balance_kernel

    losses_B, slopes_BE = sequence_balance_kernel(
        scores_BSE.contiguous(), indices_BSK.contiguous(), counts_BE.contiguous()
    )
    return losses_B.sum(), slopes_BE


@_sequence_balance.register_fake
def _(scores_BSE: Tensor, indices_BSK: Tensor, counts_BE: Tensor) -> tuple[Tensor, Tensor]:
    return scores_BSE.new_empty(()), scores_BSE.new_empty(counts_BE.shape)


@torch.library.custom_op("lightning_moe::sequence_balance_backward", mutates_args=())
def _sequence_balance_backward(grad: Tensor, scores_BSE: Tensor, indices_BSK: Tensor, slopes_BE: Tensor) -> Tensor:
    from lightning_moe.moe.balance_kernel import sequence_balance_backward_kernel

    return sequence_balance_backward_kernel(grad, scores_BSE.contiguous(), indices_BSK.contiguous(), slopes_BE)


@_sequence_balance_backward.register_fake
def _(grad: Tensor, scores_BSE: Tensor, indices_BSK: Tensor, slopes_BE: Tensor) -> Tensor:
    return scores_BSE.new_empty(scores_BSE.shape)


def _save_for_balance(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    scores_BSE, indices_BSK, _ = inputs
    ctx.save_for_backward(scores_BSE, indices_BSK, output[1])
    ctx.mark_non_differentiable(output[1])


def _balance_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.lightning_moe.sequence_balance_backward(grad, *ctx.saved_tensors), None, None


_sequence_balance.register_autograd(_balance_backward, setup_context=_save_for_balance)


@torch.no_grad()
def update_selection_bias(bias_E: Tensor, counts_E: Tensor, speed: float, applied: Tensor | None = None) -> None:
    """Moves the selection bias one step towards an even load, in place (DeepSeek-V3 report, section 2.1.2).

    An expert with less than the mean load gets ``+ speed``, one with more ``- speed``, one with the mean is left.

    Args:
        bias_E: The bias of one layer.
        counts_E: Tokens that each expert got in the whole optimizer step over all data ranks, int64.
        speed: The update speed gamma.
        applied: A scalar bool tensor; where it is False nothing is changed (a skipped step).
    """
    # Compared as integers: mean > count exactly when sum > E * count.
    direction = torch.sign(counts_E.sum() - counts_E * counts_E.numel()).to(bias_E.dtype)
    if applied is not None:
        direction = direction * applied
    bias_E.add_(direction, alpha=speed)
