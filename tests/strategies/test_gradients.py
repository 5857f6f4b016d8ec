"""Gradients, norms and balancing do not depend on the layout of processes."""

from pathlib import Path
from typing import Any

import pytest
import torch

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
