"""The casts of blockwise FP8 in plain PyTorch, for any device: what the Triton kernels have to compute.

As in the DeepSeek-V3 report (section 3.3.2): 128 values of a row share a scale, and blocks of 128x128 of a weight. A
scale is the largest magnitude divided by 448. It is not finite where that is not, so that a product with it is NaN as a
whole; what is all zero stays exactly zero.

Shapes: ``R`` rows ordered by expert, ``K`` and ``N`` widths, ``F`` expert width, ``e`` experts held here; widths are
multiples of 128. Values are E4M3, scales float32.
"""

import torch
from torch import Tensor

from lightning_moe.precision import float8_casts
from lightning_moe.precision.float8_casts import Quantised, zero_empty_groups
from lightning_moe.precision.quantisation import scale_of, tiled

__all__ = [
    "quantise_rows",
    "quantise_weight",
    "quantise_weight_columns",
    "swiglu_backward_rows",
    "swiglu_rows",
    "zero_empty_groups",
]
TILE = 128


def quantise_rows(x_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises tiles of 128 values of each row.

    Args:
        x_RK: Rows, contiguous.

    Returns:
        Values ``(R, K)``, and scales ``(R, K / 128)`` with those of a column next to each other in memory.
    """
    values_RK, scale_Rk = _quantise(x_RK, (1, TILE))
    return values_RK, scale_Rk.T.contiguous().T


def quantise_weight(weight_eNK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises blocks of 128x128 of each weight.

    Args:
        weight_eNK: Weights, contiguous.

    Returns:
        Values ``(e, N, K)`` and scales ``(e, N / 128, K / 128)``.
    """
    return _quantise(weight_eNK, (TILE, TILE))


def quantise_weight_columns(weight_eNK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises blocks of 128x128 of each weight, and transposes.

    Args:
        weight_eNK: Weights, contiguous.

    Returns:
        Values ``(e, K, N)`` and scales ``(e, K / 128, N / 128)``.
    """
    return _quantise(weight_eNK.transpose(1, 2), (TILE, TILE))


def swiglu_rows(gate_up_R2F: Tensor, weights_R: Tensor | None) -> Quantised:
    """As :func:`.float8_casts.swiglu_rows`, quantised by :func:`quantise_rows`."""
    return float8_casts.swiglu_rows(gate_up_R2F, weights_R, quantise_rows)


def swiglu_backward_rows(
    grad_RF: Tensor, gate_up_R2F: Tensor, weights_R: Tensor | None
) -> tuple[Tensor, Tensor, Quantised, Tensor | None]:
    """As :func:`.float8_casts.swiglu_backward_rows`, quantised by :func:`quantise_rows`."""
    return float8_casts.swiglu_backward_rows(grad_RF, gate_up_R2F, weights_R, quantise_rows)


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    """What values and scales of any of these stand for, in float32.

    Args:
        values: ``(..., N, K)``.
        scale: ``(..., N, K / 128)`` or ``(..., N / 128, K / 128)``.
    """
    for dim in (-2, -1):
        scale = scale.repeat_interleave(values.shape[dim] // scale.shape[dim], dim=dim)
    return values.float() * scale


def _quantise(x: Tensor, tile: tuple[int, int]) -> tuple[Tensor, Tensor]:
    tiles, amax = tiled(x.float(), tile)
    scale, inverse = scale_of(amax, "float32")
    values = (tiles * inverse).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).reshape(x.shape)
    return values, scale.squeeze(-1).squeeze(-2)
