"""Where the time of profiled steps goes, read from the trace that PyTorch's profiler exports.

A kernel has a kind, by its name, and a part of the model, by what launched it: a range named ``part: …``, or in
backward the autograd node of an operation that ran in such a range in forward.

    python benchmarks/gpu_kernels.py runs/mine/logs/fit-….pt.trace.json     (of --trainer.profiler pytorch)
"""

import argparse
import bisect
import gzip
import itertools
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

KINDS = [  # the first that matches; the compiler names its kernels after the operators that it fused
    ("copies and casts", r"^triton_poi_fused_(?:(?:_to_copy|t|transpose|clone|view|cat|split)_)+\d+$"),
    ("other elementwise", r"^triton_(poi|per|red|for)_"),
    ("attention", r"flash|fmha|sdpa|attn|attention"),
    ("grouped GEMM", r"grouped|GroupProblemShape"),
    ("cross-entropy", r"cross_entropy|nll_loss|log_softmax"),
    ("optimizer", r"adam"),
    ("gradient norm and clip", r"multi_tensor_apply|lpnorm|foreach"),
    ("GEMM", r"gemm|nvjet|cutlass|xmma|cublas|splitK|^triton_tem_"),
    ("copies and casts", r"^_(quantise_rows|amax|transpose)_kernel"),
    ("permute", r"(sum|copy|round|expand)_rows|clear_padding|spread|index|gather|scatter|permute"),
    ("router", r"topk|sort|radix|searchsorted|bucketize|histc|softmax|router|routing"),
    ("copies and casts", r"memcpy|memset|copy_kernel|direct_copy|CatArray|split_with_sizes|chunk_cat"),
    ("other elementwise", r""),
]
_PART = "part: "
_NODE = "autograd::engine::evaluate_function: "
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Kernel:
    """One piece of work of the device.

    Args:
        name: Its name.
        start: When it began, in microseconds.
        duration: How long it took, in microseconds.
        kind: What it computes, by its name.
        part: Part of the model, or ``"other"``.
    """

    name: str
    start: float
    duration: float
    kind: str
    part: str


def kind_of(name: str) -> str:
    """Returns the kind of a kernel."""
    return next(kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))


def read_events(path: Path) -> list[dict[str, Any]]:
    """Reads what took time in a trace.

    Args:
        path: What ``torch.profiler.profile.export_chrome_trace`` wrote, ``.json`` or ``.json.gz``.
    """
    content = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    return [event for event in content["traceEvents"] if event.get("ph") == "X"]


def kernels_of(events: list[dict[str, Any]]) -> list[Kernel]:
    """Returns the kernels of a trace, each with its kind and part."""
    part_at = _Parts(events)
    launches = {
        event["args"]["correlation"]: event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    kernels = []
    for event in events:
        if event.get("cat") in _DEVICE_WORK:
            launch = launches.get(event["args"].get("correlation"))
            part = "other" if launch is None else part_at(launch["tid"], launch["ts"])
            kernels.append(Kernel(event["name"], event["ts"], event["dur"], kind_of(event["name"]), part))
    return kernels


class _Parts:
    """Tells which part of the model a thread was in at a time."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        ranges: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
        for event in events:
            # The profiler also draws ranges on the device's own rows.
            if event.get("cat") == "user_annotation" and (part := _part_of_range(event["name"])):
                ranges[event["tid"]].append((event["ts"], event["ts"] + event["dur"], part))
        self._ranges = {thread: _Nested(spans) for thread, spans in ranges.items()}
        forward_thread = next(iter(ranges), None)
        # An operation makes the autograd node that bears the number it found; the last one that found it made it. Each
        # thread has numbers of its own, and what runs in a node bears that node's number too.
        part_of_node: dict[int, tuple[float, str]] = {}
        nodes: list[dict[str, Any]] = []
        for event in events:
            number = event.get("args", {}).get("Sequence number")
            if event.get("cat") != "cpu_op" or number is None:
                continue
            if event["name"].startswith(_NODE):
                nodes.append(event)
            elif event["tid"] == forward_thread and not event["args"].get("Fwd thread id"):
                part = self(event["tid"], event["ts"])
                if event["ts"] >= part_of_node.get(number, (0.0, ""))[0]:
                    part_of_node[number] = event["ts"], part
        for event in nodes:
            part = part_of_node.get(event["args"]["Sequence number"], (0.0, "other"))[1]
            ranges[event["tid"]].append((event["ts"], event["ts"] + event["dur"], part))
        self._ranges = {thread: _Nested(spans) for thread, spans in ranges.items()}

    def __call__(self, thread: Any, time: float) -> str:
        nested = self._ranges.get(thread)
        return "other" if nested is None else nested.innermost(time)


def _part_of_range(name: str) -> str | None:
    if name.startswith(_PART):
        return name[len(_PART) :]
    if name.startswith("Optimizer.step#"):
        return "optimizer"
    return "gradient norm" if name.endswith(".configure_gradient_clipping") else None


class _Nested:
    """Time ranges of one thread, which lie within or beside each other."""

    def __init__(self, spans: list[tuple[float, float, str]]) -> None:
        self._spans = sorted(spans, key=lambda span: (span[0], -span[1]))
        self._starts = [span[0] for span in self._spans]
        self._latest_end = list(itertools.accumulate((span[1] for span in self._spans), max))

    def innermost(self, time: float) -> str:
        for index in range(bisect.bisect_right(self._starts, time) - 1, -1, -1):
            if self._latest_end[index] < time:
                break
            _, end, name = self._spans[index]
            if end >= time:
                return name
        return "other"


def tables(kernels: list[Kernel], steps: int, step_ms: float, title: str, top: int = 25) -> list[Table]:
    """Makes the tables of a profile: by part, by kind, and the longest kernels.

    Args:
        kernels: Those of all profiled steps.
        steps: How many were profiled.
        step_ms: Time of a step without the profiler; what no kernel fills of it is idle.
        title: Above the tables.
        top: Kernels to show.
    """
    idle = max(step_ms - busy_ms(kernels, steps), 0.0)
    made = []
    for column in ("part", "kind"):
        shares: dict[str, float] = defaultdict(float)
        for kernel in kernels:
            shares[getattr(kernel, column)] += kernel.duration / 1e3 / steps
        shares["idle"] = idle
        if set(shares) == {"other", "idle"}:
            continue
        table = Table(title=f"{title}: by {column}", title_justify="left", min_width=60)
        table.add_column(column)
        table.add_column("ms a step", justify="right")
        table.add_column("share", justify="right")
        for name, ms in sorted(shares.items(), key=lambda item: -item[1]):
            table.add_row(name, f"{ms:.2f}", f"{ms / step_ms:.1%}")
        made.append(table)
    made.append(_longest(kernels, steps, title, top))
    return made


def _longest(kernels: list[Kernel], steps: int, title: str, top: int) -> Table:
    grouped: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for kernel in kernels:
        grouped[kernel.name, kernel.kind, kernel.part].append(kernel.duration / 1e3 / steps)
    table = Table(title=f"{title}: longest kernels", title_justify="left")
    for column in ("ms a step", "calls", "part", "kind", "kernel"):
        table.add_column(column, justify="right" if column in ("ms a step", "calls") else "left", no_wrap=True)
    for (name, kind, part), times in sorted(grouped.items(), key=lambda item: -sum(item[1]))[:top]:
        table.add_row(f"{sum(times):.2f}", f"{len(times) / steps:g}", part, kind, _shortened(name))
    return table


def busy_ms(kernels: list[Kernel], steps: int) -> float:
    """Time of a step in which the device works; kernels on several streams at a time count once."""
    busy, end = 0.0, 0.0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        busy += max(kernel.start + kernel.duration - max(kernel.start, end), 0.0)
        end = max(end, kernel.start + kernel.duration)
    return busy / 1e3 / steps


def span_ms(kernels: list[Kernel], steps: int) -> float:
    """Time of a step from the first kernel of all to the end of the last; 0 without kernels."""
    start = min((kernel.start for kernel in kernels), default=0.0)
    return (max((kernel.start + kernel.duration for kernel in kernels), default=start) - start) / 1e3 / steps


def _shortened(name: str, width: int = 70) -> str:
    return name if len(name) <= width else f"{name[: width - 32]} … {name[-29:]}"


def main() -> None:
    """Prints the tables of a trace of Lightning's PyTorchProfiler; a step is a micro-batch there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help=".json or .json.gz")
    path = parser.parse_args().trace
    events = read_events(path)
    steps = sum(event["name"].startswith("ProfilerStep#") and event["cat"] == "user_annotation" for event in events)
    kernels = kernels_of(events)
    if not kernels or not steps:
        raise SystemExit(f"{path} has no kernels of a GPU, or no steps.")
    for table in tables(kernels, steps, span_ms(kernels, steps), path.name):
        Console(width=160).print(table)


if __name__ == "__main__":
    main()
