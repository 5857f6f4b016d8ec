"""Stand-in for ``deep_ep.ElasticBuffer`` of 2.1.0, within one host, in its expanding layout."""

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
    poison_like,
    split_rows,
)

_numbers = count(1)


class EPHandle:
    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_expert: Tensor
    recv_src_metadata: Tensor
    num_expanded_tokens: int
    of_buffer: int | None  # not in the real one: tells handles of this buffer from those of others

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class ElasticBuffer:
    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        assert num_max_tokens_per_rank > 0
        assert hidden > 0
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.num_max_tokens_per_rank, self.hidden, self.num_topk = num_max_tokens_per_rank, hidden, num_topk
        self.deterministic, self.explicitly_destroy = deterministic, explicitly_destroy
        self.use_fp8_dispatch = use_fp8_dispatch
        self.runtime: int | None = next(_numbers)
        self._shuffle = torch.Generator().manual_seed(self.rank)
        sizes = exchange(group, "make", (num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch))
        assert len(set(sizes)) == 1, f"the ranks make buffers of different sizes: {sizes}"

    def destroy(self) -> None:
        assert self.explicitly_destroy
        assert self.runtime is not None
        exchange(self.group, "destroy", None)
        self.runtime = None

    @staticmethod
    def capture() -> Event:
        return Event()

    def dispatch(
        self,
        x: Any,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, None, Tensor | None, EPHandle, Event | NoEvent]:
        self._begin(previous_event, allocate_on_comm_stream)
        x, scales = split_rows(x)
        assert self.use_fp8_dispatch == (scales is not None), "the buffer has the size of other rows"
        assert do_expand, "this stand-in has the expanding layout only"
        if num_sms == 0:
            raise ZeroDivisionError("the number of SMs is guessed from the speed of a network that is not there")
        assert x.shape[0] <= self.num_max_tokens_per_rank
        assert x.shape[1] == self.hidden
        if handle is not None:
            assert topk_idx is None
            self._check_handle(handle)
            assert num_sms == handle.num_sms
            assert handle.topk_idx.shape[0] == x.shape[0]
            sent = exchange(self.group, "cached dispatch", (x, topk_weights, scales))
            new = []
        else:
            assert topk_idx is not None
            assert topk_weights is not None
            assert num_experts is not None
            check_choices(topk_idx, topk_weights, x.shape[0], num_experts)
            assert num_experts % self.size == 0
            assert topk_idx.shape[1] <= self.num_topk
            self._check_distinct(topk_idx)
            everyone = exchange(self.group, "dispatch", (x, topk_weights, scales, topk_idx))
            sent = [theirs[:3] for theirs in everyone]
            indices = [theirs[3] for theirs in everyone]
            handle = self._plan(indices, topk_idx, num_experts, expert_alignment or 1, num_sms)
            new = [value for value in vars(handle).values() if isinstance(value, Tensor)]

        recv_x = poison_like(torch.empty(handle.num_expanded_tokens, self.hidden, dtype=x.dtype))
        recv_scales = None
        if scales is not None:
            recv_scales = poison_like(torch.empty(handle.num_expanded_tokens, scales.shape[1]))
        recv_weights = poison_like(torch.empty(handle.num_expanded_tokens))
        source_and_token, slots = handle.recv_src_metadata[:, 0].long(), handle.recv_src_metadata[:, 2:].long()
        if do_zero_padding:
            padding = torch.ones(handle.num_expanded_tokens, dtype=torch.bool)
            padding[slots[slots >= 0]] = False
            recv_x[padding], recv_weights[padding] = 0, 0
            if recv_scales is not None:
                recv_scales[padding] = 0
        for rank, (their_x, their_weights, their_scales) in enumerate(sent):
            from_rank = source_and_token // self.num_max_tokens_per_rank == rank
            row, k = (slots[from_rank] >= 0).nonzero(as_tuple=True)
            token = (source_and_token[from_rank] % self.num_max_tokens_per_rank)[row]
            recv_x[slots[from_rank][row, k]] = their_x[token]
            if recv_scales is not None:
                recv_scales[slots[from_rank][row, k]] = their_scales[token]
            if their_weights is not None:
                recv_weights[slots[from_rank][row, k]] = their_weights[token, k]
        event = _event(async_with_compute_stream, recv_x, recv_scales, recv_weights, *new)
        return join_rows(recv_x, recv_scales), None, None if topk_weights is None else recv_weights, handle, event

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Event | NoEvent]:
        self._begin(previous_event, allocate_on_comm_stream)
        check_rows(x)
        self._check_handle(handle)
        assert x.shape[0] == handle.num_expanded_tokens
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32
            assert topk_weights.is_contiguous()
            assert topk_weights.shape == x.shape[:1]
        tokens, top_k = handle.topk_idx.shape
        slots = handle.recv_src_metadata[:, 2:].long()
        padded_x = torch.cat([x, x.new_zeros(1, x.shape[1])])  # a choice elsewhere has slot -1
        reduced = padded_x[slots].float().sum(dim=1).to(x.dtype)  # rounded once here, and once at home
        weights = None
        if topk_weights is not None:
            weights = torch.cat([topk_weights, topk_weights.new_zeros(1)])[slots]
        everyone = exchange(self.group, "combine", (reduced, weights, handle.recv_src_metadata[:, 0].long()))
        total, combined_weights = torch.zeros(tokens, x.shape[1]), torch.zeros(tokens, top_k)
        for their_reduced, their_weights, source in everyone:
            mine = source // self.num_max_tokens_per_rank == self.rank
            token = source[mine] % self.num_max_tokens_per_rank
            total.index_add_(0, token, their_reduced[mine].float())
            if their_weights is not None:
                combined_weights.index_add_(0, token, their_weights[mine])
        combined = total.to(x.dtype)
        event = _event(async_with_compute_stream, combined, combined_weights)
        return combined, None if weights is None else combined_weights, event

    def _plan(self, indices: list[Tensor], own: Tensor, num_experts: int, alignment: int, num_sms: int) -> EPHandle:
        """Rows by expert, each group padded; within a group in any order, unless deterministic."""
        local, top_k = num_experts // self.size, own.shape[1]
        arrived = [
            (source, token, [(e % local if e >= 0 and e // local == self.rank else -1) for e in row])
            for source, theirs in enumerate(indices)
            for token, row in enumerate(theirs.tolist())
            if any(e >= 0 and e // local == self.rank for e in row)
        ]
        if not self.deterministic:
            arrived = [arrived[i] for i in torch.randperm(len(arrived), generator=self._shuffle).tolist()]
        counts = [sum(row.count(e) for _, _, row in arrived) for e in range(local)]
        aligned = [-(-c // alignment) * alignment for c in counts]
        next_slot = [sum(aligned[:e]) for e in range(local)]
        metadata = torch.full((len(arrived), 2 + top_k), -1, dtype=torch.int32)
        for i, (source, token, row) in enumerate(arrived):
            metadata[i, 0] = source * self.num_max_tokens_per_rank + token
            for k, expert in enumerate(row):
                if expert >= 0:
                    metadata[i, 2 + k] = next_slot[expert]
                    next_slot[expert] += 1
        return EPHandle(
            do_expand=True,
            num_experts=num_experts,
            expert_alignment=alignment,
            num_max_tokens_per_rank=self.num_max_tokens_per_rank,
            num_sms=num_sms,
            topk_idx=own.clone(),
            num_recv_tokens_per_expert_list=aligned,
            psum_num_recv_tokens_per_expert=torch.tensor(next_slot, dtype=torch.int32),
            recv_src_metadata=metadata,
            num_expanded_tokens=sum(aligned),
            of_buffer=self.runtime,
        )

    def _begin(self, previous_event: Any, allocate_on_comm_stream: bool) -> None:
        check_deterministic_mode()
        assert self.runtime is not None, "the buffer was destroyed"
        if previous_event is not None:
            assert allocate_on_comm_stream
            previous_event.current_stream_wait()

    def _check_handle(self, handle: EPHandle) -> None:
        assert isinstance(handle, EPHandle)
        assert handle.of_buffer == self.runtime, "a handle of another buffer"

    @staticmethod
    def _check_distinct(indices: Tensor) -> None:
        """The kernels trap on an expert that a token has chosen twice, and the context is lost."""
        for row in indices.tolist():
            chosen = [e for e in row if e >= 0]
            assert len(set(chosen)) == len(chosen), "an expert twice in a row"


def _event(asynchronous: bool, *results: Any) -> Event | NoEvent:
    return Event(*results) if asynchronous else NoEvent()
