"""What every token dispatcher must do, checked against a dense mixture of experts on one device.

Each rank calls :func:`check_dispatcher` with its rank; all ranks know the tokens of all, so nothing is communicated but
by the dispatcher.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_moe.dispatch.base import Dispatched, TokenDispatcher
from lightning_moe.moe.router import RoutingPlan

WIDTH = 16
EXPERTS = 8
TOP_K = 2


class Case(NamedTuple):
    """Tokens of one rank: ``(T, K)`` choices, -1 for none."""

    name: str
    indices_of: Callable[[int], Tensor]


def _random(rank: int, tokens: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices


def _with_invalid(rank: int) -> Tensor:
    indices = _random(rank, 24)
    indices[::3] = -1
    return indices


CASES = [
    Case("random", _random),
    Case("unequal_tokens", lambda rank: _random(rank, 7 + 6 * rank)),
    Case("experts_without_tokens", lambda rank: _random(rank) % 3 + torch.tensor([0, 4])),
    Case("all_to_first_experts", lambda rank: torch.tensor([0, 1]).expand(32, -1).clone()),
    Case("all_to_last_experts", lambda rank: torch.tensor([EXPERTS - 1, EXPERTS - 2]).expand(32, -1).clone()),
    Case("invalid_tokens", _with_invalid),
    Case("all_invalid", lambda rank: torch.full((5, TOP_K), -1)),
    Case("one_choice_invalid", lambda rank: _random(rank).where(torch.tensor([True, False]), -1)),
    Case("first_rank_without_tokens", lambda rank: _random(rank, 32 if rank else 0)),
]
ALIGNMENTS = (1, 16, 32, 128)
Rounding = Callable[[Tensor], Tensor]
LEAST_SQNR = 22.0  # of results through E4M3, in decibels: a value by itself has about 31, two sources of noise less


def check_dispatcher(
    make: Callable[[int, int], TokenDispatcher],
    case: Case,
    alignment: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-12,
    width: int = WIDTH,
    device: str = "cpu",
    weighted_before: bool = False,
    rounding: Rounding | None = None,
) -> None:
    """Checks structure, outputs and gradients of one case.

    Args:
        make: Makes the dispatcher from the number of experts and the alignment.
        case: One of :data:`CASES`.
        alignment: Rows to whose multiple groups are padded.
        rank: This rank in the group; it holds the experts ``rank * E / world_size`` and following.
        world_size: Ranks in the group.
        dtype: Of tokens and experts.
        tolerance: Largest error, relative to the largest value.
        width: Hidden size.
        device: Where the dispatcher works.
        weighted_before: Whether the experts apply the weights, instead of the dispatcher.
        rounding: What happens to tokens and to the gradients of outputs on their way to the experts. Results are then
            those of rounded tokens and gradients, to the tolerance, and near those of unrounded ones.
    """
    local = EXPERTS // world_size
    first = rank * local
    data = [_Data.of(case, r, dtype, width, rounding) for r in range(world_size)]
    weights_EDD = _expert_weights(dtype, width)
    reference = [_dense(case, r, dtype, width, rounding) for r in range(world_size)]

    own = _Data.of(case, rank, dtype, width).on(device).with_leaves()
    own_weights = weights_EDD[first : first + local].clone().to(device).requires_grad_()
    dispatcher = make(EXPERTS, alignment)
    dispatched = dispatcher.dispatch(own.x, own.plan())
    _check_structure(dispatched, data, first, local, alignment)
    y = torch.tanh(_multiply(dispatched.rows_RD, own_weights, dispatched.offsets_e))
    if weighted_before:
        assert dispatched.weights_R is not None
        y = (y * dispatched.weights_R[:, None]).to(dtype)
        dispatched = dispatched._replace(weights_R=None)
    out = dispatcher.combine(y, dispatched)
    assert out.shape == own.x.shape
    assert out.dtype == dtype
    (out * own.grad_out).sum().backward()

    expected = reference[rank]
    _assert_near(out, expected.out, tolerance, "output")
    _assert_near(own.x.grad, expected.grad_x, tolerance, "gradient of the input")
    _assert_near(own.weights.grad, expected.grad_weights, tolerance, "gradient of the routing weights")
    summed = torch.stack([r.grad_experts for r in reference]).sum(dim=0)[first : first + local]
    _assert_near(own_weights.grad, summed, tolerance, "gradient of the experts")
    if rounding is not None:
        exact = _dense(case, rank, dtype, width)
        for value, unrounded, what in (
            (out, exact.out, "output"),
            (own.x.grad, exact.grad_x, "gradient of the input"),
            (own.weights.grad, exact.grad_weights, "gradient of the routing weights"),
        ):
            _assert_quiet(value, unrounded, what)


def check_exact_on_integers(
    make: Callable[[int, int], TokenDispatcher],
    alignment: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    dtype: torch.dtype = torch.float32,
    width: int = WIDTH,
    device: str = "cpu",
) -> None:
    """With small integers no rounding happens, so that all must be exact whatever the order of the sums is."""
    indices = _random(rank).to(device)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-4, 5, (32, width), generator=generator).to(device, dtype).requires_grad_()
    weights = torch.randint(1, 4, (32, TOP_K), generator=generator).float().to(device).requires_grad_()
    grad_out = torch.randint(-1, 2, (32, width), generator=generator).to(device, dtype)
    dispatcher = make(EXPERTS, alignment)
    scores = torch.zeros(32, EXPERTS, device=device)
    dispatched = dispatcher.dispatch(x, RoutingPlan(indices, weights, scores, all_valid=True))
    local = EXPERTS // world_size
    # Expert e multiplies by e + 1.
    factors = torch.arange(rank * local, (rank + 1) * local, device=device).to(dtype) + 1
    sizes = dispatched.offsets_e.diff(prepend=dispatched.offsets_e.new_zeros(1)).long()
    out = dispatcher.combine(dispatched.rows_RD * factors.repeat_interleave(sizes)[:, None], dispatched)
    out.backward(grad_out)
    share = ((indices + 1) * weights.detach()).sum(dim=1, keepdim=True).to(dtype)
    assert torch.equal(out, x.detach() * share), "output"
    assert torch.equal(_grad(x), grad_out * share), "gradient of the input"
    dots = (x.detach().float() * grad_out.float()).sum(dim=1, keepdim=True)
    assert torch.equal(_grad(weights), (indices + 1) * dots), "gradient of the routing weights"


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


class _Data(NamedTuple):
    x: Tensor
    indices: Tensor
    weights: Tensor
    grad_out: Tensor

    @classmethod
    def of(cls, case: Case, rank: int, dtype: torch.dtype, width: int, rounding: Rounding | None = None) -> "_Data":
        indices = case.indices_of(rank)
        tokens = indices.shape[0]
        generator = torch.Generator().manual_seed(rank)
        accurate = torch.promote_types(dtype, torch.float32)
        x = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype)
        weights = (0.1 + torch.rand(tokens, TOP_K, generator=generator, dtype=torch.float64)).to(accurate)
        grad_out = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype)
        if rounding is not None:
            x, grad_out = rounding(x), rounding(grad_out)
        return cls(x, indices, weights.where(indices >= 0, 0.0), grad_out)

    def on(self, device: str) -> "_Data":
        return _Data(*(tensor.to(device) for tensor in self))

    def with_leaves(self) -> "_Data":
        return self._replace(x=self.x.clone().requires_grad_(), weights=self.weights.clone().requires_grad_())

    def plan(self) -> RoutingPlan:
        all_valid = self.indices.numel() > 0 and bool((self.indices >= 0).all())
        return RoutingPlan(self.indices, self.weights, self.weights.new_zeros(len(self.x), EXPERTS), all_valid)


class _Reference(NamedTuple):
    out: Tensor
    grad_x: Tensor
    grad_weights: Tensor
    grad_experts: Tensor


@cache
def _expert_weights(dtype: torch.dtype, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(EXPERTS, width, width, generator=generator, dtype=torch.float64)
    return (weights * 1.2 / width**0.5).to(dtype)


@cache
def _dense(case: Case, rank: int, dtype: torch.dtype, width: int, rounding: Rounding | None = None) -> _Reference:
    """Every expert on every token in float64, masked."""
    data, weights_EDD = _Data.of(case, rank, dtype, width, rounding), _expert_weights(dtype, width)
    x = data.x.double().clone().requires_grad_()
    weights = data.weights.double().clone().requires_grad_()
    experts = weights_EDD.double().clone().requires_grad_()
    chosen_TKE = torch.nn.functional.one_hot(data.indices % (EXPERTS + 1), EXPERTS + 1)[..., :EXPERTS].double()
    y_TED = torch.tanh(torch.einsum("td,edf->tef", x, experts))
    out = torch.einsum("tk,tke,ted->td", weights, chosen_TKE, y_TED)
    gradients = torch.autograd.grad((out * data.grad_out.double()).sum(), (x, weights, experts))
    return _Reference(out.detach(), *gradients)


def _multiply(rows_RD: Tensor, weights_eDD: Tensor, offsets_e: Tensor) -> Tensor:
    ends = offsets_e.tolist()
    groups = [rows_RD[start:end] @ w for start, end, w in zip([0, *ends[:-1]], ends, weights_eDD, strict=True)]
    return torch.cat(groups)


def _check_structure(dispatched: Dispatched, data: list[_Data], first: int, local: int, alignment: int) -> None:
    assert dispatched.weights_R is not None
    rows, weights = dispatched.rows_RD.detach().cpu(), dispatched.weights_R.detach().cpu()
    offsets = dispatched.offsets_e.cpu()
    assert offsets.dtype == torch.int32
    assert offsets.shape == (local,)
    assert offsets[-1] == rows.shape[0] == weights.shape[0]
    start = 0
    for e, end in enumerate(offsets.tolist()):
        assert end >= start, "offsets decrease"
        assert (end - start) % alignment == 0, "a group is not padded to the alignment"
        group_rows, group_weights = rows[start:end], weights[start:end]
        real = group_weights != 0  # routing weights of this file are never 0
        assert not group_rows[~real].any(), "padding is not zero"
        wanted_rows, wanted_weights = [], []
        for d in data:
            token, choice = (d.indices == first + e).nonzero(as_tuple=True)
            wanted_rows.append(d.x[token])
            wanted_weights.append(d.weights[token, choice])
        _assert_same_rows(
            torch.cat([group_rows[real].double(), group_weights[real, None].double()], dim=1),
            torch.cat([torch.cat(wanted_rows).double(), torch.cat(wanted_weights)[:, None].double()], dim=1),
        )
        start = end


def _assert_same_rows(left: Tensor, right: Tensor) -> None:
    """Equal as sets of rows; the order within a group is free."""
    assert sorted(left.tolist()) == sorted(right.tolist())


def _assert_near(value: Tensor | None, expected: Tensor, tolerance: float, what: str) -> None:
    assert value is not None, what
    assert value.shape == expected.shape, what
    value = value.cpu()
    assert value.isfinite().all(), what
    if expected.numel():
        error = (value.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
        assert error <= tolerance, f"{what}: {error:.2e}"


def _assert_quiet(value: Tensor | None, exact: Tensor, what: str) -> None:
    assert value is not None, what
    signal, noise = exact.pow(2).sum(), (value.cpu().double() - exact).pow(2).sum()
    if signal > 0:
        decibels = 10 * (signal / noise).log10().item()
        assert decibels >= LEAST_SQNR, f"{what}: {decibels:.1f} dB"
        assert decibels < 60, f"{what}: nothing was rounded"
