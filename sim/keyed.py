"""Policies through one scenario side by side in the fast loop: each episode is the engine's own.

A policy sees the same views and outcomes as behind the engine, to the last digit, for requests and
coins are keyed and both loops share scheduling and prices; `run_episode` is the same with the
engine's scheduler, block tables and step. What needs those, scarce blocks and shared prefixes, is
left to it (`fits`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parlay.engine.shadow import SHADOW_TOKENS
from parlay.policies.types import NGRAM, Array, ShadowKind, ShadowRows
from parlay.sim.costs import TableCosts, load_costs
from parlay.sim.episode import MakePolicy, ended_early, set_up
from parlay.sim.fast import FastLoop
from parlay.sim.fast_price import Drafted
from parlay.sim.feed import Arrivals, Feed
from parlay.sim.keyed_luck import KeyedLuck
from parlay.sim.keyed_seat import Seat
from parlay.sim.kinds import Kind
from parlay.sim.scenario import Scenario
from parlay.sim.tally import Episode

_MATCH = int(ShadowKind.MATCH)


def fits(scenario: Scenario) -> bool:
    """Say whether a scenario needs no blocks of the engine's cache."""
    costs = load_costs(scenario.costs)
    plenty = not scenario.kv_requests and not scenario.prefix_cache
    return plenty and isinstance(costs, TableCosts)


def run_side_by_side(
    scenario: Scenario,
    makes: Sequence[MakePolicy],
    arrivals: Arrivals,
    seeds: Sequence[int],
    steps: int | None = None,
) -> list[Episode]:
    """Run each policy with its seed; as `run_episode`, with all of them in one loop.

    Raises ValueError where the scenario does not fit (`fits`), or its trace ends in the warm-up.
    """
    if not fits(scenario):
        raise ValueError(f"{scenario.name} needs the engine's blocks: use run_episode")
    costs = load_costs(scenario.costs)
    assert isinstance(costs, TableCosts)
    sets = [
        set_up(scenario, make, 1000 * seed + run, costs)
        for make, seed in zip(makes, seeds, strict=True)
        for run in range(scenario.runs)
    ]
    kind = _kind(scenario, costs)
    luck = KeyedLuck([backend for backend, _ in sets], kind.concurrency * len(sets))
    loop = FastLoop([kind] * len(sets), 0, luck=luck)
    house = _House(loop, luck)
    numbers = [1000 * seed + run for seed in seeds for run in range(scenario.runs)]
    seats = [
        Seat(loop, luck, b, planner, Feed(scenario, arrivals, numbers[b]), steps or scenario.steps)
        for b, (_, planner) in enumerate(sets)
    ]
    while any(not seat.over for seat in seats):
        house.step(seats)
    found = []
    for first in range(0, len(seats), scenario.runs):
        total = Episode()
        for seat in seats[first : first + scenario.runs]:
            total.add(seat.tally.into)
        ended_early(scenario, total)
        found.append(total)
    return found


def _kind(scenario: Scenario, costs: TableCosts) -> Kind:
    none = np.zeros(0, np.int64)
    return Kind(
        costs, scenario.most_running, scenario.tasks, none, none, none, none, scenario.catches_up
    )


class _House:
    """All batches of a loop, and the guesses of the n-gram that nobody verified.

    Those are kept by row until they are decided, as in the engine's shadow scoring: where a guess
    began (-1: none), how many tokens it held and offered, and its match length.
    """

    def __init__(self, loop: FastLoop, luck: KeyedLuck) -> None:
        self.loop, self.luck = loop, luck
        rows = len(loop.batch)
        self.start = np.full(rows, -1, np.int64)
        self.held, self.offered = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self.match = np.zeros(rows, np.int32)

    def step(self, seats: Sequence[Seat]) -> None:
        """Run a step of every batch that is not over."""
        loop = self.loop
        for seat in seats:
            seat.admit()
        loop.turn()
        n = len(loop.batch)
        who = np.zeros(n, np.intp)
        passes, kept, verified = (np.zeros(n, np.int64) for _ in range(3))
        running = [seat for seat in seats if not seat.over and seat.begins()]
        for seat in running:
            rows = seat.rows
            who[rows], passes[rows], kept[rows], verified[rows] = seat.decided()
        done = loop.run(who, Drafted(passes, kept, verified))
        self._offer(who)
        before = loop.output.copy()
        loop.advance(who, kept, done)
        matched, seen, decided = self._score()
        for seat in running:
            shadow = self._shadow(seat, matched, seen, decided)
            seat.learned(done, before, shadow)
        self.start[decided] = -1

    def _offer(self, who: Array) -> None:
        """Keep the n-gram's guesses of rows where others drafted, unless one pends."""
        loop = self.loop
        new = np.flatnonzero(loop.emits & (who != NGRAM) & (loop.match > 0) & (self.start < 0))
        self.start[new], self.match[new] = loop.output[new], loop.match[new]
        self.held[new] = self.luck.guessed(loop, new)
        self.offered[new] = np.minimum(self.luck.offered(loop, new), SHADOW_TOKENS)

    def _score(self) -> tuple[Array, Array, Array]:
        """Return what matched and was seen so far of pending guesses, and which are decided."""
        loop = self.loop
        seen = np.minimum(self.offered, loop.output - self.start)
        matched = np.minimum(self.held, seen)
        open_still = (matched == seen) & (seen < self.offered) & (loop.output < loop.length)
        return matched, seen, (self.start >= 0) & ~open_still

    def _shadow(self, seat: Seat, matched: Array, seen: Array, decided: Array) -> ShadowRows:
        rows = seat.rows[(decided & (seen > 0))[seat.rows]]
        n = len(rows)
        return ShadowRows(
            request_id=self.luck.number[rows].astype(np.uint64),
            proposer=np.full(n, NGRAM, np.uint8),
            offered_k=self.offered[rows].astype(np.int16),
            matched=matched[rows].astype(np.float32),
            observed=np.minimum(matched[rows] + 1, seen[rows]).astype(np.int16),
            match_tokens=self.match[rows],
            kind=np.full(n, _MATCH, np.uint8),
        )
