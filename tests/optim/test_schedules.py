import math
from typing import Any

import pytest

from lightning_moe.optim.schedules import TokenSchedule, check_token_value, value_at

PAPER = TokenSchedule(
    warmup=25e9, decay_start=10e12, decay_end=14.3e12, final_ratio=0.1, tail={14.633e12: 7.3e-6 / 2.2e-4}
)


@pytest.mark.parametrize(
    ("tokens", "learning_rate"),
    [
        (0, 0.0),
        (5_000_000_000, 4.4e-5),  # a fifth of the warm-up
        (12_500_000_000, 1.1e-4),
        (25_000_000_000, 2.2e-4),
        (5_000_000_000_000, 2.2e-4),
        (10_000_000_000_000, 2.2e-4),
        (11_075_000_000_000, 2.2e-5 + 1.98e-4 * (2 + math.sqrt(2)) / 4),  # a quarter of the cosine
        (12_150_000_000_000, 1.21e-4),  # its middle
        (14_300_000_000_000, 2.2e-5),
        (14_633_000_000_000, 2.2e-5),  # the last step of the phase of 333B tokens
        (14_633_000_000_001, 7.3e-6),
        (14_800_000_000_000, 7.3e-6),
    ],
)
def test_phases_of_the_report(tokens: int, learning_rate: float) -> None:
    assert 2.2e-4 * PAPER.resolve(None).multiplier(tokens) == pytest.approx(learning_rate, rel=1e-12)


def test_fractions_are_of_max_tokens() -> None:
    schedule = TokenSchedule(warmup=0.1, decay_start=0.5, decay_end=0.9, final_ratio=0.2, tail={0.95: 0.05})
    resolved = schedule.resolve(1000)
    assert resolved.multiplier(50) == 0.5
    assert resolved.multiplier(100) == resolved.multiplier(500) == 1.0
    assert resolved.multiplier(700) == pytest.approx(0.6)
    assert resolved.multiplier(900) == resolved.multiplier(950) == 0.2
    assert resolved.multiplier(951) == 0.05
    assert schedule.resolve(2000).multiplier(100) == 0.5


def test_one_means_all_tokens_and_larger_numbers_are_tokens() -> None:
    resolved = TokenSchedule(warmup=0, decay_start=100, decay_end=1, final_ratio=0.5).resolve(200)
    assert (resolved.decay_start, resolved.decay_end) == (100, 200)
    assert resolved.multiplier(150) == pytest.approx(0.75)
    assert resolved.multiplier(10**9) == 0.5


def test_defaults() -> None:
    resolved = TokenSchedule().resolve(1_000_000)
    assert [resolved.multiplier(tokens) for tokens in (10_000, 20_000, 700_000)] == [0.5, 1.0, 1.0]
    assert resolved.multiplier(850_000) == pytest.approx(0.55)
    assert resolved.multiplier(1_000_000) == 0.1


def test_the_first_and_last_step_of_a_warmup() -> None:
    resolved = TokenSchedule(warmup=40, final_ratio=1.0).resolve(None)
    steps = [resolved.multiplier(10 * step) for step in (1, 2, 3, 4, 5)]
    assert steps == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_no_warmup_and_no_decay_is_constant_and_needs_no_max_tokens() -> None:
    resolved = TokenSchedule(warmup=0, final_ratio=1.0).resolve(None)
    assert [resolved.multiplier(tokens) for tokens in (1, 10**15)] == [1.0, 1.0]


def test_decay_of_zero_length_is_a_step() -> None:
    resolved = TokenSchedule(warmup=0, decay_start=100, decay_end=100, final_ratio=0.1).resolve(None)
    assert [resolved.multiplier(tokens) for tokens in (100, 101)] == [1.0, 0.1]


def test_tail_in_any_order_and_of_both_kinds() -> None:
    resolved = TokenSchedule(warmup=0, decay_start=10, decay_end=20, tail={50: 0.03, 0.3: 0.05}).resolve(100)
    assert list(resolved.tail) == [30, 50]
    assert [resolved.multiplier(tokens) for tokens in (30, 31, 50, 51)] == [0.1, 0.05, 0.05, 0.03]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup": -0.1}, r"schedule.warmup=-0.1: must be a finite number of at least 0"),
        ({"warmup": float("nan")}, "schedule.warmup=nan"),
        ({"final_ratio": -1.0}, "schedule.final_ratio=-1.0"),
        ({"decay_start": 0.9, "decay_end": 0.5}, r"schedule.decay_start=0.9 lies after schedule.decay_end=0.5"),
        ({"decay_start": 2e9, "decay_end": 1e9}, r"schedule.decay_start=2e\+09 lies after schedule.decay_end=1e\+09"),
        ({"warmup": 0.8}, r"schedule.warmup=0.8 lies after schedule.decay_start=0.7"),
        ({"decay_end": 0.95, "tail": {0.9: 0.1}}, r"schedule.decay_end=0.95 lies after schedule.tail\[0.9\]=0.9"),
        ({"tail": {0.9: -0.1}}, r"schedule.tail\[0.9\]=-0.1"),
        ({"tail": {"1e9": 0.1}}, r"schedule.tail\['1e9'\]='1e9': must be a finite number"),
    ],
)
def test_bad_values_fail_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenSchedule(**options)


def test_fraction_without_max_tokens() -> None:
    with pytest.raises(ValueError, match=r"schedule.warmup=0.02 is a fraction of data.max_tokens, which is not set"):
        TokenSchedule().resolve(None)


def test_contradiction_that_only_max_tokens_shows() -> None:
    schedule = TokenSchedule(warmup=2000, decay_start=0.5)
    with pytest.raises(ValueError, match=r"schedule.warmup=2000 lies after schedule.decay_start=500"):
        schedule.resolve(1000)
    assert schedule.resolve(10_000).multiplier(1000) == 0.5


def test_value_at() -> None:
    value = {10e12: 0.1, 0: 0.3}
    assert [value_at(value, tokens) for tokens in (0, 9_999_999_999_999, 10_000_000_000_000, 10**14)] == [
        0.3,
        0.3,
        0.1,
        0.1,
    ]
    assert value_at(0.25, 123) == 0.25
    with pytest.raises(ValueError, match="under key 0"):
        value_at({10: 0.1}, 5)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({10e12: 0.1}, "the value at the start of training is missing"),
        ({}, "the value at the start of training is missing"),
        ({0: 0.3, -5: 0.1}, "position -5 must be a number of tokens of at least 0"),
        ({"0": 0.3}, "position '0' must be a number of tokens"),
        ({0: 0.3, 10: -0.1}, r"mtp_loss_weight\[10\]=-0.1: must be a finite number of at least 0"),
        (-0.1, "mtp_loss_weight=-0.1: must be a finite number of at least 0"),
        (float("inf"), "mtp_loss_weight=inf"),
        (True, "mtp_loss_weight=True"),
    ],
)
def test_check_token_value(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_token_value("mtp_loss_weight", value)


def test_check_token_value_bounds() -> None:
    check_token_value("speed", {0: 0.001, 14.3e12: 0.0})
    check_token_value("offset", -1.0, minimum=None)
    with pytest.raises(ValueError, match="ratio=1.5: must be a finite number of at least 0 and at most 1"):
        check_token_value("ratio", 1.5, maximum=1.0)
