import pytest
import torch

from lightning_moe.dispatch.local import LocalDispatcher
from lightning_moe.dispatch.permute import permute, plan_rows, unpermute
from lightning_moe.moe.router import RoutingPlan
from tests.dispatch.contract import ALIGNMENTS, CASES, EXPERTS, TOP_K, Case, check_dispatcher, check_exact_on_integers


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_contract(case: Case, alignment: int) -> None:
    for weighted_before in (False, True):
        check_dispatcher(LocalDispatcher, case, alignment, weighted_before=weighted_before)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("case", CASES[:1] + CASES[5:6], ids=lambda case: case.name)
def test_contract_in_training_dtypes(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    for alignment in ALIGNMENTS:
        check_dispatcher(LocalDispatcher, case, alignment, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_on_integers(alignment: int, dtype: torch.dtype) -> None:
    check_exact_on_integers(LocalDispatcher, alignment, dtype=dtype)


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("valid", [True, False])
def test_gradcheck(alignment: int, valid: bool) -> None:
    indices = torch.tensor([[0, 3], [3, 1], [0, 3]])
    if not valid:
        indices[1] = -1
    dispatcher = LocalDispatcher(4, alignment)

    def apply(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        dispatched = dispatcher.dispatch(x, RoutingPlan(indices, weights, torch.zeros(3, 4), all_valid=valid))
        return dispatcher.combine(dispatched.rows_RD.sin(), dispatched)

    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    weights = torch.rand(3, 2, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(1))
    assert torch.autograd.gradcheck(apply, (x, weights))


def test_rows_without_padding_are_as_many_as_choices() -> None:
    indices = torch.tensor([[2, 0], [2, 5]])
    x = torch.arange(2 * 3, dtype=torch.float32).view(2, 3)
    plan = RoutingPlan(indices, torch.tensor([[0.1, 0.2], [0.3, 0.4]]), torch.zeros(2, EXPERTS), all_valid=True)
    dispatched = LocalDispatcher(EXPERTS).dispatch(x, plan)
    assert dispatched.offsets_e.tolist() == [1, 1, 3, 3, 3, 4, 4, 4]
    assert torch.equal(dispatched.rows_RD, x[[0, 0, 1, 1]])  # the order of tokens is kept within an expert
    assert dispatched.weights_R is not None
    assert torch.equal(dispatched.weights_R, torch.tensor([0.2, 0.1, 0.3, 0.4]))


def test_groups_are_padded_and_slack_belongs_to_the_last() -> None:
    indices = torch.tensor([[0, 1], [0, 1], [0, 2]])
    plan = RoutingPlan(indices, torch.ones(3, TOP_K), torch.zeros(3, 4), all_valid=True)
    dispatched = LocalDispatcher(4, alignment=4).dispatch(torch.ones(3, 2), plan)
    assert dispatched.offsets_e.tolist()[:3] == [4, 8, 12]
    assert dispatched.offsets_e[-1] == dispatched.rows_RD.shape[0]
    assert dispatched.rows_RD.sum(dim=1).tolist()[:12] == [2, 2, 2, 0, 2, 2, 0, 0, 2, 0, 0, 0]
    assert not dispatched.rows_RD[12:].any()


def test_state_is_not_shared_between_calls() -> None:
    dispatcher = LocalDispatcher(EXPERTS)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    plans = [
        RoutingPlan(indices, torch.ones(4, 2) * 0.5, torch.zeros(4, EXPERTS), all_valid=True)
        for indices in (torch.tensor([[0, 1]]).expand(4, 2), torch.tensor([[7, 3], [1, 2], [4, 6], [0, 5]]))
    ]
    first, second = (dispatcher.dispatch(x, plan) for plan in plans)
    assert torch.equal(dispatcher.combine(first.rows_RD, first), x)
    assert torch.equal(dispatcher.combine(second.rows_RD, second), x)


def test_alignment_must_be_positive() -> None:
    with pytest.raises(ValueError, match="alignment is 0, but it must be at least 1"):
        LocalDispatcher(4, alignment=0)


def test_second_derivatives_are_refused_and_not_cut_off() -> None:
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    rows = plan_rows(torch.tensor([[0, 1]] * 5), 2, all_valid=True)
    rows_RD, weights_R = permute(x, weights, rows)
    (grad,) = torch.autograd.grad(rows_RD.tanh().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.pow(2).sum().backward()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(unpermute(permute(x, weights, rows)[0], weights_R, rows).sum(), x, create_graph=True)
