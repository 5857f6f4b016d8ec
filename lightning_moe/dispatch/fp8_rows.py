"""Rows in eight bits: what travels between ranks with ``fp8_dispatch`` (DeepSeek-V3 report, sections 3.3.2 and 3.3.3).

A row is cut into tiles of 1x128 values in E4M3, each with a scale in float32 that is a power of two. A tile with a
value that is not finite arrives as NaN as a whole; finite values never become infinite. In gradients the rounding
counts as the identity.

Shapes: ``T`` tokens, ``D`` hidden size, ``N`` rows sent, ``M`` rows received, ``G`` = D / 128 tiles of a row, ``B`` =
D + 4 * G bytes of a row, ``R`` rows in the experts' order, ``K`` experts per token.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_moe.dispatch.permute import RowPlan, take_rows
from lightning_moe.kernels import has_kernels
from lightning_moe.precision.quantisation import round_to_element, scale_of

TILE = 128
_SCALE_BYTES = 4


class FP8Rows(NamedTuple):
    """Rounded rows, in the form that DeepEP takes.

    Args:
        values_MD: float8_e4m3fn.
        scales_MG: Scale of each tile, float32; NaN for a tile with a value that was not finite.
    """

    values_MD: Tensor
    scales_MG: Tensor


def check_hidden_size(hidden_size: int) -> None:
    """Raises ValueError for a hidden size that cannot be cut into tiles."""
    if hidden_size % TILE:
        below = hidden_size // TILE * TILE
        works = f"{below} or {below + TILE}" if below else f"{TILE}"
        raise ValueError(
            f"hidden_size is {hidden_size}, but fp8_dispatch needs a multiple of {TILE}, as in {works}; "
            "fp8_dispatch: false takes any."
        )


def row_bytes(hidden_size: int) -> int:
    """Bytes of a row with its scales."""
    return hidden_size + hidden_size // TILE * _SCALE_BYTES


def round_rows(x_TD: Tensor) -> FP8Rows:
    """Rounds rows of any floating dtype.

    Values and scales are contiguous tensors of their own; what is beyond float32's range saturates.
    """
    check_hidden_size(x_TD.shape[1])
    if not has_kernels(x_TD.device, x_TD.dtype):
        return _round(x_TD)
    from lightning_moe.dispatch.fp8_rows_kernel import round_rows_kernel

    tokens, hidden = x_TD.shape
    values_TD = torch.empty(tokens, hidden, dtype=torch.float8_e4m3fn, device=x_TD.device)
    scales_TG = torch.empty(tokens, hidden // TILE, dtype=torch.float32, device=x_TD.device)
    round_rows_kernel(x_TD.contiguous(), None, values_TD, scales_TG)
    return FP8Rows(values_TD, scales_TG)


def pack_rows(x_TD: Tensor, index_N: Tensor) -> Tensor:
    """Rounds the rows at an index into one buffer, as collectives take it.

    Args:
        x_TD: Any floating dtype.
        index_N: Which row stands where, int64.

    Returns:
        ``(N, B)`` uint8: the values of a row and then its scales.
    """
    check_hidden_size(x_TD.shape[1])
    packed_NB = torch.empty(index_N.shape[0], row_bytes(x_TD.shape[1]), dtype=torch.uint8, device=x_TD.device)
    places = unpack_rows(packed_NB)
    if has_kernels(x_TD.device, x_TD.dtype):
        from lightning_moe.dispatch.fp8_rows_kernel import round_rows_kernel

        round_rows_kernel(x_TD.contiguous(), index_N, *places)
    else:
        for place, part in zip(places, _round(x_TD.index_select(0, index_N)), strict=True):
            place.copy_(part)
    return packed_NB


def unpack_rows(packed_MB: Tensor) -> FP8Rows:
    """The rows of :func:`pack_rows`, without a copy."""
    hidden = packed_MB.shape[1] * TILE // (TILE + _SCALE_BYTES)
    values_MD = packed_MB[:, :hidden].view(torch.float8_e4m3fn)
    return FP8Rows(values_MD, packed_MB.view(torch.float32)[:, hidden // _SCALE_BYTES :])


def expand_rows(
    rows: FP8Rows, dtype: torch.dtype, plan: RowPlan | None = None, weights_MK: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Brings rounded rows back to a dtype, in the experts' order, in one pass.

    Args:
        rows: The rounded rows.
        dtype: Of the result; what is beyond its range saturates.
        plan: Where the rows go, with zeros for padding; ``None`` to leave them where they are.
        weights_MK: Weights to be copied to the rows of the plan, or ``None``.

    Returns:
        The rows ``(R, D)`` and their weights ``(R,)``; without a gradient.
    """
    if has_kernels(rows.values_MD.device, dtype):
        from lightning_moe.dispatch.fp8_rows_kernel import expand_rows_kernel

        choice_of_row_R, top_k = (None, 1) if plan is None else (plan.choice_of_row_R, plan.row_of_choice_TK.shape[1])
        return expand_rows_kernel(*rows, dtype, choice_of_row_R, top_k, weights_MK)
    tiles = rows.values_MD.to(torch.float32).unflatten(1, (-1, TILE)) * rows.scales_MG[:, :, None]
    x_MD = tiles.flatten(1).clamp(-_largest(dtype), _largest(dtype)).to(dtype)
    if plan is None:
        return x_MD, None
    # A row of padding has choice M * K, hence row M: past the end.
    rows_RD = take_rows(x_MD, plan.choice_of_row_R // plan.row_of_choice_TK.shape[1], plan.padded)
    if weights_MK is None:
        return rows_RD, None
    return rows_RD, take_rows(weights_MK.flatten(), plan.choice_of_row_R, plan.padded)


def fp8_rows_again(rows: FP8Rows, dtype: torch.dtype, plan: RowPlan | None = None) -> Callable[[], Tensor] | None:
    """Returns a function that expands rows once more, later; ``None`` where nothing is kept for backward.

    It keeps the rounded rows, so that the very same values come again.
    """
    if not torch.is_grad_enabled():
        return None
    return lambda: expand_rows(rows, dtype, plan)[0]


def _round(x_TD: Tensor) -> FP8Rows:
    if x_TD.dtype == torch.float64:  # infinite in float32 is only what is infinite here
        largest = _largest(torch.float32)
        x_TD = x_TD.clamp(-largest, largest).where(x_TD.isfinite(), x_TD)
    tiles_TGt = x_TD.to(torch.float32).unflatten(1, (-1, TILE))
    scale, inverse = scale_of(tiles_TGt.abs().amax(dim=2, keepdim=True), "rceil")
    rounded_TGt = round_to_element(tiles_TGt * inverse).where(scale.isfinite(), float("nan"))
    return FP8Rows(rounded_TGt.flatten(1).to(torch.float8_e4m3fn), scale.squeeze(2))


def _largest(dtype: torch.dtype) -> float:
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
