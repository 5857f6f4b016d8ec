"""What this process has of what low-precision kernels need."""

import functools
import importlib
import importlib.util

import torch
import torch.nn.functional as F

from lightning_moe.precision.capability import COMPANIONS, Machine
from lightning_moe.precision.torchao_ops import has_mx_kernels, torchao_version


@functools.cache
def probe(device: torch.device) -> Machine:
    """Describes a device and what is installed beside it.

    Args:
        device: The device that multiplies.
    """
    version = torchao_version()
    if device.type != "cuda":
        return Machine(name=device.type.upper(), torchao=version)
    major, minor = torch.cuda.get_device_capability(device)
    cuda = [int(part) for part in (torch.version.cuda or "0.0").split(".")]
    return Machine(
        name=torch.cuda.get_device_name(device),
        compute_capability=(major, minor),
        cuda=(cuda[0], cuda[1]),
        torchao=version,
        triton=_can_import("triton"),
        mx_kernels=version is not None and major == 10 and has_mx_kernels(),
        blockwise_mm=hasattr(F, "scaled_mm") and hasattr(getattr(F, "ScalingType", None), "BlockWise1x128"),
        modules=frozenset(name for name in COMPANIONS if _is_usable(name)),
    )


def _is_usable(name: str) -> bool:
    if name != "deep_gemm":
        return _can_import(name)
    try:
        module = importlib.import_module(name)
    except Exception:  # it compiles and looks for CUDA when it is imported
        return False
    # With a DeepGEMM that lacks these torchao emulates without a word.
    rows = ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous")
    return hasattr(module, "k_grouped_fp8_gemm_nt_contiguous") and any(hasattr(module, one) for one in rows)


def _can_import(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
