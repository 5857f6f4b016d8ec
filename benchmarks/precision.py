"""Forward and backward in low precision against bfloat16 on one GPU: experts, linears, and a whole block with experts.

Shapes are those of the 16B model (64 experts, 16,384 tokens) and of one of 32 expert-parallel devices of the 671B model
(8 experts, 8,192 rows each). All is compiled as in training; times are medians, and quantisation is part of them. The
time of the kernels alone is given too: a multiplication by itself may wait for the host, which in a whole step is ahead
of the device. What cannot run is left out with the reason. "fp8 rowwise" and "fp8 blockwise, bf16 wgrad" have fused
casts; what torchao makes of them are other precisions. Each result keeps the time of bfloat16 in the same run. The
record is written after each of them, and keeps what was not measured again.

    python benchmarks/precision.py                              (one GPU and torchao; some minutes)
    python benchmarks/precision.py --part experts --shape 671b_ep32
    python benchmarks/precision.py --device cpu --shape tiny    (to try the script)
"""

import argparse
import contextlib
import gc
import io
import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._inductor.config
from record import RESULTS, machine, save
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_moe.models.deepseek_v3 import DeepSeekV3Config, DeepSeekV3Model
from lightning_moe.models.deepseek_v3.rope import rotation_of
from lightning_moe.moe.experts import GroupedExperts
from lightning_moe.moe.feed_forward import Linear
from lightning_moe.precision.casting import cast_on_use
from lightning_moe.precision.conversion import multiplication_of, recipe_of
from lightning_moe.precision.plugin import BlockwiseFP8Precision, Float8Precision, MXFP8Precision, QuantisedPrecision
from lightning_moe.precision.torchao_ops import torchao_linear, torchao_version
from lightning_moe.strategies.regions import apply_to_regions


@dataclass(frozen=True)
class Shape:
    """One layer with experts.

    Args:
        config: The architecture, with the experts of one device.
        batch: Rows of tokens.
        sequence: Tokens of a row.
    """

    config: DeepSeekV3Config
    batch: int
    sequence: int

    @property
    def tokens(self) -> int:
        """Tokens of a forward pass."""
        return self.batch * self.sequence

    def linears(self) -> dict[str, tuple[int, int]]:
        """Inner and outer width of the linears of a block, and of a dense feed-forward."""
        with torch.device("meta"):
            model = DeepSeekV3Model(self.config)
        block = dict(model.blocks())["layers.0"]
        found = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
        sizes = {name: (module.in_features, module.out_features) for name, module in found.items()}
        hidden, width = self.config.hidden_size, self.config.intermediate_size
        return {**sizes, "dense gate_up": (hidden, 2 * width), "dense down": (width, hidden)}


_ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
_TINY = {"vocab_size": 64, "hidden_size": 128, "moe_intermediate_size": 64}
SHAPES = {
    "16b": Shape(DeepSeekV3Config.preset("deepseek_v2_lite", **_ONE_LAYER, vocab_size=512), 4, 4096),
    "671b_ep32": Shape(
        DeepSeekV3Config.preset(
            "deepseek_v3_671b", **_ONE_LAYER, vocab_size=512, n_routed_experts=8, n_group=1, topk_group=1
        ),
        2,
        4096,
    ),
    "tiny": Shape(DeepSeekV3Config.preset("tiny", **{**_ONE_LAYER, **_TINY}), 2, 64),
}
PLUGINS: dict[str, Callable[[], QuantisedPrecision] | None] = {
    "bf16": None,
    "fp8 rowwise": lambda: Float8Precision("rowwise", "rowwise", emulate="never"),
    "fp8 rowwise, bf16 wgrad": lambda: Float8Precision("rowwise", "rowwise", True, emulate="never"),
    "fp8 rowwise torchao": lambda: Float8Precision("rowwise", "rowwise", emulate="never"),
    "fp8 tensorwise linears": lambda: Float8Precision("tensorwise", "bf16", emulate="never"),
    "fp8 tensorwise linears, rowwise experts": lambda: Float8Precision("tensorwise", "rowwise", emulate="never"),
    "fp8 blockwise": lambda: BlockwiseFP8Precision(emulate="never"),
    "fp8 blockwise, bf16 wgrad": lambda: BlockwiseFP8Precision(wgrad_in_high_precision=True, emulate="never"),
    "fp8 blockwise linears": lambda: BlockwiseFP8Precision(grouped_mm="bf16", emulate="never"),
    "fp8 blockwise emulated": lambda: BlockwiseFP8Precision(emulate="always"),
    "mxfp8": lambda: MXFP8Precision(emulate="never"),
    "mxfp8 emulated": lambda: MXFP8Precision(emulate="always"),
}
TORCHAO, BLOCKWISE = "fp8 rowwise torchao", "fp8 blockwise, bf16 wgrad"
SLOW = ("mxfp8 emulated", "fp8 blockwise emulated")  # measured last, and few times
OF_PART = {
    "experts": ("bf16", "fp8 rowwise", "fp8 rowwise, bf16 wgrad", TORCHAO, "fp8 blockwise", BLOCKWISE, "mxfp8", *SLOW),
    "linears": (
        "bf16",
        "fp8 rowwise",
        TORCHAO,
        "fp8 tensorwise linears",
        "fp8 blockwise linears",
        BLOCKWISE,
        "mxfp8",
        *SLOW,
    ),
    "block": tuple(PLUGINS),
}
Result = dict[str, Any]


def milliseconds(step: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Median time of a step after three that warm up, or as many as are measured if those are fewer."""
    for _ in range(min(3, repeats)):
        step()
    measured = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            torch.cuda.synchronize()
            measured.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            step()
            measured.append((time.perf_counter() - start) * 1e3)
    return statistics.median(measured)


def kernel_milliseconds(step: Callable[[], None], steps: int = 3) -> float:
    """Mean time in a step of its kernels on a GPU, without what is between them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e3 / steps


def times(step: Callable[[], None], device: torch.device, repeats: int) -> Result:
    """Median time of a step, and on a GPU that of its kernels alone."""
    result: Result = {"ms": milliseconds(step, device, repeats)}
    if device.type == "cuda":
        result["kernels_ms"] = kernel_milliseconds(step, min(repeats, 3))
    return result


def step_of(function: Callable[..., Tensor], module: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward and backward with gradients of input and weights; the gradient of the output is noise."""
    x.requires_grad_()
    grad = torch.randn_like(function(x))

    def step() -> None:
        x.grad = None
        module.zero_grad(set_to_none=True)
        function(x).backward(grad)

    return step


def convert(module: nn.Module, name: str, shape: Shape, x: Tensor) -> None:
    """Converts a module in place to a precision, by its name, without the table.

    Raises:
        ValueError: There are no kernels, or nothing was converted.
    """
    plugin = PLUGINS[name]
    if plugin is None:
        return
    made = plugin()
    with contextlib.redirect_stderr(io.StringIO()):
        made.convert(module, x.device, tokens=shape.tokens)
    if made.report is None or not made.report.converted:
        outcomes = [] if made.report is None else [outcome for _, _, outcome in made.report.entries]
        raise ValueError("; ".join(outcomes))
    if name == TORCHAO:
        for part in module.modules():
            recipe = recipe_of(part)
            if isinstance(part, GroupedExperts):  # with a grouped_mm of their own they multiply by that
                part.grouped_mm = multiplication_of(part)  # type: ignore[method-assign, assignment]
            elif isinstance(part, nn.Linear) and recipe is not None:
                part.forward = partial(_multiply_by_torchao, part, torchao_linear(recipe))  # type: ignore[method-assign]


def _multiply_by_torchao(linear: nn.Linear, multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    return multiply(x, linear.weight)


def measure_experts(shape: Shape, device: torch.device, repeats: int, name: str) -> Result:
    """Both multiplications of the experts and what is between them, with rows spread evenly."""
    config = shape.config
    experts = GroupedExperts(config.n_routed_experts, config.hidden_size, config.moe_intermediate_size)
    experts = experts.to(device, torch.bfloat16)
    rows = shape.tokens * config.num_experts_per_tok
    x = torch.randn(rows, config.hidden_size, device=device, dtype=torch.bfloat16)
    convert(experts, name, shape, x)
    ends = torch.arange(1, config.n_routed_experts + 1, device=device) * (rows // config.n_routed_experts)
    offsets = (ends // 128 * 128).to(torch.int32)
    offsets[-1] = rows

    def forward(x: Tensor) -> Tensor:
        return experts(x, offsets)

    step = step_of(torch.compile(forward), experts, x)
    flops = 6 * rows * config.hidden_size * 3 * config.moe_intermediate_size
    return _with_rate(times(step, device, repeats), flops)


def measure_linear(size: tuple[int, int], shape: Shape, device: torch.device, repeats: int, name: str) -> Result:
    """One linear at the tokens of a shape."""
    linear = Linear(*size, initializer_range=0.006).to(device, torch.bfloat16)
    x = torch.randn(shape.tokens, size[0], device=device, dtype=torch.bfloat16)
    convert(nn.Sequential(linear), name, shape, x)
    step = step_of(torch.compile(linear.forward), linear, x)
    return _with_rate(times(step, device, repeats), 6 * shape.tokens * size[0] * size[1])


def measure_block(shape: Shape, device: torch.device, repeats: int, name: str) -> Result:
    """A block: attention, router, dispatch, experts and shared experts, with float32 masters."""
    with torch.device(device):
        model = DeepSeekV3Model(shape.config)
    model.init_weights(0)
    hidden = torch.randn(shape.batch, shape.sequence, shape.config.hidden_size, device=device, dtype=torch.bfloat16)
    convert(model, name, shape, hidden)
    apply_to_regions(model, "none", compile_regions=True)
    cast_on_use(model, torch.bfloat16)
    block = dict(model.blocks())["layers.0"]
    rotation = rotation_of(shape.config, torch.arange(shape.sequence, device=device))

    def forward(x: Tensor) -> Tensor:
        return block(x, rotation, balance=False)[0]

    step = step_of(forward, block, hidden)
    return times(step, device, repeats)


def _with_rate(result: Result, flops: float) -> Result:
    return {**result, "tflops": flops / result["ms"] / 1e9}


def attempt(what: str, name: str, measure: Callable[[], Result], console: Console) -> Result:
    """A measurement, or the reason why there is none."""
    torch._inductor.config.emulate_precision_casts = False  # torchao's rowwise linears turn it on, for themselves
    try:
        result = measure()
        kernels = f", kernels {result['kernels_ms']:.3f}" if "kernels_ms" in result else ""
        console.print(f"  {what}, {name}: {result['ms']:.3f} ms{kernels}", highlight=False)
    except Exception as error:  # each kernel fails in a way of its own, and the others are still to be measured
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        result = {"reason": re.sub(r" for [\w.]*:", ":", reason.splitlines()[0])[:300]}
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


def measure_all(
    arguments: argparse.Namespace, device: torch.device, console: Console, written: Callable[[list[Result]], None]
) -> list[Result]:
    """Runs the parts that were asked for; what is slow comes after all else.

    Args:
        arguments: Of the command line.
        device: Where to run.
        console: For each result.
        written: Called with all rows after each result.
    """
    rows: list[Result] = []
    later: list[tuple[Result, str, Callable[[], Result]]] = []
    for shape_name in arguments.shape:
        shape = SHAPES[shape_name]
        multiplications: list[tuple[str, str, Callable[..., Result]]] = [
            ("experts", "experts", measure_experts),
            ("block", "block", measure_block),
        ]
        for name, size in shape.linears().items():
            multiplications.append(("linears", f"{name} {size[0]} -> {size[1]}", partial(measure_linear, size)))
        for part, what, measure in multiplications:
            if part not in arguments.part:
                continue
            row: Result = {"shape": shape_name, "tokens": shape.tokens, "what": what, "results": {}}
            rows.append(row)
            for name in [name for name in OF_PART[part] if name in arguments.precision]:
                repeats = min(arguments.repeats, 2) if name in SLOW else arguments.repeats
                attempted: Callable[[], Result] = partial(
                    attempt, f"{shape_name}, {what}", name, partial(measure, shape, device, repeats, name), console
                )
                if name in SLOW:
                    later.append((row, name, attempted))
                else:
                    add_result(row, name, attempted())
                    written(rows)
    for row, name, slow in later:
        add_result(row, name, slow())
        written(rows)
    return rows


def add_result(row: Result, name: str, result: Result) -> None:
    """Adds a precision's result to a row, with the times of bfloat16 in the same run, where there are any."""
    row["results"][name] = result
    base = row["results"].get("bf16", {})
    result |= {f"bf16_{key}": base[key] for key in ("ms", "kernels_ms") if key in base}


def earlier_rows() -> list[Result]:
    """The rows of the record."""
    path = RESULTS / "precision.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def merged(rows: list[Result], earlier: list[Result]) -> list[Result]:
    """The earlier rows, with the results of these in the place of what was measured again."""
    found = {(row["shape"], row["what"]): row for row in earlier}
    for row in rows:
        key = row["shape"], row["what"]
        found[key] = {**row, "results": {**found.get(key, row)["results"], **row["results"]}}
    return list(found.values())


def print_table(rows: list[Result], console: Console, title: str) -> None:
    """Prints speeds relative to bfloat16, in brackets those of the kernels alone, and why some are missing."""
    table = Table(title=title, title_justify="left")
    table.add_column("shape")
    table.add_column("forward and backward of")
    names = [name for name in PLUGINS if any(name in row["results"] for row in rows)]
    for name in names:
        table.add_column(f"{name}, ms" if name == "bf16" else name, justify="right", overflow="fold")
    reasons: dict[str, set[str]] = {}
    for row in rows:
        results = row["results"]
        cells = []
        for name in names:
            result = results.get(name, {})
            if "reason" in result:
                reasons.setdefault(name, set()).add(result["reason"])
            if "ms" not in result or "bf16_ms" not in result:
                cells.append("-")
                continue
            alone = f"{result['ms']:.2f}" if name == "bf16" else f"{result['bf16_ms'] / result['ms']:.2f}x"
            if "kernels_ms" in result and "bf16_kernels_ms" in result:
                kernels = result["kernels_ms"]
                ratio = result["bf16_kernels_ms"] / kernels
                alone += f" ({kernels:.2f})" if name == "bf16" else f" ({ratio:.2f}x)"
            cells.append(alone)
        table.add_row(row["shape"], row["what"], *cells)
    console.print(table)
    for name, texts in reasons.items():
        for text in sorted(texts):
            console.print(f"{name}: not run: {text}", highlight=False)


def main() -> None:
    """Measures, prints the table and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parts = tuple(OF_PART)
    parser.add_argument("--part", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--shape", nargs="+", choices=tuple(SHAPES), default=["16b", "671b_ep32"])
    parser.add_argument("--precision", nargs="+", choices=tuple(PLUGINS), default=list(PLUGINS), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    console = Console()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    version = torchao_version()
    torchao = "none" if version is None else f"{version[0]}.{version[1]}"
    record = {
        "machine": machine(torch.get_num_threads()),
        "device": name,
        "torchao": torchao,
        "repeats": arguments.repeats,
    }
    earlier = earlier_rows()

    def written(rows: list[Result]) -> None:
        if device.type == "cuda":
            save("precision", {**record, "rows": merged(rows, earlier)})

    rows = measure_all(arguments, device, console, written)
    title = f"{name}, torch {torch.__version__}, torchao {torchao}: speed relative to bfloat16 (of the kernels alone)"
    print_table(rows, Console(width=max(console.width, 170)), title)
    if device.type == "cuda":
        console.print("Record: benchmarks/results/precision.json")


if __name__ == "__main__":
    main()
