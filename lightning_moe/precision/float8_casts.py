"""The casts of FP8 linears and experts in plain PyTorch, for any device: what the Triton kernels have to compute.

A power-of-two scale is the least by which 448 holds the largest magnitude of what shares it. It is NaN where that is
not finite, so that a product with it is NaN as a whole; what is all zero stays exactly zero.

Shapes: ``R`` rows ordered by expert, ``K`` and ``N`` widths, ``F`` expert width, ``e`` experts held here. Values are
E4M3, scales float32.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe.moe.swiglu import swiglu_gradients_plain
from lightning_moe.precision.quantisation import scale_of

Quantised = tuple[Tensor, Tensor]  # values in E4M3, and scales in float32
ROW_MULTIPLE = 16  # of what is summed over, which FP8 multiplications demand
_E4M3 = torch.float8_e4m3fn


def quantise_rows(x_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises each row.

    Args:
        x_RK: Rows, contiguous.

    Returns:
        Values ``(R, K)`` and scales ``(R,)``.
    """
    x_RK = x_RK.float()
    scale, inverse = scale_of(x_RK.abs().amax(dim=1, keepdim=True), "rceil")
    return (x_RK * inverse).clamp(-448.0, 448.0).to(_E4M3), scale[:, 0]


def quantise_columns(
    x_RN: Tensor, offsets_e: Tensor, *, of_rows: bool = False
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """Quantises each column of each group, and transposes.

    Args:
        x_RN: Rows, contiguous.
        offsets_e: End of each group, int32; the last one is R.
        of_rows: Whether to quantise each row too.

    Returns:
        Values ``(N, R)`` and scales ``(e, N)``, zero for a group without rows; and what :func:`quantise_rows` returns,
        or ``None``.
    """
    values, scales = [], []
    for group in groups_of(offsets_e):
        if group.start == group.stop:
            scales.append(torch.zeros(x_RN.shape[1], device=x_RN.device))
            continue
        values_NR, scale_N = quantise_rows(x_RN[group].T)
        values.append(values_NR)
        scales.append(scale_N)
    return (torch.cat(values, dim=1), torch.stack(scales)), quantise_rows(x_RN) if of_rows else None


def quantise_whole_columns(
    x_MN: Tensor, *, of_rows: bool = False
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """Quantises each column over all rows, and transposes; zeros are added up to a multiple of 16 rows.

    Args:
        x_MN: Any number ``M`` of rows, contiguous.
        of_rows: Whether to quantise each row too.

    Returns:
        Values ``(N, M rounded up)`` and scales ``(N,)``; and what :func:`quantise_rows` returns, or ``None``.
    """
    columns = quantise_rows(F.pad(x_MN.T, (0, -x_MN.shape[0] % ROW_MULTIPLE)))
    return columns, quantise_rows(x_MN) if of_rows else None


def quantise_weight(weight_eNK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises each row of each weight.

    Args:
        weight_eNK: Weights, contiguous.

    Returns:
        Values ``(e, N, K)`` and scales ``(e, N)``.
    """
    values, scale = quantise_rows(weight_eNK.flatten(0, 1))
    return values.view(weight_eNK.shape), scale.view(weight_eNK.shape[:2])


def quantise_weight_columns(weight_eNK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises each column of each weight, and transposes.

    Args:
        weight_eNK: Weights, contiguous.

    Returns:
        Values ``(e, K, N)`` and scales ``(e, K)``.
    """
    experts, _, width = weight_eNK.shape
    values, scale = quantise_rows(weight_eNK.transpose(1, 2).flatten(0, 1))
    return values.unflatten(0, (experts, width)), scale.unflatten(0, (experts, width))


def swiglu_rows(
    gate_up_R2F: Tensor, weights_R: Tensor | None, quantise: Callable[[Tensor], Quantised] = quantise_rows
) -> Quantised:
    """Computes SwiGLU times the routing weight in float32, and quantises each row of that.

    Args:
        gate_up_R2F: Gate and up of each row, contiguous.
        weights_R: Routing weight of each row, or ``None`` for 1.
        quantise: Quantises rows.

    Returns:
        Values ``(R, F)`` and scales, as ``quantise`` returns them.
    """
    gate_RF, up_RF = gate_up_R2F.float().chunk(2, dim=1)
    out_RF = gate_RF * gate_RF.sigmoid() * up_RF
    return quantise(out_RF if weights_R is None else out_RF * weights_R.float()[:, None])


def swiglu_backward_rows(
    grad_RF: Tensor,
    gate_up_R2F: Tensor,
    weights_R: Tensor | None,
    quantise: Callable[[Tensor], Quantised] = quantise_rows,
) -> tuple[Tensor, Tensor, Quantised, Tensor | None]:
    """Backward of SwiGLU with a routing weight.

    Args:
        grad_RF: Gradient of the result, contiguous.
        gate_up_R2F: Gate and up of each row, contiguous.
        weights_R: Routing weight of each row, or ``None`` for 1.
        quantise: Quantises rows.

    Returns:
        The result ``(R, F)`` and the gradient ``(R, 2F)`` of its input in the input's dtype, that gradient as
        ``quantise`` returns it, and the gradient of the weights, or ``None``.
    """
    out_RF, grad_gate_up, grad_weights = swiglu_gradients_plain(grad_RF, gate_up_R2F, weights_R)
    dtype = gate_up_R2F.dtype
    return out_RF.to(dtype), grad_gate_up.to(dtype), quantise(grad_gate_up), grad_weights


def swiglu_backward_columns(
    grad_RF: Tensor, gate_up_R2F: Tensor, weights_R: Tensor | None, offsets_e: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor | None]:
    """Backward of SwiGLU with a routing weight, of which only quantised results are kept.

    Args:
        grad_RF: Gradient of the result, contiguous.
        gate_up_R2F: Gate and up of each row, contiguous.
        weights_R: Routing weight of each row, or ``None`` for 1.
        offsets_e: End of each group, int32; the last one is R.

    Returns:
        The result and the gradient of its input, each as :func:`quantise_columns` returns it, that gradient as
        :func:`quantise_rows` returns it, and the gradient of the weights, or ``None``.
    """
    out_RF, grad_gate_up, grad_weights = swiglu_gradients_plain(grad_RF, gate_up_R2F, weights_R)
    out, _ = quantise_columns(out_RF, offsets_e)
    columns, rows = quantise_columns(grad_gate_up, offsets_e, of_rows=True)
    assert rows is not None
    return out, columns, rows, grad_weights


def zero_empty_groups(out_eNK: Tensor, offsets_e: Tensor) -> None:
    """Sets the gradient of experts without rows to zero, in place: the library may leave it as it finds it.

    Args:
        out_eNK: Gradient of the weights, contiguous.
        offsets_e: End of each group, int32.
    """
    for expert, group in enumerate(groups_of(offsets_e)):
        if group.start == group.stop:
            out_eNK[expert] = 0.0


def groups_of(offsets_e: Tensor) -> list[slice]:
    """The rows of each group; waits for the device."""
    ends = offsets_e.tolist()
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
