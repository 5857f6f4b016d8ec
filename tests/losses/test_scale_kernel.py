"""The Triton kernel multiplies, and touches nothing where the factor is 1; run by Triton's interpreter."""

import pytest

from tests.triton_interpreter import run_interpreted

pytest.importorskip("triton")

_CHECK = """
import torch
from lightning_moe.losses import scale_kernel as module
from lightning_moe.losses.scale_kernel import scale_kernel

torch.manual_seed(0)
for programs in (2, 2048):  # with two programs, each takes several blocks
    module._PROGRAMS, module._BLOCK = programs, 64
    for size in (0, 1, 64, 321):
        values = torch.randn(size)
        for factor in (0.3, 1.0, 0.0, float("inf")):
            scalar = torch.tensor(factor)
            expected = values * factor
            inside = values.clone()
            scale_kernel(inside, scalar, inside)
            torch.testing.assert_close(inside, expected, rtol=0, atol=0, equal_nan=True)
            out = torch.full((size,), 7.0, dtype=torch.float16)
            scale_kernel(values, scalar, out)
            torch.testing.assert_close(out, expected.half(), rtol=0, atol=0, equal_nan=True)

# what a factor of 1 does not write keeps the payload of a signalling NaN
untouched = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
scale_kernel(untouched, torch.tensor(1.0), untouched)
assert untouched.view(torch.int32).item() == 0x7F800001
print("equal")
"""


def test_kernel_scales() -> None:
    run_interpreted(_CHECK)
