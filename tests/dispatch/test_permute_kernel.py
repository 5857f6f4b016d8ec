"""The Triton kernels equal the plain path; run by Triton's interpreter, so that no GPU is needed."""

import pytest

from tests.triton_interpreter import run_interpreted

pytest.importorskip("triton")

_CHECK = """
import torch
from lightning_moe.dispatch.permute import permute, plan_rows, sum_rows, unpermute
from lightning_moe.dispatch.permute_kernel import copy_rows_kernel, spread_kernel, sum_rows_kernel

torch.manual_seed(0)
for tokens, hidden, top_k, experts, alignment in ((9, 40, 2, 4, 1), (33, 1500, 3, 8, 16), (5, 1024, 1, 4, 1)):
    indices = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    if alignment > 1:
        indices[::4] = -1
    plan = plan_rows(indices, experts, alignment, all_valid=alignment == 1)
    rows = len(plan.choice_of_row_R)
    y = torch.randn(rows, hidden)
    weights = torch.rand(rows).where(plan.choice_of_row_R < tokens * top_k, 0.0)
    grad = torch.randn(tokens, hidden)
    for w in (None, weights):
        expected = sum_rows(y, plan.row_of_choice_TK, plan.padded, w)
        values = torch.randn(rows)
        total, picked = sum_rows_kernel(y, plan.row_of_choice_TK, w, values)
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(picked, torch.cat([values, torch.zeros(1)])[plan.row_of_choice_TK])
        assert sum_rows_kernel(y, plan.row_of_choice_TK, w)[1] is None
    x, choice_weights = torch.randn(tokens, hidden), torch.rand(tokens, top_k)
    where = plan.row_of_choice_TK, plan.choice_of_row_R
    copied, copied_weights = copy_rows_kernel(x, *where, choice_weights, padded=plan.padded)
    expected_rows, expected_weights = permute(x, choice_weights, plan)
    assert torch.equal(copied, expected_rows)
    assert torch.equal(copied_weights, expected_weights)
    assert torch.equal(copy_rows_kernel(x, *where, padded=plan.padded)[0], expected_rows)
    leaves = y.clone().requires_grad_(), weights.clone().requires_grad_()
    unpermute(*leaves, plan).backward(grad)
    grad_y, grad_weights = spread_kernel(grad, y, weights, plan.choice_of_row_R, top_k)
    torch.testing.assert_close(grad_y, leaves[0].grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad_weights, leaves[1].grad, rtol=1e-5, atol=1e-4)
print("equal")
"""


def test_kernels_equal_the_plain_path() -> None:
    run_interpreted(_CHECK)
