"""Products of what was quantised in tiles and blocks of 128: by DeepGEMM on CUDA, in plain PyTorch elsewhere.

Sums are promoted to float32 every 128 values, as the DeepSeek-V3 report demands (section 3.3.2).

Shapes: ``R`` rows ordered by expert, ``K`` inner and ``N`` outer width, ``e`` experts.
"""

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_moe.precision.blockwise_casts import dequantise
from lightning_moe.precision.float8_casts import Quantised, groups_of


def blockwise_grouped_mm(a: Quantised, b: Quantised, offsets_e: Tensor) -> Tensor:
    """Multiplies the rows of each group by the weight of that group.

    Args:
        a: Values ``(R, K)`` and scales ``(R, K / 128)``, as :func:`.blockwise_casts.quantise_rows` returns them.
        b: Values ``(e, N, K)`` and scales ``(e, N / 128, K / 128)``.
        offsets_e: End of each group, int32; the last one is R. On CUDA multiples of 128.

    Returns:
        The products ``(R, N)`` in bfloat16.
    """
    if a[0].device.type == "cuda":
        return _by_deep_gemm(a, b, offsets_e)
    a_whole, b_whole = dequantise(*a), dequantise(*b)
    groups = zip(groups_of(offsets_e), b_whole, strict=True)
    return torch.cat([a_whole[rows] @ b_NK.T for rows, b_NK in groups]).to(torch.bfloat16)


def blockwise_mm(a: Quantised, b: Quantised) -> Tensor:
    """Multiplies all rows by one weight.

    Args:
        a: Values ``(M, K)`` and scales ``(M, K / 128)``; on CUDA ``M`` is a multiple of 128.
        b: Values ``(1, N, K)`` and scales ``(1, N / 128, K / 128)``.

    Returns:
        The product ``(M, N)`` in bfloat16.
    """
    rows = a[0].shape[0]
    return blockwise_grouped_mm(a, b, torch.full((1,), rows, dtype=torch.int32, device=a[0].device))


def _by_deep_gemm(a: Quantised, b: Quantised, offsets_e: Tensor) -> Tensor:
    (a_RK, _), (b_eNK, _) = a, b
    rows = torch.arange(a_RK.shape[0], dtype=torch.int32, device=a_RK.device)
    group_R = torch.searchsorted(offsets_e, rows, right=True, out_int32=True)
    out_RN = torch.empty(a_RK.shape[0], b_eNK.shape[1], dtype=torch.bfloat16, device=a_RK.device)
    _deep_gemm_function()(a, b, out_RN, group_R)
    return out_RN


@functools.cache
def _deep_gemm_function() -> Callable[..., None]:
    module = importlib.import_module("deep_gemm")
    names = ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous")  # the name has changed
    return next(function for name in names if (function := getattr(module, name, None)) is not None)
