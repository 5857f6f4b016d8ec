import torch
from torch import nn

from lightning_moe.metrics import TokenMean


def test_mean_over_tokens_and_not_over_batches() -> None:
    metric = TokenMean()
    metric.update(torch.tensor(10.0, requires_grad=True), torch.tensor(2))
    metric.update(torch.tensor(2.0), 4)
    assert metric.compute().item() == 2.0
    metric.reset()
    metric.update(3.0, 4)
    assert metric.compute().item() == 0.75


def test_no_tokens_is_nan() -> None:
    metric = TokenMean()
    metric.update(torch.tensor(0.0), torch.tensor(0))
    assert metric.compute().isnan()


def test_exact_after_casts_to_bfloat16() -> None:
    module = nn.Module()
    module.metric = TokenMean()
    module.metric.update(16_777_217.0, 2**53 + 1)
    module.to(torch.bfloat16).half()
    module.metric.set_dtype(torch.bfloat16)
    module.metric.update(0.0, 0)
    assert module.metric.total.dtype == torch.float64
    assert module.metric.total.item() == 16_777_217.0
    assert module.metric.tokens.item() == 2**53 + 1
    module.metric.reset()
    assert module.metric.total.dtype == torch.float64


def test_built_on_meta_starts_at_zero() -> None:
    with torch.device("meta"):
        module = nn.Module()
        module.metric = TokenMean()
    module.to_empty(device="cpu")
    module.metric.update(torch.tensor(6.0), torch.tensor(3))
    assert module.metric.compute().item() == 2.0


def test_reset_in_inference_mode_then_update_in_training() -> None:
    metric = TokenMean()
    with torch.inference_mode():
        metric.update(torch.tensor(1.0), torch.tensor(1))
        metric.reset()
        metric.update(torch.tensor(1.0), torch.tensor(1))
    metric.update(torch.tensor(5.0, requires_grad=True) * 1, torch.tensor(1))
    assert metric.compute().item() == 3.0
    assert not metric.total.requires_grad
