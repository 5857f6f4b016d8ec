"""A DeepSeek-V3 training step on one GPU: ours and its rivals in one run, each in a process of its own.

All do the same work on the same tokens: zero_grad, forward, loss, backward, gradient clipping, AdamW and, where they
have one, the update of the selection bias, with float32 master weights and bfloat16 compute. Steps are timed by CUDA
events; operations are counted by one rule (lightning_moe/models/flops.py), as a share of a measured bfloat16 GEMM.

    python benchmarks/gpu_step.py --shapes v2_lite_16k 671b_8k              (the rivals need the extra "bench")
    python benchmarks/gpu_step.py --systems lightning-moe --shapes v2_lite_16k --profile traces
    python benchmarks/gpu_step.py --systems lightning-moe --precision float8_rowwise float8_tensorwise_rowwise

``--precision`` also times our step in low precision: converted by a plugin as in training, whatever the table of
measurements would choose, and only by kernels on a GPU. Such rows have their ratio to our bfloat16 of the same run, and
its loss beside theirs: that of the last batch once more, after the steps on it, so that gradients that are wrong show
too. To try the script: ``--device cpu --shapes tiny``, where low precision is emulated.
"""

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import busy_ms, kernels_of, read_events, tables
from gpu_ours import OURS, through_trainer, with_bf16_moments, without_trainer
from gpu_precision import PRECISIONS, compare, system_name
from gpu_precision import SYSTEMS as LOW_PRECISION
from gpu_rivals import torchtitan, transformers
from gpu_shapes import SHAPES, Batch, Options, Shape, System, routing_name, shown_shape
from record import RESULTS, machine, write
from rich.console import Console
from rich.table import Table
from torch import Tensor

TRAINER, BF16_MOMENTS = "lightning-moe (Trainer)", "lightning-moe (bf16 moments)"
SYSTEMS: dict[str, Callable[[Shape, Options], System]] = {
    OURS: without_trainer,
    TRAINER: through_trainer,
    BF16_MOMENTS: with_bf16_moments,
    **LOW_PRECISION,
    "transformers": transformers,
    "torchtitan": torchtitan,
}
RIVALS = ("transformers", "torchtitan")
RESULT = "RESULT "
PROFILED_STEPS = 2


# One system, in its own process


def make_batches(shape: Shape, steps: int, device: torch.device, seed: int) -> list[Batch]:
    """Uniformly random tokens, the same for every system, another batch for every step."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(
        0, shape.config.vocab_size, (steps, shape.batch, shape.sequence + 1), generator=generator
    ).to(device)
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in tokens]


class StepTimes:
    """Takes the time of steps, the first of them as warm-up.

    Args:
        warmup: Steps that are not timed.
        device: Where the steps run.
    """

    def __init__(self, warmup: int, device: torch.device) -> None:
        self.warmup = warmup
        self.on_cuda = device.type == "cuda"
        self.losses: list[Tensor] = []
        self.first_step_s = 0.0
        self._began = time.perf_counter()
        self._marks: list[Any] = []

    def after_step(self, loss: Tensor) -> None:
        """Marks the end of a step."""
        self.losses.append(loss)
        if len(self.losses) == 1:
            loss.item()
            self.first_step_s = time.perf_counter() - self._began
        if len(self.losses) == self.warmup:
            self._synchronize()
            gc.collect()
            gc.disable()
            if self.on_cuda:
                torch.cuda.reset_peak_memory_stats()
        if len(self.losses) >= self.warmup:
            mark: Any = torch.cuda.Event(enable_timing=True) if self.on_cuda else time.perf_counter()
            if self.on_cuda:
                mark.record()
            self._marks.append(mark)

    def milliseconds(self) -> list[float]:
        """Returns the time of each step after the warm-up."""
        self._synchronize()
        gc.enable()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [a.elapsed_time(b) if self.on_cuda else (b - a) * 1e3 for a, b in pairs]

    def _synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()


def measure(system: System, batches: list[Batch], arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains a system and takes its time."""
    name, shape_name = arguments.worker
    shape = SHAPES[shape_name]
    parameters, flops = shape.count()
    if system.parameters != parameters:
        raise RuntimeError(f"it has {system.parameters:,} parameters, but the shape has {parameters:,}")
    times = StepTimes(arguments.warmup, torch.device(arguments.device))
    system.train(batches, times.after_step)
    milliseconds = times.milliseconds()
    peak = torch.cuda.max_memory_allocated() / 2**30 if times.on_cuda else None
    losses_after: list[Tensor] = []
    if name != TRAINER:  # which trains once
        system.train(batches[-1:], losses_after.append)
    step_ms = statistics.median(milliseconds)
    tflops = flops * shape.tokens / step_ms / 1e9
    return {
        "system": name,
        "shape": shape_name,
        "routing": routing_name(arguments.forced_balance),
        "tokens_per_s": shape.tokens / step_ms * 1e3,
        "step_ms": step_ms,
        "step_ms_mean": statistics.mean(milliseconds),
        "step_ms_min": min(milliseconds),
        "step_ms_max": max(milliseconds),
        "tflops": tflops,
        "mfu": tflops / arguments.ceiling,
        "peak_memory_gib": peak,
        "first_step_s": times.first_step_s,
        "first_loss": times.losses[0].item(),
        "last_loss": times.losses[-1].item(),
        "loss_after": losses_after[0].item() if losses_after else None,
        "settings": {
            **system.settings,
            "compiled": not arguments.no_compile,
            "activation_checkpointing": arguments.checkpointing,
            "clip": arguments.clip,
        },
    }


def profile(system: System, batches: list[Batch], row: dict[str, Any], folder: Path) -> None:
    """Profiles a few steps, writes the trace and prints where the time goes."""
    if system.name_parts is not None:
        system.name_parts()
    with torch.profiler.profile() as profiler:
        system.train(batches, lambda loss: None)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{row['shape']}-{row['system'].replace(' ', '_')}.json.gz"
    profiler.export_chrome_trace(str(path))
    kernels = kernels_of(read_events(path))
    title = f"{row['system']}, {row['shape']}"
    console = Console(width=160)
    console.print(
        f"{title}: kernels run {busy_ms(kernels, len(batches)):.1f} of {row['step_ms']:.1f} ms; trace: {path}"
    )
    for table in tables(kernels, len(batches), row["step_ms"], title):
        console.print(table)


def versions(device: str) -> dict[str, Any]:
    """Describes the machine of a process that uses the device."""
    described = machine(torch.get_num_threads())
    for package in ("torchtitan", "triton", "lightning"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            described["versions"][package] = importlib.metadata.version(package)
    described["device"] = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    described["cuda"] = torch.version.cuda
    return described


def work(arguments: argparse.Namespace) -> None:
    """Measures one system, and prints its row for the process that started this one."""
    name, shape_name = arguments.worker
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    options = Options(
        device=device,
        clip=arguments.clip,
        forced_balance=arguments.forced_balance,
        compile=not arguments.no_compile,
        checkpointing=arguments.checkpointing,
        strategy=arguments.strategy_arguments,
        optimizer=arguments.optimizer_arguments,
    )
    torch.manual_seed(arguments.seed)
    try:
        batches = make_batches(SHAPES[shape_name], arguments.warmup + arguments.steps, device, arguments.seed)
        system = SYSTEMS[name](SHAPES[shape_name], options)
        row = measure(system, batches, arguments)
    except Exception as error:  # a rival may fail in any way; the reason is what is shown
        traceback.print_exc()
        text = " ".join(str(error).split())
        memory = isinstance(error, torch.OutOfMemoryError)
        _send({"reason": f"{type(error).__name__}: {text[:300]}", "out_of_memory": memory})
        return
    _send({"row": row, "machine": versions(arguments.device)})
    if arguments.profile is not None and name != TRAINER:
        profile(system, batches[:PROFILED_STEPS], row, arguments.profile)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _send(result: dict[str, Any]) -> None:
    print(RESULT + json.dumps(result), flush=True)


# All systems, one after the other


def run(name: str, shape_name: str, arguments: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Runs one system in a new process, for a limited time, and returns what it found."""
    command = [sys.executable, "-u", __file__, *sys.argv[1:], *more, "--worker", name, shape_name]
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    late = threading.Event()

    def stop() -> None:
        late.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(arguments.time_limit, stop)
    timer.start()
    assert process.stdout is not None
    result = None
    for line in process.stdout:
        if line.startswith(RESULT):
            result = json.loads(line[len(RESULT) :])
        elif not arguments.quiet:
            print(line, end="", flush=True)
    status = process.wait()
    timer.cancel()
    if result is None:
        reason = f"no result after {arguments.time_limit:.0f} s" if late.is_set() else f"ended with status {status}"
        result = {"reason": reason, "out_of_memory": False}
    return result


def run_all(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Runs every system on every shape; where memory does not suffice, once more with recomputed activations.

    The record is written after each of them, for runs that are cut short.
    """
    rows: list[dict[str, Any]] = []
    described: dict[str, Any] = {}
    for shape_name in arguments.shapes:
        for name in arguments.systems:
            began = time.perf_counter()
            result = run(name, shape_name, arguments)
            if result.get("out_of_memory") and not arguments.checkpointing:
                result = run(name, shape_name, arguments, "--checkpointing")
            described = result.get("machine", described)
            routing = routing_name(arguments.forced_balance)
            failed = {"system": name, "shape": shape_name, "routing": routing, "reason": result.get("reason")}
            row = result.get("row", failed)
            rows.append(row)
            shown = f"{row['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in row else row["reason"]
            print(f"{shape_name}, {name}: {shown} ({time.perf_counter() - began:.0f} s)", flush=True)
            save(rows, described, arguments)
    return rows, described


def report(rows: list[dict[str, Any]], ceiling: float) -> Table:
    """Makes the table, and adds to each row its ratio to the best rival on the same shape."""
    table = Table(title=f"One training step; 100% is {ceiling:g} TFLOP/s", title_justify="left")
    for column in ("shape", "system", "tokens/s", "ms", "min to max", "share", "peak GiB", "to best rival"):
        table.add_column(column, justify="left" if column in ("shape", "system") else "right")
    for row in rows:
        if "reason" in row:
            table.add_row(row["shape"], row["system"], "cannot run")
            continue
        rivals = [
            r["tokens_per_s"] for r in rows if r["shape"] == row["shape"] and r["system"] in RIVALS and "mfu" in r
        ]
        row["ratio_to_best_rival"] = row["tokens_per_s"] / max(rivals) if rivals else None
        table.add_row(
            shown_shape(row),
            row["system"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['step_ms']:.1f}",
            f"{row['step_ms_min']:.1f} to {row['step_ms_max']:.1f}",
            f"{row['mfu']:.1%}",
            "" if row["peak_memory_gib"] is None else f"{row['peak_memory_gib']:.1f}",
            f"{row['ratio_to_best_rival']:.2f}x" if rivals else "",
        )
    return table


def cannot_run(rows: list[dict[str, Any]]) -> list[str]:
    """Says why systems have no figures."""
    return [f"{row['shape']}: {row['system']} cannot run: {row['reason']}" for row in rows if "reason" in row]


def overheads(rows: list[dict[str, Any]]) -> list[str]:
    """Says what the Trainer adds to a step, by the means over steps, which include those that log."""
    means = {(row["shape"], row["system"]): row["step_ms_mean"] for row in rows if "step_ms_mean" in row}
    return [
        f"{shape}: Trainer adds {means[shape, TRAINER] / mean - 1:.1%} to the mean step of {mean:.1f} ms"
        for (shape, system), mean in means.items()
        if system == OURS and (shape, TRAINER) in means
    ]


def save(rows: list[dict[str, Any]], described: dict[str, Any], arguments: argparse.Namespace) -> Path | None:
    """Writes the record, if there is one to write; rows of others that it holds from the same versions stay.

    Args:
        rows: Those of this run.
        described: The machine.
        arguments: Of the command line.

    Returns:
        Where it is, or ``None``.
    """
    path: Path | None = arguments.output
    if path is None or all("reason" in row for row in rows):
        return None
    measured = {(row["shape"], row["routing"], row["system"]) for row in rows}
    kept: list[dict[str, Any]] = []
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        same = all(before["machine"].get(key) == described.get(key) for key in ("device", "versions"))
        kept = [row for row in before["rows"] if same and (row["shape"], row["routing"], row["system"]) not in measured]
    settings = {name: getattr(arguments, name) for name in ("steps", "warmup", "seed", "ceiling")}
    dated = [{"date": described.get("date"), **row} for row in rows]
    content = {"machine": described, "settings": settings, "rows": kept + dated}
    return write(path, content)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    goals = [name for name in SHAPES if not name.startswith("tiny")]
    parser.add_argument(
        "--shapes", nargs="+", choices=list(SHAPES), default=goals, metavar="SHAPE", help=", ".join(goals)
    )
    parser.add_argument("--systems", nargs="+", choices=[OURS, *RIVALS], default=[OURS, *RIVALS])
    parser.add_argument("--through-lightning", action="store_true", help="also time our step in Trainer.fit")
    parser.add_argument(
        "--bf16-moments", action="store_true", help="also time our step with AdamW's moments in bfloat16"
    )
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=list(PRECISIONS),
        default=[],
        metavar="NAME",
        help=f"also time our step in low precision: {', '.join(PRECISIONS)}",
    )
    parser.add_argument("--steps", type=int, default=12, help="timed steps")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them, compilation included")
    parser.add_argument("--clip", type=float, default=1.0, help="gradient norm; 0 for no clipping")
    parser.add_argument("--forced-balance", action="store_true", help="give every expert the same number of tokens")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--no-compile", action="store_true", help="compile nothing")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="profile two more steps, with traces here")
    parser.add_argument("--ceiling", type=float, default=797.0, help="TFLOP/s of a large bfloat16 GEMM on this device")
    parser.add_argument("--time-limit", type=float, default=240.0, help="seconds for one system and shape")
    parser.add_argument("--strategy-arguments", type=json.loads, default={}, metavar="JSON", help="more, for ours")
    parser.add_argument("--optimizer-arguments", type=json.loads, default={}, metavar="JSON", help="more, for ours")
    parser.add_argument("--output", type=Path, help="where the record goes; by default to results/, from a GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--quiet", action="store_true", help="show nothing of what the systems print")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    more = [(arguments.through_lightning, TRAINER), (arguments.bf16_moments, BF16_MOMENTS)]
    arguments.systems += [name for asked, name in more if asked]
    arguments.systems += [system_name(name) for name in dict.fromkeys(arguments.precision)]
    if arguments.output is None and arguments.device == "cuda":
        arguments.output = RESULTS / "gpu_step.json"
    rows, described = run_all(arguments)
    console = Console(width=140)
    console.print(report(rows, arguments.ceiling))
    beside_bf16 = compare(rows)
    if beside_bf16 is not None:
        console.print(beside_bf16)
    for line in [*cannot_run(rows), *overheads(rows)]:
        console.print(line, highlight=False)
    path = save(rows, described, arguments)  # once more, with the ratios
    if path is not None:
        console.print(f"Record: {path}")


if __name__ == "__main__":
    main()
