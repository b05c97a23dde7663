"""Rounds of `parlay bench engine`: every entrant decodes every load, each first in its turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from parlay.engine.bench_load import Answer, Entrant, Load

TELL_S = 20.0
Key = tuple[int, int]
"""An entrant's place and a concurrency."""


def run_rounds(
    entrants: Sequence[Entrant],
    loads: Sequence[Load],
    rounds: int,
    stop_s: float,
    on_start: Callable[[str], None],
    on_done: Callable[[Load], None],
) -> dict[Key, list[Answer]]:
    """Return by entrant and concurrency an answer a round.

    After the first round another begins only if one as long as the longest would end before
    `stop_s` (of time.monotonic()). on_start hears of each load what it is, on_done that it is done.
    """
    answers: dict[Key, list[Answer]] = {}
    longest_s = 0.0
    for number in range(rounds):
        began_s = time.monotonic()
        if number and began_s + longest_s > stop_s:
            break
        for index, load in enumerate(loads):
            taking_part = [i for i, e in enumerate(entrants) if load.concurrency in e.settings]
            first = (number + index) % len(taking_part)
            for i in (*taking_part[first:], *taking_part[:first]):
                entrant = entrants[i]
                at = f"round {number + 1} at {load.concurrency}: {entrant.engine} {entrant.mode}"
                on_start(at)
                answers.setdefault((i, load.concurrency), []).append(entrant.decode(load))
                on_done(load)
        longest_s = max(longest_s, time.monotonic() - began_s)
    return answers


class Bar:
    """A bar over loads by their tokens; where none can be drawn, a line now and then.

    total: tokens of all loads to come. Use as a context.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._said_s = console, time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description:<40}"),
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

    def done(self, load: Load) -> None:
        """Count a load."""
        self._progress.advance(self._task, sum(load.lengths))

    def finish(self) -> None:
        """Fill the bar: what is left was not wanted."""
        self._progress.update(self._task, completed=self._progress.tasks[0].total)
