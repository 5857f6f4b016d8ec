"""Recomputation repeats what it says and nothing else; compilation makes graphs without breaks."""

import copy
from collections import Counter
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from lightning_moe.models.deepseek_v3 import DeepSeekV3Model
from lightning_moe.moe.router import Router, RoutingPlan
from lightning_moe.strategies.regions import ActivationCheckpointing, _recomputed, apply_to_regions
from tests.models.test_module import CONFIG, SEQUENCE
from tests.strategies import processes
from tests.strategies.training import train


def gradients_and_calls(mode: ActivationCheckpointing) -> tuple[dict[str, Tensor], Counter[str], list[Tensor]]:
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = DeepSeekV3Model(CONFIG).double()
    model.init_weights(3)
    calls: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    for _, block in model.blocks():
        block.attend = counted("attend", block.attend)
    layers: Any = model.moe_layers()
    for _, layer in layers:
        layer.router.forward = counted("route", layer.router.forward)
        layer.dispatcher.dispatch = counted("dispatch", layer.dispatcher.dispatch)
        layer.experts.compute = counted("compute", layer.experts.compute)
    apply_to_regions(model, mode, compile_regions=False)
    tokens = torch.randint(0, CONFIG.vocab_size, (2, SEQUENCE + 1))
    output = model(tokens[:, :-1], tokens[:, 1:])
    (output.loss + output.mtp_losses[0] + output.balance_loss).backward()
    return {name: cast(Tensor, p.grad) for name, p in model.named_parameters()}, calls, list(output.expert_counts)


class NoisyRouter(Router):
    """Chooses other experts each time it is asked."""

    def forward(self, x_TD: Tensor, valid_T: Tensor | None = None) -> RoutingPlan:
        noise = torch.rand(self.n_routed_experts, dtype=self.e_score_correction_bias.dtype)
        self.e_score_correction_bias.copy_(noise)
        return super().forward(x_TD, valid_T)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("none", {"attend": 3, "route": 2, "dispatch": 2, "compute": 2}),
        ("selective", {"attend": 6, "route": 2, "dispatch": 2, "compute": 4}),
        ("full", {"attend": 6, "route": 2, "dispatch": 4, "compute": 4}),
    ],
)
def test_what_is_repeated_in_backward(
    mode: ActivationCheckpointing, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_moe.models.deepseek_v3.block.Router", NoisyRouter)
    reference, _, reference_counts = gradients_and_calls("none")
    gradients, calls, counts = gradients_and_calls(mode)
    assert calls == expected
    for name, value in reference.items():
        assert torch.equal(gradients[name], value), name
    assert all(torch.equal(a, b) for a, b in zip(counts, reference_counts, strict=True))


def compiled_training(folder: Any) -> None:
    from torch._dynamo.utils import counters

    seen: list[tuple[int, int]] = []

    class Counted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            seen.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
            return result

    layout = {"expert_parallel_size": 2, "compile": True, "activation_checkpointing": "selective"}
    _, _, norms = train(
        2,
        layout,
        optimizer=lambda params: Counted(params, lr=0.5),
        steps=50,
        batch=4,
        micro_batch=2,
        double=False,
    )
    processes.save(folder / "compiled.pt", (seen, norms))


def eager_training(folder: Any) -> None:
    _, _, norms = train(2, {"expert_parallel_size": 2}, steps=50, batch=4, micro_batch=2, double=False)
    processes.save(folder / "eager.pt", norms)


def test_compiled_regions_have_no_breaks_and_do_not_recompile(tmp_path: Any) -> None:
    processes.run(2, compiled_training, tmp_path)
    processes.run(2, eager_training, tmp_path)
    seen, norms = torch.load(tmp_path / "compiled.pt")
    graphs = [graphs for graphs, _ in seen]
    assert graphs[0] > 0
    assert [breaks for _, breaks in seen] == [0] * 50
    assert graphs[3:] == [graphs[3]] * 47  # routed rows change in each step
    assert norms[:5] == pytest.approx(torch.load(tmp_path / "eager.pt")[:5], rel=1e-4)


class Drops(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64, dtype=torch.float64))

    def attend(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x * self.weight, 0.5)


def test_dropout_is_the_same_in_backward() -> None:
    block = Drops()
    recomputed = _recomputed(block.attend)
    x = torch.rand(8, 64, dtype=torch.float64)
    out = recomputed(x)
    torch.rand(3)  # what follows draws too
    out.sum().backward()
    assert block.weight.grad is not None
    torch.testing.assert_close(block.weight.grad, out.detach().sum(0), rtol=0, atol=1e-14)  # its weights are 1


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_copy_computes_with_its_own_weights(mode: ActivationCheckpointing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = DeepSeekV3Model(CONFIG)
    model.init_weights(3)
    apply_to_regions(model, mode, compile_regions=True)
    tokens = torch.randint(0, CONFIG.vocab_size, (2, SEQUENCE + 1))
    expected = model(tokens[:, :-1], tokens[:, 1:]).loss
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(copied(tokens[:, :-1], tokens[:, 1:]).loss, expected)
