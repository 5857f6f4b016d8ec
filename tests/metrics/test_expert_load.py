import math

import pytest
import torch
from torch import nn

from lightning_moe.metrics import ExpertLoad


def test_even_load() -> None:
    metric = ExpertLoad(num_layers=2, num_experts=4)
    metric.update(torch.full((2, 4), 5))
    values = {name: value.item() for name, value in metric.compute().items()}
    assert values == pytest.approx({"max_violation": 0.0, "max_violation_worst_layer": 0.0, "entropy": 1.0})


def test_hand_values() -> None:
    metric = ExpertLoad(num_layers=2, num_experts=4, per_layer=True)
    metric.update(torch.tensor([[4, 2, 0, 0], [8, 0, 0, 0]]))
    metric.update(torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]]))
    values = metric.compute()
    # Layer 0: loads 4, 2, 1, 1 around a mean of 2, 1.75 bits of 2; layer 1: all on one expert
    assert values["layer_max_violation"].tolist() == [1.0, 3.0]
    torch.testing.assert_close(values["layer_entropy"], torch.tensor([0.875, 0.0]))
    assert values["max_violation"].item() == 2.0
    assert values["max_violation_worst_layer"].item() == 3.0
    assert values["entropy"].item() == pytest.approx(0.4375)


def test_values_add_over_batches_as_counts() -> None:
    metric = ExpertLoad(num_layers=1, num_experts=2)
    metric.update(torch.tensor([[10, 0]]))
    metric.update(torch.tensor([[0, 10]]))
    assert metric.compute()["max_violation"].item() == 0.0
    metric.reset()
    metric.update(torch.tensor([[3, 1]]))
    assert metric.compute()["max_violation"].item() == 0.5


def test_no_tokens_is_nan() -> None:
    metric = ExpertLoad(num_layers=1, num_experts=2)
    metric.update(torch.zeros(1, 2, dtype=torch.int64))
    values = metric.compute()
    assert all(math.isnan(value) for value in values.values())


def test_counts_survive_casts() -> None:
    module = nn.Module()
    module.metric = ExpertLoad(num_layers=1, num_experts=2)
    module.metric.update(torch.tensor([[2**53 + 1, 1]]))
    module.to(torch.bfloat16).double()
    module.metric.set_dtype(torch.bfloat16)
    assert module.metric.counts.dtype == torch.int64
    assert module.metric.counts.tolist() == [[2**53 + 1, 1]]
    module.metric.reset()
    assert module.metric.counts.dtype == torch.int64
    assert "metric.counts" not in module.state_dict()


@pytest.mark.parametrize("counts", [torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 4)])
def test_bad_counts(counts: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"must be \(2, 4\) \(layers, experts\) and torch.int64"):
        ExpertLoad(num_layers=2, num_experts=4).update(counts)


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match="num_layers=0"):
        ExpertLoad(num_layers=0, num_experts=4)
    with pytest.raises(ValueError, match="num_experts=1"):
        ExpertLoad(num_layers=1, num_experts=1)
