"""Dispatch on one device: all experts are here, so tokens are only put in the experts' order."""

from torch import Tensor

from lightning_moe.dispatch.base import Dispatched, TokenDispatcher
from lightning_moe.dispatch.permute import permute, plan_rows, rows_again, unpermute
from lightning_moe.moe.router import RoutingPlan


class LocalDispatcher(TokenDispatcher):
    """Groups tokens by expert on one device, without communication and without host synchronisation."""

    def dispatch(self, x_TD: Tensor, plan: RoutingPlan) -> Dispatched:
        """Copies each token once for each of its experts, in the experts' order."""
        rows = plan_rows(plan.indices_TK, self.num_experts, self.alignment, all_valid=plan.all_valid)
        rows_RD, weights_R = permute(x_TD, plan.weights_TK, rows)
        again = rows_again(x_TD, rows)
        return Dispatched(rows_RD, weights_R, rows.offsets_E, rows, again)

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Sums each token's weighted rows."""
        return unpermute(y_RD, dispatched.weights_R, dispatched.state)
