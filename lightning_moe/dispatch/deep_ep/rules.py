"""What shapes and groups DeepEP can take; found in the source of v1.2.1 (V1) and 2.1.0 (V2)."""

from collections.abc import Sequence

from lightning_moe.dispatch.deep_ep.found import Generation

_V1_GROUP_SIZES = (2, 4, 8, 16, 32, 64, 128, 144, 160)
_V1_RANKS_PER_HOST = 8
_MAX_CHOICES = 32


def broken_rule(
    generation: Generation,
    *,
    num_experts: int,
    group_size: int,
    hidden_size: int,
    num_experts_per_tok: int,
    num_sms: int,
    hosts: Sequence[str] = (),
) -> str | None:
    """The first rule of DeepEP that sizes break, in words, or ``None``.

    Args:
        generation: Which DeepEP.
        num_experts: Experts of a layer, over the whole group.
        group_size: Ranks of the expert-parallel group.
        hidden_size: Values of a token.
        num_experts_per_tok: Experts of a token.
        num_sms: Streaming multiprocessors for communication.
        hosts: Host name of each rank of the group, where known.
    """
    name = f"DeepEP {generation}"
    if num_experts % group_size:
        return f"n_routed_experts is {num_experts}, but it must be a multiple of expert_parallel_size ({group_size})."
    if num_sms < 2 or num_sms % 2:
        return f"num_sms is {num_sms}, but {name} needs an even number of at least 2, as in 20."
    if num_experts_per_tok > _MAX_CHOICES:
        return f"num_experts_per_tok is {num_experts_per_tok}, but {name} takes at most {_MAX_CHOICES}."
    # V1's kernels halve a row of 16-byte words; V2's combine splits it over the 32 lanes of a warp.
    step = 16 if generation == "V1" else 256
    if hidden_size % step:
        below = hidden_size // step * step
        works = f"{below} or {below + step}" if below else f"{step}"
        return f"hidden_size is {hidden_size}, but {name} needs a multiple of {step}, as in {works}."
    if generation == "V2":
        return None
    if hidden_size > 8176:
        return f"hidden_size is {hidden_size}, but {name} takes at most 8176."
    if group_size not in _V1_GROUP_SIZES:
        sizes = ", ".join(map(str, _V1_GROUP_SIZES))
        return f"expert_parallel_size is {group_size}, but {name} takes only {sizes}."
    most_local = 128 if group_size <= _V1_RANKS_PER_HOST else 1024
    if num_experts // group_size > most_local:
        return (
            f"{num_experts} experts over an expert_parallel_size of {group_size} are {num_experts // group_size} on "
            f"each rank, but {name} takes at most {most_local}; spread them over more ranks."
        )
    for first in range(0, len(hosts), _V1_RANKS_PER_HOST):
        neighbours = set(hosts[first : first + _V1_RANKS_PER_HOST])
        if len(neighbours) > 1:
            return (
                f"ranks {first} to {min(first + _V1_RANKS_PER_HOST, len(hosts)) - 1} of the expert-parallel group are "
                f"on the hosts {', '.join(sorted(neighbours))}, but {name} needs each 8 of them on one."
            )
    return None


def estimate_buffer_bytes(
    generation: Generation,
    *,
    group_size: int,
    hidden_size: int,
    num_experts_per_tok: int,
    max_tokens_per_rank: int,
    num_sms: int,
) -> int | None:
    """About how much device memory the buffers of a rank take, for a group on one host; ``None`` for larger groups.

    Args:
        generation: Which DeepEP.
        group_size: Ranks of the expert-parallel group.
        hidden_size: Values of a token.
        num_experts_per_tok: Experts of a token.
        max_tokens_per_rank: Most tokens of one rank in a dispatch; V1 does not depend on it.
        num_sms: Streaming multiprocessors for communication; V2 does not depend on it.
    """
    if group_size > _V1_RANKS_PER_HOST:
        return None
    row_bytes = 2 * hidden_size
    if generation == "V1":
        # Queues of 256 rows from each rank in each channel, with room for 128 choices and 128 scales a row
        return num_sms // 2 * group_size * 256 * (row_bytes + 128 * (8 + 4 + 4))
    return group_size * max_tokens_per_rank * (row_bytes + 12 * num_experts_per_tok)
