"""The Triton kernels equal the plain path; run by Triton's interpreter, so that no GPU is needed."""

import pytest

from tests.triton_interpreter import run_interpreted

pytest.importorskip("triton")

_CHECK = """
import torch
from lightning_moe.models.deepseek_v3 import query_key_kernel
from lightning_moe.models.deepseek_v3.query_key import rotate_plainly
from lightning_moe.models.deepseek_v3.query_key_kernel import rotate_backward_kernel, rotate_kernel
from lightning_moe.models.deepseek_v3.rope import Rotation

torch.manual_seed(0)


def spread(batch, sequence, heads, dim):  # (B, S, H, d) as attention's backward may give it, with gaps between rows
    return torch.randn(batch, heads, sequence, dim + 3)[..., :dim].transpose(1, 2)


def check(batch, sequence, heads, nope, rope, value, positions):
    q = torch.randn(batch, sequence, heads, nope + rope + 1)[..., 1:].requires_grad_()
    kv = torch.randn(sequence, batch, heads, nope + value).transpose(0, 1).requires_grad_()
    k_rope = torch.randn(batch, sequence, 5 + rope)[..., 5:].requires_grad_()
    angles = torch.randn(*positions, rope // 2)
    rotation = Rotation(angles.cos(), angles.sin())
    expected = rotate_plainly(q, kv, k_rope, rotation)
    actual = rotate_kernel(q.detach(), kv.detach(), k_rope.detach(), *rotation)
    for ours, wanted in zip(actual, expected):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)
    grads = [spread(batch, sequence, heads, dim) for dim in (nope + rope, nope + rope, value)]
    grads[1] = torch.randn(nope + rope).expand(grads[1].shape) if batch == 1 else grads[1]
    grads[2] = torch.randn(1).expand(grads[2].shape) if heads == 3 else grads[2]  # a plain sum's: no stride at all
    wanted = torch.autograd.grad((*expected, kv[..., nope:]), (q, kv, k_rope), grads)
    for ours, other in zip(rotate_backward_kernel(*grads, *rotation), wanted):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)


check(2, 3, 5, 32, 16, 24, (3,))
check(2, 3, 3, 48, 48, 20, (2, 3))
check(2, 3, 2, 128, 64, 130, (1, 3))
check(1, 1, 1, 6, 2, 4, (1,))
check(1, 2, 3, 10, 6, 7, (2,))
query_key_kernel._TILE = 128  # several blocks of heads, the last one not full
check(1, 2, 7, 32, 16, 24, (1, 2))
for shape in ((0, 3), (2, 0)):
    q, kv, k_rope, cos = (torch.randn(*shape, *rest) for rest in ((2, 12), (2, 13), (4,), (2,)))
    assert [t.shape for t in rotate_kernel(q, kv, k_rope, cos, cos)] == [q.shape, q.shape]
    assert [t.shape for t in rotate_backward_kernel(q, q, kv[..., 8:], cos, cos)] == [q.shape, kv.shape, k_rope.shape]
exact = torch.randn(1, 2, 2, 48), torch.randn(1, 2, 2, 64), torch.randn(1, 2, 16)
q, kv, k_rope = (t.to(torch.bfloat16) for t in exact)
rotation = Rotation(torch.rand(2, 8), torch.rand(2, 8))
for ours, wanted in zip(rotate_kernel(q, kv, k_rope, *rotation), rotate_plainly(q, kv, k_rope, rotation)):
    torch.testing.assert_close(ours, wanted, rtol=8e-3, atol=1e-3)
print("equal")
"""


def test_kernels_equal_the_plain_path() -> None:
    run_interpreted(_CHECK)
