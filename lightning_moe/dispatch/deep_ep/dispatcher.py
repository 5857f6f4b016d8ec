"""Dispatch over an expert-parallel group through DeepEP's NVLink and RDMA kernels.

Shapes: ``T`` tokens of this rank, ``D`` hidden size, ``K`` experts per token, ``M`` rows that arrived, as DeepEP orders
them.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe.dispatch.base import Dispatched, TokenDispatcher
from lightning_moe.dispatch.deep_ep.found import find_deep_ep
from lightning_moe.dispatch.deep_ep.fp8 import ReturnForFP8, SendInFP8
from lightning_moe.dispatch.deep_ep.rules import broken_rule
from lightning_moe.dispatch.deep_ep.transport import Arrival, Transport
from lightning_moe.dispatch.deep_ep.v1 import TransportV1
from lightning_moe.dispatch.deep_ep.v2 import TransportV2
from lightning_moe.dispatch.fp8_rows import check_hidden_size, fp8_rows_again
from lightning_moe.dispatch.permute import RowPlan
from lightning_moe.moe.router import RoutingPlan

_log = logging.getLogger(__name__)
_PATIENCE = 5.0  # seconds that ranks wait for each other before they free buffers after an exception
_closings = count()


class _Sizes(NamedTuple):
    hidden_size: int
    num_experts_per_tok: int


class _State(NamedTuple):
    arrival: Arrival
    rows: RowPlan


class DeepEPDispatcher(TokenDispatcher):
    """Exchanges tokens through DeepEP, V1 or V2, whichever is installed; bfloat16 on CUDA only.

    Rank r of the group holds experts ``r * e`` to ``(r + 1) * e - 1``. A token travels once to each rank that holds any
    of its experts, and for groups over several hosts once to each host. Backward of dispatch is combine, and backward
    of combine is dispatch the same way again. The buffers are made at the first dispatch and belong to this instance.

    Args:
        num_experts: Experts ``E`` of the layer, a multiple of the group's size.
        group: The expert-parallel group.
        alignment: Rows to whose multiple each expert's group is padded.
        num_sms: Streaming multiprocessors for communication, even; 20 in the DeepSeek-V3 report and in DeepEP.
        max_tokens_per_rank: Most tokens of one rank in a dispatch, which V2 sizes its buffers by; by default those of
            the data module's batches, or of the first batch where there is none.
        cpu_timeout: Seconds that the host waits for other ranks (V2; V1 has 100 built in).
        gpu_timeout: Seconds that kernels wait for other ranks (V2; V1 has about 100 built in).
        asynchronous: Whether kernels run behind events with memory of DeepEP's own stream.
        environment: Variables that DeepEP reads, set before it is imported, as in ``{EP_DISABLE_GIN: "1"}``.
        fp8_dispatch: Whether tokens travel to experts in E4M3 with a scale per 128 values, and so do the gradients of
            ``combine``; what comes back does not. The hidden size must be a multiple of 128. For backward, indices and
            the handle are kept and, where the rows are to be made again, the bytes that came.
    """

    communicates = True

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        alignment: int = 1,
        *,
        num_sms: int = 20,
        max_tokens_per_rank: int | None = None,
        cpu_timeout: int = 300,
        gpu_timeout: int = 100,
        asynchronous: bool = False,
        environment: Mapping[str, str] | None = None,
        fp8_dispatch: bool = False,
    ) -> None:
        super().__init__(num_experts, alignment)
        for variable in environment or {}:
            if not variable.startswith(("EP_", "NVSHMEM_")):
                raise ValueError(f"environment has {variable}, but DeepEP's variables start with EP_ or NVSHMEM_.")
        if max_tokens_per_rank is not None and max_tokens_per_rank < 1:
            raise ValueError(f"max_tokens_per_rank is {max_tokens_per_rank}, but it must be at least 1, as in 4096.")
        os.environ.update(environment or {})
        self.group = group
        self.num_sms = num_sms
        self.max_tokens_per_rank = max_tokens_per_rank
        self.cpu_timeout = cpu_timeout
        self.gpu_timeout = gpu_timeout
        self.asynchronous = asynchronous
        self.fp8_dispatch = fp8_dispatch
        self._sizes: _Sizes | None = None
        self._capacity = max_tokens_per_rank
        self._transport: Transport | None = None

    @staticmethod
    def why_not(
        num_experts: int,
        group_size: int,
        hidden_size: int,
        num_experts_per_tok: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        num_sms: int = 20,
        hosts: Sequence[str] = (),
    ) -> str | None:
        """Why this dispatcher cannot serve a model here, in one sentence; ``None`` where it can.

        Args:
            num_experts: Experts of a layer, over the whole group.
            group_size: Ranks of the expert-parallel group.
            hidden_size: Values of a token.
            num_experts_per_tok: Experts of a token.
            dtype: Of the tokens.
            num_sms: Streaming multiprocessors for communication.
            hosts: Host name of each rank of the group, where known.
        """
        if not _has_cuda():
            return "DeepEP needs a GPU and a PyTorch built with CUDA."
        if dtype != torch.bfloat16:
            return f"DeepEP moves bfloat16 tokens, and these are {dtype}; compute_dtype: bfloat16 works."
        try:
            generation = find_deep_ep().generation
        except ImportError as error:
            return str(error)
        return broken_rule(
            generation,
            num_experts=num_experts,
            group_size=group_size,
            hidden_size=hidden_size,
            num_experts_per_tok=num_experts_per_tok,
            num_sms=num_sms,
            hosts=hosts,
        )

    def prepare(self, hidden_size: int, num_experts_per_tok: int, max_tokens: int | None = None) -> None:
        """Checks shapes and learns the sizes of the buffers; a larger size than before makes new ones.

        All ranks of the group call it together, between steps.

        Raises:
            ValueError: DeepEP is missing or cannot take a shape; the message names the rule.
        """
        hosts: list[str] = [""] * self.group.size()
        dist.all_gather_object(hosts, socket.gethostname(), group=self.group)
        reason = self.why_not(
            self.num_experts,
            self.group.size(),
            hidden_size,
            num_experts_per_tok,
            num_sms=self.num_sms,
            hosts=hosts,
        )
        if reason is not None:
            raise ValueError(reason)
        if self.fp8_dispatch:
            check_hidden_size(hidden_size)
        if self.max_tokens_per_rank is not None and max_tokens is not None and max_tokens > self.max_tokens_per_rank:
            raise ValueError(_too_many(max_tokens, self.max_tokens_per_rank))
        sizes, capacity = _Sizes(hidden_size, num_experts_per_tok), self._capacity
        if self.max_tokens_per_rank is None and max_tokens is not None:
            capacity = max(capacity or 0, max_tokens)
        if (sizes, capacity) != (self._sizes, self._capacity):
            self.close()
        self._sizes, self._capacity = sizes, capacity

    def close(self) -> None:
        """Frees the buffers, in which all ranks of the group take part.

        After an exception some may not come: the buffers are then left to the end of the process.
        """
        transport, self._transport = self._transport, None
        if transport is None:
            return
        if transport.failed or (sys.exc_info()[0] is not None and not _all_come(self.group)):
            _log.warning("DeepEP's buffers are not freed before the process ends, as other ranks are lost.")
            return
        transport.destroy()

    def dispatch(self, x_TD: Tensor, plan: RoutingPlan) -> Dispatched:
        """Sends each token to the ranks of its experts; what arrives is ordered by local expert."""
        transport = self._ready(x_TD, plan)
        # It makes autograd record the dispatch, and with it the handle, also where neither tokens nor weights train.
        anchor = torch.empty(0, device="cpu", requires_grad=torch.is_grad_enabled())
        weights_TK = plan.weights_TK.to(torch.float32)
        if self.fp8_dispatch:
            rows_RD, weights_R, arrival, rows, received = SendInFP8.apply(
                x_TD, weights_TK, anchor, plan.indices_TK, transport, self.alignment
            )
            again = fp8_rows_again(received, x_TD.dtype, None if transport.in_order else rows)
            return Dispatched(rows_RD, weights_R, rows.offsets_E, _State(arrival, rows), again)
        x_MD, weights, arrival = _Send.apply(x_TD, weights_TK, anchor, plan.indices_TK, transport, self.alignment)
        rows_RD, weights_R, rows = transport.in_expert_order(x_MD, weights, arrival.layout, self.alignment)
        return Dispatched(rows_RD, weights_R, rows.offsets_E, _State(arrival, rows))

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Applies the weights that are left and sends the rows home, where those of each token are summed."""
        state: _State = dispatched.state
        if self.fp8_dispatch and dispatched.weights_R is None:
            return ReturnForFP8.apply(y_RD, state.arrival, state.rows)
        partial_MD = state.arrival.transport.in_arrival_order(y_RD, dispatched.weights_R, state.rows)
        if self.fp8_dispatch:
            return ReturnForFP8.apply(partial_MD, state.arrival, None)
        return _Return.apply(partial_MD, state.arrival)

    def _ready(self, x_TD: Tensor, plan: RoutingPlan) -> Transport:
        sizes = _Sizes(x_TD.shape[1], plan.indices_TK.shape[1])
        if x_TD.dtype != torch.bfloat16:
            raise ValueError(
                f"DeepEP moves bfloat16 tokens, and these are {x_TD.dtype}; compute_dtype: bfloat16 works."
            )
        if self._sizes is None:
            self.prepare(*sizes)
        elif sizes != self._sizes:
            raise ValueError(
                f"hidden_size and num_experts_per_tok are {tuple(sizes)} in a forward pass, but DeepEP's buffers were "
                f"prepared for {tuple(self._sizes)}; call prepare() for others."
            )
        if self._transport is None:
            self._transport = self._open(x_TD)
        most = self._transport.max_tokens_per_rank
        if most is not None and x_TD.shape[0] > most:
            raise ValueError(_too_many(x_TD.shape[0], most))
        return self._transport

    def _open(self, x_TD: Tensor) -> Transport:
        assert self._sizes is not None
        generation, module = find_deep_ep()
        if generation == "V1":
            return TransportV1(
                module,
                self.group,
                num_experts=self.num_experts,
                hidden_size=self._sizes.hidden_size,
                num_sms=self.num_sms,
                asynchronous=self.asynchronous,
            )
        if self._capacity is None:
            most = torch.tensor([x_TD.shape[0], 1], device=x_TD.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
            self._capacity = int(most.max())
        return TransportV2(
            module,
            self.group,
            num_experts=self.num_experts,
            hidden_size=self._sizes.hidden_size,
            num_experts_per_tok=self._sizes.num_experts_per_tok,
            max_tokens_per_rank=self._capacity,
            num_sms=self.num_sms,
            cpu_timeout=self.cpu_timeout,
            gpu_timeout=self.gpu_timeout,
            asynchronous=self.asynchronous,
            fp8_dispatch=self.fp8_dispatch,
        )


class _Send(torch.autograd.Function):
    """Tokens and routing weights to the ranks of their experts; the gradients come back the same way.

    The handle's tensors are saved as those of any operation: they go after backward, and where the region is
    recomputed, backward gets those of the recomputation, whose rows may stand in another order.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, anchor: Tensor, indices_TK: Tensor, transport: Transport, align: int
    ) -> tuple[Tensor, Tensor, Arrival]:
        x_MD, weights, handle, layout = transport.dispatch(
            x_TD.contiguous(), indices_TK.contiguous(), weights_TK.contiguous(), align
        )
        assert isinstance(x_MD, Tensor)
        tensors, ctx.rest = transport.take_apart(handle)
        ctx.save_for_backward(*tensors)
        ctx.transport, ctx.handle = transport, None
        return x_MD, weights, Arrival(transport, handle, layout, ctx)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        # Saved tensors of a recomputed region can be had once only, and combine may have had them.
        handle = _handle_of(ctx) if ctx.handle is None else ctx.handle
        ctx.handle = None
        if not any(ctx.needs_input_grad[:2]):
            return (None,) * 6
        grad_x, grad_weights = ctx.transport.combine(grads[0].contiguous(), handle, grads[1].contiguous())
        return grad_x, grad_weights, None, None, None, None


class _Return(torch.autograd.Function):
    """Rows back to the ranks of their tokens, summed there.

    It saves nothing itself, so that the recomputation of a region ends before it.
    """

    @staticmethod
    def forward(ctx: Any, partial_MD: Tensor, arrival: Arrival) -> Tensor:
        ctx.sent, ctx.transport = arrival.sent, arrival.transport
        return arrival.transport.combine(partial_MD.contiguous(), arrival.handle)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        ctx.sent.handle = _handle_of(ctx.sent)
        return ctx.transport.dispatch_again(grads[0].contiguous(), ctx.sent.handle), None


def _handle_of(ctx: Any) -> Any:
    return ctx.transport.put_together(ctx.saved_tensors, ctx.rest)


def _has_cuda() -> bool:
    return torch.version.cuda is not None and torch.cuda.is_available()


def _too_many(tokens: int, most: int) -> str:
    return (
        f"a rank has {tokens} tokens in a forward pass, but DeepEP's buffers are made for max_tokens_per_rank {most}. "
        f"Set it to the most that any rank can have, on all ranks alike, as in max_tokens_per_rank: {tokens}."
    )


def _all_come(group: dist.ProcessGroup) -> bool:
    """Whether all ranks of a group are here within a few seconds; over the store, as the group may be broken."""
    ranks = dist.get_process_group_ranks(group)
    prefix = f"lightning_moe/deep_ep_closing/{'-'.join(map(str, ranks))}/{next(_closings)}"
    keys = [f"{prefix}/{rank}" for rank in ranks]
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(keys[dist.get_rank(group)], "1")
        deadline = time.monotonic() + _PATIENCE
        while not store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
    except RuntimeError:
        return False  # the store is gone, and with it the process that held it
    return True
