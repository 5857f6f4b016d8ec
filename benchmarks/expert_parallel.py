"""Expert parallelism on the GPUs of one host: DeepEP against all-to-all through NCCL, in one run.

Each part starts one process for each GPU. `dispatch` times dispatch and combine alone and the adapter around DeepEP;
`step` whole training steps of the 16B shape cut to 8 layers, through Trainer.fit; `scaling` the same on fewer GPUs;
`curves` trains a small model through both dispatchers on the same data; `trace` profiles two steps and tells what runs
while tokens travel. Without an installed DeepEP only all-to-all is measured. `dispatch` and `step` measure each
dispatcher with tokens in FP8, too, where the hidden size is a multiple of 128. `--forced-balance` takes away what ranks
wait for one another as their experts get more and fewer tokens, which an untrained router makes large.

    python benchmarks/expert_parallel.py                            (about four minutes on two H200s)
    python benchmarks/expert_parallel.py --parts dispatch --num-sms 16 24
    python benchmarks/expert_parallel.py --device cpu --processes 2 --no-compile --output ep.json   (to try it)
"""

import argparse
import json
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ep_curves import measure_curves
from ep_dispatch import (
    ALL_TO_ALL,
    DEEP_EP,
    DISPATCH_SHAPES,
    IN_FP8,
    measure_dispatch,
    takes_fp8,
    why_no_deep_ep,
)
from ep_processes import Task, Worker, run_group
from ep_report import add_ratios, remarks, save, tables
from ep_training import BF16, FLOAT8, FSDP, ONE_DEVICE, TRAINING_SHAPES, Variant, measure_training
from gpu_step import versions
from record import RESULTS
from rich.console import Console

from lightning_moe.dispatch.deep_ep.found import find_deep_ep

MACHINE = "machine"
PARTS = ("dispatch", "step", "trace", "scaling", "curves")


def described(worker: Worker, task: Task) -> None:
    """Sends the machine and the versions before a task: the process that starts the others holds no GPU."""
    machine = versions(worker.device.type)
    machine["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if worker.on_cuda else None
    reason = why_no_deep_ep()
    machine["versions"]["deep_ep"] = find_deep_ep().generation if reason is None else None
    worker.send({"part": MACHINE, "machine": machine})
    task(worker)


def groups(arguments: argparse.Namespace) -> list[tuple[str, int, Task]]:
    """The groups of processes to start: what they are for, their number, and what they do."""
    world_size, parts = arguments.processes, arguments.parts
    made: list[tuple[str, int, Task]] = []

    def train(name: str, size: int, variants: list[Variant], part: str) -> None:
        made.append((name, size, partial(measure_training, arguments=arguments, variants=variants, part=part)))

    dispatchers = [ALL_TO_ALL] + [DEEP_EP] * (why_no_deep_ep() is None)
    if "dispatch" in parts:
        made.append(("dispatch", world_size, partial(measure_dispatch, arguments=arguments)))
    if {"step", "trace"} & set(parts):
        variants = [Variant(FSDP)] if "step" in parts else []
        for dispatcher in dispatchers:
            variants.append(Variant(dispatcher, profiled="trace" in parts))
            if "step" in parts:
                variants += [Variant(dispatcher, precision) for precision in arguments.precision if precision != BF16]
        if "step" in parts and takes_fp8(TRAINING_SHAPES[arguments.shape].config):
            for dispatcher in dispatchers:
                variants += [Variant(IN_FP8[dispatcher], p) for p in dict.fromkeys((BF16, *arguments.precision))]
        train("step and trace", world_size, variants, "step" if "step" in parts else "traced")
    if "scaling" in parts:
        train("scaling, 1 process", 1, [Variant(ONE_DEVICE)], "scaling")
        sizes = [size for size in (2, 4, 8, 16) if size < world_size]
        if "step" not in parts:
            sizes.append(world_size)
        for size in sizes:
            train(f"scaling, {size} processes", size, [Variant(dispatcher) for dispatcher in dispatchers], "scaling")
    if "curves" in parts:
        made.append(("curves", world_size, partial(measure_curves, arguments=arguments)))
    return made


def run_all(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Runs all groups and writes the record after each."""
    machine: dict[str, Any] = {}
    found: list[dict[str, Any]] = []
    reasons: dict[str, str] = {}
    for name, size, task in groups(arguments):
        began = time.perf_counter()
        rows, reason = run_group(partial(described, task=task), size, arguments.device, arguments.time_limit)
        for row in rows:
            if row["part"] == MACHINE:
                machine = {**row["machine"], "devices": arguments.processes}
            else:
                found.append(row)
        if reason is not None:
            reasons[name] = reason
            print(f"{name} did not end well:\n{reason}", flush=True)
        print(f"-- {name}: {time.perf_counter() - began:.0f} s", flush=True)
        add_ratios(found)
        if found:
            save(found, machine, reasons, arguments)
    return found, reasons


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--processes", type=int, help="by default the GPUs that are visible")
    parser.add_argument("--num-sms", type=int, nargs="+", default=[20, 24], help="of DeepEP; the first one in training")
    parser.add_argument("--precision", nargs="+", choices=(BF16, FLOAT8), default=[BF16], help="also for `step`")
    parser.add_argument("--shape", choices=list(TRAINING_SHAPES), help="of a training step; by default v2_lite_16k")
    parser.add_argument("--dispatch-shapes", nargs="+", choices=list(DISPATCH_SHAPES), help="by default 16b 671b")
    parser.add_argument("--steps", type=int, default=8, help="timed training steps")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them, compilation included")
    parser.add_argument("--dispatch-steps", type=int, default=20, help="timed dispatches")
    parser.add_argument("--curve-steps", type=int, default=200, help="steps of the loss curves")
    parser.add_argument("--forced-balance", action="store_true", help="training: as many tokens for each expert")
    parser.add_argument("--no-compile", action="store_true", help="compile nothing")
    parser.add_argument("--strategy-arguments", type=json.loads, default={}, metavar="JSON", help="more, for training")
    parser.add_argument("--dispatcher-arguments", type=json.loads, default={}, metavar="JSON", help="more, for DeepEP")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="keep the traces of `trace` here")
    parser.add_argument("--time-limit", type=float, default=240.0, help="seconds for one group of processes")
    parser.add_argument("--output", type=Path, default=RESULTS / "expert_parallel.json", help="where the record goes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args()
    on_cuda = arguments.device == "cuda"
    arguments.processes = arguments.processes or (torch.cuda.device_count() if on_cuda else 2)
    if arguments.processes < 2:
        parser.error("expert parallelism needs two GPUs at least; --device cpu tries the script without.")
    arguments.shape = arguments.shape or ("v2_lite_16k" if on_cuda else "tiny_wide")
    arguments.dispatch_shapes = arguments.dispatch_shapes or (["16b", "671b"] if on_cuda else ["tiny"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the processes are stopped too
    began = time.perf_counter()
    found, reasons = run_all(arguments)
    console = Console(width=150)
    for table in tables(found):
        console.print(table)
    for line in remarks(found):
        console.print(line, highlight=False)
    for name, reason in reasons.items():
        console.print(f"{name} did not end well: {reason.splitlines()[-1]}", highlight=False, markup=False)
    console.print(f"Record: {arguments.output}, {time.perf_counter() - began:.0f} s in all", highlight=False)


if __name__ == "__main__":
    main()
