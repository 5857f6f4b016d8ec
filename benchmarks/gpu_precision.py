"""Our step in low precision, in ``gpu_step.py``: converted by a precision plugin as in training, beside bfloat16."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from gpu_ours import OURS, without_trainer
from gpu_shapes import PRECISION, Options, Shape, System, shown_shape
from precision import PLUGINS
from rich.table import Table

from lightning_moe.moe.experts import GroupedExperts
from lightning_moe.precision.conversion import recipe_of

# Their names in ``precision.py``, whose plugins ask for their recipes: no table of measurements keeps bfloat16.
PRECISIONS = {
    "float8_rowwise": "fp8 rowwise",
    "float8_tensorwise_linears": "fp8 tensorwise linears",
    "float8_tensorwise_rowwise": "fp8 tensorwise linears, rowwise experts",
    "blockwise_fp8": "fp8 blockwise",
    "blockwise_fp8_bf16_wgrad": "fp8 blockwise, bf16 wgrad",
    "blockwise_fp8_linears": "fp8 blockwise linears",
    "mxfp8": "mxfp8",
}


def system_name(precision: str) -> str:
    """Returns the name that a precision's rows have."""
    return f"{OURS}, {precision}"


def in_precision(precision: str, shape: Shape, options: Options) -> System:
    """As :func:`~gpu_ours.without_trainer`, converted before it is compiled; a CPU emulates, a GPU must have kernels.

    Raises:
        ValueError: There are no kernels, or nothing was converted.
    """
    make = PLUGINS[PRECISIONS[precision]]
    assert make is not None
    plugin = make()
    plugin.emulate = "never" if options.device.type == "cuda" else "auto"
    system = without_trainer(shape, options, plugin)
    report = plugin.report
    if report is None or not report.converted:
        outcomes = [] if report is None else [outcome for _, _, outcome in report.entries]
        raise ValueError(f"nothing was converted: {'; '.join(outcomes)}")
    converted = Counter(
        f"{recipe.name} {'experts' if isinstance(module, GroupedExperts) else 'linears'}"
        for module in system.modules
        if (recipe := recipe_of(module)) is not None
    )
    settings = {
        **system.settings,
        "precision": f"{PRECISION}, {precision} multiplications",
        "converted": dict(converted),
        "not_converted": report.skipped,
        "emulated": report.emulated,
    }
    return replace(system, settings=settings)


SYSTEMS = {system_name(name): partial(in_precision, name) for name in PRECISIONS}


def compare(rows: list[dict[str, Any]]) -> Table | None:
    """Adds to each row in low precision how it stands beside our bfloat16 of the same run, and makes the table of that.

    Args:
        rows: Those of one run; without bfloat16 of a shape there is nothing to compare with.

    Returns:
        The table, or ``None`` if no row is in low precision.
    """
    bf16 = {row["shape"]: row for row in rows if row["system"] == OURS and "tokens_per_s" in row}
    lowered = [row for row in rows if row["system"] in SYSTEMS and "tokens_per_s" in row]
    table = Table(title="Low precision beside bfloat16 of the same run", title_justify="left")
    for column in ("shape", "system", "ms", "to bf16", "loss", "of bf16", "converted"):
        table.add_column(column, justify="left" if column in ("shape", "system", "converted") else "right")
    for row in lowered:
        base = bf16.get(row["shape"])
        alike = base is not None and _recomputes(row) == _recomputes(base)
        row["ratio_to_bf16"] = row["tokens_per_s"] / base["tokens_per_s"] if base is not None and alike else None
        row["bf16_loss_after"] = None if base is None else base["loss_after"]
        converted = [f"{count} {what}" for what, count in row["settings"]["converted"].items()]
        table.add_row(
            shown_shape(row),
            row["system"],
            f"{row['step_ms']:.1f}",
            "" if row["ratio_to_bf16"] is None else f"{row['ratio_to_bf16']:.2f}x",
            _shown(row["loss_after"]),
            "" if base is None else _shown(base["loss_after"]),
            ", ".join(converted) + (", EMULATED" if row["settings"]["emulated"] else ""),
        )
    return table if lowered else None


def _recomputes(row: dict[str, Any]) -> bool:
    return row["settings"]["activation_checkpointing"]


def _shown(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "NOT FINITE"
