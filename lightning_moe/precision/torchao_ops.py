"""Everything of torchao: the only file that imports it, at first use.

Functions are looked up where torchao 0.17, 0.18 and its next versions have them, when a model is converted: a look-up
during the forward pass would break compiled graphs. Operands are cast to bfloat16, which the kernels take.

Shapes: ``M`` rows, ``K`` inner width, ``N`` outer width, ``R`` rows ordered by expert, ``e`` experts.
"""

import functools
import importlib
import importlib.metadata
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe.moe.grouped_mm import grouped_mm
from lightning_moe.precision.capability import row_alignment
from lightning_moe.precision.recipes import Recipe

_PROTOTYPE = "torchao.prototype."


def torchao_version() -> tuple[int, int] | None:
    """Major and minor version of torchao; ``None`` if it is not installed."""
    try:
        numbers = re.findall(r"\d+", importlib.metadata.version("torchao"))
    except importlib.metadata.PackageNotFoundError:
        return None
    return int(numbers[0]), int(numbers[1])


def has_mx_kernels() -> bool:
    """Whether torchao's compiled MXFP8 operators are registered for CUDA; imports torchao."""
    try:
        importlib.import_module("torchao")
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        return has_kernel("torchao::mx_block_rearrange_2d_M_groups", "CUDA")
    except (ImportError, RuntimeError):
        return False


def torchao_linear(recipe: Recipe) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns torchao's ``(x (..., K), weight (N, K)) -> (..., N)`` of a recipe, differentiable in both.

    Raises:
        RuntimeError: This torchao has no such function, or cannot be imported.
    """
    if recipe.name == "fp8_rowwise":
        # Otherwise a compiled maximum sees values that the quantised tensor does not have (pytorch#150859).
        inductor: Any = importlib.import_module("torch._inductor.config")
        inductor.emulate_precision_casts = True
    return _torchao_linear(recipe)


@functools.cache
def _torchao_linear(recipe: Recipe) -> Callable[[Tensor, Tensor], Tensor]:
    makers = {"mxfp8": _mxfp8_linear, "fp8_blockwise": _blockwise_linear}
    multiply_rows = makers.get(recipe.name, _float8_linear)(recipe)
    alignment = row_alignment(recipe, "linear", _installed())

    def multiply(x: Tensor, weight_NK: Tensor) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        rows = x_MK.shape[0]
        if rows == 0:  # a kernel over nothing cannot be launched, nor a largest value of nothing be had
            return F.linear(x, weight_NK.to(x.dtype))
        x_MK = F.pad(x_MK, (0, 0, 0, -rows % alignment)).contiguous()
        out_MN = multiply_rows(x_MK, weight_NK.to(torch.bfloat16))
        if recipe.name == "fp8_blockwise":
            out_MN = keep_nonfinite(out_MN, x_MK)
        return out_MN[:rows].unflatten(0, x.shape[:-1]).to(x.dtype)

    return multiply


@functools.cache
def torchao_grouped_mm(recipe: Recipe) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns torchao's :func:`~lightning_moe.moe.grouped_mm.grouped_mm` of a recipe.

    Groups must be padded to :func:`~lightning_moe.precision.capability.row_alignment`, as dispatchers do.

    Raises:
        RuntimeError: This torchao has no such function, or cannot be imported.
    """
    if recipe.name == "mxfp8":
        function = _find("_to_mxfp8_then_scaled_grouped_mm", "moe_training.mxfp8_grouped_mm", "moe_training")
        options = _mx_options(recipe)
    elif recipe.name == "fp8_blockwise":
        # It reads the sizes of the groups on the host, and compiled graphs would specialise on them.
        function = torch.compiler.disable(
            _find("_to_fp8_blockwise_then_scaled_grouped_mm", "moe_training.blockwise_fp8.grouped_mm")
        )
        options = {}
    else:
        function = _find("_to_fp8_rowwise_then_scaled_grouped_mm", "moe_training.fp8_grouped_mm", "moe_training")
        options = {}
    options |= {"out_dtype": torch.bfloat16, "pad_token_groups_for_grouped_mm": False}

    def multiply(a_RK: Tensor, b_eKN: Tensor, offsets_e: Tensor) -> Tensor:
        if a_RK.shape[0] == 0:  # a kernel over nothing cannot be launched
            return grouped_mm(a_RK, b_eKN, offsets_e)
        a_bf16, b_bf16 = a_RK.to(torch.bfloat16), b_eKN.to(torch.bfloat16)
        product_RN = function(a_bf16, b_bf16, offs=offsets_e, **options)
        if recipe.name != "mxfp8":
            product_RN = keep_nonfinite(product_RN, a_bf16)
        return product_RN.to(a_RK.dtype)

    return multiply


def keep_nonfinite(product_RN: Tensor, a_RK: Tensor) -> Tensor:
    """Makes rows of a product NaN whose factors were not finite, and rows of the factors' gradient likewise.

    torchao's Triton kernels take maxima that pass over NaN and clamp it to a number, which would hide it.

    Args:
        product_RN: The product.
        a_RK: The factors.
    """
    return _KeepNonfinite.apply(product_RN, a_RK)


class _KeepNonfinite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product_RN: Tensor, a_RK: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = a_RK.shape, a_RK.dtype
        return product_RN + _nothing_or_nan(a_RK).to(product_RN.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], _nothing_or_nan(grads[0]).to(ctx.dtype).expand(ctx.shape)


def _nothing_or_nan(rows: Tensor) -> Tensor:
    """For each row 0, or NaN where it holds a value that is not finite."""
    return rows.sum(dim=-1, keepdim=True, dtype=torch.float32) * 0.0


def _mxfp8_linear(recipe: Recipe) -> Callable[[Tensor, Tensor], Tensor]:
    function = _find("_to_mxfp8_then_scaled_mm", "moe_training.mxfp8_linear", "mx_formats.mx_linear")
    options = _mx_options(recipe)

    def multiply(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        return function(x_MK, weight_NK, **options)

    return multiply


def _mx_options(recipe: Recipe) -> dict[str, Any]:
    preference = _find("KernelPreference", "torchao.quantization.quantize_.common.kernel_preference")
    modes = _find("ScaleCalculationMode", "mx_formats.config")
    return {
        "kernel_preference": preference.AUTO,
        "scale_calculation_mode": modes.RCEIL if recipe.scale == "rceil" else modes.FLOOR,
        "wgrad_with_hp": recipe.wgrad_in_high_precision,
    }


def _float8_linear(recipe: Recipe) -> Callable[[Tensor, Tensor], Tensor]:
    function = _find("matmul_with_hp_or_float8_args", "torchao.float8.float8_linear")
    linear_class = _find("Float8Linear", "torchao.float8.float8_linear")
    config_class = _find("Float8LinearConfig", "torchao.float8")
    cast_config = _find("CastConfig", "torchao.float8")
    scaling = _find("ScalingType", "torchao.float8")
    name = recipe.name.removeprefix("fp8_")
    if recipe.wgrad_in_high_precision and name == "rowwise":
        config = config_class.from_recipe_name("rowwise_with_gw_hp")
    elif recipe.wgrad_in_high_precision:
        kept, kept_gradient = (
            cast_config(scaling_type=scaling.DISABLED, target_dtype=dtype)
            for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        )
        config = config_class(
            cast_config_input_for_grad_weight=kept, cast_config_grad_output_for_grad_weight=kept_gradient
        )
    else:
        config = config_class.from_recipe_name(name)
    template = linear_class(16, 16, bias=False, device="meta", config=config)
    multiplication = template.linear_mm_config

    def multiply(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        return function.apply(x_MK, weight_NK.t(), multiplication, config)

    return multiply


def _blockwise_linear(recipe: Recipe) -> Callable[[Tensor, Tensor], Tensor]:
    # As torchao's other autograd functions: compiled graphs take it whole.
    function = torch.compiler.allow_in_graph(_find("fp8_blockwise_mm", "blockwise_fp8_training.linear"))

    def multiply(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        return function.apply(x_MK, weight_NK, 128, torch.bfloat16, False)

    return multiply


def _installed() -> tuple[int, int]:
    version = torchao_version()
    if version is None:
        raise RuntimeError("torchao is not installed; pip install 'torchao>=0.17', or set emulate to always.")
    return version


def _find(name: str, *modules: str) -> Any:
    """A name from the first module that has it; relative ones lie below ``torchao.prototype``."""
    version = _installed()
    failures = []
    for module in modules:
        qualified = module if module.startswith("torchao.") else _PROTOTYPE + module
        try:
            return getattr(importlib.import_module(qualified), name)
        except (ImportError, AttributeError) as error:
            failures.append(f"{qualified}: {error}")
    raise RuntimeError(
        f"torchao {version[0]}.{version[1]} has no {name} that can be imported ({'; '.join(failures)}).\n"
        "Use another version of torchao, or set the precision plugin's emulate to always."
    )
