"""DeepEPDispatcher on stand-ins of both generations: lifetimes, recomputation, order of calls, sizes, failures."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe.dispatch.deep_ep.dispatcher import DeepEPDispatcher
from lightning_moe.models.deepseek_v3 import DeepSeekV3Model
from lightning_moe.moe.router import RoutingPlan
from lightning_moe.strategies.dispatchers import distribute_experts
from lightning_moe.strategies.mesh import Layout, MoEMesh
from lightning_moe.strategies.regions import apply_to_regions
from tests.dispatch import deep_ep_standin
from tests.dispatch.deep_ep_standin.shared import CALLS, FAIL_IN, Event
from tests.dispatch.groups import join
from tests.models.test_module import CONFIG
from tests.strategies import processes
from tests.strategies.training import train

WIDTH, EXPERTS = 256, 8


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def tokens(count: int = 12, top_k: int = 2) -> tuple[Tensor, RoutingPlan]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(count, WIDTH, generator=generator).bfloat16().requires_grad_()
    indices = torch.rand(count, EXPERTS, generator=generator).topk(top_k).indices
    weights = torch.rand(count, top_k, generator=generator).requires_grad_()
    return x, RoutingPlan(indices, weights, torch.zeros(count, EXPERTS), all_valid=True)


def forward(dispatcher: DeepEPDispatcher, x: Tensor, plan: RoutingPlan) -> Tensor:
    dispatched = dispatcher.dispatch(x, plan)
    return dispatcher.combine(dispatched.rows_RD * 2, dispatched)


def no_handle_outlives_backward(generation: str) -> None:
    dispatcher = DeepEPDispatcher(EXPERTS, world())
    for training in (True, False):
        with torch.set_grad_enabled(training):
            x, plan = tokens()
            dispatched = dispatcher.dispatch(x, plan)
            transport = dispatcher._transport
            assert transport is not None
            handles = [weakref.ref(t) for t in transport.take_apart(dispatched.state.arrival.handle)[0]]
            out = dispatcher.combine(dispatched.rows_RD * 2, dispatched)
        del dispatched
        gc.collect()
        assert len(handles) >= 3
        assert any(handle() is not None for handle in handles) == training
        if training:
            loss = out.float().sum()
            loss.backward()
            gc.collect()
            assert [handle() for handle in handles] == [None] * len(handles)  # while the loss is still here
            assert x.grad is not None
    dispatcher.close()


def backward_can_be_repeated(generation: str) -> None:
    dispatcher = DeepEPDispatcher(EXPERTS, world())
    x, plan = tokens()
    loss = forward(dispatcher, x, plan).float().sum()
    loss.backward(retain_graph=True)
    first = cast(Tensor, x.grad).clone()
    loss.backward()
    assert torch.equal(cast(Tensor, x.grad), 2 * first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    dispatcher.close()


def model_gradients(
    mode: Any, dispatcher: Any, *, train_only: str = "", dtype: torch.dtype = torch.bfloat16
) -> tuple[dict[str, Tensor], Counter[str]]:
    mesh = MoEMesh(Layout(1, dist.get_world_size(), dist.get_world_size()), "cpu")
    model = DeepSeekV3Model(replace(CONFIG, hidden_size=WIDTH)).to(dtype)
    made = distribute_experts(model, mesh, dispatcher, max_tokens=32, compute_dtype=dtype)
    model.init_weights(3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(train_only in name)
    apply_to_regions(model, mode, compile_regions=False)
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(0, CONFIG.vocab_size, (2, 17), generator=generator)
    CALLS.clear()
    output = model(ids[:, :-1], ids[:, 1:])
    (output.loss + output.mtp_losses[0]).backward()
    calls = Counter(CALLS)
    for one in made:
        one.close()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, calls


def assert_close(gradients: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert gradients.keys() == expected.keys()
    for name, value in expected.items():
        error = (gradients[name].double() - value.double()).abs().max() / value.double().abs().max().clamp(min=1e-3)
        assert error <= tolerance, f"{name}: {error:.1e}"


def recomputation_sends_what_it_says(generation: str) -> None:
    expected, _ = model_gradients("none", "all_to_all")
    assert any("router" in name and value.abs().max() > 0 for name, value in expected.items())
    layers = 2  # one block and one of multi-token prediction
    for mode, repeated in (("none", 0), ("selective", 0), ("full", layers)):
        gradients, calls = model_gradients(mode, DeepEPDispatcher)
        assert calls == {
            "make": 1,
            "dispatch": layers + repeated,
            "combine": 2 * layers,
            "cached dispatch": layers,
        }, mode
        assert_close(gradients, expected, 5e-2)


def frozen_parts_keep_the_order(generation: str) -> None:
    for train_only in ("router", "experts", "embed"):
        expected, _ = model_gradients("none", "all_to_all", train_only=train_only)
        for mode in ("none", "full"):
            gradients, _ = model_gradients(mode, DeepEPDispatcher, train_only=train_only)
            assert_close(gradients, expected, 5e-2)


def deterministic_mode_works(generation: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        first, _ = model_gradients("none", DeepEPDispatcher)
        again, _ = model_gradients("full", DeepEPDispatcher)
        assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in first.items():
        assert torch.equal(again[name], value), name


def buffers_are_closed_and_grow(generation: str) -> None:
    dispatcher = DeepEPDispatcher(EXPERTS, world())
    dispatcher.prepare(WIDTH, 2, max_tokens=16)
    CALLS.clear()
    forward(dispatcher, *tokens(16))
    forward(dispatcher, *tokens(4))
    dispatcher.prepare(WIDTH, 2, max_tokens=16)
    dispatcher.prepare(WIDTH, 2, max_tokens=8)
    assert CALLS.count("make") == 1
    dispatcher.prepare(WIDTH, 2, max_tokens=20)
    out = forward(dispatcher, *tokens(20))
    assert (CALLS.count("make"), CALLS.count("destroy")) == (2, 1)
    dispatcher.close()
    dispatcher.close()
    assert CALLS.count("destroy") == 2
    with pytest.raises(RuntimeError, match="closed before its backward pass"):
        out.float().sum().backward()
    forward(dispatcher, *tokens(20))
    if generation == "V2":
        with pytest.raises(ValueError, match="a rank has 21 tokens .* max_tokens_per_rank 20"):
            forward(dispatcher, *tokens(21))
        with pytest.raises(ValueError, match="a rank has 9 tokens .* max_tokens_per_rank 8"):
            DeepEPDispatcher(EXPERTS, world(), max_tokens_per_rank=8).prepare(WIDTH, 2, max_tokens=9)
    dispatcher.close()


def ranks_agree_on_sizes_of_their_own(generation: str) -> None:
    dispatcher = DeepEPDispatcher(EXPERTS, world())
    forward(dispatcher, *tokens(5 + 4 * dist.get_rank()))  # the stand-in compares the ranks' sizes
    forward(dispatcher, *tokens(9))
    dispatcher.close()


def an_expert_twice_in_a_row(generation: str) -> None:
    dispatcher = DeepEPDispatcher(EXPERTS, world())
    x, plan = tokens()
    indices = plan.indices_TK.clone()
    indices[3] = indices[3, 0]
    plan = plan._replace(indices_TK=indices)
    if generation == "V2":  # the kernels trap; the router's top-k chooses no expert twice
        with pytest.raises(AssertionError, match="an expert twice"):
            forward(dispatcher, x, plan)
    else:
        out = forward(dispatcher, x, plan)
        expected = 2 * x.float() * plan.weights_TK.sum(dim=1, keepdim=True)
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=1e-2)


def a_lost_peer_is_named(generation: str) -> None:
    dispatcher = DeepEPDispatcher(EXPERTS, world())
    forward(dispatcher, *tokens())
    FAIL_IN.append("dispatch")
    try:
        message = rf"in dispatch on rank {dist.get_rank()} of .* global ranks \[0, 1\].*died.*CPU recv timeout"
        with pytest.raises(RuntimeError, match=message):
            forward(dispatcher, *tokens())
    finally:
        FAIL_IN.clear()
    CALLS.clear()
    dispatcher.close()
    assert CALLS == []  # freeing would wait for the peer


def buffers_are_freed_after_an_exception_of_all(generation: str) -> None:
    dispatcher = DeepEPDispatcher(EXPERTS, world())
    forward(dispatcher, *tokens())
    CALLS.clear()
    try:
        raise ValueError("of the user")
    except ValueError:
        dispatcher.close()
    assert CALLS == ["destroy"]


def buffers_are_left_after_an_exception_of_one(generation: str) -> None:
    dispatcher = DeepEPDispatcher(EXPERTS, world())
    forward(dispatcher, *tokens())
    CALLS.clear()
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lightning_moe.dispatch.deep_ep.dispatcher._PATIENCE", 0.2)
            try:
                raise ValueError("of the user")
            except ValueError:
                dispatcher.close()
    assert CALLS == []


def only_bfloat16_moves(generation: str) -> None:
    x, plan = tokens()
    with pytest.raises(ValueError, match="moves bfloat16 tokens, and these are torch.float32"):
        forward(DeepEPDispatcher(EXPERTS, world()), x.float(), plan)


CHECKS: list[Callable[[str], None]] = [
    no_handle_outlives_backward,
    backward_can_be_repeated,
    recomputation_sends_what_it_says,
    frozen_parts_keep_the_order,
    deterministic_mode_works,
    buffers_are_closed_and_grow,
    ranks_agree_on_sizes_of_their_own,
    an_expert_twice_in_a_row,
    a_lost_peer_is_named,
    buffers_are_freed_after_an_exception_of_all,
    only_bfloat16_moves,
    buffers_are_left_after_an_exception_of_one,
]


def run_checks(generation: str) -> None:
    join()
    for check in CHECKS:
        with pytest.MonkeyPatch.context() as patch:
            deep_ep_standin.install(patch, generation)
            try:
                check(generation)
            except Exception as error:
                raise AssertionError(f"{check.__name__}: {error}") from error


@pytest.mark.parametrize("generation", deep_ep_standin.GENERATIONS)
def test_on_two_processes(generation: str) -> None:
    processes.run(2, run_checks, generation)


def train_through(path: Path) -> None:
    layout = {"expert_parallel_size": 2, "compute_dtype": "bfloat16", "activation_checkpointing": "full"}
    norms = {}
    with pytest.MonkeyPatch.context() as patch:
        deep_ep_standin.install(patch, "V1")
        for name, dispatcher in (("all_to_all", "all_to_all"), ("deep_ep", DeepEPDispatcher)):
            _, _, norms[name] = train(2, {**layout, "dispatcher": dispatcher}, steps=3, double=False)
    processes.save(path, (norms, CALLS))


def test_training_is_that_through_all_to_all_and_frees_the_buffers(tmp_path: Path) -> None:
    processes.run(2, train_through, tmp_path / "norms.pt")
    norms, calls = torch.load(tmp_path / "norms.pt")
    assert len(norms["deep_ep"]) == 3
    assert norms["deep_ep"] == pytest.approx(norms["all_to_all"], rel=2e-2)
    assert (calls[0], calls[-1], calls.count("make")) == ("make", "destroy", 1)


def test_results_of_asynchronous_calls_are_hidden_until_someone_waits() -> None:
    values, flags = torch.arange(3.0), torch.tensor([True, False])
    event = Event(values, flags, None)
    assert values.isnan().all()
    assert flags.tolist() == [False, True]
    event.current_stream_wait()
    assert values.tolist() == [0, 1, 2]
    assert flags.tolist() == [True, False]
