import math
from dataclasses import dataclass, field

TokenValue = dict[float, float] | float
"""A value that may change with training: a number, or ``{from this token: value}`` with a key 0."""


def check_token_value(name: str, value: TokenValue, minimum: float | None = 0.0, maximum: float | None = None) -> None:
    """Checks a :data:`TokenValue`; its owner calls this when it is constructed.

    Args:
        name: The field, for the message.
        value: A number, or ``{from this token: value}``.
        minimum: The smallest value allowed; ``None`` for no bound.
        maximum: The largest value allowed; ``None`` for no bound.

    Raises:
        ValueError: If a position or a value is not allowed; the message names field, value, rule and an example.

    """
    if isinstance(value, dict):
        for token, number in value.items():
            if not _is_number(token) or token < 0:
                raise ValueError(f"{name}: position {token!r} must be a number of tokens of at least 0, such as 10e12.")
            _check_bounds(f"{name}[{token:g}]", number, minimum, maximum)
        if 0 not in value:
            raise ValueError(
                f"{name}={value!r}: the value at the start of training is missing.\n"
                f"Give it under key 0, for example {{0: {next(iter(value.values()), 0.0)!r}, ...}}, or give one number."
            )
    else:
        _check_bounds(name, value, minimum, maximum)


def value_at(value: TokenValue, tokens: int) -> float:
    """Returns the value that holds for the next token after ``tokens`` tokens have been seen.

    Args:
        value: A number, or ``{from this token: value}``; keys may be in any order.
        tokens: Tokens seen before the step that uses the value.

    Returns:
        The value of the largest key not above ``tokens``.

    Raises:
        ValueError: If no key is at most ``tokens``.

    """
    if not isinstance(value, dict):
        return float(value)
    reached = [start for start in value if start <= tokens]
    if not reached:
        raise ValueError(f"{value!r} has no value at token {tokens}: give the value at the start under key 0.")
    return float(value[max(reached)])


@dataclass(frozen=True)
class TokenSchedule:
    """Learning rate over tokens: linear warm-up, constant, cosine decay, then constant phases.

    The learning rate is the optimizer's ``lr`` times a multiplier: it rises from 0 to 1 over the warm-up, stays 1 until
    ``decay_start``, falls along a half cosine to ``final_ratio`` at ``decay_end`` and stays there; each entry of
    ``tail`` then sets a new constant. A position of at most 1 is a fraction of the data module's ``max_tokens``, a
    larger one is a number of tokens.

    The defaults are the shape of the DeepSeek-V3 report with the decay stretched to the end. The report itself (section
    4.2; the warm-up is 2000 steps of about 3072 sequences of 4096 tokens)::

        TokenSchedule(
            warmup=25e9, decay_start=10e12, decay_end=14.3e12, final_ratio=0.1, tail={14.633e12: 7.3e-6 / 2.2e-4}
        )

    Args:
        warmup: End of the warm-up; 0 for none.
        decay_start: Start of the cosine decay.
        decay_end: End of the cosine decay.
        final_ratio: Multiplier at the end of the decay. With 1 there is no decay, and its positions are not used.
        tail: ``{from this position: multiplier}``, after the decay.

    Raises:
        ValueError: If a position is negative, a ratio is negative, or positions of one kind are out of order.

    """

    warmup: float = 0.02
    decay_start: float = 0.7
    decay_end: float = 1.0
    final_ratio: float = 0.1
    tail: dict[float, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_bounds("schedule.final_ratio", self.final_ratio, 0.0, None)
        for start, ratio in self.tail.items():
            _check_bounds(f"schedule.tail[{start!r}]", ratio, 0.0, None)
        positions = self._positions()
        for name, position in positions:
            _check_bounds(f"schedule.{name}", position, 0.0, None)
        # What can be compared without `max_tokens` fails here, before any work; `resolve` compares the rest
        _check_order([(name, position) for name, position in positions if _is_fraction(position)])
        _check_order([(name, position) for name, position in positions if position > 1])

    def resolve(self, max_tokens: int | None) -> "ResolvedTokenSchedule":
        """Returns the schedule with every position as a number of tokens.

        Args:
            max_tokens: Tokens of the whole run; ``None`` if every position is given in tokens.

        Raises:
            ValueError: If a fraction is used without ``max_tokens``, or the positions are out of order.

        """
        tokens = {name: _to_tokens(name, position, max_tokens) for name, position in self._positions()}
        _check_order(list(tokens.items()))
        tail = {tokens[f"tail[{start!r}]"]: ratio for start, ratio in self.tail.items()}
        return ResolvedTokenSchedule(
            warmup=tokens["warmup"],
            decay_start=tokens.get("decay_start", math.inf),
            decay_end=tokens.get("decay_end", math.inf),
            final_ratio=self.final_ratio,
            tail=dict(sorted(tail.items())),
        )

    def _positions(self) -> list[tuple[str, float]]:
        positions = [("warmup", self.warmup)]
        if self.final_ratio != 1.0:
            positions += [("decay_start", self.decay_start), ("decay_end", self.decay_end)]
        return positions + [(f"tail[{start!r}]", start) for start in self.tail]


@dataclass(frozen=True)
class ResolvedTokenSchedule:
    """A :class:`TokenSchedule` whose positions are numbers of tokens.

    Args:
        warmup: Tokens of the warm-up.
        decay_start: Tokens seen at the start of the decay; infinite for none.
        decay_end: Tokens seen at its end.
        final_ratio: Multiplier from the end of the decay on.
        tail: ``{from this token: multiplier}``, in rising order.

    """

    warmup: float
    decay_start: float
    decay_end: float
    final_ratio: float
    tail: dict[float, float]

    def multiplier(self, tokens: int) -> float:
        """Returns the factor on the learning rate of the step after which ``tokens`` tokens have been seen.

        Counting the tokens of the step itself gives the first step of a warm-up a learning rate above 0 and the
        last step of a warm-up exactly the peak. A tail phase holds for the first step that reads past its start.

        Args:
            tokens: Tokens seen at the end of the step: those seen before it plus its own.

        """
        reached = [ratio for start, ratio in self.tail.items() if tokens > start]
        if reached:
            return reached[-1]
        if tokens < self.warmup:
            return tokens / self.warmup
        if tokens <= self.decay_start:
            return 1.0
        if tokens >= self.decay_end:
            return self.final_ratio
        progress = (tokens - self.decay_start) / (self.decay_end - self.decay_start)
        return self.final_ratio + (1.0 - self.final_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_bounds(name: str, value: object, minimum: float | None, maximum: float | None) -> None:
    low = -math.inf if minimum is None else minimum
    high = math.inf if maximum is None else maximum
    if isinstance(value, int | float) and _is_number(value) and low <= value <= high:
        return
    rule = "must be a finite number"
    if minimum is not None:
        rule += f" of at least {minimum:g}"
    if maximum is not None:
        rule += f"{' and' if minimum is not None else ' of'} at most {maximum:g}"
    example = minimum if minimum is not None else (maximum if maximum is not None else 0.0)
    raise ValueError(f"{name}={value!r}: {rule}, for example {example:g}.")


def _is_fraction(position: float) -> bool:
    return 0 < position <= 1


def _to_tokens(name: str, position: float, max_tokens: int | None) -> float:
    if not _is_fraction(position):
        return position
    if max_tokens is None:
        raise ValueError(
            f"schedule.{name}={position:g} is a fraction of data.max_tokens, which is not set.\n"
            "Set data.max_tokens, for example 1e9, or give the schedule in tokens (numbers above 1)."
        )
    return position * max_tokens


def _check_order(positions: list[tuple[str, float]]) -> None:
    tail = sorted((entry for entry in positions if entry[0].startswith("tail")), key=lambda entry: entry[1])
    ordered = [entry for entry in positions if not entry[0].startswith("tail")] + tail[:1]
    for (name, position), (next_name, next_position) in zip(ordered, ordered[1:], strict=False):
        if position > next_position:
            raise ValueError(
                f"schedule.{name}={position:g} lies after schedule.{next_name}={next_position:g}; the order is "
                "warmup <= decay_start <= decay_end <= tail.\n"
                f"Lower {name} or raise {next_name} (at most 1: a fraction of data.max_tokens; above 1: tokens)."
            )
