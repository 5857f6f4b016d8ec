"""Memory and time of the cross-entropy of a linear head with 129280 words: chunked against naive, on CPU.

Each way runs in a process of its own; memory is the peak of forward and backward over what inputs and weight take.
Losses and gradients are compared; of several repeats the fastest counts.

    python benchmarks/cross_entropy_memory.py
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import machine, peak_memory, resident_memory, save
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_moe.losses.linear_cross_entropy import linear_cross_entropy

NAIVE, CHUNKED, LIBRARY = "naive: logits at once", "lightning-moe: chunked", "torch: linear_cross_entropy"
WAYS = [NAIVE, CHUNKED]
if hasattr(torch.nn, "LinearCrossEntropyOptions"):
    WAYS.append(LIBRARY)


def loss_of(way: str, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropy."""
    if way == CHUNKED:
        return linear_cross_entropy(hidden, weight, labels).loss
    if way == NAIVE:
        return F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


def run_one(arguments: argparse.Namespace) -> None:
    """Measures one way in this process and prints the result."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(arguments.tokens, arguments.width, generator=generator).requires_grad_()
    weight = (torch.randn(arguments.vocabulary, arguments.width, generator=generator) * 0.02).requires_grad_()
    labels = torch.randint(0, arguments.vocabulary, (arguments.tokens,), generator=generator)
    labels[::7] = -100
    # Loads the kernels first, so that their memory is not counted.
    for way in WAYS:
        loss_of(way, torch.randn(4, 8, requires_grad=True), torch.randn(16, 8), torch.zeros(4).long()).backward()
    before = resident_memory()
    start = time.perf_counter()
    loss = loss_of(arguments.way, hidden, weight, labels)
    loss.backward()
    seconds = time.perf_counter() - start
    peak = peak_memory() - before
    if hidden.grad is None or weight.grad is None:
        raise RuntimeError("no gradient")
    if arguments.gradients:
        save_file({"hidden": hidden.grad, "weight": weight.grad}, arguments.gradients)
    print(json.dumps({"loss": loss.item(), "seconds": seconds, "peak": peak}))


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Runs every way, interleaved, and compares gradients with the naive ones."""
    results: dict[str, dict[str, Any]] = {way: {"seconds": [], "peak": []} for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(arguments.repeats):
            for way in WAYS:
                command = [sys.executable, __file__, "--way", way]
                for name in ("tokens", "width", "vocabulary", "threads"):
                    command += [f"--{name}", str(getattr(arguments, name))]
                gradients = Path(folder) / f"{WAYS.index(way)}.safetensors"
                if repeat == 0:
                    command += ["--gradients", str(gradients)]
                one = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                result = results[way]
                result["loss"] = one["loss"]
                result["seconds"].append(one["seconds"])
                result["peak"].append(one["peak"])
                if repeat == 0:
                    result["gradient_error"] = _difference(Path(folder) / "0.safetensors", gradients)
    return results


def _difference(reference: Path, other: Path) -> float:
    left, right = load_file(reference), load_file(other)
    return max(((left[name] - right[name]).abs().max() / left[name].abs().max()).item() for name in left)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256, help="hidden size")
    parser.add_argument("--vocabulary", type=int, default=129280)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--gradients", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.way:
        run_one(arguments)
        return

    results = measure(arguments)
    table = Table(
        title=f"Cross-entropy of {arguments.tokens} tokens, width {arguments.width}, vocabulary "
        f"{arguments.vocabulary}, float32, CPU, {arguments.threads} threads",
        caption="memory: peak of forward and backward over inputs and weight; it holds the gradients, "
        f"{(arguments.tokens + arguments.vocabulary) * arguments.width * 4 / 2**20:,.0f} MiB",
    )
    for column in ("", "memory (MiB)", "against naive", "forward + backward (s)", "loss", "gradient error"):
        table.add_column(column, justify="left" if not column else "right")
    for way, result in results.items():
        result["memory_to_naive"] = max(result["peak"]) / max(results[NAIVE]["peak"])
        table.add_row(
            way,
            f"{max(result['peak']) / 2**20:,.0f}",
            f"{result['memory_to_naive']:.2f}x",
            f"{min(result['seconds']):.2f}",
            f"{result['loss']:.1f}",
            f"{result['gradient_error']:.1e}",
        )
    console = Console(width=120)
    console.print(table)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("way", "gradients")}
    content = {"machine": machine(arguments.threads), "settings": settings, "results": results}
    console.print(f"Record: benchmarks/results/{save('cross_entropy_memory', content).name}")


if __name__ == "__main__":
    main()
