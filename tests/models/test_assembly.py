from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_moe import BF16Precision, DeepSeekV3, MXFP8Precision
from lightning_moe.models.assembly import compute_dtype_of
from lightning_moe.strategies.expert_parallel import ExpertParallelStrategy
from tests.models.test_module import CONFIG, Rows, make_trainer


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


def test_a_model_that_was_worked_on_is_not_taken_for_a_plain_one() -> None:
    rows = DataLoader(Rows(), batch_size=2)
    for plugin, other in ((MXFP8Precision(), None), (MXFP8Precision(), BF16Precision()), (BF16Precision(), None)):
        module = DeepSeekV3(CONFIG)
        make_trainer(plugins=[plugin], max_steps=1).fit(module, rows)
        make_trainer(plugins=[plugin]).validate(module, rows, verbose=False)
        with pytest.raises(ValueError, match=f"precision plugin {type(plugin).__name__}.* but this Trainer asks for"):
            make_trainer(plugins=[other] if other else None).validate(module, rows, verbose=False)
