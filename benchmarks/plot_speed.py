"""Draws the training steps on one and two GPUs from the records of ``gpu_step.py`` and ``expert_parallel.py``.

python benchmarks/plot_speed.py docs/images/speed.png
"""

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from record import RESULTS

ONE_GPU = {
    "v2_lite_16k": "DeepSeek-V2-Lite, 8 layers\n16,384 tokens",
    "v2_lite_32k": "the same\n32,768 tokens",
    "671b_8k": "four layers of the 671B\n8,192 tokens",
}
SYSTEMS = {
    "torchtitan": ("TorchTitan 0.2.2, tuned", "tab:gray"),
    "transformers": ("transformers, tuned", "silver"),
    "lightning-moe": ("lightning-moe", "tab:blue"),
    "lightning-moe (bf16 moments)": ("lightning-moe, moments: bfloat16", "tab:cyan"),
    "lightning-moe, float8_rowwise": ("lightning-moe, FP8 rowwise", "tab:orange"),
}
TWO_GPUS = {"FSDP2 alone": "FSDP2\nalone", "all_to_all": "all-to-all", "deep_ep": "DeepEP"}


def newest(name: str, shapes: Collection[str]) -> list[dict[str, Any]]:
    """Rows of the newest run of a record that has all shapes."""
    record = json.loads((RESULTS / name).read_text())
    runs = {run: [row for row in record["rows"] if row["run"] == run] for run in record["runs"]}
    complete = [run for run, rows in runs.items() if set(shapes) <= {row.get("shape") for row in rows}]
    return runs[max(complete, key=int)]


def draw_one_gpu(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Speeds as multiples of transformers', a group of bars for each shape."""
    speeds = {(row["shape"], row["system"]): row["tokens_per_s"] for row in rows if row["routing"] == "real"}
    left, ticks, seen = 0.0, [], set()
    for shape in ONE_GPU:
        systems = [system for system in SYSTEMS if (shape, system) in speeds]
        for place, system in enumerate(systems):
            label, color = SYSTEMS[system]
            ratio = speeds[shape, system] / speeds[shape, "transformers"]
            axes.bar(left + place, ratio, width=0.9, color=color, label=None if system in seen else label)
            axes.text(left + place, ratio + 0.02, f"{ratio:.2f}x", ha="center", fontsize=8)
            seen.add(system)
        ticks.append(left + (len(systems) - 1) / 2)
        left += len(systems) + 0.8
    axes.set_xticks(ticks, ONE_GPU.values(), fontsize=8)
    axes.set(title="One H200: speed of a training step against transformers", ylim=(0, 1.95), yticks=[0, 0.5, 1, 1.5])
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")


def draw_two_gpus(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Tokens per second and GPU with two GPUs, as a share of those with one in the same run."""
    scaled = [row for row in rows if row["part"] == "step" and row["routing"] == "real" and "efficiency" in row]
    shares = {row["system"]: row["efficiency"] for row in scaled if row["system"] in TWO_GPUS}
    axes.bar(range(len(shares)), shares.values(), width=0.7, color=["silver", "tab:gray", "tab:blue"])
    for place, share in enumerate(shares.values()):
        axes.text(place, share + 0.01, f"{share:.0%}", ha="center", fontsize=8)
    axes.set_xticks(range(len(shares)), [TWO_GPUS[system] for system in shares], fontsize=8)
    axes.set(title="Two H200s: speed per GPU\nagainst one", ylim=(0, 1.05), yticks=[0, 0.5, 1])


def main(picture: Path) -> None:
    """Draws the picture."""
    figure, (one, two) = plt.subplots(1, 2, figsize=(11, 3.6), dpi=110, width_ratios=[3, 1])
    draw_one_gpu(one, newest("gpu_step.json", ONE_GPU))
    draw_two_gpus(two, newest("expert_parallel.json", ["v2_lite_16k"]))
    for axes in (one, two):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(alpha=0.2, axis="y")
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
