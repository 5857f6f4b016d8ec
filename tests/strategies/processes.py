"""Runs a function on several gloo processes of this machine."""

import logging
import multiprocessing
import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.tensor import DTensor

# Workers fork from a server that has imported what is slow to import, once for all tests.
multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.strategies.training"])


def run(world_size: int, function: Callable[..., Any], *args: Any) -> None:
    """Runs ``function(*args)`` on each process, with the environment of a launcher."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(_worker, args=(world_size, port, function, args), nprocs=world_size, start_method="forkserver")


def _worker(rank: int, world_size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(
        LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    try:
        function(*args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def rank() -> int:
    """Rank of this process."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors without their sharding; a collective."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def save(path: Path, value: Any) -> None:
    """Saves a value of the first process."""
    if rank() == 0:
        torch.save(value, path)
