from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe.moe.experts import GroupedExperts, grouped_mm
from tests.tensors import grad

OFFSETS = [
    pytest.param([4, 8, 16, 32], id="even"),
    pytest.param([0, 0, 5, 32], id="first_empty"),
    pytest.param([32, 32, 32, 32], id="all_to_the_first"),
    pytest.param([0, 0, 0, 32], id="all_to_the_last"),
    pytest.param([1, 1, 31, 32], id="uneven"),
]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def loop(a: Tensor, b: Tensor, ends: list[int]) -> Tensor:
    out = a.new_zeros(a.shape[0], b.shape[2])
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        for row in range(start, end):
            out[row] = a[row] @ b[expert]
    return out


def dirty_memory() -> None:
    """Leaves NaN in freed memory of the sizes that follow."""
    for elements in (32 * 24, 32 * 16, 4 * 16 * 24):
        torch.full((elements,), float("nan"))


@pytest.mark.parametrize("ends", OFFSETS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_grouped_mm_values_and_gradients(ends: list[int], dtype: torch.dtype, tolerance: float) -> None:
    a, b = draw(32, 16, dtype=dtype), draw(4, 16, 24, seed=1, dtype=dtype)
    above = draw(32, 24, seed=2, dtype=dtype)
    a64, b64 = a.double().clone().requires_grad_(), b.double().clone().requires_grad_()
    expected = loop(a64, b64, ends)
    expected.backward(above.double())

    a.requires_grad_()
    b.requires_grad_()
    dirty_memory()
    out = grouped_mm(a, b, torch.tensor(ends, dtype=torch.int32))
    assert out.dtype == dtype
    dirty_memory()
    out.backward(above)
    for actual, wanted in ((out, expected), (grad(a), grad(a64)), (grad(b), grad(b64))):
        assert actual.isfinite().all()
        assert (actual.double() - wanted).abs().max() <= tolerance * wanted.abs().max()
    sizes = torch.tensor(ends).diff(prepend=torch.tensor([0]))
    assert not grad(b)[sizes == 0].any(), "an expert without rows has exactly zero gradient"


def test_grouped_mm_of_no_rows() -> None:
    for dtype in (torch.float32, torch.float64):
        a, b = draw(0, 16, dtype=dtype).requires_grad_(), draw(4, 16, 24, dtype=dtype).requires_grad_()
        out = grouped_mm(a, b, torch.zeros(4, dtype=torch.int32))
        assert out.shape == (0, 24)
        out.square().sum().backward()
        assert not grad(b).any()


def test_grouped_mm_follows_autocast() -> None:
    offsets = torch.tensor([4, 32], dtype=torch.int32)
    a, b = draw(32, 16, dtype=torch.float32), draw(2, 16, 24, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = grouped_mm(a, b, offsets)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, grouped_mm(a.bfloat16(), b.bfloat16(), offsets))


def make(num_experts: int = 4, dtype: torch.dtype = torch.float64, **options: int) -> GroupedExperts:
    torch.manual_seed(0)
    return GroupedExperts(num_experts, 16, 8, initializer_range=0.3, **options).to(dtype)


@pytest.mark.parametrize("ends", OFFSETS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_experts_against_a_loop_over_tokens(ends: list[int], dtype: torch.dtype, tolerance: float) -> None:
    experts, reference = make(dtype=dtype), make()
    reference.load_state_dict(experts.state_dict())
    rows = draw(32, 16)
    outs = []
    for row, x in enumerate(rows):
        expert = next(e for e, end in enumerate(ends) if row < end)
        gate, up = reference.gate_up_proj[expert][:8] @ x, reference.gate_up_proj[expert][8:] @ x
        outs.append(reference.down_proj[expert] @ (F.silu(gate) * up))
    expected = torch.stack(outs)
    expected.square().sum().backward()
    actual = experts(rows.to(dtype), torch.tensor(ends, dtype=torch.int32))
    actual.square().sum().backward()
    assert (actual.double() - expected).abs().max() <= tolerance * expected.abs().max()
    for ours, wanted in (
        (grad(experts.gate_up_proj), grad(reference.gate_up_proj)),
        (grad(experts.down_proj), grad(reference.down_proj)),
    ):
        assert (ours.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("ends", OFFSETS)
@pytest.mark.parametrize("replaced", [False, True], ids=["own", "replaced"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_weighted_rows_are_the_rows_times_their_weights(
    ends: list[int], replaced: bool, dtype: torch.dtype, tolerance: float
) -> None:
    experts, reference = make(dtype=dtype), make(dtype=dtype).double()
    if replaced:
        other: Any = lambda a, b, offsets: grouped_mm(a, b, offsets)
        experts.grouped_mm = other  # type: ignore[method-assign]
    offsets = torch.tensor(ends, dtype=torch.int32)
    weight_dtype = torch.promote_types(dtype, torch.float32)
    rows, weights = draw(32, 16, dtype=dtype).requires_grad_(), draw(32, seed=1, dtype=weight_dtype).requires_grad_()
    rows64, weights64 = (leaf.detach().double().requires_grad_() for leaf in (rows, weights))
    above = draw(32, 16, seed=2, dtype=dtype)
    experts(rows, offsets, weights).backward(above)
    (reference(rows64, offsets) * weights64[:, None]).backward(above.double())
    for ours, wanted in (
        (grad(rows), grad(rows64)),
        (grad(weights), grad(weights64)),
        *((grad(p), grad(q)) for p, q in zip(experts.parameters(), reference.parameters(), strict=True)),
    ):
        assert ours.dtype in (dtype, weight_dtype)
        assert (ours.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_seam_is_used_for_both_multiplications() -> None:
    class Counting(GroupedExperts):
        calls = 0

        def grouped_mm(self, a_RK: Tensor, b_eKN: Tensor, offsets_e: Tensor) -> Tensor:
            self.calls += 1
            return super().grouped_mm(a_RK, b_eKN, offsets_e)

    experts = Counting(2, 16, 8)
    experts(draw(4, 16, dtype=torch.float32), torch.tensor([1, 4], dtype=torch.int32))
    assert experts.calls == 2


def test_initial_weights_depend_on_the_global_id_alone() -> None:
    whole, part = make(8), make(2, first_expert=4)
    assert torch.equal(whole.gate_up_proj[4:6], part.gate_up_proj)
    assert torch.equal(whole.down_proj[4:6], part.down_proj)
    flat = whole.gate_up_proj.flatten(1)
    assert all(not torch.equal(flat[i], flat[j]) for i in range(8) for j in range(i))
