"""Draws the loss curve and the load of the experts of a run from its TensorBoard logs, as they stand in the README.

python benchmarks/plot_run.py runs/tiny docs/images/tiny.png
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read(run: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Reads the scalars of a run: tokens seen (in millions) and values, by name."""
    events = EventAccumulator(str(run / "logs"))
    events.Reload()
    tokens_at = {event.step: event.value / 1e6 for event in events.Scalars("train/tokens_seen")}
    steps = sorted(tokens_at)
    per_step = tokens_at[steps[-1]] / (steps[-1] + 1)
    return {
        name: (
            [(event.step + 1) * per_step for event in events.Scalars(name)],
            [event.value for event in events.Scalars(name)],
        )
        for name in events.Tags()["scalars"]
    }


def main(run: Path, picture: Path) -> None:
    """Draws the picture."""
    scalars = read(run)
    figure, (losses, load) = plt.subplots(1, 2, figsize=(11, 3.6), dpi=110)
    losses.plot(*scalars["train/loss"], color="tab:blue", alpha=0.5, linewidth=1, label="training")
    losses.plot(*scalars["val/loss"], color="tab:blue", marker="o", label="validation")
    losses.plot(*scalars["val/mtp_loss_1"], color="tab:orange", marker="o", label="validation, MTP (one token further)")
    losses.set(xlabel="tokens seen (millions)", ylabel="loss", title="Loss")
    losses.legend(frameon=False)
    load.plot(*scalars["train/expert_load_max_violation"], color="tab:green", label="max violation (0 is even)")
    load.plot(*scalars["train/expert_load_entropy"], color="tab:red", label="entropy (1 is even)")
    load.set(xlabel="tokens seen (millions)", title="Load of the experts, mean over layers", ylim=(0, None))
    load.legend(frameon=False)
    for axes in (losses, load):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
