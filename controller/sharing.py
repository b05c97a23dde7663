"""Engines of one kind learn together: what each counted goes out, what others counted comes in.

The thread that decides (`run`, between two calls) takes copies and swaps in what was heard, whole;
a thread of its own does everything that can wait for a disk or a network. Where the store is
silent, decisions go on with what is known, and what was learned is merged once it answers.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from uuid import uuid4

from parlay.controller.session import Session
from parlay.controller.slot import counts_in, decode, encode
from parlay.controller.store import Held, Scope, Store
from parlay.policies.counts import Counts
from parlay.policies.policy import Policy
from parlay.policies.shared_stats import Pool, Slot, acceptance_of, saved_of, warm
from parlay.policies.types import Array

PERIOD_S = 0.25
CROWD_PERIOD_S = 1.0
CROWD = 12
"""Traffic grows with the square of the replicas; above so many of them they meet less often."""
TICK_S = 0.02
SAVE_EVERY_S = 10.0
SILENT_S = 5.0
"""An engine that left, or says nothing outside a stream, is no longer spoken for."""
WARM_STEPS = 64
"""A policy that has learned from so many steps is not loaded over."""
MOST_BACKOFF_S = 1.0
CLOSE_S = 3.0
log = logging.getLogger("parlay.controller")
_Known = dict[tuple[Scope, str], Counts | None]


@dataclass(slots=True)
class ShareCounts:
    """Exchanges with the store that were done or failed; slots ignored as damaged or foreign.

    warmed: policies that began with a saved state; unfit: saved states that did not fit. writers:
    most replicas in a scope when last heard, own ones counted; last_error: why one failed last.
    """

    exchanges: int = 0
    failures: int = 0
    ignored_slots: int = 0
    saves: int = 0
    warmed: int = 0
    unfit: int = 0
    writers: int = 0
    last_error: str = ""


@dataclass(slots=True)
class _Member:
    """One engine's policy here, and boxes in which the two threads pass each other whole values.

    out: own counts; to_save: a state; heard: others' slots; saved: once, before the first `heard`,
    a state with its age and whether it is the engine's own.
    """

    session: Session
    policy: Policy
    scope: Scope
    pool: Pool | None
    writer: str
    out: Counts | None = None
    to_save: dict[str, Array] | None = None
    heard: dict[str, Slot] | None = None
    saved: tuple[dict[str, Array], float, bool] | None = None
    asked: bool = False
    due_s: float = 0.0
    save_s: float = 0.0
    seen: int = -1
    saved_outcomes: int = 0
    failed: bool = False
    active_s: float = field(default_factory=time.monotonic)


class Sharing:
    """Shares what the policies of a host's sessions learn, through a store, until closed.

    ask: whether the store is asked something at once, so that one that is away is said at the start
    and not when the first engine comes.
    """

    def __init__(
        self,
        store: Store,
        tenant: str = "default",
        model: str = "default",
        period_s: float = PERIOD_S,
        ask: bool = False,
    ) -> None:
        self.counts = ShareCounts()
        self._store, self._tenant, self._model = store, tenant, model
        self._period_s, self._crowded = period_s, False
        self._instance = uuid4().hex[:12]
        self._members: dict[str, _Member] = {}
        self._random = random.Random(self._instance)
        self._wake, self._closing, self._backoff_s = threading.Event(), False, 0.0
        self._exchanged_s, self._ask = time.monotonic(), ask
        self._thread = threading.Thread(target=self._work, name="parlay-state", daemon=True)
        self._thread.start()

    @property
    def lag_s(self) -> float:
        """Return the seconds since the newest exchange with the store that worked."""
        return time.monotonic() - self._exchanged_s

    # --- The thread that decides -----------------------------------------------------------------

    async def run(self, sessions: Mapping[str, Session]) -> None:
        """Swap again and again, until cancelled; other calls come between any two engines."""
        while True:
            for _ in self.swapping(sessions):
                await asyncio.sleep(0)
            await asyncio.sleep(TICK_S)

    def swap(self, sessions: Mapping[str, Session]) -> None:
        """Take what was heard into each policy, and copies of what each learned out."""
        for _ in self.swapping(sessions):
            pass

    def swapping(self, sessions: Mapping[str, Session]) -> Iterator[None]:
        """Do `swap`, and yield after each engine that there was something to do for."""
        for engine_id in [e for e in self._members if e not in sessions]:
            del self._members[engine_id]
        for engine_id, session in list(sessions.items()):
            member = self._members.get(engine_id)
            if member is None or member.policy is not session.policy:
                member = self._members[engine_id] = self._join(engine_id, session)
                self._wake.set()
                yield
            elif self._due(member, time.monotonic()):
                self._tried(member)
                yield

    def _join(self, engine_id: str, session: Session) -> _Member:
        acceptance = acceptance_of(session.policy)
        policy = session.spec.name
        if acceptance is None:
            # Of these everything is taken, so that the settings have to be the same.
            policy += "".join(f" {key}={value}" for key, value in session.spec.settings)
        k_max = session.limits.k_max if acceptance is None else acceptance.k_max
        mask = session.limits.proposer_mask
        scope = Scope(self._tenant, self._model, mask, policy, k_max)
        pool = None if acceptance is None else Pool(acceptance)
        member = _Member(session, session.policy, scope, pool, f"{engine_id}@{self._instance}")
        member.out = acceptance.counted() if acceptance is not None else None
        member.save_s = time.monotonic() + SAVE_EVERY_S * self._random.random()
        return member

    def _due(self, member: _Member, now_s: float) -> bool:
        return not member.failed and (member.heard is not None or now_s >= member.due_s)

    def _tried(self, member: _Member) -> None:
        """Swap; a policy that raises is left alone, so that it and all others go on deciding."""
        try:
            self._swap(member)
        except Exception:
            member.failed = True
            self.counts.failures += 1
            log.exception("no longer shared engine=%s", member.session.engine_id)

    def _swap(self, member: _Member) -> None:
        now_s = time.monotonic()
        heard, member.heard = member.heard, None
        member.due_s = now_s + self._period_s * self._random.uniform(0.9, 1.1)
        if heard is not None and member.saved is not None:
            self._warm(member)
        if member.pool is not None:
            member.out = member.pool.exchange(heard, now_s)
        seen = member.session.counts.outcomes + member.session.counts.plans
        if seen != member.seen or member.session.stream > 0:
            member.seen, member.active_s = seen, now_s
        if now_s >= member.save_s:
            self._put_aside(member)
            member.save_s = now_s + SAVE_EVERY_S

    def _put_aside(self, member: _Member) -> None:
        """Copy what is new, for the other thread; not before it was asked what was there before."""
        outcomes = member.session.counts.outcomes
        if member.asked and outcomes != member.saved_outcomes:
            member.to_save = saved_of(member.policy, member.pool)
            member.saved_outcomes = outcomes

    def _warm(self, member: _Member) -> None:
        """Begin with what the store had kept: it is newer than a --warm-start snapshot."""
        saved, member.saved = member.saved, None
        if saved is None or member.session.counts.outcomes > WARM_STEPS:
            return
        state, age_s, own = saved
        try:
            warm(member.policy, member.pool, state, age_s, own)
            self.counts.warmed += 1
        except ValueError as error:
            self.counts.unfit += 1
            log.warning("saved state not used engine=%s: %s", member.session.engine_id, error)

    def close(self) -> None:
        """Save what was learned, for a few seconds at most, and end the thread."""
        for member in self._members.values():
            if not member.failed:
                self._put_aside(member)
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("state: the store is silent, what was learned last is not saved")

    # --- The thread that may wait ----------------------------------------------------------------

    def _work(self) -> None:
        if self._ask:
            # Of no engine's scope: nothing is there, and whether it answers is what matters.
            scope = Scope(self._tenant, self._model, 0, "none", 1)
            self._guarded(lambda: self._store.saved(scope, "none"))
        while not self._closing:
            began_s = time.monotonic()
            self._guarded(self._exchange)
            period_s = CROWD_PERIOD_S if self._crowded else self._period_s
            pause_s = max(period_s, self._backoff_s) * self._random.uniform(0.9, 1.1)
            self._wake.wait(max(began_s + pause_s - time.monotonic(), 0.0))
            self._wake.clear()
        self._guarded(self._save)
        self._guarded(self._store.close)

    def _guarded(self, task: Callable[[], object]) -> None:
        """Do a task; count and say what it raises, once for each spell of failures."""
        try:
            task()
        except Exception as error:
            self.counts.failures += 1
            text = f"{type(error).__name__}: {error}"
            if not self.counts.last_error:
                log.warning("state is not shared for now, and is once the store answers: %s", text)
            self.counts.last_error = text
            self._backoff_s = min(max(2 * self._backoff_s, self._period_s), MOST_BACKOFF_S)

    def _exchange(self) -> None:
        now_s = time.monotonic()
        live = [m for m in list(self._members.values()) if now_s - m.active_s < SILENT_S]
        if not live:
            return
        pooled = {(m.scope, m.writer): encode(m.out.arrays()) for m in live if m.out is not None}
        found = self._store.exchange(pooled)
        self._exchanged_s = time.monotonic()
        known: _Known = {}
        for member in live:
            if not member.asked:
                member.saved = self._saved(member)
                member.asked = True
            member.heard = self._slots(member, found.get(member.scope, {}), known)
        self.counts.writers = max((len(slots) for slots in found.values()), default=0)
        self._crowded = self.counts.writers > CROWD
        self._save()
        self.counts.exchanges += 1
        if self.counts.last_error:
            log.warning("state is shared again")
        self.counts.last_error, self._backoff_s = "", 0.0

    def _slots(self, member: _Member, found: Mapping[str, Held], known: _Known) -> dict[str, Slot]:
        """Return the others' counts; those that cannot be read, or do not fit, are counted.

        known: those read before, for another engine of this exchange; they are added to.
        """
        slots, now_s = {}, time.monotonic()
        for writer, held in found.items():
            if writer == member.writer:
                continue
            key = (member.scope, writer)
            if key not in known:
                known[key] = counts_in(held.data, member.scope.k_max)
            counts = known[key]
            if counts is None:
                self.counts.ignored_slots += 1
            else:
                slots[writer] = Slot(counts, now_s - held.age_s)
        return slots

    def _saved(self, member: _Member) -> tuple[dict[str, Array], float, bool] | None:
        found = self._store.saved(member.scope, member.session.engine_id)
        if found is None:
            return None
        held, own = found
        try:
            return decode(held.data), held.age_s, own
        except ValueError:
            self.counts.ignored_slots += 1
            return None

    def _save(self) -> None:
        for member in list(self._members.values()):
            state, member.to_save = member.to_save, None
            if state:
                self._store.save(member.scope, member.session.engine_id, encode(state))
                self.counts.saves += 1
