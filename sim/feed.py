"""The requests of one start as they come: closed loops are kept full, open ones come by time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from parlay.sim.scenario import Scenario, Stage
from parlay.sim.workload import Arrival

Arrivals = Callable[[Stage, int], Iterator[Arrival]]
"""Yields the requests of a stage, given a seed; a trace's file may end."""
_SAMPLE = 2000


class Feed:
    """Hands out a scenario's requests; ended: nothing more will come, for a trace is over."""

    def __init__(self, scenario: Scenario, arrivals: Arrivals, seed: int) -> None:
        self.scenario, self.arrivals, self.seed = scenario, arrivals, seed
        self.ended = False
        self._sources: dict[int, Iterator[Arrival]] = {}
        self._next: Arrival | None = None

    def due(self, step: int, now_s: float, there: int) -> tuple[list[tuple[Arrival, float]], float]:
        """Return who comes before step `step`, each with when it came, and the time then.

        there: how many requests are in the house. Where it is empty the time may be later than
        now_s: an idle open loop waits for its next request.
        """
        stage, came = self.scenario.stage_at(step), list[tuple[Arrival, float]]()
        if stage.concurrency:
            while there + len(came) < stage.concurrency and (one := self._pull(stage)):
                came.append((one, now_s))
            return came, now_s
        while (one := self._next or self._pull(stage)) is not None:
            self._next = one
            if one.arrival_s > now_s:
                if there or came:
                    break
                now_s = one.arrival_s
            came.append((one, one.arrival_s))
            self._next = None
        return came, now_s

    def _pull(self, stage: Stage) -> Arrival | None:
        key = id(stage)
        if key not in self._sources:
            self._sources[key] = self.arrivals(stage, self.seed)
        one = next(self._sources[key], None)
        self.ended = one is None
        return one

    def served(self, steps: int) -> int:
        """Return how many requests an open loop serves in `steps`; 0 for a closed one.

        Those that plain decoding would serve: steps of a faster policy would be other requests'
        steps, longer or shorter.
        """
        if not self.scenario.arrivals:
            return 0
        tokens = steps * float(self.scenario.arrivals["mean_concurrency"])
        some = itertools.islice(self.arrivals(self.scenario.stages[0], self.seed), _SAMPLE)
        lengths = [arrival.output_tokens for arrival in some]
        return max(1, round(tokens / float(np.mean(lengths))))
