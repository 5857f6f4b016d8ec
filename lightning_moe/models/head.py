"""The head of a language model.

Shapes: ``T`` tokens, ``D`` hidden size.
"""

from collections.abc import Sequence

from torch import Tensor

from lightning_moe.losses.linear_cross_entropy import CrossEntropy, linear_cross_entropy
from lightning_moe.moe.feed_forward import Linear


class Head(Linear):
    """The projection to the vocabulary; called it gives logits, and with labels losses, without the logits as a whole.

    A strategy gathers its weight apart from the rest of the model: it is large, and its gradient is the first of all
    to be ready.
    """

    def cross_entropies(
        self, hidden: Sequence[Tensor], labels: Sequence[Tensor], *, predictions: bool = False
    ) -> list[CrossEntropy]:
        """Computes the losses of several predictions, such as multi-token prediction's, in one use of the weight.

        Args:
            hidden: Hidden states ``(T, D)`` of each prediction.
            labels: Their targets ``(T,)``, int64; -100 is ignored.
            predictions: Whether the most likely tokens are wanted as well.

        Returns:
            What :func:`~lightning_moe.losses.linear_cross_entropy.linear_cross_entropy` returns for each of them.
        """
        weight_VD = self.master_weight
        return [
            linear_cross_entropy(hidden_TD, weight_VD, labels_T, predictions=predictions)
            for hidden_TD, labels_T in zip(hidden, labels, strict=True)
        ]
