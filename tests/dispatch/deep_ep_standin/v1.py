"""Stand-in for ``deep_ep.Buffer`` of v1.2.1, intranode, built without NVSHMEM."""

from itertools import count
from typing import Any

import torch
from torch import Tensor

from tests.dispatch.deep_ep_standin.shared import (
    Event,
    NoEvent,
    check_choices,
    check_deterministic_mode,
    check_rows,
    exchange,
    join_rows,
    split_rows,
)

_numbers = count(1)


class Config:
    def __init__(self, num_sms: int, nvl_send: int, nvl_recv: int, rdma_send: int, rdma_recv: int) -> None:
        assert 0 < nvl_send < nvl_recv
        self.channels, self.nvl_recv = num_sms // 2, nvl_recv

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        queues = self.channels * num_ranks
        size = queues * 5 * 4 + queues * self.nvl_recv * (hidden_bytes + 128 * (8 + 4 + 4))
        return -(-size // 128) * 128

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        raise RuntimeError("Assertion error: NVSHMEM is disable during compilation")


class EventOverlap:
    def __init__(self, event: Event | NoEvent) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        self.event.current_stream_wait()


class Buffer:
    num_sms = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        comm: Any = None,
    ) -> None:
        assert group.size() in (2, 4, 8), "Unsupported ranks"
        assert num_nvl_bytes % 128 == 0
        assert num_rdma_bytes == 0
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.explicitly_destroy = num_nvl_bytes, explicitly_destroy
        self.runtime: int | None = next(_numbers)  # tells handles of this buffer from those of others
        exchange(group, "make", None)

    def destroy(self) -> None:
        assert self.explicitly_destroy
        assert self.runtime is not None
        exchange(self.group, "destroy", None)
        self.runtime = None

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(Event())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms, {2: 24, 4: 6, 8: 6}[num_ranks], 256, 6, 128)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms, {2: 10, 4: 9, 8: 4}[num_ranks], 256, 6, 128)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        self._begin(previous_event, async_finish, allocate_on_comm_stream)
        assert topk_idx.is_contiguous()
        assert topk_idx.dtype == torch.int64
        per_expert = topk_idx[topk_idx >= 0].bincount(minlength=num_experts).to(torch.int32)
        rank_of_choice = torch.where(topk_idx >= 0, topk_idx // (num_experts // self.size), -1)
        in_rank = torch.stack([(rank_of_choice == rank).any(dim=1) for rank in range(self.size)], dim=1)
        per_rank = in_rank.sum(dim=0, dtype=torch.int32)
        return per_rank, None, per_expert, in_rank, _event(async_finish, per_rank, per_expert, in_rank)

    def dispatch(
        self,
        x: Any,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, Any, EventOverlap]:
        self._begin(previous_event, async_finish, allocate_on_comm_stream)
        x, scales = split_rows(x)
        assert x.shape[1] * x.element_size() % 32 == 0  # halved in words of 16 bytes
        channels = (config or self.get_dispatch_config(self.size)).channels
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            self._check_handle(handle, channels)
            in_rank = handle[4]
            assert in_rank.shape[0] == x.shape[0]
            everyone = exchange(self.group, "cached dispatch", (x, in_rank, scales))
            recv_x = torch.cat([theirs[0][theirs[1][:, self.rank]] for theirs in everyone])
            assert recv_x.shape[0] == handle[3].shape[0]
            recv_scales = None
            if scales is not None:
                recv_scales = torch.cat([theirs[2][theirs[1][:, self.rank]] for theirs in everyone])
            event = _event(async_finish, recv_x, recv_scales)
            return join_rows(recv_x, recv_scales), None, None, None, None, event

        assert num_tokens_per_rank is not None
        assert num_tokens_per_expert is not None
        assert is_token_in_rank is not None
        assert topk_idx is not None
        assert topk_weights is not None
        num_experts = num_tokens_per_expert.shape[0]
        check_choices(topk_idx, topk_weights, x.shape[0], num_experts)
        assert num_experts % self.size == 0
        assert num_experts // self.size <= 128
        assert torch.equal(num_tokens_per_rank, is_token_in_rank.sum(dim=0, dtype=torch.int32))
        self._check_room(
            x, scales, channels * (config or self.get_dispatch_config(self.size)).nvl_recv, topk_idx.shape[1]
        )

        everyone = exchange(self.group, "dispatch", (x, topk_idx, topk_weights, is_token_in_rank, scales))
        local = num_experts // self.size
        rows = [theirs[3][:, self.rank].nonzero().flatten() for theirs in everyone]
        recv_x, ids, weights = (
            torch.cat([theirs[part][row] for theirs, row in zip(everyone, rows, strict=True)]) for part in range(3)
        )
        here = (ids >= 0) & (ids // local == self.rank)
        recv_ids, recv_weights = (ids % local).where(here, -1), weights.where(here, 0.0)
        counts = recv_ids[here].bincount(minlength=local)
        counts = (counts + expert_alignment - 1) // expert_alignment * expert_alignment
        own = (
            torch.stack([theirs[3].sum(dim=0) for theirs in everyone]).cumsum(dim=0).to(torch.int32),
            torch.full((self.size, channels), self.runtime or 0, dtype=torch.int32),
            torch.full((self.size, channels), self.runtime or 0, dtype=torch.int32),
            torch.cat(rows).to(torch.int32),
            is_token_in_rank,
            torch.zeros(is_token_in_rank.shape, dtype=torch.int32),
        )
        recv_scales = None
        if scales is not None:
            recv_scales = torch.cat([theirs[4][row] for theirs, row in zip(everyone, rows, strict=True)])
        event = _event(async_finish, recv_x, recv_scales, recv_ids, recv_weights, *own)
        return join_rows(recv_x, recv_scales), recv_ids, recv_weights, counts.tolist(), own, event

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        self._begin(previous_event, async_finish, allocate_on_comm_stream)
        check_rows(x)
        self._check_handle(handle, (config or self.get_combine_config(self.size)).channels)
        rank_prefix, _, _, source_token, _, send_head = handle
        assert x.shape[0] == source_token.shape[0]
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32
            assert topk_weights.is_contiguous()
            assert topk_weights.dim() == 2
            assert topk_weights.shape[0] == x.shape[0]
        payload = (x, topk_weights, source_token.long(), rank_prefix[:, self.rank].tolist())
        everyone = exchange(self.group, "combine", payload)
        total = torch.zeros(send_head.shape[0], x.shape[1])
        weights = None if topk_weights is None else torch.zeros(send_head.shape[0], topk_weights.shape[1])
        for their_x, their_weights, their_tokens, their_ends in everyone:  # in the order of ranks
            mine = slice(their_ends[self.rank - 1] if self.rank else 0, their_ends[self.rank])
            total.index_add_(0, their_tokens[mine], their_x[mine].float())
            if weights is not None:
                weights.index_add_(0, their_tokens[mine], their_weights[mine])
        combined = total.to(x.dtype)
        return combined, weights, _event(async_finish, combined, weights)

    def _begin(self, previous_event: Any, async_finish: bool, allocate_on_comm_stream: bool) -> None:
        check_deterministic_mode()
        assert self.runtime is not None, "the buffer was destroyed"
        if allocate_on_comm_stream:
            assert previous_event is not None
            assert async_finish
        if previous_event is not None:
            previous_event.event.current_stream_wait()

    def _check_handle(self, handle: Any, channels: int) -> None:
        assert len(handle) == 6
        for matrix in handle[1:3]:
            assert matrix.shape == (self.size, channels), "another number of SMs than in dispatch"
            assert bool((matrix == self.runtime).all()), "a handle of another buffer"

    def _check_room(self, x: Tensor, scales: Tensor | None, slots: int, top_k: int) -> None:
        row = x.shape[1] * x.element_size() + 4 + top_k * (8 + 4) + 4 * (0 if scales is None else scales.shape[1])
        assert self.size * slots * row <= self.num_nvl_bytes, "the buffer is too small"


def _event(asynchronous: bool, *results: Any) -> EventOverlap:
    return EventOverlap(Event(*results) if asynchronous else NoEvent())
