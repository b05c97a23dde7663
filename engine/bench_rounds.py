"""Rounds of `parlay bench engine`: every entrant decodes every load, each first in its turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from parlay.engine.bench_load import Answer, Entrant, Load

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
