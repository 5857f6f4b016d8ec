"""The head's losses and gradients; under several processes they are tested with whole models."""

import torch
import torch.nn.functional as F

from lightning_moe.models.head import Head
from tests.tensors import grad


def test_losses_of_several_predictions() -> None:
    torch.manual_seed(0)
    head = Head(8, 13, 0.5).double()
    hidden = [torch.randn(5, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    labels = [torch.randint(0, 13, (5,)) for _ in range(2)]
    labels[1][2] = -100
    results = head.cross_entropies(hidden, labels, predictions=True)
    assert [result.num_tokens.item() for result in results] == [5, 4]
    (results[0].loss + 0.3 * results[1].loss).backward()
    found = [grad(head.weight), *(grad(one) for one in hidden)]

    expected = [
        F.cross_entropy(head(x), y, ignore_index=-100, reduction="sum") for x, y in zip(hidden, labels, strict=True)
    ]
    wanted = torch.autograd.grad(expected[0] + 0.3 * expected[1], [head.weight, *hidden])
    for result, loss, x in zip(results, expected, hidden, strict=True):
        torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=0)
        assert result.predictions_T is not None
        assert torch.equal(result.predictions_T, head(x).argmax(dim=-1))
    for actual, value in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, value, rtol=1e-12, atol=1e-14)
