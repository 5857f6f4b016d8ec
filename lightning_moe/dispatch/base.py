"""The seam that moves tokens to experts and back.

Shapes: ``T`` tokens, ``D`` hidden size, ``K`` experts per token, ``R`` routed rows on this rank, ``e`` local experts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lightning_moe.moe.router import RoutingPlan


class Dispatched(NamedTuple):
    """Tokens at their experts.

    Args:
        rows_RD: Rows ordered by local expert; each group is padded with zero rows to the alignment.
        weights_R: Routing weight of each row, differentiable; 0 for padding. ``None`` once the experts have applied it.
        offsets_e: End of each expert's rows, int32; the last one is R, so that no row is uninitialised.
        state: What the dispatcher needs to bring the rows back.
        make_rows_again: Returns the values of ``rows_RD`` once more, where that takes less than keeping them.
    """

    rows_RD: Tensor
    weights_R: Tensor | None
    offsets_e: Tensor
    state: Any
    make_rows_again: Callable[[], Tensor] | None = None


class TokenDispatcher(ABC):
    """Moves tokens to their experts and brings the weighted results back.

    Args:
        num_experts: Experts ``E`` of the layer.
        alignment: Rows to whose multiple each expert's group is padded: 1 for none, 16, 32 or 128 as the
            multiplication needs.
    """

    communicates = False  # whether other work can be done while tokens travel

    def __init__(self, num_experts: int, alignment: int = 1) -> None:
        if alignment < 1:
            raise ValueError(f"alignment is {alignment}, but it must be at least 1, as in 32.")
        self.num_experts = num_experts
        self.alignment = alignment

    def prepare(  # noqa: B027 - nothing to check without rules
        self, hidden_size: int, num_experts_per_tok: int, max_tokens: int | None = None
    ) -> None:
        """Checks shapes before training, and learns what communication buffers are sized by.

        A strategy calls it on all ranks of the group; a dispatcher with rules or buffers of its own overrides it.

        Args:
            hidden_size: Width ``D`` of a token.
            num_experts_per_tok: Experts ``K`` per token.
            max_tokens: Most tokens of one rank in a dispatch, equal on all ranks; ``None`` where it is not known.

        Raises:
            ValueError: The dispatcher cannot take a shape; the message names the rule.
        """

    def close(self) -> None:  # noqa: B027 - nothing to do without buffers
        """Frees communication buffers; called before the process group ends, also after an exception.

        A later dispatch may make them anew.
        """

    def __deepcopy__(self, memo: dict[int, Any]) -> "TokenDispatcher":
        # A copy of a model talks to the same group; neither group nor buffers can be copied.
        return self

    @abstractmethod
    def dispatch(self, x_TD: Tensor, plan: RoutingPlan) -> Dispatched:
        """Brings each token to the experts that the plan chose for it; an index of -1 goes nowhere."""

    @abstractmethod
    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Returns ``(T, D)``: for each token the sum of its experts' rows times their weights.

        Rows that have been weighted before come with ``weights_R`` of ``None``, and are summed as they are.
        """
