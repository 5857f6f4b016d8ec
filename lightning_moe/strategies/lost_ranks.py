"""Which process was lost, when a collective fails."""

import sys
import time

import torch.distributed as dist

_PATIENCE = 5.0  # seconds
# How torch tells failed communication from other errors where it raises a plain RuntimeError
_SIGNS = ("DeepEP failed", "gloo", "NCCL", "pair closure", "Connection closed by peer", "Connection reset by peer")


def is_lost_connection(exception: BaseException) -> bool:
    """Whether an exception is that of a collective that another process did not take part in."""
    if not isinstance(exception, RuntimeError):
        return False
    return isinstance(exception, dist.DistError) or any(sign in str(exception) for sign in _SIGNS)


def report_lost_ranks(exception: BaseException) -> None:
    """Names the processes that were lost, where a collective has failed; else does nothing.

    The processes that are left tell each other through the store in which they once met, as their groups are broken.

    Args:
        exception: What training ended with on this process.
    """
    if not (dist.is_available() and dist.is_initialized() and is_lost_connection(exception)):
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        silent = ", ".join(map(str, _silent_ranks(rank, world_size)))
        lost = f"lost: rank {silent}. Its log tells why" if silent else "all ranks have seen one fail"
    except RuntimeError:
        lost = "lost: rank 0 or its launcher, which held the store"
    sys.stderr.write(f"error: rank {rank} of {world_size} ends because a collective failed; {lost}.\n")
    sys.stderr.flush()


def _silent_ranks(rank: int, world_size: int) -> list[int]:
    """Ranks that do not say within a few seconds that they have seen a collective fail."""
    store = dist.distributed_c10d._get_default_store()
    keys = [f"lightning_moe/collective_failed/{peer}" for peer in range(world_size)]
    store.set(keys[rank], "1")
    deadline = time.monotonic() + _PATIENCE
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [peer for peer, key in enumerate(keys) if not store.check([key])]
