"""The progress bar of `prepare`."""

from __future__ import annotations

from typing import Any


class Progress:
    """A rich progress bar over bytes of input on stderr, or nothing.

    Args:
        shown: Whether to show anything.
    """

    def __init__(self, shown: bool) -> None:
        self._bar: Any = None
        self._task: Any = None
        if shown:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=Console(stderr=True),
            )

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a line."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def start(self, description: str, total: int, completed: int = 0) -> None:
        """Adds a bar for ``total`` bytes, of which ``completed`` are done."""
        if self._bar is not None:
            self._task = self._bar.add_task(description, total=total, completed=completed)

    def advance(self, size: int) -> None:
        """Advances the newest bar by ``size`` bytes."""
        if self._bar is not None:
            self._bar.advance(self._task, size)
