"""The Triton kernels of the balance statistics equal the plain path; run by Triton's interpreter, without a GPU."""

import pytest

from tests.triton_interpreter import run_interpreted

pytest.importorskip("triton")

_CHECK = """
import torch
from lightning_moe.kernels import has_kernels
from lightning_moe.moe import balance, balance_kernel
from lightning_moe.moe.balance import count_routed, sequence_balance_loss

torch.manual_seed(0)
for batch, sequence, experts, top_k, cells, programs, span_cells in (
    (3, 37, 16, 2, 2048, 512, 8192),
    (2, 50, 60, 6, 512, 512, 128),  # several blocks, and several at a time
    (1, 300, 8, 1, 64, 7, 8),  # spans of several blocks
    (5, 9, 256, 8, 2048, 2, 8192),  # more rows than programs
    (2, 1, 6, 3, 2048, 512, 8192),
    (2, 0, 6, 3, 2048, 512, 8192),
    (0, 7, 6, 3, 2048, 512, 8192),
):
    balance_kernel._CELLS, balance_kernel._PROGRAMS, balance_kernel._SPAN_CELLS = cells, programs, span_cells
    for missing in (0.0, 0.4, 1.0):
        scores = torch.rand(batch, sequence, experts)
        indices = (scores + torch.linspace(0, 1, experts)).topk(top_k).indices
        indices = indices.where(torch.rand(batch, sequence, 1) >= missing, -1)
        counts = balance_kernel.count_routed_kernel(indices, experts)
        assert counts.dtype == torch.int64 and torch.equal(counts, count_routed(indices, experts))

        exact = scores.double().requires_grad_()
        expected = sequence_balance_loss(exact, indices)
        (wanted,) = torch.autograd.grad(0.3 * expected, exact)
        balance.has_kernels = lambda device, dtype: True
        losses = []
        for strided in (False, True):
            leaf = (scores.transpose(0, 1).contiguous().transpose(0, 1) if strided else scores).requires_grad_()
            loss = sequence_balance_loss(leaf, indices, counts_BE=counts)
            (gradient,) = torch.autograd.grad(0.3 * loss, leaf)
            torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(gradient.double(), wanted, rtol=1e-5, atol=1e-6)
            losses.append(loss)
        assert torch.equal(*losses) and loss.dtype == torch.float32 and loss.shape == ()
        assert torch.equal(sequence_balance_loss(scores, indices), loss)  # counts that it makes itself
        balance.has_kernels = has_kernels

balance.has_kernels = lambda device, dtype: True
scores = torch.rand(2, 5, 8, requires_grad=True)
indices = scores.topk(2).indices
loss = sequence_balance_loss(scores, indices)
compiled = torch.compile(sequence_balance_loss, fullgraph=True, backend="aot_eager")
assert torch.equal(compiled(scores, indices, counts_BE=count_routed(indices, 8)), loss)
(gradient,) = torch.autograd.grad(loss, scores, create_graph=True)
try:
    gradient.square().sum().backward()
except RuntimeError as error:
    assert "autograd formula" in str(error)
else:
    raise AssertionError("a second derivative that is not there")
# Documents, and scores in float64, take the plain path.
ids = torch.arange(5).expand(2, -1) // 3
with_documents = sequence_balance_loss(scores, indices, document_ids_BS=ids)
exact = sequence_balance_loss(scores.double(), indices)
balance.has_kernels = has_kernels
assert torch.equal(sequence_balance_loss(scores, indices, document_ids_BS=ids), with_documents)
assert torch.equal(sequence_balance_loss(scores.double(), indices), exact) and exact.dtype == torch.float64
print("equal")
"""


def test_kernels_equal_the_plain_path() -> None:
    run_interpreted(_CHECK)
