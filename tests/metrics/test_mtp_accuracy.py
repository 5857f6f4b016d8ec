import pytest
import torch
from torch import nn

from lightning_moe.metrics import MTPAccuracy, count_mtp_hits


def test_hand_values() -> None:
    metric = MTPAccuracy(depths=2)
    metric.update(torch.tensor([3, 1]), torch.tensor([4, 4]), torch.tensor([4, 2]))
    metric.update(torch.tensor([0, 0]), torch.tensor([2, 1]), torch.tensor([2, 0]))
    values = metric.compute()
    torch.testing.assert_close(values["accuracy"], torch.tensor([0.5, 0.2]))
    torch.testing.assert_close(values["acceptance"], torch.tensor([1.0, 0.4]))


def test_without_acceptance() -> None:
    metric = MTPAccuracy(depths=1)
    metric.update(torch.tensor([1]), torch.tensor([2]))
    assert {name: value.item() for name, value in metric.compute().items()} == {"accuracy": 0.5}


def test_no_positions_is_nan() -> None:
    metric = MTPAccuracy(depths=2)
    metric.update(torch.tensor([1, 0]), torch.tensor([2, 0]), torch.tensor([0, 0]))
    values = metric.compute()
    assert values["accuracy"].isnan().tolist() == [False, True]
    assert values["acceptance"].isnan().tolist() == [False, True]


def test_bad_depths() -> None:
    with pytest.raises(ValueError, match="depths=0"):
        MTPAccuracy(depths=0)


def test_counts_survive_casts() -> None:
    module = nn.Module()
    module.metric = MTPAccuracy(depths=1)
    module.metric.update(torch.tensor([257]), torch.tensor([2**53 + 1]), torch.tensor([259]))
    module.to(torch.bfloat16)
    module.metric.set_dtype(torch.bfloat16)
    states = [module.metric.correct, module.metric.total, module.metric.accepted]
    assert [state.dtype for state in states] == [torch.int64] * 3
    assert [state.item() for state in states] == [257, 2**53 + 1, 259]


def test_count_mtp_hits() -> None:
    ignore = -100
    # Tokens 10 to 15, and a target of depth k at position i is token i + k + 1
    labels = torch.tensor([[[12, ignore, ignore, 15, ignore, ignore]], [[13, 14, 15, ignore, ignore, ignore]]])
    # The main model is right everywhere but at position 2, where it expects 99
    main = torch.tensor([[11, 12, 99, 14, 15, 16]])
    mtp = torch.tensor([[[12, 99, 0, 77, 16, 11]], [[99, 14, 0, 16, 11, 12]]])
    correct, total, accepted = count_mtp_hits(main, mtp, labels)
    # Depth 1: position 0 predicts 12 (data 12, main 12), position 3 predicts 77 (data 15, main 15)
    # Depth 2: position 0 predicts 99 (data 13, main 99), 1 predicts 14 (14, 14), 2 predicts 0 (15, 15)
    assert correct.tolist() == [1, 1]
    assert total.tolist() == [2, 3]
    assert accepted.tolist() == [1, 2]
    assert {tensor.dtype for tensor in (correct, total, accepted)} == {torch.int64}
