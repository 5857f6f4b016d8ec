"""The global order of samples: which sample of the store is the n-th of the training run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MASK_64 = (1 << 64) - 1
_ROUNDS = 6


def _mix(value: int) -> int:
    """splitmix64's finaliser: one 64-bit integer to another, every input bit changes every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """:func:`_mix` for every element; unsigned arithmetic wraps as wanted."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permute(indices: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Maps indices through the pseudo-random permutation of ``range(size)`` that belongs to ``key``.

    A Feistel network permutes the next power of four; values that fall outside ``range(size)`` are permuted again
    until they fall inside ("cycle walking", Black & Rogaway 2002), which keeps it a permutation. It needs no table, so
    a lookup costs the same in a store of a thousand and of a billion samples.

    Args:
        indices: Values in ``range(size)``, any shape, int64.
        size: Number of elements, at least 1.
        key: Any integer; chooses the permutation.

    Returns:
        The permuted values, same shape, int64.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    shift, half_mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    round_keys = [np.uint64(_mix((key + number * 0xD1342543DE82EF95) & _MASK_64)) for number in range(_ROUNDS)]

    result = np.array(indices, dtype=np.uint64).reshape(-1)
    pending = np.arange(result.size)
    while pending.size:
        left, right = result[pending] >> shift, result[pending] & half_mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix_array(right ^ round_key) & half_mask)
        result[pending] = (left << shift) | right
        pending = pending[result[pending] >= np.uint64(size)]
    return result.astype(np.int64).reshape(np.shape(indices))


@dataclass(frozen=True)
class SampleOrder:
    """The order in which training reads a store, a pure function of the seed and the global sample index.

    Global sample ``n`` belongs to pass ``n // num_samples`` over the store; every pass has a permutation of its own.
    Ranks, workers and batch sizes play no part.

    Args:
        num_samples: Samples in the store, at least 1.
        seed: Seed of the order.
        shuffle: ``False`` reads every pass in store order.
    """

    num_samples: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"num_samples={self.num_samples}: a sample order needs at least one sample")

    def store_indices(self, global_indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Finds the store's samples for global sample indices.

        Args:
            global_indices: Indices counted from the start of training, shape ``(n,)``, int64.

        Returns:
            Positions in the store, shape ``(n,)``, int64.
        """
        passes, within = np.divmod(np.asarray(global_indices, dtype=np.int64), self.num_samples)
        if not self.shuffle:
            return within
        result = np.empty_like(within)
        for number in np.unique(passes).tolist():
            chosen = passes == number
            # mixed one after the other, so that (seed, pass) and (seed + 1, pass - 1) have nothing in common
            key = _mix(_mix(self.seed & _MASK_64) ^ number)
            result[chosen] = permute(within[chosen], self.num_samples, key)
        return result
