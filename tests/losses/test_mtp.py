import pytest
import torch

from lightning_moe.losses.mtp import shift_sequence, shift_valid

X = -100
ROW = torch.arange(10)[None]
LABELS = ROW + 1
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2]])  # of 3, 4 and 3 tokens


@pytest.mark.parametrize(
    ("shift", "tokens"),
    [
        (0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (1, [1, 2, X, 4, 5, 6, X, 8, 9, X]),
        (2, [2, X, X, 5, 6, X, X, 9, X, X]),
        (3, [X, X, X, 6, X, X, X, X, X, X]),
        (10, [X] * 10),
    ],
)
def test_documents_of_3_4_and_3_tokens(shift: int, tokens: list[int]) -> None:
    ahead = shift_valid(DOCUMENTS, None, ROW, shift)
    assert shift_sequence(ROW, shift, ahead, X).tolist() == [tokens]


@pytest.mark.parametrize(("depth", "last_valid"), [(1, 8), (2, 7), (3, 6)])
def test_depth_predicts_the_token_after_the_next(depth: int, last_valid: int) -> None:
    # labels[i] = i + 1, so depth d at position i predicts token i + d + 1
    targets = shift_sequence(LABELS, depth, shift_valid(None, None, ROW, depth), X)[0].tolist()
    assert targets == [i + depth + 1 if i <= last_valid else X for i in range(10)]


def test_padding_at_the_end_is_no_target() -> None:
    valid = torch.arange(10)[None] < 7
    assert shift_sequence(ROW, 2, shift_valid(None, valid, ROW, 2), X).tolist() == [[2, 3, 4, 5, 6, X, X, X, X, X]]


def test_documents_of_a_padded_layout() -> None:
    # Documents of 5 and 3 tokens in slots of 8 and 4: the boundaries of the layout count.
    documents = torch.tensor([[0] * 8 + [1] * 4])
    valid = torch.tensor([[True] * 5 + [False] * 3 + [True] * 3 + [False]])
    row = torch.arange(12)[None]
    targets = shift_sequence(row, 1, shift_valid(documents, valid, row, 1), X)
    assert targets.tolist() == [[1, 2, 3, 4, X, X, X, X, 9, 10, X, X]]


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_rows_do_not_mix(documents: torch.Tensor | None) -> None:
    two = torch.cat([ROW, ROW + 100])
    ids = None if documents is None else torch.cat([documents, torch.zeros_like(documents)])
    moved = shift_sequence(two, 1, shift_valid(ids, None, two, 1), X)
    assert moved[1].tolist() == [*range(101, 110), X]
    assert moved[0, -1] == X


def test_hidden_states_move_with_their_positions() -> None:
    hidden = torch.randn(1, 10, 3, generator=torch.Generator().manual_seed(0))
    moved = shift_sequence(hidden, 1, shift_valid(DOCUMENTS, None, ROW, 1), 0.0)
    assert torch.equal(moved[0, 0], hidden[0, 1])
    assert not moved[0, [2, 6, 9]].any()


def test_a_document_that_comes_again_is_not_skipped_into() -> None:
    # Ids count up within a row, so the same id two places ahead means the same document.
    documents = torch.tensor([[0, 1, 2, 2]])
    row = torch.arange(4)[None]
    assert shift_valid(documents, None, row, 1).tolist() == [[False, False, True, False]]


def test_targets_of_packed_documents_whose_last_labels_are_ignored() -> None:
    # The data module ignores labels that stand in the next document; the depths must not reach past them either.
    labels = torch.tensor([[1, 2, X, 4, 5, 6, X, 8, 9, X]])
    depths = [shift_sequence(labels, k, shift_valid(DOCUMENTS, None, ROW, k), X).tolist()[0] for k in (1, 2)]
    assert depths == [[2, X, X, 5, 6, X, X, 9, X, X], [X, X, X, 6, X, X, X, X, X, X]]
