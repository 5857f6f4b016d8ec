"""How many samples each optimizer step reads, for a batch size that may grow with the tokens seen."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite


@dataclass(frozen=True)
class Phase:
    """Consecutive optimizer steps of one batch size.

    Args:
        first_step: Index of the phase's first optimizer step.
        last_step: Index after its last optimizer step, or None for a phase without end.
        first_sample: Global index of the first sample that the phase reads.
        batch_size: Samples (sequences) in each step.
    """

    first_step: int
    last_step: int | None
    first_sample: int
    batch_size: int


@dataclass(frozen=True)
class BatchPlan:
    """The batch size of every optimizer step, in a few phases.

    Step ``s`` reads the ``B_s`` samples after those of the steps before it; ``B_s`` is chosen from the tokens seen when
    the step starts.

    Args:
        global_batch_size: Sequences per optimizer step, or steps ``{from this token: sequences}`` that start at 0.
        sequence_length: Tokens that one sample counts for.
        first_step: Optimizer step at which the plan begins: 0, or the step of a checkpoint or of an earlier fit that
            had another plan.
        first_sample: Samples consumed before ``first_step``.

    Raises:
        ValueError: A batch size or a token threshold that cannot be used.
    """

    global_batch_size: int | Mapping[float, int]
    sequence_length: int
    first_step: int = 0
    first_sample: int = 0
    phases: tuple[Phase, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", tuple(self._build()))

    def _build(self) -> list[Phase]:
        steps = batch_size_steps(self.global_batch_size)
        step, sample = self.first_step, self.first_sample
        phases: list[Phase] = []
        for position, (_, size) in enumerate(steps):
            last_step = None
            if position + 1 < len(steps):
                missing = steps[position + 1][0] - sample * self.sequence_length
                if missing <= 0:
                    continue
                last_step = step + -(-missing // (size * self.sequence_length))
            if phases and phases[-1].batch_size == size:
                phases[-1] = Phase(phases[-1].first_step, last_step, phases[-1].first_sample, size)
            else:
                phases.append(Phase(step, last_step, sample, size))
            if last_step is not None:
                sample, step = sample + (last_step - step) * size, last_step
        return phases

    def phase_index(self, step: int) -> int:
        """Returns which phase optimizer step ``step`` belongs to."""
        return max(0, bisect_right(self.phases, step, key=lambda phase: phase.first_step) - 1)

    def phase_at(self, step: int) -> Phase:
        """Returns the phase of optimizer step ``step``."""
        return self.phases[self.phase_index(step)]

    def samples_before(self, step: int) -> int:
        """Returns how many samples the steps before ``step`` consume: the global index of its first sample."""
        phase = self.phase_at(step)
        return phase.first_sample + (step - phase.first_step) * phase.batch_size

    def total_steps(self, max_tokens: int) -> int:
        """Returns the number of optimizer steps after which ``max_tokens`` tokens are seen for the first time."""
        for phase in self.phases:
            missing = max_tokens - phase.first_sample * self.sequence_length
            if missing <= 0:
                return phase.first_step
            step = phase.first_step + -(-missing // (phase.batch_size * self.sequence_length))
            if phase.last_step is None or step <= phase.last_step:
                return step
        raise AssertionError("the last phase has no end")

    def micro_batches_before(self, step: int, samples_per_micro_batch: int) -> int:
        """Returns how many micro-batches each data rank runs in the plan's steps before ``step``.

        Args:
            step: Optimizer step.
            samples_per_micro_batch: Samples of one micro-batch over all data ranks.
        """
        total = 0
        for phase in self.phases:
            last = step if phase.last_step is None else min(step, phase.last_step)
            total += max(0, last - phase.first_step) * (phase.batch_size // samples_per_micro_batch)
        return total


def batch_size_steps(global_batch_size: int | Mapping[float, int]) -> list[tuple[int, int]]:
    """Checks a ``global_batch_size`` and returns its steps as sorted pairs ``(from token, sequences)``.

    Raises:
        ValueError: Sizes that are not positive whole numbers, or steps without one from token 0.
    """
    given = global_batch_size if isinstance(global_batch_size, Mapping) else {0: global_batch_size}
    steps = []
    for token, size in given.items():
        if not isfinite(float(size)) or int(size) != size or size < 1:
            raise ValueError(f"data.global_batch_size: {size!r} is not a positive number of sequences, such as 16")
        if not isfinite(float(token)) or float(token) < 0:
            raise ValueError(
                f"data.global_batch_size: token {token!r} is negative or not finite; steps are"
                " {from this token: size}, such as {0: 16, 1e6: 32}"
            )
        steps.append((int(float(token)), int(size)))
    steps.sort()
    if not steps or steps[0][0] != 0:
        raise ValueError(
            f"data.global_batch_size: {dict(given)} says nothing about the first step; begin with token 0,"
            " for example {0: 16, 1e6: 32}"
        )
    return steps
