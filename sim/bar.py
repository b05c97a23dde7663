"""Where a long run is: bars on a terminal; elsewhere a line now and then on standard error."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID

TELL_S = 20.0
"""Between two lines."""


class Bar:
    """Bars that vanish when they end; what is printed goes through `print`, above them.

    Where nothing can be drawn, lines tell instead, apart from what the command writes. Use as a
    context.
    """

    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        self.print = console.print
        self._progress = Progress(*columns, console=console, transient=True)
        self._lines = None if console.is_terminal else Console(stderr=True, highlight=False)
        self._said_s = time.monotonic()

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def add(self, what: str, total: float | None = None) -> TaskID:
        """Begin another bar; total: of whatever is counted, None while that is not known."""
        return self._progress.add_task(what, total=total)

    def update(
        self,
        bar: TaskID,
        what: str | None = None,
        total: float | None = None,
        completed: float | None = None,
        advance: float | None = None,
    ) -> None:
        """Say what runs now, of how much, how much is done, or how much more."""
        self._progress.update(
            bar, description=what, total=total, completed=completed, advance=advance
        )
        if self._lines is not None and time.monotonic() - self._said_s > TELL_S:
            self._said_s = time.monotonic()
            task = next(task for task in self._progress.tasks if task.id == bar)
            share = "" if task.total is None else f": {task.percentage:.0f}%"
            self._lines.print(f"{task.description}{share}")
