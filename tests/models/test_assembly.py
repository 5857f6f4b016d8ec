from typing import Any

import pytest
import torch

from lightning_moe import BF16Precision
from lightning_moe.models.assembly import compute_dtype_of
from lightning_moe.strategies.expert_parallel import ExpertParallelStrategy
from tests.models.test_module import make_trainer


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, torch.float32),
        ({"precision": "bf16-mixed"}, torch.bfloat16),
        ({"precision": "bf16-true"}, torch.bfloat16),
        ({"precision": "64-true"}, torch.float64),
        ({"plugins": [BF16Precision()]}, torch.bfloat16),
        ({"strategy": ExpertParallelStrategy()}, torch.float32),
        ({"strategy": ExpertParallelStrategy(compute_dtype="bfloat16")}, torch.bfloat16),
        ({"strategy": ExpertParallelStrategy(compute_dtype="float32"), "plugins": [BF16Precision()]}, torch.float32),
        ({"strategy": ExpertParallelStrategy(), "plugins": [BF16Precision()]}, torch.bfloat16),
    ],
)
def test_compute_dtype(settings: dict[str, Any], expected: torch.dtype) -> None:
    assert compute_dtype_of(make_trainer(**settings).strategy) == expected
    assert torch.get_default_dtype() == torch.float32
