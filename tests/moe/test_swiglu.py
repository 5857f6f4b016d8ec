from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_moe.moe.feed_forward import GatedMLP
from lightning_moe.moe.swiglu import swiglu, swiglu_plain
from tests.tensors import grad


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("rows", [(5,), (2, 3), (1, 1, 1), ()])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_values_and_gradients(rows: tuple[int, ...], weighted: bool, dtype: torch.dtype, tolerance: float) -> None:
    gate_up = 3 * draw(*rows, 2 * 7, dtype=dtype)
    weights = draw(*rows, seed=1, dtype=torch.promote_types(dtype, torch.float32)) if weighted else None
    leaves = [t.requires_grad_() for t in (gate_up, weights) if t is not None]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    above = draw(*rows, 7, seed=2, dtype=dtype)
    out, expected = swiglu(*leaves), swiglu_plain(*exact)
    out.backward(above)
    expected.backward(above.double())
    assert out.shape == (*rows, 7)
    assert out.dtype == dtype
    for ours, wanted in ((out, expected), *((grad(a), grad(b)) for a, b in zip(leaves, exact, strict=True))):
        assert ours.shape == wanted.shape
        assert (ours.double() - wanted).abs().max() <= tolerance * wanted.abs().max()
    assert [grad(t).dtype for t in leaves] == [t.dtype for t in leaves]


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_with_gaps_and_transposed_and_gradients_without_strides(weighted: bool) -> None:
    gate_up = draw(4, 3, 20)[..., 3:17].transpose(0, 1).requires_grad_()
    weights = draw(4, 3, seed=1).T.requires_grad_() if weighted else None
    twins = [None if t is None else t.detach().clone().requires_grad_() for t in (gate_up, weights)]
    assert twins[0] is not None
    out, expected = swiglu(gate_up, weights), swiglu_plain(twins[0], twins[1])
    torch.testing.assert_close(out, expected)
    assert out.is_contiguous()
    out.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(grad(gate_up), grad(twins[0]))
    if weights is not None and twins[1] is not None:
        torch.testing.assert_close(grad(weights), grad(twins[1]))


def test_no_rows() -> None:
    gate_up, weights = draw(2, 0, 14).requires_grad_(), draw(2, 0).requires_grad_()
    out = swiglu(gate_up, weights)
    assert out.shape == (2, 0, 7)
    out.sum().backward()
    assert grad(gate_up).shape == gate_up.shape
    assert grad(weights).shape == weights.shape


def test_used_twice_and_run_twice() -> None:
    gate_up, twin = (draw(3, 14).requires_grad_() for _ in range(2))
    for leaf, function in ((gate_up, swiglu), (twin, swiglu_plain)):
        loss = (function(leaf) * function(leaf * 2)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close(grad(gate_up), grad(twin))


def test_only_the_input_is_kept_for_backward() -> None:
    gate_up = draw(3, 14).requires_grad_()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        swiglu(gate_up)
    assert [t.data_ptr() for t in kept] == [gate_up.data_ptr()]


@pytest.mark.parametrize("weighted", [False, True])
def test_operators_keep_their_promises(weighted: bool) -> None:
    for rows in ((5,), (2, 3)):
        gate_up = draw(*rows, 14, dtype=torch.float32).requires_grad_()
        weights = draw(*rows, seed=1, dtype=torch.float32).requires_grad_() if weighted else None
        checks = torch.library.opcheck(torch.ops.lightning_moe.swiglu, (gate_up, weights))
        assert set(checks.values()) == {"SUCCESS"}
        above = draw(*rows, 7, seed=2, dtype=torch.float32)
        detached = None if weights is None else weights.detach()
        checks = torch.library.opcheck(torch.ops.lightning_moe.swiglu_grad, (above, gate_up.detach(), detached))
        assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_feed_forward_compiles_without_breaks(recomputed: bool) -> None:
    torch.compiler.reset()
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = GatedMLP(6, 10, initializer_range=0.3).double()
        x = draw(2, 3, 6).requires_grad_()
        function: Any = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
        out = checkpoint(function, x, use_reentrant=False) if recomputed else function(x)
        out.square().sum().backward()
        results.append([out.detach(), grad(x), *(grad(p) for p in module.parameters())])
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-12, atol=1e-14)


def test_the_feed_forward_under_autocast() -> None:
    module = GatedMLP(6, 10, initializer_range=0.3)
    x = draw(4, 6, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    exact, x64 = GatedMLP(6, 10).double(), x.detach().double().requires_grad_()
    exact.load_state_dict(module.state_dict())
    expected = exact(x64)
    expected.sum().backward()
    assert (out.double() - expected).norm() <= 2e-2 * expected.norm()
    assert (grad(x).double() - grad(x64)).norm() <= 2e-2 * grad(x64).norm()
