from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_moe.models.deepseek_v3.attention import MultiHeadLatentAttention
from lightning_moe.models.deepseek_v3.query_key import queries_keys_values, rotate_plainly
from lightning_moe.models.deepseek_v3.rope import Rotation, rotation_of
from tests.models.tiny import randomise, smaller_config
from tests.tensors import grad

Leaves = tuple[Tensor, Tensor, Tensor]

# B, S, H, N, R, V
SHAPES = [(2, 3, 2, 32, 16, 24), (1, 1, 1, 48, 48, 128), (2, 5, 3, 128, 64, 128), (3, 1, 2, 6, 2, 10)]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rotation_for(positions: tuple[int, ...], rope: int, dtype: torch.dtype) -> Rotation:
    angles = draw(*positions, rope // 2, seed=9)
    accurate = torch.promote_types(dtype, torch.float32)
    return Rotation(angles.cos().to(accurate), angles.sin().to(accurate))


def plainly(q: Tensor, kv: Tensor, k_rope: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    return (*rotate_plainly(q, kv, k_rope, rotation), kv[..., q.shape[-1] - k_rope.shape[-1] :])


def doubles(leaves: Leaves) -> Leaves:
    q, kv, k_rope = (t.detach().double().requires_grad_() for t in leaves)
    return q, kv, k_rope


def leaves_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Leaves:
    """With gaps between rows, as the rotary key has them."""
    batch, sequence, heads, nope, rope, value = shape
    return (
        draw(batch, sequence, heads, nope + rope + 2, dtype=dtype)[..., 2:].requires_grad_(),
        draw(sequence, batch, heads, nope + value, seed=1, dtype=dtype).transpose(0, 1).requires_grad_(),
        draw(batch, sequence, rope + 5, seed=2, dtype=dtype)[..., 5:].requires_grad_(),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("positions", ["S", "BS", "1S"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_values_and_gradients(shape: tuple[int, ...], positions: str, dtype: torch.dtype, tolerance: float) -> None:
    batch, sequence, heads, nope, rope, value = shape
    where = {"S": (sequence,), "BS": (batch, sequence), "1S": (1, sequence)}[positions]
    leaves = leaves_of(shape, dtype)
    exact = doubles(leaves)
    rotation = rotation_for(where, rope, dtype)
    outs = queries_keys_values(*leaves, rotation)
    expected = plainly(*exact, Rotation(rotation.cos.double(), rotation.sin.double()))
    above = [
        draw(batch, heads, sequence, dim, seed=3 + i, dtype=dtype).transpose(1, 2)
        for i, dim in enumerate((nope + rope, nope + rope, value))
    ]
    torch.autograd.backward(outs, above)
    torch.autograd.backward(expected, [t.double() for t in above])
    pairs = [*zip(outs, expected, strict=True), *((grad(a), grad(b)) for a, b in zip(leaves, exact, strict=True))]
    for ours, wanted in pairs:
        assert ours.dtype == dtype
        assert ours.shape == wanted.shape
        assert (ours.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_values_are_not_copied_and_nothing_large_is_kept() -> None:
    leaves = leaves_of(SHAPES[0])
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    rotation = rotation_for((3,), 16, torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        _, _, v = queries_keys_values(*leaves, rotation)
    assert v.untyped_storage().data_ptr() == leaves[1].untyped_storage().data_ptr()
    assert sum(t.numel() for t in kept) == rotation.cos.numel() + rotation.sin.numel()


@pytest.mark.parametrize("used", [0, 1, 2])
def test_one_output_alone_is_used(used: int) -> None:
    leaves, twins = leaves_of(SHAPES[0]), leaves_of(SHAPES[0])
    rotation = rotation_for((3,), 16, torch.float64)
    queries_keys_values(*leaves, rotation)[used].square().sum().backward()
    plainly(*twins, rotation)[used].square().sum().backward()
    for ours, twin in zip(leaves, twins, strict=True):
        torch.testing.assert_close(grad(ours), torch.zeros_like(twin) if twin.grad is None else twin.grad)


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_one_input_alone_needs_a_gradient(trained: int) -> None:
    leaves, twins = leaves_of(SHAPES[0]), leaves_of(SHAPES[0])
    rotation = rotation_for((3,), 16, torch.float64)
    for some, function in ((leaves, queries_keys_values), (twins, plainly)):
        inputs = [t if i == trained else t.detach() for i, t in enumerate(some)]
        q, k, v = function(inputs[0], inputs[1], inputs[2], rotation)
        (q.square().sum() + k.sin().sum() + v.exp().sum()).backward()
    torch.testing.assert_close(grad(leaves[trained]), grad(twins[trained]))
    assert all(t.grad is None for i, t in enumerate(leaves) if i != trained)


def test_a_rotation_that_asks_for_a_gradient_gets_none() -> None:
    leaves = leaves_of(SHAPES[0])
    cos, sin = (t.requires_grad_() for t in rotation_for((3,), 16, torch.float64))
    q, _, _ = queries_keys_values(*leaves, Rotation(cos, sin))
    q.sum().backward()
    assert cos.grad is None
    assert sin.grad is None


def test_used_twice_and_run_twice() -> None:
    leaves, twins = leaves_of(SHAPES[0]), leaves_of(SHAPES[0])
    rotation = rotation_for((3,), 16, torch.float64)
    for some, function in ((leaves, queries_keys_values), (twins, plainly)):
        first, second = function(*some, rotation), function(some[0], some[1] * 2, some[2], rotation)
        loss = sum(((t * u).sum() + v.sum() for t, u, v in zip(first, second, first, strict=True)), torch.zeros(()))
        loss.backward(retain_graph=True)
        loss.backward()
    for ours, twin in zip(leaves, twins, strict=True):
        torch.testing.assert_close(grad(ours), grad(twin))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_tokens(shape: tuple[int, int]) -> None:
    leaves = [draw(*shape, *rest).requires_grad_() for rest in ((2, 12), (2, 13), (4,))]
    q, k, v = queries_keys_values(leaves[0], leaves[1], leaves[2], rotation_for((shape[1],), 4, torch.float64))
    assert q.shape == k.shape == (*shape, 2, 12)
    assert v.shape == (*shape, 2, 5)
    (q.sum() + k.sum() + v.sum()).backward()
    assert all(grad(t).shape == t.shape for t in leaves)


def test_unequal_dtypes_are_promoted_as_by_the_plain_path() -> None:
    q, kv, k_rope = leaves_of(SHAPES[0])
    mixed = q.detach().bfloat16(), kv.detach().bfloat16(), k_rope.detach().float()
    leaves, twins = ([t.clone().requires_grad_() for t in mixed] for _ in range(2))
    rotation = rotation_for((3,), 16, torch.float32)
    outs = queries_keys_values(leaves[0], leaves[1], leaves[2], rotation)
    expected = plainly(twins[0], twins[1], twins[2], rotation)
    for some in (outs, expected):
        sum((t.float().square().sum() for t in some), torch.zeros(())).backward()
    for ours, wanted in (
        *zip(outs, expected, strict=True),
        *((grad(a), grad(b)) for a, b in zip(leaves, twins, strict=True)),
    ):
        assert ours.dtype == wanted.dtype
        torch.testing.assert_close(ours, wanted, rtol=1e-2, atol=1e-2)


def test_operators_keep_their_promises() -> None:
    q, kv, k_rope = (t.detach() for t in leaves_of(SHAPES[0], torch.float32))
    for positions in ((3,), (2, 3)):
        cos, sin = rotation_for(positions, 16, torch.float32)
        checks = torch.library.opcheck(torch.ops.lightning_moe.rotate_queries_keys, (q, kv, k_rope, cos, sin))
        assert set(checks.values()) == {"SUCCESS"}
        grads = q.transpose(1, 2).contiguous().transpose(1, 2), q.flip(0), kv[..., 32:]
        backward = torch.ops.lightning_moe.rotate_queries_keys_backward
        assert set(torch.library.opcheck(backward, (*grads, cos, sin)).values()) == {"SUCCESS"}


def attention_and_input() -> tuple[MultiHeadLatentAttention, Tensor]:
    module = MultiHeadLatentAttention(smaller_config()).double()
    randomise(module, std=0.3)
    return module, draw(2, 7, 16).requires_grad_()


@pytest.mark.parametrize("recomputed", [False, True])
def test_attention_compiles_without_breaks(recomputed: bool) -> None:
    torch.compiler.reset()
    results = []
    for compiled in (False, True):
        module, x = attention_and_input()
        rotation = rotation_of(smaller_config(), torch.arange(7), torch.float64)
        function: Any = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
        out = checkpoint(function, x, rotation, use_reentrant=False) if recomputed else function(x, rotation)
        out.square().sum().backward()
        results.append([out.detach(), grad(x), *(grad(p) for p in module.parameters())])
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_alone_with_values_that_are_a_view_of_an_input(backend: str) -> None:
    torch.compiler.reset()
    rotation = rotation_for((3,), 16, torch.float64)
    results = []
    for function in (plainly, torch.compile(queries_keys_values, backend=backend, fullgraph=True)):
        leaves = leaves_of(SHAPES[0])
        q, k, v = function(*leaves, rotation)
        (q.square().sum() + k.sin().sum() + v.exp().sum()).backward()
        results.append([q, k, v, *(grad(t) for t in leaves)])
    for wanted, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


def test_sequences_of_many_lengths_make_two_graphs() -> None:
    torch.compiler.reset()
    module, _ = attention_and_input()
    graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    function = torch.compile(module, backend=count, fullgraph=True)
    for length in (7, 9, 12, 20):
        rotation = rotation_of(smaller_config(), torch.arange(length), torch.float64)
        x = draw(2, length, 16)
        torch.testing.assert_close(function(x, rotation), module(x, rotation))
    assert len(graphs) == 2


def test_autocast() -> None:
    module, x = attention_and_input()
    module, x = module.float(), x.detach().float().requires_grad_()
    rotation = rotation_of(smaller_config(), torch.arange(7))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x, rotation)
    out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    exact, x64 = attention_and_input()
    expected = exact(x64, rotation_of(smaller_config(), torch.arange(7), torch.float64))
    expected.square().sum().backward()
    for ours, wanted in ((out, expected), (grad(x), grad(x64))):
        assert (ours.double() - wanted).norm() <= 3e-2 * wanted.norm()
