import math

import torch
from torch import Tensor

from lightning_moe.metrics.exact import ExactMetric


class ExpertLoad(ExactMetric):
    """How evenly tokens are spread over the experts of each layer.

    ``compute`` returns scalars under these keys:

    - ``max_violation``: (largest load - mean load) / mean load, mean over layers; 0 is perfectly even, and with E
      experts and top-k routing E / k - 1 is the worst (MaxVio of "Auxiliary-Loss-Free Load Balancing Strategy for
      Mixture-of-Experts", arXiv 2408.15664);
    - ``max_violation_worst_layer``: its maximum over layers;
    - ``entropy``: entropy of the load divided by log E, mean over layers; 1 is perfectly even.

    A layer without any token has no load to judge: its values are NaN.

    Args:
        num_layers: MoE layers, MTP blocks included.
        num_experts: Routed experts of each layer.
        per_layer: Whether ``compute`` also returns ``layer_max_violation`` and ``layer_entropy``, each of shape
            (layers,), a scalar for one layer.

    Raises:
        ValueError: If there is no layer, or there are fewer than two experts.

    """

    is_differentiable = False
    counts: Tensor

    def __init__(self, num_layers: int, num_experts: int, per_layer: bool = False) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"ExpertLoad num_layers={num_layers}: must be at least 1.")
        if num_experts < 2:
            raise ValueError(f"ExpertLoad num_experts={num_experts}: must be at least 2, for example 8.")
        self.per_layer = per_layer
        self.add_state("counts", torch.zeros(num_layers, num_experts, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, counts: Tensor) -> None:
        """Adds the loads of a batch, without a host sync.

        Args:
            counts: Tokens routed to each expert, int64 of shape (layers, experts).

        Raises:
            ValueError: If shape or dtype differ.

        """
        if counts.shape != self.counts.shape or counts.dtype != torch.int64:
            raise ValueError(
                f"ExpertLoad counts of shape {tuple(counts.shape)} and {counts.dtype}: "
                f"must be {tuple(self.counts.shape)} (layers, experts) and torch.int64."
            )
        self.counts = self.counts + counts

    def compute(self) -> dict[str, Tensor]:
        """Returns the values listed at the class, in float32."""
        return expert_load_values(self.counts, self.per_layer)


def expert_load_values(counts: Tensor, per_layer: bool = False) -> dict[str, Tensor]:
    """Computes what :class:`ExpertLoad` does of loads that are complete, all layers at once.

    Args:
        counts: Tokens routed to each expert, int64 of shape (layers, experts).
        per_layer: Whether to return the values of each layer too.

    Returns:
        The values listed at the class, in float32.
    """
    load = counts.float()
    total = load.sum(dim=1)
    max_violation = load.amax(dim=1) * load.shape[1] / total - 1.0
    entropy = torch.special.entr(load / total[:, None]).sum(dim=1) / math.log(load.shape[1])
    values = {
        "max_violation": max_violation.mean(),
        "max_violation_worst_layer": max_violation.amax(),
        "entropy": entropy.mean(),
    }
    if per_layer:
        values |= {"layer_max_violation": max_violation, "layer_entropy": entropy}
    return values
