"""Signatures of the real classes: parameters with their defaults, read in DeepEP v1.2.1 and 2.1.0."""

import inspect
from collections.abc import Callable
from typing import Any

SIGNATURES = {
    "V1": {
        "Buffer.__init__": "self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, "
        "num_qps_per_rank=24, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=False, "
        "comm=None",
        "Buffer.destroy": "self",
        "Buffer.set_num_sms": "new_num_sms",
        "Buffer.capture": "",
        "Buffer.get_dispatch_config": "num_ranks",
        "Buffer.get_combine_config": "num_ranks",
        "Buffer.get_dispatch_layout": "self, topk_idx, num_experts, previous_event=None, async_finish=False, "
        "allocate_on_comm_stream=False",
        "Buffer.dispatch": "self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, "
        "is_token_in_rank=None, num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, "
        "num_worst_tokens=0, config=None, previous_event=None, async_finish=False, allocate_on_comm_stream=False",
        "Buffer.combine": "self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None, "
        "async_finish=False, allocate_on_comm_stream=False",
    },
    "V2": {
        "ElasticBuffer.__init__": "self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, "
        "num_topk=0, use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, "
        "allow_multiple_reduction=True, prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, "
        "num_cpu_timeout_secs=300, num_gpu_timeout_secs=100, explicitly_destroy=False",
        "ElasticBuffer.destroy": "self",
        "ElasticBuffer.capture": "",
        "ElasticBuffer.dispatch": "self, x, topk_idx=None, topk_weights=None, "
        "cumulative_local_expert_recv_stats=None, num_experts=None, num_max_tokens_per_rank=None, "
        "expert_alignment=None, num_sms=0, num_qps=0, previous_event=None, previous_event_before_epilogue=None, "
        "async_with_compute_stream=False, allocate_on_comm_stream=False, handle=None, do_handle_copy=True, "
        "do_cpu_sync=None, do_expand=False, do_zero_padding=False, use_tma_aligned_col_major_sf=False",
        "ElasticBuffer.combine": "self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, "
        "previous_event=None, previous_event_before_epilogue=None, async_with_compute_stream=False, "
        "allocate_on_comm_stream=False",
    },
}


def parameters_of(module: Any, path: str) -> str:
    """Parameters of a method of the module's class, written as above."""
    owner, name = path.split(".")
    function: Callable[..., Any] = getattr(getattr(module, owner), name)
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parts.append(f"{parameter.name}{default}")
    return ", ".join(parts)
