import pytest
import torch
from torch import Tensor

from lightning_moe.moe.balance import Balancing, count_routed, sequence_balance_loss, update_selection_bias
from tests.tensors import grad


def draw(batch: int, sequence: int, experts: int, top_k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(batch, sequence, experts, generator=generator, dtype=torch.float64)
    return scores, (scores + torch.linspace(0, 1, experts)).topk(top_k).indices  # skewed


def brute_force(scores_SE: Tensor, indices_SK: Tensor) -> Tensor:
    """One sequence, equations 17 to 20 with loops."""
    length, experts = scores_SE.shape
    top_k = indices_SK.shape[1]
    loss = torch.zeros((), dtype=torch.float64)
    for i in range(experts):
        f = experts / (top_k * length) * sum(int(i in row) for row in indices_SK.tolist())
        p = sum(scores_SE[t, i] / scores_SE[t].sum() for t in range(length)) / length
        loss = loss + f * p
    return loss


def test_even_load_and_uniform_scores_give_one() -> None:
    indices = torch.tensor([[[0, 1], [2, 3], [0, 1], [2, 3]]])
    for level in (0.1, 0.9):  # sigmoid scores are normalised over experts
        loss = sequence_balance_loss(torch.full((1, 4, 4), level), indices)
        torch.testing.assert_close(loss, torch.tensor(4.0))  # length times 1


def test_hand_value_of_skewed_routing() -> None:
    # E = 4, K = 2, two tokens, both on experts 0 and 1: f = (2, 2, 0, 0); P = (.4, .3, .2, .1) and (.5, .3, .1, .1)
    scores = torch.tensor([[[0.4, 0.3, 0.2, 0.1], [1.0, 0.6, 0.2, 0.2]]])
    indices = torch.tensor([[[0, 1], [1, 0]]])
    loss = sequence_balance_loss(scores, indices)
    torch.testing.assert_close(loss, torch.tensor(2 * (2 * 0.45 + 2 * 0.3)))


def test_against_brute_force_for_each_sequence() -> None:
    scores, indices = draw(3, 7, 8, 2)
    expected = sum(7 * brute_force(scores[b], indices[b]) for b in range(3))
    torch.testing.assert_close(sequence_balance_loss(scores, indices), expected, rtol=1e-12, atol=0)
    assert expected / 21 > 1.05
    counts = count_routed(indices, 8)
    assert torch.equal(sequence_balance_loss(scores, indices, counts_BE=counts), sequence_balance_loss(scores, indices))


@pytest.mark.parametrize("lengths", [(5, 11), (16,), (1, 1, 14), (3, 4, 9)])
def test_packed_documents_are_sequences_of_their_own(lengths: tuple[int, ...]) -> None:
    scores, indices = draw(2, 16, 8, 2)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(2, -1)
    expected = torch.zeros((), dtype=torch.float64)
    for row in range(2):
        for s, i in zip(scores[row].split(lengths), indices[row].split(lengths), strict=True):
            expected = expected + len(s) * brute_force(s, i)
    actual = sequence_balance_loss(scores, indices, document_ids_BS=documents)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("documents", [False, True])
def test_padding_masked_equals_padding_removed(documents: bool) -> None:
    scores, indices = draw(2, 12, 8, 2)
    scores.requires_grad_()
    ids = torch.arange(12).expand(2, -1) // 5 if documents else None
    padded = indices.clone()
    padded[:, 9:] = -1
    masked = sequence_balance_loss(scores, padded, document_ids_BS=ids)
    removed = sequence_balance_loss(scores[:, :9], indices[:, :9], document_ids_BS=None if ids is None else ids[:, :9])
    torch.testing.assert_close(masked, removed, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(masked, scores, retain_graph=True)
    assert not gradient[:, 9:].any()
    assert gradient[:, :9].any()


def test_row_of_padding_alone_costs_nothing() -> None:
    scores, indices = draw(2, 5, 8, 2)
    indices[1] = -1
    loss = sequence_balance_loss(scores, indices)
    torch.testing.assert_close(loss, sequence_balance_loss(scores[:1], indices[:1]), rtol=1e-12, atol=0)


def test_gradient_pushes_overloaded_experts_down() -> None:
    scores = torch.full((1, 4, 4), 0.5, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([[0, 1]]).expand(1, 4, 2)
    sequence_balance_loss(scores, indices).backward()
    assert (grad(scores)[..., :2] > 0).all()
    assert (grad(scores)[..., 2:] < 0).all()


def test_count_routed() -> None:
    indices = torch.tensor([[[0, 2], [2, 3], [-1, -1]], [[3, 2], [-1, 3], [3, 0]]])
    counts = count_routed(indices, 5)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [[1, 0, 2, 1, 0], [1, 0, 1, 3, 0]]


@pytest.mark.parametrize(
    ("counts", "direction"),
    [
        ([5, 3, 4, 4], [-1, 1, 0, 0]),
        ([4, 4, 4, 4], [0, 0, 0, 0]),
        ([16, 0, 0, 0], [-1, 1, 1, 1]),
        ([1, 0, 0, 0], [-1, 1, 1, 1]),
        # One token more than the mean of 2^40: lost when the mean is a float32.
        ([2**40 + 1, 2**40 - 1, 2**40, 2**40], [-1, 1, 0, 0]),
    ],
)
def test_bias_follows_the_sign_of_the_missing_load(counts: list[int], direction: list[int]) -> None:
    bias = torch.full((4,), 0.5)
    update_selection_bias(bias, torch.tensor(counts), 0.001)
    torch.testing.assert_close(bias, 0.5 + 0.001 * torch.tensor(direction))


def test_bias_stays_on_a_skipped_step_and_at_speed_zero() -> None:
    bias = torch.tensor([0.1, -0.2])
    counts = torch.tensor([7, 1])
    update_selection_bias(bias, counts, 0.001, applied=torch.tensor(False))
    update_selection_bias(bias, counts, 0.0)
    assert torch.equal(bias, torch.tensor([0.1, -0.2]))
    update_selection_bias(bias, counts, 0.5, applied=torch.tensor(True))
    torch.testing.assert_close(bias, torch.tensor([-0.4, 0.3]))


def test_bias_evens_out_the_load() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = (torch.randn(512, 8, generator=generator) + torch.linspace(-1, 1, 8)).sigmoid()
    bias = torch.zeros(8)

    def load() -> Tensor:
        return count_routed((scores + bias).topk(2).indices[None], 8)[0]

    before = load().max().item()
    for _ in range(400):
        update_selection_bias(bias, load(), 0.005)
    assert before > 250
    assert load().max().item() < 1.1 * 128


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"sequence_loss_weight": -1.0}, "balancing.sequence_loss_weight"),
        ({"sequence_loss_weight": float("nan")}, "balancing.sequence_loss_weight"),
        ({"bias_update_speed": -0.1}, "balancing.bias_update_speed"),
    ],
)
def test_bad_settings_are_named(options: dict[str, float], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Balancing(**options)  # type: ignore[arg-type]
