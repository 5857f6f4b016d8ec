"""What a conversion did: said once, in a table, and kept for the log and the checkpoint."""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table

from lightning_moe.precision.conversion import Candidate


@dataclass
class Report:
    """What became of every candidate of a model.

    Args:
        precision: Name of the precision.
        compute_dtype: What everything else computes in.
        emulated: Why recipes were emulated; empty if none was.
        entries: Shape, outcome and number of the modules, by their names in a block.
    """

    precision: str
    compute_dtype: str
    emulated: list[str] = field(default_factory=list)
    entries: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    converted: int = 0
    skipped: int = 0

    def add(self, candidate: Candidate, recipe: str | None, reason: str = "") -> None:
        """Notes that a module was converted to a recipe, or why it was not."""
        place = re.sub(r"(?<![^.])\d+(?![^.])", "*", candidate.place)
        shape = ", ".join(f"{inner} -> {outer}" for inner, outer in candidate.weights)
        self.entries[(place, shape, recipe or f"{self.compute_dtype}: {reason}")] += 1
        self.converted += recipe is not None
        self.skipped += recipe is None

    def add_emulated(self, text: str) -> None:
        """Notes why a recipe is emulated, once."""
        if text not in self.emulated:
            self.emulated.append(text)

    def summary(self) -> dict[str, Any]:
        """What log and checkpoint keep."""
        return {
            "recipe": self.precision,
            "emulated": bool(self.emulated),
            "converted": self.converted,
            "skipped": self.skipped,
        }

    @rank_zero_only
    def print(self) -> None:
        """Prints the table, and loudly what is emulated or that nothing was converted."""
        console = Console(stderr=True)
        table = Table(title=f"precision: {self.precision}", title_justify="left", title_style="bold")
        for column in ("multiplication", "weights", "computed in", "modules"):
            table.add_column(column, overflow="fold", justify="right" if column == "modules" else "left")
        for (name, shape, outcome), count in self.entries.items():
            table.add_row(name, shape, outcome, str(count))
        console.print(table)
        for text in self.emulated:
            console.print(f"EMULATED: {text}", style="bold red", highlight=False)
        if not self.converted:
            console.print(
                f"Nothing was converted: all computes in {self.compute_dtype}, for the reasons in the table.",
                style="bold red",
            )
