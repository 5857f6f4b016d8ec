"""The Triton kernels equal the plain path; run by Triton's interpreter, so that no GPU is needed."""

import pytest

from tests.triton_interpreter import run_interpreted

pytest.importorskip("triton")

_CHECK = """
import torch
from lightning_moe.moe.swiglu import swiglu_plain
from lightning_moe.moe.swiglu_kernel import swiglu_backward_kernel, swiglu_kernel

torch.manual_seed(0)
for rows, width in ((5, 24), (3, 1408), (0, 16)):
    for weighted in (True, False):
        gate_up = (3 * torch.randn(rows, 2 * width)).requires_grad_()
        weights = torch.rand(rows).requires_grad_() if weighted else None
        if weighted and rows:
            weights.data[0] = 0.0
        expected = swiglu_plain(gate_up, weights)
        torch.testing.assert_close(swiglu_kernel(gate_up.detach(), weights), expected, rtol=1e-5, atol=1e-6)
        grad = torch.randn(rows, width)
        expected.backward(grad)
        for with_output in (True, False):
            out, grad_gate_up, grad_weights = swiglu_backward_kernel(
                grad, gate_up.detach(), weights, with_output=with_output
            )
            if with_output:
                torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
            else:
                assert out is None
            torch.testing.assert_close(grad_gate_up, gate_up.grad, rtol=1e-5, atol=1e-5)
            if weighted:
                torch.testing.assert_close(grad_weights, weights.grad, rtol=1e-5, atol=1e-4)
            else:
                assert grad_weights is None
print("equal")
"""


def test_kernels_equal_the_plain_path() -> None:
    run_interpreted(_CHECK)
