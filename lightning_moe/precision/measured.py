"""Where FP8 has been measured to be faster than bfloat16: what ``auto`` goes by.

A gain of 20% or more counts for the same GPU and multiplications that are no smaller in any dimension; outside of it,
``auto`` stays with bfloat16. Times are those of forward and backward, quantisation included.
"""

from dataclasses import dataclass

from lightning_moe.precision.recipes import Kind, RecipeName


@dataclass(frozen=True)
class Measurement:
    """One measured multiplication.

    Args:
        gpu: Part of the GPU's name.
        kind: ``"linear"``, or ``"grouped"`` for all of an expert layer's multiplications.
        recipe: The recipe.
        in_features: Inner width; for experts the hidden size.
        out_features: Outer width; for experts their width.
        rows: Rows of a linear, or rows per expert.
        speed: Time of bfloat16 divided by that of the recipe.
        source: Where the number is from.
    """

    gpu: str
    kind: Kind
    recipe: RecipeName
    in_features: int
    out_features: int
    rows: int
    speed: float
    source: str


_LEAST_GAIN = 1.2  # below it, the loss of accuracy buys next to nothing in a whole step
_ROWWISE = 1.05  # so much faster must a recipe of coarser scales be
_FIRST = "first measurement, 2026-11-29, torch 2.11.0+cu130, torchao 0.18"
_PRECISION = "benchmarks/precision.py, 2026-11-30, torch 2.11.0+cu130, torchao 0.18"
MEASUREMENTS = (
    Measurement("H200", "grouped", "fp8_rowwise", 7168, 2048, 8192, 1.45, _PRECISION),
    Measurement("H200", "grouped", "fp8_rowwise", 2048, 1408, 1536, 0.97, _PRECISION),
    Measurement("H200", "linear", "fp8_rowwise", 18432, 7168, 8192, 1.64, _PRECISION),
    Measurement("H200", "linear", "fp8_rowwise", 7168, 36864, 8192, 1.64, _PRECISION),
    Measurement("H200", "linear", "fp8_rowwise", 16384, 7168, 8192, 1.50, _PRECISION),
    Measurement("H200", "linear", "fp8_rowwise", 2048, 21888, 16384, 1.39, _PRECISION),
    Measurement("H200", "linear", "fp8_rowwise", 7168, 4096, 8192, 1.04, _PRECISION),
    Measurement("H200", "linear", "fp8_rowwise", 1536, 24576, 8192, 0.99, _PRECISION),
    Measurement("H200", "linear", "fp8_rowwise", 10944, 2048, 16384, 0.98, _PRECISION),
    Measurement("H200", "linear", "fp8_rowwise", 2048, 5632, 16384, 0.69, _PRECISION),
    Measurement("H200", "linear", "fp8_tensorwise", 18432, 7168, 8192, 1.69, _PRECISION),
    Measurement("H200", "linear", "fp8_tensorwise", 7168, 36864, 8192, 1.68, _PRECISION),
    Measurement("H200", "linear", "fp8_tensorwise", 7168, 7168, 16384, 1.61, _FIRST),
    Measurement("H200", "linear", "fp8_tensorwise", 16384, 7168, 8192, 1.54, _PRECISION),
    Measurement("H200", "linear", "fp8_tensorwise", 2048, 21888, 16384, 1.41, _PRECISION),
    Measurement("H200", "linear", "fp8_tensorwise", 10944, 2048, 16384, 1.28, _PRECISION),
    Measurement("H200", "linear", "fp8_tensorwise", 1536, 24576, 8192, 1.19, _PRECISION),
    Measurement("H200", "linear", "fp8_tensorwise", 2048, 5632, 16384, 1.11, _PRECISION),
    Measurement("H200", "linear", "fp8_tensorwise", 7168, 4096, 8192, 1.10, _PRECISION),
    Measurement("H200", "linear", "fp8_tensorwise", 2048, 3072, 16384, 0.77, _PRECISION),
)


def fastest(gpu: str, kind: Kind, in_features: int, out_features: int, rows: int | None) -> Measurement | None:
    """Returns the measurement of the fastest recipe that counts for a multiplication; ``None`` means bfloat16.

    Scales per row, which are finer, are preferred to those that are less than 5% faster.

    Args:
        gpu: Name of the GPU.
        kind: ``"linear"`` or ``"grouped"``.
        in_features: Inner width; for experts the hidden size.
        out_features: Outer width; for experts their width.
        rows: Rows of a linear, or mean rows per expert; ``None`` where they are not known.
    """
    if rows is None:
        return None
    counting = [
        m
        for m in MEASUREMENTS
        if m.speed >= _LEAST_GAIN
        and m.gpu in gpu
        and m.kind == kind
        and (m.in_features <= in_features and m.out_features <= out_features and m.rows <= rows)
    ]
    return max(counting, key=lambda m: m.speed * (_ROWWISE if m.recipe == "fp8_rowwise" else 1.0), default=None)
