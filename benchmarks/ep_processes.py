"""Groups of processes in ``expert_parallel.py``: one for each device, for a limited time, and what they found."""

import contextlib
import json
import logging
import os
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_ROWS, _ERROR = "rows.jsonl", "error.txt"
_GRACE = 5.0  # seconds that the others have after one process has failed
_SHOWN_LINES = 12
_COLLECTIVE_TIMEOUT = timedelta(minutes=3)


@dataclass(frozen=True)
class Worker:
    """One process of a group.

    Args:
        rank: Its rank, which is also the number of its device.
        world_size: Processes of the group.
        device: Where it computes.
        folder: Where the group writes what it finds.
    """

    rank: int
    world_size: int
    device: torch.device
    folder: Path

    @property
    def on_cuda(self) -> bool:
        """Whether it has a GPU."""
        return self.device.type == "cuda"

    def send(self, row: dict[str, Any], shown: str | None = None) -> None:
        """Gives the first process's row to the process that started the group, and prints a line about it."""
        if self.rank == 0:
            with (self.folder / _ROWS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            if shown is not None:
                self.say(shown)

    def say(self, line: str) -> None:
        """Prints a line of the first process."""
        if self.rank == 0:
            print(line, flush=True)

    def wait_for_all(self) -> None:
        """Returns when all processes have come here and their devices are idle."""
        if self.on_cuda:
            torch.cuda.synchronize()
        if self.world_size > 1:
            dist.barrier()
        if self.on_cuda:
            torch.cuda.synchronize()

    def largest(self, values: list[float]) -> list[float]:
        """The largest of each value on any process."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def mean(self, values: list[float]) -> list[float]:
        """The mean of each value over the processes."""
        return [value / self.world_size for value in self._reduced(values, dist.ReduceOp.SUM)]

    def _reduced(self, values: list[float], operation: Any) -> list[float]:
        if self.world_size == 1:
            return values
        reduced = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(reduced, operation)
        return reduced.tolist()


Task = Callable[[Worker], None]


def run_group(task: Task, world_size: int, device: str, time_limit: float) -> tuple[list[dict[str, Any]], str | None]:
    """Runs a function on processes of their own, one for each device.

    Args:
        task: What each process does; it must be picklable.
        world_size: Number of processes; they see as many GPUs.
        device: ``"cuda"`` or ``"cpu"``.
        time_limit: Seconds until the processes are stopped.

    Returns:
        The rows that were sent until the end, and why there are not more of them: ``None`` if all went well.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = [torch.device("cuda", rank) if device == "cuda" else torch.device("cpu") for rank in range(world_size)]
        processes = [
            context.Process(target=_work, args=(task, Worker(rank, world_size, place, folder)), daemon=True)
            for rank, place in enumerate(places)
        ]
        with _environment(world_size, device):
            for process in processes:
                process.start()
        try:
            reason = _wait(processes, time_limit, folder)
        finally:
            for process in processes:
                process.kill()
            for process in processes:  # only then: one whose kernel waits for others may take long to end
                process.join()
        sent = folder / _ROWS
        rows = [json.loads(line) for line in sent.read_text(encoding="utf-8").splitlines()] if sent.exists() else []
    return rows, reason


def _wait(processes: list[Any], time_limit: float, folder: Path) -> str | None:
    """Waits until all processes have ended, one has failed, or time is over; returns what went wrong."""
    deadline, failed = time.monotonic() + time_limit, False
    while any(process.exitcode is None for process in processes):
        if time.monotonic() > deadline:
            break
        if not failed and any(process.exitcode for process in processes):
            failed, deadline = True, min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.1)
    statuses = [process.exitcode for process in processes]
    if not any(status is None or status for status in statuses):
        return None
    errors = sorted(folder.glob(f"*-{_ERROR}"), key=lambda path: path.stat().st_mtime)
    if errors:  # the first that failed is the reason, the others miss it
        return f"processes ended with status {statuses}, one of them with\n{errors[0].read_text(encoding='utf-8')}"
    if failed:
        return f"the processes ended with status {statuses}"
    return f"stopped after {time_limit:.0f} s"


def _work(task: Task, worker: Worker) -> None:
    os.environ["LOCAL_RANK"] = str(worker.rank)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        if worker.on_cuda:
            torch.cuda.set_device(worker.device)
        else:
            torch.set_num_threads(1)
        if worker.world_size > 1:
            dist.init_process_group(
                "nccl" if worker.on_cuda else "gloo",
                rank=worker.rank,
                world_size=worker.world_size,
                timeout=_COLLECTIVE_TIMEOUT,
            )
        task(worker)
    except BaseException:
        text = traceback.format_exc().strip().splitlines()[-_SHOWN_LINES:]
        (worker.folder / f"{worker.rank}-{_ERROR}").write_text("\n".join(text), encoding="utf-8")
        raise SystemExit(1) from None
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def _environment(world_size: int, device: str) -> Iterator[None]:
    """Sets what the processes of a group inherit: what a launcher would say, and the GPUs that they see."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    before = dict(os.environ)
    os.environ.update(
        WORLD_SIZE=str(world_size), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), PYTHONUNBUFFERED="1"
    )
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if device == "cuda":
        visible = before.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:world_size])
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
