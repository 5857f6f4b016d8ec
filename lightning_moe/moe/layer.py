"""The MoE layer: router, dispatcher, experts and shared experts put together.

Shapes: ``B`` batch, ``S`` sequence, ``T`` = B * S tokens, ``D`` hidden size, ``E`` experts, ``K`` experts per token.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks

from lightning_moe.dispatch.base import Dispatched, TokenDispatcher
from lightning_moe.moe.balance import count_routed, sequence_balance_loss
from lightning_moe.moe.beside import Beside
from lightning_moe.moe.experts import GroupedExperts
from lightning_moe.moe.router import Router, RoutingPlan


class RouterStats(NamedTuple):
    """What a MoE layer says of its routing; an output of the forward pass, never an attribute set on the way.

    Args:
        counts_E: Tokens that each expert got, int64.
        balance_sum: Sum over sequences of length times balance loss, or ``None`` when it was not asked for.
    """

    counts_E: Tensor
    balance_sum: Tensor | None


class MoELayer(nn.Module):
    """A DeepSeekMoE layer (DeepSeek-V3 report, section 2.1.2).

    Args:
        router: Chooses experts for each token.
        experts: The routed experts.
        dispatcher: Moves tokens to experts and back; a strategy replaces it.
        shared_experts: A feed-forward that every token takes, or ``None``.
    """

    def __init__(
        self,
        router: Router,
        experts: GroupedExperts,
        dispatcher: TokenDispatcher,
        shared_experts: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared_experts = shared_experts
        self.dispatcher = dispatcher
        # Whether the experts are computed once more in backward: their rows are then kept for that, or made with them.
        self.recomputed = False

    def forward(
        self,
        x_BSD: Tensor,
        valid_BS: Tensor | None = None,
        *,
        document_ids_BS: Tensor | None = None,
        balance: bool = True,
    ) -> tuple[Tensor, RouterStats]:
        """Applies the layer.

        Args:
            x_BSD: Hidden states.
            valid_BS: Bool, False for tokens that must not be routed nor counted; ``None`` when all are valid.
            document_ids_BS: Documents of packed rows, which the balance loss then takes as its sequences.
            balance: Whether to compute the balance loss.

        Returns:
            The output ``(B, S, D)``, without the residual, and the statistics of the routing.
        """
        batch, sequence, _ = x_BSD.shape
        x_TD = x_BSD.flatten(0, 1)
        plan = self.router(x_TD, None if valid_BS is None else valid_BS.flatten())
        if self.shared_experts is None:
            y_BSD = self.apply_experts(x_TD, plan).view_as(x_BSD)
        elif self.dispatcher.communicates and x_BSD.is_cuda:
            shared = Beside(self.shared_experts, x_BSD)
            y_BSD = self.apply_experts(x_TD, plan).view_as(x_BSD) + shared.result()
        else:
            y_BSD = self.apply_experts(x_TD, plan).view_as(x_BSD) + self.shared_experts(x_BSD)

        indices_BSK = plan.indices_TK.unflatten(0, (batch, sequence))
        counts_BE = count_routed(indices_BSK, self.router.n_routed_experts)
        balance_sum = None
        if balance:
            balance_sum = sequence_balance_loss(
                plan.scores_TE.unflatten(0, (batch, sequence)),
                indices_BSK,
                counts_BE=counts_BE,
                document_ids_BS=document_ids_BS,
            )
        return y_BSD, RouterStats(counts_BE.sum(dim=0), balance_sum)

    def apply_experts(self, x_TD: Tensor, plan: RoutingPlan) -> Tensor:
        """The region behind the router: dispatch, expert computation, combine."""
        dispatched = self.dispatcher.dispatch(x_TD, plan)
        with nullcontext() if self.recomputed else _rows_not_kept(dispatched):
            # Weighted inside the experts, where it costs nothing and no rows have to be kept for the weights' gradient.
            y_RD = self.experts(dispatched.rows_RD, dispatched.offsets_e, dispatched.weights_R)
        return self.dispatcher.combine(y_RD, dispatched._replace(weights_R=None))


def _rows_not_kept(dispatched: Dispatched) -> AbstractContextManager[object]:
    """Makes the rows once more in backward rather than keeping them: K times the tokens, for one copy."""
    make_rows_again = dispatched.make_rows_again
    # Hooks replace one another: those of a checkpoint around the layer have to see all that is kept.
    if make_rows_again is None or _top_saved_tensors_default_hooks(True) is not None:
        return nullcontext()
    rows_RD = dispatched.rows_RD
    where, version = rows_RD.data_ptr(), rows_RD._version
    layout = (rows_RD.shape, rows_RD.stride(), rows_RD.dtype)

    def pack(tensor: Tensor) -> Tensor | None:
        # What a precision keeps in a type of its own has no address, and rows that changed in place are other rows.
        same = type(tensor) is Tensor and tensor.data_ptr() == where and tensor._version == version
        return None if same and (tensor.shape, tensor.stride(), tensor.dtype) == layout else tensor

    def unpack(packed: Tensor | None) -> Tensor:
        return make_rows_again() if packed is None else packed

    return saved_tensors_hooks(pack, unpack)
