from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_moe.losses.linear_cross_entropy import linear_cross_entropy
from tests.tensors import grad

TOKENS, WIDTH, VOCABULARY = 23, 8, 37


def draw(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[::5] = -100
    return hidden, weight, labels


def reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden = hidden.detach().double().requires_grad_()
    weight = weight.detach().double().requires_grad_()
    loss = F.cross_entropy(hidden @ weight.T, labels, ignore_index=-100, reduction="sum")
    hidden_grad, weight_grad = torch.autograd.grad(loss, (hidden, weight))
    return loss.detach(), hidden_grad, weight_grad


# 23 is prime: no chunk but 1 and 23 divides the tokens.
@pytest.mark.parametrize("chunk_tokens", [1, 4, 7, 22, 23, 100, None])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_loss_and_gradients(chunk_tokens: int | None, dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, labels = draw(dtype)
    loss, hidden_grad, weight_grad = reference(hidden, weight, labels)
    result = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens)
    result.loss.backward()
    assert result.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert result.num_tokens == 18
    assert result.num_tokens.dtype == torch.int64
    assert result.predictions_T is None
    for actual, wanted in ((result.loss, loss), (grad(hidden), hidden_grad), (grad(weight), weight_grad)):
        assert (actual.double() - wanted).abs().max() <= tolerance * wanted.abs().max()
    assert grad(hidden).dtype == grad(weight).dtype == dtype
    assert not grad(hidden)[::5].any()


def test_gradient_is_scaled_by_what_comes_from_above() -> None:
    hidden, weight, labels = draw()
    _, hidden_grad, weight_grad = reference(hidden, weight, labels)
    (linear_cross_entropy(hidden, weight, labels, chunk_tokens=4).loss * 0.3 / 18).backward()
    torch.testing.assert_close(grad(hidden), hidden_grad * 0.3 / 18, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(grad(weight), weight_grad * 0.3 / 18, rtol=1e-12, atol=1e-15)


def test_weight_used_twice_gets_both_gradients() -> None:
    hidden, weight, labels = draw()
    first = reference(hidden, weight, labels)[2]
    second = reference(hidden.flip(0), weight, labels)[2]
    losses = [linear_cross_entropy(h, weight, labels, chunk_tokens=5).loss for h in (hidden, hidden.flip(0))]
    (losses[0] + 0.5 * losses[1]).backward()
    torch.testing.assert_close(grad(weight), first + 0.5 * second, rtol=1e-12, atol=1e-14)


def test_all_ignored_is_zero_and_has_zero_gradients() -> None:
    hidden, weight, labels = draw()
    result = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), chunk_tokens=4)
    assert result.loss == 0
    assert result.num_tokens == 0
    result.loss.backward()
    assert not grad(hidden).any()
    assert not grad(weight).any()


def test_no_tokens() -> None:
    hidden, weight, labels = draw()
    result = linear_cross_entropy(hidden[:0], weight, labels[:0])
    result.loss.backward()
    assert result.loss == 0
    assert not grad(weight).any()


def test_ignored_positions_may_hold_anything() -> None:
    hidden, weight, labels = draw()
    expected = linear_cross_entropy(hidden, weight, labels).loss
    spoiled = hidden.detach().clone()
    spoiled[::5] = float("inf")
    torch.testing.assert_close(linear_cross_entropy(spoiled, weight, labels, chunk_tokens=4).loss, expected)


def test_predictions() -> None:
    hidden, weight, labels = draw()
    expected = (hidden @ weight.T).argmax(dim=-1)
    for chunk_tokens in (4, None):
        result = linear_cross_entropy(hidden, weight, labels, predictions=True, chunk_tokens=chunk_tokens)
        assert result.predictions_T is not None
        assert torch.equal(result.predictions_T, expected)
        assert not result.predictions_T.requires_grad
        result.loss.backward()
    with torch.no_grad():
        result = linear_cross_entropy(hidden, weight, labels, predictions=True)
    torch.testing.assert_close(result.predictions_T, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_loss_is_the_same_and_none_are_computed(mode: Any) -> None:
    hidden, weight, labels = draw()

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    names: list[str] = []
    with Operations():
        expected = linear_cross_entropy(hidden, weight, labels, chunk_tokens=23).loss
    assert names.count("mm") + names.count("addmm_") == 3  # logits, and both gradients
    names.clear()
    with mode(), Operations():
        result = linear_cross_entropy(hidden, weight, labels, chunk_tokens=23)
    assert torch.equal(result.loss, expected)
    assert not result.loss.requires_grad
    assert "addmm_" not in names
    assert names.count("mm") + names.count("linear") == 1


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_only_one_side_needs_a_gradient(trained: str) -> None:
    hidden, weight, labels = draw()
    _, hidden_grad, weight_grad = reference(hidden, weight, labels)
    if trained == "hidden":
        linear_cross_entropy(hidden, weight.detach(), labels, chunk_tokens=4).loss.backward()
        torch.testing.assert_close(grad(hidden), hidden_grad)
    else:
        linear_cross_entropy(hidden.detach(), weight, labels, chunk_tokens=4).loss.backward()
        torch.testing.assert_close(grad(weight), weight_grad)


def test_uniform_logits_cost_log_of_the_vocabulary() -> None:
    _, weight, labels = draw(torch.float32)
    result = linear_cross_entropy(torch.zeros(TOKENS, WIDTH), weight, labels, chunk_tokens=4)
    torch.testing.assert_close(result.loss / result.num_tokens, torch.tensor(float(VOCABULARY)).log())


def test_large_logits_stay_finite() -> None:
    hidden, weight, labels = draw(torch.float32)
    result = linear_cross_entropy(hidden * 1e4, weight, labels)
    result.loss.backward()
    assert result.loss.isfinite()
    assert grad(hidden).isfinite().all()


def test_autocast_gives_the_loss_of_bfloat16_in_float32() -> None:
    hidden, weight, labels = draw(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = linear_cross_entropy(hidden, weight, labels)
    expected = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels)
    assert result.loss.dtype == torch.float32
    assert torch.equal(result.loss, expected.loss)
    result.loss.backward()
    assert grad(hidden).dtype == grad(weight).dtype == torch.float32


def test_weight_gradient_of_many_chunks_is_summed_in_float32() -> None:
    # 4096 times the same small gradient: a bfloat16 sum stops growing at 256 of them.
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.zeros(4096, dtype=torch.int64), chunk_tokens=1).loss.backward()
    assert grad(weight).flatten().tolist() == [-2048.0, 2048.0]


@pytest.mark.parametrize("factors", [(0.5, 0.5), (1.0, 0.5, 1.0), (1.0, 1.0), (0.25, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_backward_again_through_a_retained_graph(factors: tuple[float, ...], dtype: torch.dtype) -> None:
    hidden, weight, labels = draw(dtype)
    _, hidden_grad, weight_grad = reference(hidden, weight, labels)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=4).loss
    for i, factor in enumerate(factors):
        last = i == len(factors) - 1
        grads = torch.autograd.grad(loss, (hidden, weight), torch.tensor(factor, dtype=loss.dtype), not last)
        for actual, wanted in zip(grads, (hidden_grad, weight_grad), strict=True):
            tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
            assert (actual.double() - factor * wanted).abs().max() <= tolerance * wanted.abs().max()
            actual.fill_(float("nan"))  # what was given away is the receiver's
    with pytest.raises(RuntimeError, match="gives them away once"):
        loss.backward()


def test_retained_graph_adds_up_in_the_gradients() -> None:
    hidden, weight, labels = draw()
    _, hidden_grad, weight_grad = reference(hidden, weight, labels)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=4).loss * 0.5
    loss.backward(retain_graph=True)
    grad(weight).mul_(2)  # as an optimizer's step may, before the second backward
    loss.backward()
    torch.testing.assert_close(grad(hidden), hidden_grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad(weight), 1.5 * weight_grad, rtol=1e-12, atol=1e-14)


def test_gradients_are_given_away_without_a_copy() -> None:
    hidden, weight, labels = draw(torch.float32)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=4).loss
    stored = loss.grad_fn.grads  # type: ignore[union-attr]
    places = [t.data_ptr() for t in stored]
    del stored
    loss.backward()
    assert grad(weight).data_ptr() == places[1]


def test_compiles_without_breaks() -> None:
    hidden, weight, labels = draw()
    _, hidden_grad, weight_grad = reference(hidden, weight, labels)

    def halved(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, chunk_tokens=8).loss * 0.5

    torch.compile(halved, backend="aot_eager", fullgraph=True)(hidden, weight).backward()
    torch.testing.assert_close(grad(hidden), 0.5 * hidden_grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad(weight), 0.5 * weight_grad, rtol=1e-12, atol=1e-14)


def test_second_derivative_is_refused() -> None:
    hidden, weight, labels = draw()
    loss = linear_cross_entropy(hidden.tanh(), weight, labels).loss
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_a_kept_graph_under_compiled_autograd_keeps_its_gradients() -> None:
    hidden, weight, labels = draw()
    _, hidden_grad, weight_grad = reference(hidden, weight, labels)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=4).loss
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        (2 * loss).backward(retain_graph=True)
        (3 * loss).backward()
    torch.testing.assert_close(grad(hidden), 5 * hidden_grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad(weight), 5 * weight_grad, rtol=1e-12, atol=1e-14)
