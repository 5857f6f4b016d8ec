"""``deep_ep.Buffer``, the first generation (v1.2.1).

What arrives is one row for each token that has an expert here, ordered by source rank and token, with local expert ids
or -1 and the weights; the rows are then ordered by expert as on one device. Shapes: see :mod:`.transport`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe.dispatch.deep_ep.transport import Rows, Transport
from lightning_moe.dispatch.fp8_rows import FP8Rows, expand_rows
from lightning_moe.dispatch.permute import RowPlan, permute, plan_rows, unpermute

_RANKS_PER_HOST = 8


class TransportV1(Transport):
    """NVLink buffers, and RDMA buffers for groups over several hosts. Making one is a collective.

    Args:
        module: ``deep_ep``.
        group: The expert-parallel group, of any backend.
        num_experts: Experts of a layer, over the whole group.
        hidden_size: Values of a token.
        num_sms: Streaming multiprocessors for communication.
        asynchronous: See :class:`Transport`.
    """

    def __init__(
        self,
        module: Any,
        group: dist.ProcessGroup,
        *,
        num_experts: int,
        hidden_size: int,
        num_sms: int,
        asynchronous: bool,
    ) -> None:
        super().__init__(group, num_experts, num_sms, asynchronous)
        self._class = module.Buffer
        size, row_bytes = group.size(), 2 * hidden_size
        # The number of SMs is an attribute of DeepEP's class, which recommended settings are made with.
        before = self._class.num_sms
        self._class.set_num_sms(num_sms)
        self._dispatch_config = self._class.get_dispatch_config(size)
        self._combine_config = self._class.get_combine_config(size)
        self._class.set_num_sms(before)
        configs = (self._dispatch_config, self._combine_config)
        rdma_bytes = 0
        if size > _RANKS_PER_HOST:
            rdma_bytes = max(config.get_rdma_buffer_size_hint(row_bytes, size) for config in configs)
        with self._calling("setting up buffers"):
            self._opened = self._class(
                group,
                num_nvl_bytes=max(config.get_nvl_buffer_size_hint(row_bytes, size) for config in configs),
                num_rdma_bytes=rdma_bytes,
                explicitly_destroy=True,
            )

    def dispatch(
        self, x_TD: Rows, indices_TK: Tensor, weights_TK: Tensor, alignment: int
    ) -> tuple[Rows, Tensor, Any, Any]:
        with self._calling("dispatch"):
            per_rank, per_host, per_expert, in_rank, event = self._buffer.get_dispatch_layout(
                indices_TK, self.num_experts, **self._after()
            )
            x_MD, ids_MK, weights_MK, counts, handle, event = self._buffer.dispatch(
                x_TD,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_host,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=indices_TK,
                topk_weights=weights_TK,
                config=self._dispatch_config,
                **self._after(event),
            )
            self._wait(event)
        # DeepEP's host has waited for the counts already, so that rows can be planned without another wait.
        return self._received(x_MD), weights_MK, handle, (ids_MK, counts)

    def in_expert_order(
        self, x_MD: Rows, weights: Tensor, layout: Any, alignment: int
    ) -> tuple[Tensor, Tensor, RowPlan]:
        local_ids_MK, counts = layout
        rows = plan_rows(
            local_ids_MK,
            self.num_local_experts,
            alignment,
            num_choices=sum(counts),
            num_rows=sum(-(-count // alignment) * alignment for count in counts),
        )
        # Choices of other ranks (-1) have no row: their weights are never read and their gradients are 0, as the sum
        # over ranks in combine needs.
        if isinstance(x_MD, FP8Rows):
            rows_RD, weights_R = expand_rows(x_MD, torch.bfloat16, rows, weights)
            assert weights_R is not None
        else:
            rows_RD, weights_R = permute(x_MD, weights, rows)
        return rows_RD, weights_R, rows

    def in_arrival_order(self, y_RD: Tensor, weights_R: Tensor | None, rows: RowPlan) -> Tensor:
        return unpermute(y_RD, weights_R, rows)

    def dispatch_again(self, x_TD: Rows, handle: Any) -> Rows:
        with self._calling("cached dispatch"):
            x_MD, *_, event = self._buffer.dispatch(x_TD, handle=handle, config=self._dispatch_config, **self._after())
            self._wait(event)
        return self._received(x_MD)

    def combine(self, x_MD: Tensor, handle: Any, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        with self._calling("combine"):
            x_TD, weights_TK, event = self._buffer.combine(
                x_MD, handle, topk_weights=weights, config=self._combine_config, **self._after()
            )
            self._wait(event)
        return x_TD, weights_TK

    @staticmethod
    def take_apart(handle: Any) -> tuple[list[Tensor], Any]:
        return list(handle), None

    @staticmethod
    def put_together(tensors: tuple[Tensor, ...], rest: Any) -> Any:
        return tensors

    def _after(self, event: Any = None) -> dict[str, Any]:
        """Settings of an asynchronous call behind an event, or behind all that the current stream has now."""
        if not self.asynchronous:
            return {}
        event = self._class.capture() if event is None else event
        return {"previous_event": event, "async_finish": True, "allocate_on_comm_stream": True}
