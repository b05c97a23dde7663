"""The one line that says where a long run is."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

TELL_S = 20.0


class Bar:
    """A bar with what runs now beside it; where none can be drawn, a line now and then.

    total: of whatever `advance` counts. Use as a context.
    """

    def __init__(self, console: Console, total: float) -> None:
        self._console, self._said_s = console, time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description:<36}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, what: str) -> None:
        """Say what runs now."""
        self._progress.update(self._task, description=what)
        if not self._console.is_terminal and time.monotonic() - self._said_s > TELL_S:
            self._said_s = time.monotonic()
            percent = self._progress.tasks[0].percentage
            self._console.print(f"{what}: {percent:.0f}%", highlight=False)

    def advance(self, amount: float) -> None:
        """Count what is done."""
        self._progress.advance(self._task, amount)

    def finish(self) -> None:
        """Fill the bar: what is left was not wanted."""
        self._progress.update(self._task, completed=self._progress.tasks[0].total)
