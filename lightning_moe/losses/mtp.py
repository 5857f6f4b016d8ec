"""Targets of multi-token prediction: one shift for tokens, labels, hidden states and masks.

Shapes: ``B`` batch, ``S`` sequence.
"""

import torch
from torch import Tensor

from lightning_moe.losses.linear_cross_entropy import IGNORE_INDEX


def shift_valid(document_ids_BS: Tensor | None, valid_BS: Tensor | None, like_BS: Tensor, shift: int) -> Tensor:
    """Tells at which positions the token ``shift`` places ahead exists, is valid and stands in the same document.

    Args:
        document_ids_BS: Document of each token, or ``None`` when a row is one document.
        valid_BS: Bool, False for padding, or ``None`` when all tokens are valid.
        like_BS: Any tensor of the shape and device.
        shift: Places ahead, at least 0.

    Returns:
        Bool ``(B, S)``.
    """
    sequence = like_BS.shape[1]
    ahead_exists = (torch.arange(sequence, device=like_BS.device) < sequence - shift).expand(like_BS.shape)
    if document_ids_BS is not None:
        ahead_exists = ahead_exists & (document_ids_BS == document_ids_BS.roll(-shift, dims=1))
    if valid_BS is not None:
        ahead_exists = ahead_exists & valid_BS & valid_BS.roll(-shift, dims=1)
    return ahead_exists


def shift_sequence(sequence_BS: Tensor, shift: int, ahead_valid_BS: Tensor, fill_value: float) -> Tensor:
    """Moves a sequence ``shift`` places to the front, so that position i holds what stood at i + shift.

    Args:
        sequence_BS: Tokens, labels ``(B, S)`` or hidden states ``(B, S, D)``.
        shift: Places, at least 0.
        ahead_valid_BS: :func:`shift_valid` of the same shift.
        fill_value: What stands where there is nothing valid ahead.
    """
    if sequence_BS.dim() > ahead_valid_BS.dim():
        ahead_valid_BS = ahead_valid_BS[..., None]
    return sequence_BS.roll(-shift, dims=1).where(ahead_valid_BS, fill_value)


def within_documents(labels_BS: Tensor, document_ids_BS: Tensor) -> Tensor:
    """Ignores labels whose token stands in another document than the position that predicts it.

    What follows the last position of a row is not known here; that label is left as it is.

    Args:
        labels_BS: Next token of each position, int64.
        document_ids_BS: Document of each token, int64.
    """
    crosses = document_ids_BS[:, 1:] != document_ids_BS[:, :-1]
    return torch.cat((labels_BS[:, :-1].masked_fill(crosses, IGNORE_INDEX), labels_BS[:, -1:]), dim=1)
