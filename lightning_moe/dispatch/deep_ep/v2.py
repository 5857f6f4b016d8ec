"""``deep_ep.ElasticBuffer``, the second generation (2.1).

Its expanding layout is used: what arrives is one row for each choice of an expert here, ordered by expert, each group
padded with zero rows to the alignment. Rows of one token are summed here before they are sent home, so that it travels
once to each rank and back. Shapes: see :mod:`.transport`.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe.dispatch.deep_ep.transport import Rows, Transport
from lightning_moe.dispatch.fp8_rows import FP8Rows, expand_rows
from lightning_moe.dispatch.permute import RowPlan, unpermute


class TransportV2(Transport):
    """Symmetric buffers for a fixed number of tokens per rank. Making one is a collective.

    Args:
        module: ``deep_ep``.
        group: The expert-parallel group, of NCCL.
        num_experts: Experts of a layer, over the whole group.
        hidden_size: Values of a token.
        num_experts_per_tok: Experts of a token.
        max_tokens_per_rank: Most tokens of one rank in a dispatch, equal on all ranks.
        num_sms: Streaming multiprocessors for communication.
        cpu_timeout: Seconds that the host waits for other ranks.
        gpu_timeout: Seconds that kernels wait for other ranks.
        asynchronous: See :class:`Transport`.
        fp8_dispatch: Whether rounded rows are dispatched.
    """

    in_order = True

    def __init__(
        self,
        module: Any,
        group: dist.ProcessGroup,
        *,
        num_experts: int,
        hidden_size: int,
        num_experts_per_tok: int,
        max_tokens_per_rank: int,
        num_sms: int,
        cpu_timeout: int,
        gpu_timeout: int,
        asynchronous: bool,
        fp8_dispatch: bool = False,
    ) -> None:
        super().__init__(group, num_experts, num_sms, asynchronous)
        self.max_tokens_per_rank = max_tokens_per_rank
        self._class = module.ElasticBuffer
        self._index_dtype = module.topk_idx_t
        with self._calling("setting up buffers"):
            self._opened = self._class(
                group,
                num_max_tokens_per_rank=max_tokens_per_rank,
                hidden=hidden_size,
                num_topk=num_experts_per_tok,
                use_fp8_dispatch=fp8_dispatch,
                deterministic=torch.are_deterministic_algorithms_enabled(),
                num_cpu_timeout_secs=cpu_timeout,
                num_gpu_timeout_secs=gpu_timeout,
                explicitly_destroy=True,
            )

    def dispatch(
        self, x_TD: Rows, indices_TK: Tensor, weights_TK: Tensor, alignment: int
    ) -> tuple[Rows, Tensor, Any, Any]:
        with self._calling("dispatch"):
            x_RD, _, weights_R, handle, event = self._buffer.dispatch(
                x_TD,
                topk_idx=indices_TK.to(self._index_dtype),
                topk_weights=weights_TK,
                num_experts=self.num_experts,
                expert_alignment=alignment,
                num_sms=self.num_sms,
                do_expand=True,
                do_zero_padding=True,
                **self._after(),
            )
            self._wait(event)
        # Each sum ends behind the real rows of its expert; the next group starts at the following multiple.
        ends_e = handle.psum_num_recv_tokens_per_expert
        offsets_e = torch.div(ends_e + (alignment - 1), alignment, rounding_mode="floor").mul_(alignment)
        return self._received(x_RD), weights_R, handle, offsets_e.to(torch.int32)

    def in_expert_order(
        self, x_MD: Rows, weights: Tensor, layout: Any, alignment: int
    ) -> tuple[Tensor, Tensor, RowPlan]:
        x_RD = expand_rows(x_MD, torch.bfloat16)[0] if isinstance(x_MD, FP8Rows) else x_MD
        row_R = torch.arange(x_RD.shape[0], device=x_RD.device)
        return x_RD, weights, RowPlan(row_R[:, None], row_R, layout, padded=False)

    def in_arrival_order(self, y_RD: Tensor, weights_R: Tensor | None, rows: RowPlan) -> Tensor:
        return y_RD if weights_R is None else unpermute(y_RD, weights_R, rows)

    def dispatch_again(self, x_TD: Rows, handle: Any) -> Rows:
        with self._calling("cached dispatch"):
            x_RD, *_, event = self._buffer.dispatch(
                x_TD,
                handle=handle,
                num_sms=handle.num_sms,  # left out, DeepEP would look for the number of experts before the handle's
                do_expand=True,
                do_zero_padding=True,
                **self._after(),
            )
            self._wait(event)
        return self._received(x_RD)

    def combine(self, x_MD: Tensor, handle: Any, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        with self._calling("combine"):
            x_TD, weights_TK, event = self._buffer.combine(x_MD, handle, topk_weights=weights, **self._after())
            self._wait(event)
        return x_TD, weights_TK

    @staticmethod
    def take_apart(handle: Any) -> tuple[list[Tensor], Any]:
        rest = copy.copy(handle)
        tensors = {name: value for name, value in vars(handle).items() if isinstance(value, Tensor)}
        vars(rest).update(dict.fromkeys(tensors))
        return list(tensors.values()), (list(tensors), rest)

    @staticmethod
    def put_together(tensors: tuple[Tensor, ...], rest: Any) -> Any:
        names, bare = rest
        handle = copy.copy(bare)
        vars(handle).update(zip(names, tensors, strict=True))
        return handle

    def _after(self) -> dict[str, Any]:
        """Settings of an asynchronous call behind all that the current stream has now."""
        if not self.asynchronous:
            return {}
        return {
            "previous_event": self._class.capture(),
            "async_with_compute_stream": True,
            "allocate_on_comm_stream": True,
        }
