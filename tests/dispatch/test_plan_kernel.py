"""The Triton kernels plan the rows that the plain path plans; run by Triton's interpreter, so that no GPU is needed."""

import pytest

from tests.triton_interpreter import run_interpreted

pytest.importorskip("triton")

_CHECK = """
import torch
from lightning_moe.dispatch import plan_kernel
from lightning_moe.dispatch.permute import plan_rows

torch.manual_seed(0)
for tokens, top_k, experts, alignment, most_cells, scan in (
    (9, 2, 4, 1, 16384, 1024),
    (200, 3, 8, 16, 128, 4),
    (150, 2, 6, 1, 128, 8),
    (64, 2, 160, 32, 16384, 1024),
    (0, 2, 4, 1, 16384, 1024),
    (0, 2, 4, 8, 16384, 1024),
    (33, 1, 1, 1, 256, 2),
):
    plan_kernel._MOST_CELLS, plan_kernel._SCAN = most_cells, scan
    indices = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]) if tokens else torch.zeros(0, top_k)
    indices = indices.to(torch.int64)
    for missing in (0.0, 0.4, 1.0):
        chosen = indices.where(torch.rand(indices.shape) >= missing, -1)
        all_valid = missing == 0.0
        for known in (False, True):
            present = int((chosen >= 0).sum()) if known else None
            expected = plan_rows(chosen, experts, alignment, all_valid=all_valid, num_choices=present)
            rows = len(expected.choice_of_row_R)
            plan = plan_kernel.plan_rows_kernel(chosen, experts, alignment, rows, expected.padded)
            for ours, theirs in zip(plan, expected):
                assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), (tokens, missing, ours, theirs)
print("equal")
"""


def test_kernels_equal_the_plain_path() -> None:
    run_interpreted(_CHECK)
