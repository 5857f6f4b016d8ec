"""The Triton kernel equals the plain path; run by Triton's interpreter, so that no GPU is needed."""

import pytest

from tests.triton_interpreter import run_interpreted

pytest.importorskip("triton")

_CHECK = """
import torch
from lightning_moe.strategies import norm_kernel
from lightning_moe.strategies.norm_kernel import sum_of_squares

torch.manual_seed(0)
tensors = [torch.randn(70_001), torch.randn(3, 5), torch.randn(2, 9, 40_00).bfloat16(), torch.randn(()), torch.randn(0)]
tensors.append(torch.randn(40, 30).T)
expected = sum(tensor.double().square().sum() for tensor in tensors)
torch.testing.assert_close(sum_of_squares(tensors).double(), expected, rtol=1e-6, atol=0)
norm_kernel._MANY = 70_000  # as large ones are
torch.testing.assert_close(sum_of_squares(tensors).double(), expected, rtol=1e-6, atol=0)
assert sum_of_squares([torch.tensor([1.0, float("inf")])]).isinf()
assert sum_of_squares([torch.ones(3), torch.tensor([float("nan")])]).isnan()
print("equal")
"""


def test_kernel_equals_the_plain_path() -> None:
    run_interpreted(_CHECK)
