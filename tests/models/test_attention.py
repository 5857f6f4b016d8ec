import math

import pytest
import torch
from torch import Tensor

from lightning_moe.models.deepseek_v3.attention import MultiHeadLatentAttention
from lightning_moe.models.deepseek_v3.attention_backends import (
    AttentionMask,
    attention_backend,
    causal_attention,
    document_mask,
)
from lightning_moe.models.deepseek_v3.rope import rotation_of
from tests.models.tiny import randomise, smaller_config
from tests.tensors import grad


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(q: Tensor, k: Tensor, v: Tensor, scale: float, allowed: Tensor) -> Tensor:
    logits = (q @ k.transpose(-1, -2) * scale).masked_fill(~allowed, -math.inf)
    return logits.softmax(dim=-1) @ v


@pytest.mark.parametrize("v_dim", [6, 10, 16])
@pytest.mark.parametrize("documents", [False, True])
def test_kernel_against_the_formula(v_dim: int, documents: bool) -> None:
    q, k, v = draw(2, 3, 9, 10), draw(2, 3, 9, 10, seed=1), draw(2, 3, 9, v_dim, seed=2)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9])
    allowed = torch.ones(9, 9, dtype=torch.bool).tril()
    if documents:
        allowed = allowed & (ids[:, None, :, None] == ids[:, None, None, :])
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    mask = AttentionMask(dense=document_mask(ids)) if documents else None
    out = causal_attention(leaves[0], leaves[1], leaves[2], scale=0.3, mask=mask)
    twins = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = by_hand(twins[0], twins[1], twins[2], 0.3, allowed)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    out.square().sum().backward()
    expected.square().sum().backward()
    for leaf, twin in zip(leaves, twins, strict=True):
        torch.testing.assert_close(grad(leaf), grad(twin), rtol=1e-9, atol=1e-11)


def test_document_mask() -> None:
    mask = document_mask(torch.tensor([[0, 0, 1]]))
    assert mask.tolist() == [[[[True, False, False], [True, True, False], [False, False, True]]]]


@pytest.mark.parametrize("query_rank", [12, None])
@pytest.mark.parametrize("v_head_dim", [6, 4, 14])
def test_module_against_the_equations(query_rank: int | None, v_head_dim: int) -> None:
    config = smaller_config(q_lora_rank=query_rank, v_head_dim=v_head_dim)
    module = MultiHeadLatentAttention(config).double()
    randomise(module, std=0.3)
    x = draw(1, 7, 16)
    out = module(x, rotation_of(config, torch.arange(7), torch.float64))

    def norm(t: Tensor, weight: Tensor) -> Tensor:
        return t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def turn(t: Tensor) -> Tensor:  # (7, 4): two pairs
        angles = torch.arange(7)[:, None] * torch.tensor([1.0, 10000**-0.5], dtype=torch.float64)
        pairs = torch.view_as_complex(t.reshape(7, 2, 2).contiguous()) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(pairs).reshape(7, 4)

    h = x[0]
    if module.q_proj is not None:
        q = h @ module.q_proj.weight.T
    else:
        q = norm(h @ module.q_a_proj.weight.T, module.q_a_layernorm.weight) @ module.q_b_proj.weight.T
    compressed = h @ module.kv_a_proj_with_mqa.weight.T
    kv = norm(compressed[:, :8], module.kv_a_layernorm.weight) @ module.kv_b_proj.weight.T
    k_rope = turn(compressed[:, 8:])
    heads = []
    for head in range(2):
        q_head = q.view(7, 2, 10)[:, head]
        kv_head = kv.view(7, 2, 6 + v_head_dim)[:, head]
        q_full = torch.cat([q_head[:, :6], turn(q_head[:, 6:])], dim=1)
        k_full = torch.cat([kv_head[:, :6], k_rope], dim=1)
        allowed = torch.ones(7, 7, dtype=torch.bool).tril()
        heads.append(by_hand(q_full, k_full, kv_head[:, 6:], 10**-0.5, allowed))
    expected = torch.cat(heads, dim=1) @ module.o_proj.weight.T
    torch.testing.assert_close(out[0], expected, rtol=1e-9, atol=1e-11)


def test_inner_norms_have_their_own_epsilon() -> None:
    module = MultiHeadLatentAttention(smaller_config(rms_norm_eps=1e-2))
    assert module.q_a_layernorm.eps == module.kv_a_layernorm.eps == 1e-6


def test_backend_is_named() -> None:
    cpu = torch.device("cpu")
    assert attention_backend(smaller_config(), cpu, torch.float32) == "SDPA flash, values padded"
    assert attention_backend(smaller_config(v_head_dim=10), cpu, torch.float32) == "SDPA flash"
