"""The Triton kernel equals PyTorch's AdamW; run by Triton's interpreter, so that no GPU is needed."""

import pytest

from tests.triton_interpreter import run_interpreted

pytest.importorskip("triton")

_CHECK = """
import torch
from lightning_moe.optim.adamw_kernel import adamw_

torch.manual_seed(0)
options = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
for shape, grad_dtype, moments in (
    ((37, 130), torch.float32, torch.float32),
    ((7000,), torch.bfloat16, torch.float32),
    ((4, 33, 8), torch.bfloat16, torch.bfloat16),
    ((), torch.float32, torch.float32),
    ((0, 4), torch.float32, torch.float32),
):
    reference = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
    expected = torch.optim.AdamW([reference], **options)
    param = reference.detach().float().clone()
    first, second = torch.zeros_like(param, dtype=moments), torch.zeros_like(param, dtype=moments)
    factor = torch.tensor(0.37)
    for number in range(1, 6):
        grad = (torch.randn(shape) * 10).to(grad_dtype)
        if len(shape) == 2:
            grad = grad.T.contiguous().T  # of other strides than the parameter
        skip = torch.tensor(float(number == 3))
        if number != 3:
            reference.grad = grad.double() * 0.37
            expected.step()
        step = torch.tensor(float(number - (number > 3)))
        before = param.clone()
        adamw_(param, grad, first, second, step, factor=factor, skip=skip, **options)
        assert number != 3 or torch.equal(param, before)
    low = moments == torch.bfloat16
    torch.testing.assert_close(param.double(), reference.detach(), rtol=0, atol=1e-4 if low else 1e-6)
    if first.numel():
        state = expected.state[reference]
        tolerance = {"rtol": 3e-2 if low else 1e-5, "atol": 1e-1 if low else 1e-5}
        torch.testing.assert_close(first.double(), state["exp_avg"], **tolerance)
        torch.testing.assert_close(second.double(), state["exp_avg_sq"], **tolerance)
param, moment = torch.ones(3), torch.zeros(3)
adamw_(param, torch.full((3,), 2.0), moment, torch.zeros(3), torch.tensor(1.0), factor=None, skip=None, **options)
torch.testing.assert_close(param, torch.full((3,), 1 - 3e-4 - 3e-3))
print("equal")
"""


def test_kernel_equals_pytorch() -> None:
    run_interpreted(_CHECK)
