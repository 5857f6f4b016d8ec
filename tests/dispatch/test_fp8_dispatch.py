"""Dispatchers that send tokens and gradients of outputs in eight bits, on processes, and on DeepEP's stand-ins."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lightning_moe
from lightning_moe.cli import MoECLI
from lightning_moe.dispatch import all_to_all
from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.base import TokenDispatcher
from lightning_moe.dispatch.deep_ep import fp8
from lightning_moe.dispatch.deep_ep.dispatcher import DeepEPDispatcher
from lightning_moe.dispatch.fp8_rows import row_bytes
from lightning_moe.moe.router import RoutingPlan
from lightning_moe.precision.quantisation import quantise
from tests.callbacks.standins import arguments
from tests.dispatch import deep_ep_standin, test_deep_ep
from tests.dispatch.deep_ep_standin.shared import CALLS
from tests.dispatch.groups import check_contract, join
from tests.dispatch.test_deep_ep import model_gradients
from tests.dispatch.test_groups import shared
from tests.strategies import processes

WIDTH, DEEP_EP_WIDTH, EXPERTS, TOP_K = 128, 256, 8, 2
ALL_TO_ALL_FP8 = partial(AllToAllDispatcher, fp8_dispatch=True)
DEEP_EP_FP8 = partial(DeepEPDispatcher, fp8_dispatch=True)


def rounding(x: Tensor) -> Tensor:
    """What the format does, by the emulation of low-precision multiplications."""
    return quantise(x, (1, 128), "rceil")


def keep_contract(generations: tuple[str, ...]) -> None:
    join()
    check = partial(check_contract, rounding=rounding)
    make, _ = shared(AllToAllDispatcher, fp8_dispatch=True)
    check(make, dtype=torch.float64, tolerance=1e-12, width=WIDTH, alignments=(1, 16, 32))
    check(make, dtype=torch.bfloat16, tolerance=3e-2, width=WIDTH, alignments=(16, 32))
    for generation in generations:
        for asynchronous in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                deep_ep_standin.install(patch, generation)
                make, made = shared(DeepEPDispatcher, fp8_dispatch=True, asynchronous=asynchronous)
                alignments = (1, 128) if asynchronous else (16, 32)
                check(make, dtype=torch.bfloat16, tolerance=3e-2, width=DEEP_EP_WIDTH, alignments=alignments)
                for dispatcher in made.values():
                    dispatcher.close()


@pytest.mark.parametrize(("world_size", "generations"), [(1, ("V2",)), (2, ("V1", "V2"))])
def test_contract_with_rounded_tokens_and_gradients(world_size: int, generations: tuple[str, ...]) -> None:
    processes.run(world_size, keep_contract, generations)


Make = Callable[[bool], TokenDispatcher]


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def tokens(dtype: torch.dtype, width: int, count: int = 12) -> tuple[Tensor, RoutingPlan]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(count, width, generator=generator).to(dtype).requires_grad_()
    indices = torch.rand(count, EXPERTS, generator=generator).topk(TOP_K).indices
    weights = torch.rand(count, TOP_K, generator=generator).requires_grad_()
    return x, RoutingPlan(indices, weights, torch.zeros(count, EXPERTS), all_valid=True)


def gradients_travel_as_they_should(make: Make, dtype: torch.dtype, width: int) -> None:
    x, plan = tokens(dtype, width)
    results: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for eight_bits in (False, True):
        x.grad = None
        dispatcher = make(eight_bits)
        dispatched = dispatcher.dispatch(x, plan)
        assert dispatched.weights_R is not None
        order = dispatched.weights_R.argsort()
        # The same whatever the order of rows is, and what no rounding to three bits would leave
        y = dispatched.weights_R.detach()[:, None].expand(-1, width).to(dtype).contiguous().requires_grad_()
        out = dispatcher.combine(y, dispatched._replace(weights_R=None))
        out.backward(torch.linspace(-3, 3, x.numel()).view_as(x).to(dtype).sin())
        grad_rows = dispatched.weights_R.detach()[:, None] * torch.linspace(-1, 1, width)
        dispatched.rows_RD.backward(grad_rows.to(dtype))
        assert y.grad is not None
        assert x.grad is not None
        results.append((dispatched.rows_RD.detach()[order], out.detach(), y.grad[order], x.grad))
        dispatcher.close()
    (rows, out, grad_y, grad_x), (rows_8, out_8, grad_y_8, grad_x_8) = results
    assert torch.equal(rows_8, rounding(rows))
    assert not torch.equal(rows_8, rows)
    assert torch.equal(out_8, out)
    assert torch.equal(grad_y_8, rounding(grad_y))
    assert not torch.equal(grad_y_8, grad_y)
    assert torch.equal(grad_x_8, grad_x)


def what_is_not_finite_is_seen(make: Make, dtype: torch.dtype, width: int) -> None:
    x, plan = tokens(dtype, width)
    dispatcher = make(True)
    with torch.no_grad():
        x[2, 3], x[5, width - 1], x[7] = float("nan"), float("inf"), torch.finfo(dtype).max
    dispatched = dispatcher.dispatch(x, plan)
    rows = dispatched.rows_RD.detach()
    tiles = rows.unflatten(1, (-1, 128)).isnan().sum(dim=2)
    assert sorted(set(tiles.flatten().tolist())) == [0, 128]
    assert not rows.isinf().any()
    bad = torch.tensor([tiles.bool().any(dim=1).sum().item()])
    dist.all_reduce(bad)
    assert bad.item() == 2 * TOP_K * dist.get_world_size()
    grad = torch.ones_like(x)
    grad[4, 0] = float("nan")
    y = torch.zeros_like(rows, requires_grad=True)
    dispatcher.combine(y, dispatched._replace(weights_R=None)).backward(grad)
    assert y.grad is not None
    bad = y.grad.isnan().sum()
    dist.all_reduce(bad)
    assert bad.item() == 128 * TOP_K * dist.get_world_size()
    dispatcher.close()


def rows_come_again(make: Make, dtype: torch.dtype, width: int) -> None:
    x, plan = tokens(dtype, width)
    dispatcher = make(True)
    dispatched = dispatcher.dispatch(x, plan)
    rows = dispatched.rows_RD.detach().clone()
    assert dispatched.make_rows_again is not None
    with torch.no_grad():
        x.zero_()
        dispatched.rows_RD.zero_()
        assert torch.equal(dispatched.make_rows_again(), rows)
        assert dispatcher.dispatch(x, plan).make_rows_again is None
    dispatcher.close()


def without_the_option_nothing_is_rounded(make: Make, dtype: torch.dtype, width: int) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("rows were rounded")

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((all_to_all, "pack_rows"), (fp8, "round_rows")):
            patch.setattr(module, name, never)
        x, plan = tokens(dtype, width)
        dispatcher = make(False)
        dispatched = dispatcher.dispatch(x, plan)
        dispatcher.combine(dispatched.rows_RD * 2, dispatched).float().sum().backward()
        assert x.grad is not None
        with pytest.raises(AssertionError, match="rows were rounded"):
            make(True).dispatch(x, plan)
        dispatcher.close()


CHECKS: list[Callable[[Make, torch.dtype, int], None]] = [
    gradients_travel_as_they_should,
    what_is_not_finite_is_seen,
    rows_come_again,
    without_the_option_nothing_is_rounded,
]


def run_checks(generation: str | None) -> None:
    join()
    if generation is None:
        kinds: list[tuple[Any, torch.dtype, int]] = [
            (AllToAllDispatcher, dtype, WIDTH) for dtype in (torch.float64, torch.float32, torch.bfloat16)
        ]
    else:
        kinds = [(DeepEPDispatcher, torch.bfloat16, DEEP_EP_WIDTH)]
    for kind, dtype, width in kinds:
        for check in CHECKS:
            with pytest.MonkeyPatch.context() as patch:
                if generation is not None:
                    deep_ep_standin.install(patch, generation)
                try:
                    check(lambda eight_bits, kind=kind: kind(EXPERTS, world(), fp8_dispatch=eight_bits), dtype, width)  # type: ignore[misc]
                except Exception as error:
                    raise AssertionError(f"{check.__name__}, {dtype}: {error}") from error


@pytest.mark.parametrize("generation", [None, *deep_ep_standin.GENERATIONS])
def test_on_two_processes(generation: str | None) -> None:
    processes.run(2, run_checks, generation)


def count_bytes() -> None:
    join()
    sent: list[tuple[torch.dtype, int, int]] = []
    real = dist.all_to_all_single

    def counted(output: Tensor, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        if rows.dim() == 2 and rows.shape[1] > TOP_K:  # neither counts nor routing weights
            sent.append((rows.dtype, rows.shape[1], rows.nbytes))
        return real(output, rows, *args, **kwargs)

    amounts = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        for eight_bits in (False, True):
            x, plan = tokens(torch.bfloat16, DEEP_EP_WIDTH)
            dispatcher = AllToAllDispatcher(EXPERTS, world(), fp8_dispatch=eight_bits)
            sent.clear()
            dispatched = dispatcher.dispatch(x, plan)
            out = dispatcher.combine(dispatched.rows_RD, dispatched._replace(weights_R=None))
            out.sum().backward()
            amounts[eight_bits] = list(sent)
    bfloat16 = (torch.bfloat16, DEEP_EP_WIDTH)
    in_fp8 = (torch.uint8, row_bytes(DEEP_EP_WIDTH))
    assert [(dtype, width) for dtype, width, _ in amounts[False]] == [bfloat16] * 4
    # Dispatch, combine, and then the backward of combine and of dispatch
    assert [(dtype, width) for dtype, width, _ in amounts[True]] == [in_fp8, bfloat16, in_fp8, bfloat16]
    for part, share in enumerate((33 / 64, 1, 33 / 64, 1)):
        assert amounts[True][part][2] == share * amounts[False][part][2] > 0


def test_half_of_the_bytes_leave_in_one_collective() -> None:
    processes.run(2, count_bytes)


def recompute(generation: str | None) -> None:
    join()
    patch = pytest.MonkeyPatch()
    dispatcher: Any = ALL_TO_ALL_FP8
    if generation is not None:
        deep_ep_standin.install(patch, generation)
        dispatcher = DEEP_EP_FP8
    in_bfloat16, _ = model_gradients("none", "all_to_all")
    torch.use_deterministic_algorithms(True)  # with V2 as a stand-in, too, rows arrive in one order then
    kept, _ = model_gradients("none", dispatcher)
    assert kept.keys() == in_bfloat16.keys()
    for name, value in kept.items():
        if "experts" in name and "shared" not in name:
            relative = ((value - in_bfloat16[name]).norm() / in_bfloat16[name].norm()).item()
            assert 1e-3 < relative < 0.2, f"{name}: {relative:.1e}"
    layers = 2  # one block and one of multi-token prediction
    for mode, repeated in (("selective", 0), ("full", layers)):
        gradients, calls = model_gradients(mode, dispatcher)
        assert gradients.keys() == kept.keys()
        for name, value in kept.items():
            assert torch.equal(gradients[name], value), f"{mode}, {name}"
        if generation is not None:
            expected = {"make": 1, "dispatch": layers + repeated, "combine": 2 * layers, "cached dispatch": layers}
            assert calls == expected, mode
    for train_only in ("router", "experts", "embed"):
        first, _ = model_gradients("none", dispatcher, train_only=train_only)
        again, _ = model_gradients("full", dispatcher, train_only=train_only)
        for name, value in first.items():
            assert torch.equal(again[name], value), f"only {train_only}, {name}"
    torch.use_deterministic_algorithms(False)
    if generation is not None:
        # Without deterministic mode V2's rows are in another order when the region is computed again.
        gradients, _ = model_gradients("full", dispatcher)
        test_deep_ep.assert_close(gradients, kept, 5e-2)
        patch.setattr(test_deep_ep, "DeepEPDispatcher", DEEP_EP_FP8)
        for check in (
            test_deep_ep.no_handle_outlives_backward,
            test_deep_ep.backward_can_be_repeated,
            test_deep_ep.buffers_are_closed_and_grow,
        ):
            check(generation)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, CALLS)
    assert all(calls == CALLS for calls in everyone), "the ranks made different calls"
    patch.undo()


@pytest.mark.parametrize("generation", [None, *deep_ep_standin.GENERATIONS])
def test_recomputation_gives_the_same_gradients(generation: str | None) -> None:
    processes.run(2, recompute, generation)


def refuse_sizes() -> None:
    join()
    message = "hidden_size is 144, but fp8_dispatch needs a multiple of 128, as in 128 or 256; fp8_dispatch: false"
    with pytest.raises(ValueError, match=message):
        ALL_TO_ALL_FP8(EXPERTS, world()).prepare(144, TOP_K)
    AllToAllDispatcher(EXPERTS, world()).prepare(144, TOP_K)
    ALL_TO_ALL_FP8(EXPERTS, world()).prepare(256, TOP_K)
    with pytest.MonkeyPatch.context() as patch:
        deep_ep_standin.install(patch, "V1")
        with pytest.raises(ValueError, match=message):
            DEEP_EP_FP8(EXPERTS, world()).prepare(144, TOP_K)
        DeepEPDispatcher(EXPERTS, world()).prepare(144, TOP_K)
        DEEP_EP_FP8(EXPERTS, world()).prepare(256, TOP_K)


def test_hidden_sizes_are_checked_before_training() -> None:
    processes.run(2, refuse_sizes)


@pytest.mark.parametrize("name", ["AllToAllDispatcher", "DeepEPDispatcher"])
def test_in_yaml_and_on_the_command_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 8)
    file = tmp_path / "more.yaml"
    file.write_text(
        f"""
trainer:
  strategy:
    class_path: lightning_moe.ExpertParallelStrategy
    init_args:
      dispatcher: {{class_path: lightning_moe.{name}, init_args: {{fp8_dispatch: true}}}}
"""
    )
    in_file = [f"--config={file}"]
    by_class = ["--trainer.strategy=lightning_moe.ExpertParallelStrategy"]
    by_class.append(f"--trainer.strategy.dispatcher=lightning_moe.{name}")
    for given, expected in (
        (in_file, True),
        ([*in_file, "--trainer.strategy.dispatcher.fp8_dispatch=false"], False),
        (by_class, False),
        ([*by_class, "--trainer.strategy.dispatcher.fp8_dispatch=true"], True),
    ):
        cli = MoECLI(args=[*arguments(tmp_path), *given], run=False)
        strategy = cli.trainer.strategy
        assert isinstance(strategy, lightning_moe.ExpertParallelStrategy)
        make: Any = strategy.dispatcher
        dispatcher = make(256, SimpleNamespace(size=lambda: 8), 32)
        assert type(dispatcher).__name__ == name
        assert (dispatcher.alignment, dispatcher.fp8_dispatch) == (32, expected)
