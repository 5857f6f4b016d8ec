"""Gradients, norms and balancing do not depend on the layout of processes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_moe import DeepSeekV3
from lightning_moe.models.base import MoEModel
from lightning_moe.strategies.gradients import skip_step_unless
from tests.strategies import processes
from tests.strategies.training import train_and_keep

LAYOUTS: dict[int, list[dict[str, Any] | None]] = {
    1: [{}, {"activation_checkpointing": "selective"}, {"activation_checkpointing": "full"}],
    2: [
        {"expert_parallel_size": 1},
        {"expert_parallel_size": 2},
        {"expert_parallel_size": 2, "reduce_every_micro_batch": False},
        {"expert_parallel_size": 2, "activation_checkpointing": "selective"},
        {"expert_parallel_size": 2, "activation_checkpointing": "full"},
    ],
    4: [
        {"expert_parallel_size": 1},
        {"expert_parallel_size": 2},
        {"expert_parallel_size": 4},
        {"expert_parallel_size": 2, "data_parallel_replicate_size": 2},
        {"expert_parallel_size": 1, "data_parallel_replicate_size": 4},
    ],
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], list[float]]:
    folder = tmp_path_factory.mktemp("reference")
    processes.run(1, train_and_keep, 1, [None], folder, {})
    return torch.load(folder / "1-0.pt")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_two_steps_equal_those_of_one_process(world_size: int, reference: Any, tmp_path: Path) -> None:
    expected, expected_norms = reference
    processes.run(world_size, train_and_keep, world_size, LAYOUTS[world_size], tmp_path, {})
    for number, layout in enumerate(LAYOUTS[world_size]):
        weights, norms = torch.load(tmp_path / f"{world_size}-{number}.pt")
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-10, msg=f"{name} with {layout}")
        assert norms == pytest.approx(expected_norms, rel=1e-10), layout
        assert len(norms) == 2
    assert any("e_score_correction_bias" in name and value.abs().max() > 0 for name, value in expected.items())


def test_clipping_uses_one_norm_on_all_ranks(tmp_path: Path) -> None:
    processes.run(1, train_and_keep, 1, [None], tmp_path, {"clip": 0.1})
    processes.run(2, train_and_keep, 2, [{"expert_parallel_size": 2}], tmp_path, {"clip": 0.1})
    expected, expected_norms = torch.load(tmp_path / "1-0.pt")
    weights, norms = torch.load(tmp_path / "2-0.pt")
    assert expected_norms[0] > 0.1
    assert norms == pytest.approx(expected_norms, rel=1e-10)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-10, msg=name)


class FrozenExperts(DeepSeekV3):
    """Trains all but the routed experts."""

    def build_model(self) -> MoEModel:
        model = super().build_model()
        for _, layer in model.moe_layers():
            layer.experts.requires_grad_(False)
        return model


def test_frozen_experts_stay_frozen_when_they_are_spread(tmp_path: Path) -> None:
    options = {"module": FrozenExperts}
    processes.run(1, train_and_keep, 1, [None], tmp_path, options)
    processes.run(2, train_and_keep, 2, [{"expert_parallel_size": 2}], tmp_path, options)
    expected, _ = torch.load(tmp_path / "1-0.pt")
    weights, _ = torch.load(tmp_path / "2-0.pt")
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_first_step_leaves_no_momentum(fused: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=fused)
    for gradient in (float("nan"), 1.0):
        dirty = [torch.full((1000,), float("nan")) for _ in range(20)]
        del dirty
        parameter.grad = torch.full((1000,), gradient)
        skip_step_unless(torch.tensor(gradient == 1.0), optimizer)
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((1000,), 0.9))
