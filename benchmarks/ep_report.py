"""Tables and record of ``expert_parallel.py``."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ep_curves import verdict
from ep_dispatch import ALL_TO_ALL
from ep_training import BF16, ONE_DEVICE
from gpu_shapes import shown_shape
from record import write
from rich.table import Table

Row = dict[str, Any]
_SETTINGS = ("shape", "dispatch_shapes", "steps", "warmup", "dispatch_steps", "curve_steps", "num_sms", "seed")


def add_ratios(rows: Sequence[Row]) -> None:
    """Adds to rows how they compare with all-to-all, and to those of several GPUs how they scale."""
    for row in rows:
        if row["part"] == "dispatch":
            base = _only(rows, part="dispatch", system=ALL_TO_ALL, shape=row["shape"])
            for direction in ("forward", "backward"):
                if base is not None:
                    row[f"{direction}_ratio"] = base[f"{direction}_ms"] / row[f"{direction}_ms"]
        elif row["part"] in ("step", "scaling"):
            base = _only(rows, part=row["part"], system=ALL_TO_ALL, gpus=row["gpus"], precision=row["precision"])
            if base is not None:
                row["ratio_to_all_to_all"] = row["tokens_per_s"] / base["tokens_per_s"]
            one = _only(rows, part="scaling", system=ONE_DEVICE, shape=row["shape"])
            if one is not None and row["precision"] == BF16:
                row["efficiency"] = row["tokens_per_s_per_gpu"] / one["tokens_per_s_per_gpu"]


def _only(rows: Sequence[Row], **values: Any) -> Row | None:
    return next((row for row in rows if all(row.get(key) == value for key, value in values.items())), None)


def tables(rows: Sequence[Row]) -> list[Table]:
    """Makes the tables of the parts that have rows."""
    parts = [_dispatch_table(rows), _overhead_table(rows), _training_table(rows), _trace_table(rows)]
    return [table for table in parts if table.row_count]


def remarks(rows: Sequence[Row]) -> list[str]:
    """What is said in a line: the verdict over the curves, and what was not measured."""
    lines = []
    curves = {row["system"]: row["losses"] for row in rows if row["part"] == "curves"}
    if curves:
        lines.append(verdict(curves))
    traced = {row["system"]: row for row in rows if row["part"] == "trace" and row["busy_ms"]}
    for system, row in traced.items():
        idle = row["step_ms"] - row["busy_ms"]
        lines.append(f"{system}: no kernel runs in {idle:.1f} of {row['step_ms']:.1f} ms of a profiled step.")
    if any(row["part"] in ("dispatch", "step") for row in rows):
        lines.append("Tokens travel in bfloat16, with float8 multiplications too, but where the system's name has FP8.")
    return lines


def _dispatch_table(rows: Sequence[Row]) -> Table:
    table = _table(
        "Dispatch + combine alone, in bfloat16 but for FP8; the slowest rank; GB/s of what leaves the busiest rank",
        *("shape", "system", "SMs"),
        *("dispatch ms", "combine ms", "forward GB/s", "to all-to-all"),
        *("backward ms", "backward GB/s", "to all-to-all", "its kernels' GB/s"),
    )
    for row in rows:
        if row["part"] == "dispatch":
            table.add_row(
                row["shape"],
                row["system"],
                _shown(row["num_sms"], "d"),
                *(f"{row[key]:.3f}" for key in ("dispatch_ms", "combine_ms")),
                f"{row['forward_gb_per_s']:.0f}",
                _ratio(row.get("forward_ratio")),
                f"{row['backward_ms']:.3f}",
                f"{row['backward_gb_per_s']:.0f}",
                _ratio(row.get("backward_ratio")),
                _shown(row["kernels_gb_per_s"], ".0f"),
            )
    return table


def _overhead_table(rows: Sequence[Row]) -> Table:
    table = _table(
        "DeepEP's own calls and the adapter, host time of a pair on few tokens",
        *("shape", "SMs", "tokens", "forward us: raw", "adapter", "backward us: raw", "adapter"),
        *("kernels: raw", "more in the adapter"),
    )
    for row in rows:
        if row["part"] == "overhead":
            times = (row[key] for key in ("raw_forward_us", "forward_us", "raw_backward_us", "backward_us"))
            counts = (row[key] for key in ("num_sms", "tokens_per_gpu"))
            kernels = (row[key] for key in ("raw_kernels", "extra_kernels"))
            table.add_row(row["shape"], *map(str, counts), *(f"{us:.0f}" for us in times), *map(str, kernels))
    return table


def _training_table(rows: Sequence[Row]) -> Table:
    table = _table(
        "A whole training step through Trainer.fit",
        *("shape", "GPUs", "system", "precision", "tokens/s", "per GPU", "ms", "peak GiB"),
        *("to all-to-all", "efficiency against 1 GPU"),
    )
    for row in sorted((row for row in rows if row["part"] in ("step", "scaling")), key=lambda row: row["gpus"]):
        efficiency = row.get("efficiency")
        table.add_row(
            shown_shape(row),
            str(row["gpus"]),
            row["system"],
            row["precision"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{row['step_ms']:.1f}",
            _shown(row["peak_memory_gib"], ".1f"),
            _ratio(row.get("ratio_to_all_to_all")),
            "" if efficiency is None else f"{efficiency:.1%}",
        )
    return table


def _trace_table(rows: Sequence[Row]) -> Table:
    table = _table(
        "Kernels that communicate, in a training step, and what runs at the same time",
        *("system", "kernels of", "a step", "ms a step", "overlapped", "by shared experts"),
    )
    for row in rows:
        if row["part"] == "trace" and row["communication"] is not None:
            table.add_row(
                row["system"],
                row["communication"],
                f"{row['kernels']:g}",
                f"{row['ms']:.2f}",
                f"{row['overlapped_ms'] / row['ms']:.0%}",
                f"{row['overlapped_by_shared_expert_ms'] / row['ms']:.0%}",
            )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    words = ("shape", "system", "precision", "kernels of")
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right")
    return table


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def save(rows: list[Row], machine: Row, failures: dict[str, str], arguments: argparse.Namespace) -> Path:
    """Writes the record; rows of parts that were not run now stay, where machine and versions are the same."""
    path: Path = arguments.output
    kept: list[Row] = []
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        same = all(before["machine"].get(key) == machine.get(key) for key in ("device", "devices", "versions"))
        measured = {(row["part"], row.get("routing")) for row in rows}
        kept = [row for row in before["rows"] if same and (row["part"], row.get("routing")) not in measured]
    content = {
        "machine": machine,
        "settings": {name: getattr(arguments, name) for name in _SETTINGS},
        "failures": failures,
        "remarks": remarks(rows),
        "rows": kept + [{"date": machine.get("date"), **row} for row in rows],
    }
    return write(path, content)
