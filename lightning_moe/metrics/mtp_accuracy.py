import torch
from torch import Tensor

from lightning_moe.metrics.exact import ExactMetric


class MTPAccuracy(ExactMetric):
    """How often the multi-token prediction blocks are right, for each depth k = 1 … D.

    ``compute`` returns, each of shape (D,) (a scalar for D = 1) and NaN where no position was counted:

    - ``accuracy``: the block's most likely token is the token of the data;
    - ``acceptance`` (if ``update`` was given it): the block's most likely token is the one that the main model would
      choose, so that greedy speculative decoding would accept it. Depths are judged each on its own.

    Args:
        depths: Number of MTP blocks D.

    Raises:
        ValueError: If ``depths`` is below 1.

    """

    is_differentiable = False
    higher_is_better = True
    correct: Tensor
    accepted: Tensor
    total: Tensor

    def __init__(self, depths: int) -> None:
        super().__init__()
        if depths < 1:
            raise ValueError(f"MTPAccuracy depths={depths}: must be at least 1.")
        for state in ("correct", "accepted", "total"):
            self.add_state(state, torch.zeros(depths, dtype=torch.int64), dist_reduce_fx="sum")
        self.has_acceptance = False

    def update(self, correct: Tensor, total: Tensor, accepted: Tensor | None = None) -> None:
        """Adds a batch, without a host sync; :func:`count_mtp_hits` computes the arguments.

        Args:
            correct: Positions where the block predicts the token of the data, int64 of shape (D,).
            total: Positions that have a target, int64 of shape (D,).
            accepted: Positions where block and main model agree, int64 of shape (D,); in every batch or in none.

        """
        self.correct = self.correct + correct
        self.total = self.total + total
        if accepted is not None:
            self.has_acceptance = True
            self.accepted = self.accepted + accepted

    def compute(self) -> dict[str, Tensor]:
        """Returns the values listed at the class, in float32."""
        return mtp_accuracy_values(self.correct, self.total, self.accepted if self.has_acceptance else None)


def mtp_accuracy_values(correct: Tensor, total: Tensor, accepted: Tensor | None = None) -> dict[str, Tensor]:
    """Computes what :class:`MTPAccuracy` does of counts that are complete.

    Args:
        correct: See :meth:`MTPAccuracy.update`, as for the others.
        total: Positions that have a target.
        accepted: Positions where block and main model agree.

    Returns:
        The values listed at the class, in float32.
    """
    values = {"accuracy": correct / total}
    if accepted is not None:
        values["acceptance"] = accepted / total
    return values


def count_mtp_hits(main: Tensor, mtp: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Counts the arguments of :meth:`MTPAccuracy.update`.

    Depth k at position i predicts token i + k + 1, which the main model predicts at position i + k.

    Args:
        main: Most likely token of the main model at each position, int64 of shape (B, S).
        mtp: Most likely token of each MTP block, int64 of shape (D, B, S).
        labels: Targets of each MTP block, int64 of shape (D, B, S); -100 where there is none, which includes the last
            k positions.

    Returns:
        ``correct``, ``total`` and ``accepted``, each int64 of shape (D,).

    """
    valid = labels != -100
    # The last k positions wrap around, but have no target
    agreed = torch.stack([predicted == main.roll(-depth, dims=1) for depth, predicted in enumerate(mtp, start=1)])
    correct = ((mtp == labels) & valid).sum(dim=(1, 2))
    return correct, valid.sum(dim=(1, 2)), (agreed & valid).sum(dim=(1, 2))
