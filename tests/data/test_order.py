import numpy as np
import pytest

from lightning_moe.data.order import SampleOrder, permute

SIZES = [1, 2, 3, 4, 5, 7, 16, 17, 255, 256, 257, 1000, 65537]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("key", [0, 1, 2**63])
def test_is_a_permutation(size: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@pytest.mark.parametrize("size", SIZES)
def test_every_pass_reads_every_sample_once(size: int) -> None:
    order = SampleOrder(size, seed=3)
    for number in range(3):
        read = order.store_indices(np.arange(number * size, (number + 1) * size))
        assert np.array_equal(np.sort(read), np.arange(size))


def test_passes_and_seeds_differ() -> None:
    passes = [SampleOrder(1000, 0).store_indices(np.arange(start, start + 1000)) for start in (0, 1000, 2000)]
    seeds = [SampleOrder(1000, seed).store_indices(np.arange(1000)) for seed in (1, 2)]
    # also seed s + 1 in pass p - 1 must not repeat seed s in pass p
    orders = [tuple(order) for order in (*passes, *seeds)]
    assert len(set(orders)) == len(orders)


def test_looks_random() -> None:
    permuted = permute(np.arange(10_000), 10_000, 1)
    assert abs(np.corrcoef(permuted, np.arange(10_000))[0, 1]) < 0.03
    # neighbours of a random permutation lie a third of the size apart
    assert np.abs(np.diff(permuted)).mean() == pytest.approx(10_000 / 3, rel=0.05)
    counts = np.zeros((3, 3))
    for key in range(3000):
        counts[np.arange(3), permute(np.arange(3), 3, key)] += 1
    assert np.abs(counts - 1000).max() < 150


def test_golden_values() -> None:
    """The order of existing runs must never change: a resumed run would read other samples."""
    order = SampleOrder(1000, 1337)
    assert order.store_indices(np.arange(8)).tolist() == [207, 908, 775, 584, 763, 589, 303, 875]
    assert order.store_indices(np.arange(1000, 1008)).tolist() == [104, 292, 633, 343, 799, 709, 694, 599]
    large = SampleOrder(10**12, 0).store_indices(np.array([0, 1, 10**12 - 1, 10**12]))
    assert large.tolist() == [105909427418, 198320057411, 312485987150, 978851703289]


def test_a_lookup_depends_on_the_index_alone() -> None:
    order, indices = SampleOrder(777, 5), np.array([2000, 3, 776, 777, 1554])
    assert order.store_indices(indices).tolist() == [order.store_indices(indices[i : i + 1])[0] for i in range(5)]


def test_without_shuffle_passes_repeat_the_store() -> None:
    assert SampleOrder(3, 1, shuffle=False).store_indices(np.arange(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_needs_a_sample() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        SampleOrder(0, 1)
