"""What runs where: every rule says what is missing."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_moe.precision.capability import Machine, misaligned, row_alignment, runs_here, why_not
from lightning_moe.precision.machine import probe
from lightning_moe.precision.measured import MEASUREMENTS, fastest
from lightning_moe.precision.recipes import Kind, Recipe, fp8_blockwise, fp8_rowwise, fp8_tensorwise, mxfp8

CPU = Machine()
H200 = Machine("NVIDIA H200", (9, 0), (13, 0), (0, 18), triton=True, blockwise_mm=True)
B200 = Machine(
    "NVIDIA B200",
    (10, 0),
    (13, 0),
    (0, 18),
    triton=True,
    mx_kernels=True,
    blockwise_mm=True,
    modules=frozenset({"cutlass", "tvm_ffi", "cuda.bindings"}),
)
A100 = replace(H200, name="NVIDIA A100", compute_capability=(8, 0))
ADA = replace(H200, name="NVIDIA L40S", compute_capability=(8, 9))
B300 = replace(B200, name="NVIDIA B300", compute_capability=(10, 3))
RTX = replace(B200, name="NVIDIA RTX 5090", compute_capability=(12, 0))

RUNS: list[tuple[Machine, Recipe, Kind]] = [
    (H200, fp8_rowwise(), "linear"),
    (H200, fp8_rowwise(), "grouped"),
    (H200, fp8_rowwise(wgrad_in_high_precision=True), "linear"),
    (H200, fp8_rowwise(wgrad_in_high_precision=True), "grouped"),
    (H200, fp8_tensorwise(wgrad_in_high_precision=True), "linear"),
    (H200, fp8_blockwise(), "linear"),
    (replace(H200, modules=frozenset({"deep_gemm"})), fp8_blockwise(), "grouped"),
    (replace(H200, modules=frozenset({"deep_gemm"})), fp8_blockwise(wgrad_in_high_precision=True), "grouped"),
    (replace(H200, modules=frozenset({"deep_gemm"})), fp8_blockwise(wgrad_in_high_precision=True), "linear"),
    (ADA, fp8_tensorwise(), "linear"),
    (ADA, fp8_rowwise(), "linear"),
    (replace(H200, triton=False), fp8_tensorwise(), "linear"),
    (B200, fp8_rowwise(), "grouped"),
    (B200, mxfp8(), "linear"),
    (B200, mxfp8(wgrad_in_high_precision=True), "grouped"),
    (replace(B200, modules=frozenset()), mxfp8(), "linear"),
    (replace(B200, modules=frozenset(), torchao=(0, 17)), mxfp8(), "grouped"),
    (replace(B200, torchao=(0, 19)), mxfp8(), "grouped"),
]


@pytest.mark.parametrize(("machine", "recipe", "kind"), RUNS)
def test_kernels_run(machine: Machine, recipe: Recipe, kind: Kind) -> None:
    assert why_not(recipe, kind, machine) is None


REFUSED: list[tuple[Machine, Recipe, Kind, str]] = [
    (CPU, fp8_rowwise(), "linear", "no FP8 kernels for CPU"),
    (replace(H200, torchao=None), fp8_rowwise(), "linear", "torchao is not installed"),
    (replace(H200, torchao=(0, 16)), fp8_rowwise(), "linear", "torchao is 0.16, but it must be at least 0.17"),
    (replace(H200, triton=False), fp8_rowwise(), "grouped", "triton is not installed"),
    (replace(H200, triton=False), fp8_rowwise(), "linear", "triton is not installed"),
    (H200, fp8_tensorwise(), "grouped", "experts would share one scale"),
    (H200, fp8_blockwise(wgrad_in_high_precision=True), "grouped", "DeepGEMM"),
    (H200, fp8_blockwise(wgrad_in_high_precision=True), "linear", "DeepGEMM"),
    (H200, mxfp8(), "grouped", r"compute capability 10.x \(B200, GB200\), and this is NVIDIA H200 \(9.0\)"),
    (H200, fp8_blockwise(), "grouped", "DeepGEMM"),
    (replace(H200, cuda=(12, 8)), fp8_blockwise(), "linear", "CUDA 12.9 or newer, not 12.8"),
    (replace(H200, torchao=(0, 17)), fp8_blockwise(), "linear", "torchao 0.18 or newer, not 0.17"),
    (replace(H200, blockwise_mm=False), fp8_blockwise(), "linear", "no scaled_mm with blockwise scales"),
    (A100, fp8_tensorwise(), "linear", "8.9 or newer, and this is NVIDIA A100"),
    (ADA, fp8_rowwise(), "grouped", "9.0 or 10.0"),
    (B300, fp8_rowwise(), "grouped", r"9.0 or 10.0 .*B300 \(10.3\)"),
    (B200, fp8_blockwise(), "linear", "compute capability 9.x"),
    (RTX, mxfp8(), "linear", "compute capability 10.x"),
    (replace(B200, cuda=(12, 6)), mxfp8(), "linear", "CUDA 12.8 or newer, not 12.6"),
    (replace(B200, cuda=None), mxfp8(), "linear", "CUDA 12.8 or newer, not none"),
    (replace(B200, mx_kernels=False), mxfp8(), "linear", "x86_64 wheel"),
    (replace(B200, triton=False), mxfp8(), "linear", "triton"),
    (replace(B200, torchao=(0, 17)), mxfp8(), "linear", "torchao 0.18 or newer"),
    (
        replace(B200, modules=frozenset({"tvm_ffi"})),
        mxfp8(),
        "grouped",
        "pip install 'nvidia-cutlass-dsl<4.6' cuda-python$",
    ),
]


@pytest.mark.parametrize(("machine", "recipe", "kind", "reason"), REFUSED)
def test_what_is_missing_is_named(machine: Machine, recipe: Recipe, kind: Kind, reason: str) -> None:
    found = why_not(recipe, kind, machine)
    assert found is not None
    assert re.search(reason, found), found


def test_what_runs_instead() -> None:
    assert [runs_here(machine) for machine in (CPU, A100, H200, B200, RTX)] == [
        "BF16Precision",
        "BF16Precision",
        "Float8Precision",
        "MXFP8Precision",
        "BF16Precision",
    ]


ALIGNMENT: list[tuple[Recipe, Kind, tuple[int, int] | None, int, int]] = [
    # recipe, kind, torchao (None emulates), multiple of the dimensions, of the rows
    (mxfp8(), "grouped", (0, 18), 128, 128),
    (mxfp8(), "grouped", (0, 17), 32, 32),
    (mxfp8(), "linear", (0, 18), 32, 32),
    (mxfp8(), "grouped", None, 32, 1),
    (fp8_rowwise(), "grouped", (0, 18), 16, 16),
    (fp8_rowwise(), "grouped", None, 16, 1),
    (fp8_tensorwise(), "linear", (0, 18), 16, 16),
    (fp8_blockwise(), "grouped", (0, 18), 128, 128),
    (fp8_blockwise(), "linear", None, 8, 1),
]


@pytest.mark.parametrize(("recipe", "kind", "torchao", "multiple", "rows"), ALIGNMENT)
def test_alignment(recipe: Recipe, kind: Kind, torchao: tuple[int, int] | None, multiple: int, rows: int) -> None:
    assert row_alignment(recipe, kind, torchao) == rows
    assert misaligned(recipe, kind, 3 * multiple, multiple, torchao) is None
    for dims in ((multiple, multiple + multiple // 2), (multiple // 2, multiple)):
        assert misaligned(recipe, kind, *dims, torchao) == f"{dims[0]} x {dims[1]} is not a multiple of {multiple}"


def test_auto_counts_what_was_measured_and_nothing_else() -> None:
    def choice(*args: Any) -> str | None:
        best = fastest(*args)
        return None if best is None else best.recipe

    assert choice("NVIDIA H200", "linear", 7168, 7168, 16384) == "fp8_tensorwise"
    assert choice("NVIDIA H200", "linear", 16384, 7168, 8192) == "fp8_rowwise"  # 1.50 to 1.54: not worth its scales
    assert choice("NVIDIA H200", "linear", 7168, 36864, 8192) == "fp8_rowwise"
    assert choice("NVIDIA H200", "linear", 10944, 2048, 16384) == "fp8_tensorwise"
    assert choice("NVIDIA H200", "linear", 2048, 21888, 16384) == "fp8_rowwise"
    assert choice("NVIDIA H200", "linear", 1536, 24576, 8192) is None  # measured, and little faster
    assert choice("NVIDIA H200", "linear", 2048, 16384, 65536) is None
    assert choice("NVIDIA H200", "linear", 7168, 7168, 8192) is None
    assert choice("NVIDIA H200", "grouped", 7168, 2048, 8192) == "fp8_rowwise"
    assert choice("NVIDIA H200", "grouped", 2048, 1408, 1536) is None  # measured, and no faster
    assert choice("NVIDIA H200", "grouped", 7168, 2048, None) is None
    assert choice("NVIDIA B200", "grouped", 7168, 2048, 65536) is None
    assert all(measurement.source for measurement in MEASUREMENTS)


def test_this_machine_is_described() -> None:
    machine = probe(torch.device("cpu"))
    assert (machine.name, machine.compute_capability) == ("CPU", None)
