"""The Triton kernel equals cross-entropy in float64; run by Triton's interpreter, so that no GPU is needed."""

import pytest

from tests.triton_interpreter import run_interpreted

pytest.importorskip("triton")

_CHECK = """
import torch
from lightning_moe.losses.cross_entropy_kernel import cross_entropy_in_place

torch.manual_seed(0)
for vocabulary in (7, 1000, 4096, 9001):
    logits = torch.randn(7, vocabulary) * 3
    labels = torch.randint(0, vocabulary, (7,))
    labels[2] = -100
    logits[2, 5] = float("nan")
    logits[4, vocabulary - 1] = 50.0
    kept = labels >= 0
    exact = logits[kept].double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, labels[kept], reduction="none")
    expected.sum().backward()

    predictions = torch.empty(7, dtype=torch.int64)
    gradient = logits.clone()
    losses = cross_entropy_in_place(gradient, labels, with_gradient=True, predictions_T=predictions)
    torch.testing.assert_close(losses[kept].double(), expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(gradient[kept].double(), exact.grad, rtol=0, atol=1e-6)
    assert losses[2] == 0 and (gradient[2] == 0).all()
    assert torch.equal(predictions[kept], logits[kept].argmax(-1))

    untouched = logits.clone()
    again = cross_entropy_in_place(untouched, labels, with_gradient=False, predictions_T=None)
    assert torch.equal(again, losses)
    assert torch.equal(untouched.nan_to_num(), logits.nan_to_num())
print("equal")
"""


def test_kernel_equals_cross_entropy_in_float64() -> None:
    run_interpreted(_CHECK)
