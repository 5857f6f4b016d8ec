"""Which multiplications a machine can run in which recipe: pure functions of what is installed and of shapes.

The rules are those of torch 2.11 to 2.14 and torchao 0.17 to 0.18; each names what it stands on.
"""

from dataclasses import dataclass, field

from lightning_moe.precision.recipes import Kind, Recipe, RecipeName, fp8_rowwise, mxfp8

_PACKAGES_OF_MODULES = {
    "cutlass": "'nvidia-cutlass-dsl<4.6'",
    "tvm_ffi": "apache-tvm-ffi",
    "cuda.bindings": "cuda-python",
}
COMPANIONS = frozenset({*_PACKAGES_OF_MODULES, "deep_gemm"})


@dataclass(frozen=True)
class Machine:
    """What capability rules ask for.

    Args:
        name: Name of the GPU, or of the kind of device.
        compute_capability: Of the CUDA GPU; ``None`` on other devices.
        cuda: CUDA version that torch was built with.
        torchao: Its version; ``None`` if it is not installed.
        triton: Whether triton can be imported.
        mx_kernels: Whether torchao's compiled MXFP8 operators are registered.
        blockwise_mm: Whether torch has ``scaled_mm`` with blockwise scales.
        modules: Which of :data:`COMPANIONS` can be imported.
    """

    name: str = "CPU"
    compute_capability: tuple[int, int] | None = None
    cuda: tuple[int, int] | None = None
    torchao: tuple[int, int] | None = None
    triton: bool = False
    mx_kernels: bool = False
    blockwise_mm: bool = False
    modules: frozenset[str] = field(default_factory=frozenset)


def why_not(recipe: Recipe, kind: Kind, machine: Machine) -> str | None:
    """Says why a machine has no kernels for a recipe.

    Args:
        recipe: The recipe.
        kind: ``"linear"`` or ``"grouped"``.
        machine: The machine.

    Returns:
        The reason, naming what is missing, or ``None`` if the kernels run.
    """
    if machine.compute_capability is None:
        return f"there are no FP8 kernels for {machine.name}"
    if machine.torchao is None:
        return "torchao is not installed"
    if machine.torchao < (0, 17):
        return f"torchao is {_dotted(machine.torchao)}, but it must be at least 0.17"
    if recipe.name == "mxfp8":
        return _why_not_mxfp8(recipe, kind, machine)
    if recipe.name == "fp8_blockwise":
        return _why_not_blockwise(recipe, kind, machine)
    return _why_not_fp8(recipe.name, kind, machine)


def _why_not_mxfp8(recipe: Recipe, kind: Kind, machine: Machine) -> str | None:
    assert machine.torchao is not None
    capability = machine.compute_capability
    if capability is None or capability[0] != 10:
        return f"MXFP8 needs a GPU of compute capability 10.x (B200, GB200), and {_gpu(machine)}"
    if machine.cuda is None or machine.cuda < (12, 8):
        return f"MXFP8 needs torch with CUDA 12.8 or newer, not {_dotted(machine.cuda)}"
    if not machine.triton:
        return "triton is not installed"
    if not machine.mx_kernels:
        return (
            "torchao's compiled MXFP8 operators are missing: its x86_64 wheel has them, for torch 2.11 or newer with "
            "CUDA 13"
        )
    if recipe.scale == "float32":
        return "MXFP8 scales are powers of two"
    if kind == "linear" and machine.torchao < (0, 18):
        # 0.17 fails on gradients that are not contiguous (pytorch/ao#4470).
        return f"MXFP8 linears need torchao 0.18 or newer, not {_dotted(machine.torchao)}"
    if kind == "grouped" and machine.torchao >= (0, 18):
        missing = [package for module, package in _PACKAGES_OF_MODULES.items() if module not in machine.modules]
        if missing:
            return f"its kernels need more packages: pip install {' '.join(missing)}"
    return None


def _why_not_fp8(name: RecipeName, kind: Kind, machine: Machine) -> str | None:
    capability = machine.compute_capability
    if kind == "grouped":
        if name == "fp8_tensorwise":
            return "experts would share one scale; grouped multiplications take fp8_rowwise"
        # torch._scaled_grouped_mm takes these two and traps on 10.3 (pytorch#187095).
        if capability not in ((9, 0), (10, 0)):
            return f"grouped FP8 needs a GPU of compute capability 9.0 or 10.0 (H100, H200, B200), and {_gpu(machine)}"
        return None if machine.triton else "triton is not installed"
    if capability is None or capability < (8, 9):
        return f"FP8 needs a GPU of compute capability 8.9 or newer, and {_gpu(machine)}"
    return "triton is not installed" if name == "fp8_rowwise" and not machine.triton else None


def _why_not_blockwise(recipe: Recipe, kind: Kind, machine: Machine) -> str | None:
    assert machine.torchao is not None
    capability = machine.compute_capability
    if capability is None or capability[0] != 9:
        return f"blockwise FP8 needs a GPU of compute capability 9.x (H100, H200), and {_gpu(machine)}"
    if not machine.triton:
        return "triton is not installed"
    if (kind == "grouped" or recipe.wgrad_in_high_precision) and "deep_gemm" not in machine.modules:
        return "its grouped multiplication needs DeepGEMM (module deep_gemm, from deepseek-ai/DeepGEMM)"
    if recipe.wgrad_in_high_precision:
        return None  # by operators of our own
    if machine.cuda is None or machine.cuda < (12, 9):
        return f"blockwise FP8 needs torch with CUDA 12.9 or newer, not {_dotted(machine.cuda)}"
    if machine.torchao < (0, 18):
        return f"blockwise FP8 needs torchao 0.18 or newer, not {_dotted(machine.torchao)}"
    if kind == "linear" and not machine.blockwise_mm:
        return "this torch has no scaled_mm with blockwise scales"
    return None


def runs_here(machine: Machine) -> str:
    """Names a precision plugin whose kernels run on a machine; ``BF16Precision`` runs on every one."""
    for plugin, recipe in (("MXFP8Precision", mxfp8()), ("Float8Precision", fp8_rowwise())):
        if why_not(recipe, "linear", machine) is None and why_not(recipe, "grouped", machine) is None:
            return plugin
    return "BF16Precision"


def misaligned(
    recipe: Recipe, kind: Kind, in_features: int, out_features: int, torchao: tuple[int, int] | None
) -> str | None:
    """Says why a recipe cannot take the dimensions of a weight.

    Args:
        recipe: The recipe.
        kind: ``"linear"`` or ``"grouped"``.
        in_features: Inner width.
        out_features: Outer width.
        torchao: Version whose kernels multiply; ``None`` for emulation.

    Returns:
        The reason, or ``None`` if they fit.
    """
    if torchao is not None and recipe.name == "fp8_blockwise":
        multiple = 128
    elif torchao is not None and recipe.name == "mxfp8" and kind == "grouped" and torchao >= (0, 18):
        multiple = 128  # its quantisation kernel asserts that
    elif recipe.name == "mxfp8":
        multiple = 32
    elif recipe.name == "fp8_blockwise":
        multiple = 8  # bfloat16 strides of 16 bytes; tiles at the edge may be smaller
    else:
        multiple = 16
    if in_features % multiple == 0 and out_features % multiple == 0:
        return None
    return f"{in_features} x {out_features} is not a multiple of {multiple}"


def row_alignment(recipe: Recipe, kind: Kind, torchao: tuple[int, int] | None) -> int:
    """Rows to whose multiple a recipe's kernels need each group, or the rows of a linear, padded; emulation 1.

    Args:
        recipe: The recipe.
        kind: ``"linear"`` or ``"grouped"``.
        torchao: Version whose kernels multiply; ``None`` for emulation.
    """
    if torchao is None:
        return 1
    if recipe.name == "fp8_blockwise":
        return 128
    if recipe.name == "mxfp8":
        return 128 if kind == "grouped" and torchao >= (0, 18) else 32
    return 16


def _gpu(machine: Machine) -> str:
    return f"this is {machine.name} ({_dotted(machine.compute_capability)})"


def _dotted(version: tuple[int, int] | None) -> str:
    return "none" if version is None else f"{version[0]}.{version[1]}"
