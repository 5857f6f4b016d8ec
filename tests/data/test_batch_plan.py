from math import inf, nan
from typing import Any

import pytest

from lightning_moe.data.batch_plan import BatchPlan, Phase


def test_one_size() -> None:
    plan = BatchPlan(16, 256)
    assert plan.phases == (Phase(0, None, 0, 16),)
    assert plan.samples_before(10) == 160
    assert [plan.total_steps(tokens) for tokens in (1, 4096, 4097, 10**6)] == [1, 1, 2, 245]


def test_steps_in_tokens() -> None:
    # 10 tokens a sample: 4 samples until 100 tokens are seen, 8 until 250, then 16
    plan = BatchPlan({0: 4, 100: 8, 250: 16}, 10)
    assert plan.phases == (Phase(0, 3, 0, 4), Phase(3, 5, 12, 8), Phase(5, None, 28, 16))
    assert [plan.samples_before(step) for step in range(8)] == [0, 4, 8, 12, 20, 28, 44, 60]
    assert [plan.total_steps(tokens) for tokens in (1, 120, 121, 280, 281, 440)] == [1, 3, 4, 5, 6, 6]
    assert plan.micro_batches_before(6, samples_per_micro_batch=4) == 3 * 1 + 2 * 2 + 1 * 4


@pytest.mark.parametrize("steps", [{0: 3, 50: 5, 51: 7, 400: 2, 1000: 11}, {0: 1}, {0: 4, 1: 8}, {0: 2, 30: 2, 90: 4}])
def test_agrees_with_a_loop_over_the_steps(steps: dict[float, int]) -> None:
    plan, length, samples = BatchPlan(steps, 10), 10, 0
    for step in range(200):
        size = steps[max(token for token in steps if token <= samples * length)]
        assert plan.phase_at(step).batch_size == size
        assert plan.samples_before(step) == samples
        assert plan.total_steps(samples * length + 1) == step + 1
        assert plan.total_steps((samples + size) * length) == step + 1
        samples += size


def test_the_paper_sized_ramp_has_few_phases() -> None:
    steps = {0: 3072, **{(index * 469e9) / 48: 3072 + 256 * index for index in range(1, 49)}}
    plan = BatchPlan(steps, 4096)
    assert len(plan.phases) == 49
    assert plan.phases[-1].batch_size == 15360
    total = plan.total_steps(int(14.8e12))
    assert plan.samples_before(total) * 4096 >= 14.8e12 > plan.samples_before(total - 1) * 4096


def test_continues_from_another_plan() -> None:
    plan = BatchPlan({0: 4, 100: 8}, 10, first_step=2, first_sample=6)
    assert plan.phases == (Phase(2, 3, 6, 4), Phase(3, None, 10, 8))
    assert plan.samples_before(2) == 6


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, "not a positive number"),
        (2.5, "not a positive number"),
        ({100: 4}, "begin with token 0"),
        ({}, "begin with token 0"),
        ({0: 4, -5: 3}, "token -5 is negative or not finite"),
        ({0: 4, inf: 3}, r"global_batch_size: token inf is negative or not finite; .*such as \{0: 16, 1e6: 32\}"),
        ({0: 4, nan: 3}, "global_batch_size: token nan is negative or not finite"),
        (inf, "global_batch_size: inf is not a positive number of sequences, such as 16"),
        ({0: 4, 100: nan}, "global_batch_size: nan is not a positive number"),
        ("16", "global_batch_size: '16' is not a positive number"),
    ],
)
def test_bad_sizes(size: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchPlan(size, 10)
