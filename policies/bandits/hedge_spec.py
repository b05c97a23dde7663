"""The best proposer of each request, where every one is scored on what was committed.

Source: HedgeSpec (Liu et al. 2025, "Not-a-Bandit", 2510.20064): a verified chunk shows what any
proposer would have had accepted, so nothing is explored. A proposer's value in a step is
sum over k = 1 .. K + 1 of k (1 - g_k) prod over j < k of g_j, g_j its acceptance at place j and
g_{K+1} = 0; NormalHedge (Chaudhuri et al. 2009) draws with weights from the regrets.

Every step of a request is a round of its own. What a proposer is worth in it shows at once where it
drafted or its overlap was scored; else later: a shadow guess is reported once it is decided, and
what is left of it behind a step's tokens is what the proposer would have drafted in the next, so
that one report values every round it reaches over. A round is settled in turn, once all is known of
it, by the weights that it was drawn with (delayed feedback). Places that could not be seen take the
batch's mean, what is never told its last value, an n-gram without a match is worth the one token
that any step brings. The plan asks for a shadow of the draft model where another drafts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from parlay.policies.bandits.arms import check_seed
from parlay.policies.baselines.recent import Recent
from parlay.policies.baselines.rows import check_k, drafter, rows_plan
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import (
    DRAFT_MODEL,
    NGRAM,
    Array,
    BatchView,
    Plan,
    Reason,
    ShadowKind,
    StepOutcome,
)

_DISCOUNT = 0.99
_HALVINGS = 20
"""Of the interval that c lies in: to a millionth of it."""
_MOST_OPEN = 8
"""Rounds that wait for a guess: no engine keeps one for more tokens."""


@dataclass(slots=True, frozen=True)
class HedgeSpecSettings:
    """proposers to choose among; k, tokens drafted; seed of the draws."""

    proposers: tuple[str, ...] = ("ngram", "draft_model")
    k: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.proposers:
            drafter("hedge_spec", name)
        if len(self.proposers) < 2 or len(set(self.proposers)) != len(self.proposers):
            raise ValueError("hedge_spec: proposers must be two or more, all different")
        check_k("hedge_spec", "k", self.k, least=1)
        check_seed("hedge_spec", self.seed)


def expected_tokens(accept: Array) -> Array:
    """Return the tokens a step should emit, f64 [...], for acceptances g f64 [..., K]."""
    end = np.zeros((*accept.shape[:-1], 1))
    reached = np.cumprod(np.concatenate([end + 1.0, accept], axis=-1), axis=-1)
    stops = 1.0 - np.concatenate([accept, end], axis=-1)
    found: Array = (np.arange(1, accept.shape[-1] + 2) * stops * reached).sum(axis=-1)
    return found


def normal_hedge(regret: Array) -> Array:
    """Return NormalHedge's weights f64 [rows, experts]; even where no regret is above 0.

    Proportional to r / c exp(r^2 / 2c), r the regret or 0, c such that the mean of exp(r^2 / 2c)
    is e.
    """
    half = np.maximum(regret, 0.0) ** 2 / 2.0
    top = half.max(axis=1, keepdims=True)
    high = np.where(top > 0.0, top, 1.0)
    low = high / (1.0 + math.log(regret.shape[1]))
    for _ in range(_HALVINGS):
        c = (low + high) / 2.0
        large = np.exp(half / c).mean(axis=1, keepdims=True) > math.e
        low, high = np.where(large, c, low), np.where(large, high, c)
    weight = np.sqrt(half) * np.exp(half / high)
    weight = np.where(top > 0.0, weight, 1.0)
    found: Array = weight / weight.sum(axis=1, keepdims=True)
    return found


@dataclass(slots=True)
class Round:
    """One step of a request: tokens emitted before it; by proposer its weight, and its value, nan
    as long as it is not known.
    """  # noqa: D205

    start: int
    weight: list[float]
    value: list[float]


@dataclass(slots=True)
class Record:
    """One request: by proposer its regret and newest value; tokens emitted; rounds not settled."""

    regret: list[float]
    latest: list[float]
    emitted: int = 0
    rounds: list[Round] = field(default_factory=list)


@register("hedge_spec", HedgeSpecSettings)
class HedgeSpec(Stateless):
    """Keeps a record of each request, and mean acceptances."""

    name = "hedge_spec"

    def __init__(self, settings: HedgeSpecSettings, limits: EngineLimits) -> None:
        self.proposers = np.array([drafter("hedge_spec", p) for p in settings.proposers], np.uint8)
        self.k, self.seed, self.draws = max(1, min(settings.k, limits.k_max)), settings.seed, 0
        # How many drafts held, and could be seen, by proposer and place.
        self.held, self.seen = np.zeros((2, len(self.proposers), self.k))
        # Whose guesses an engine reports: for others no round waits.
        self.reported = np.zeros(len(self.proposers), bool)
        self.known: Recent[Record] = Recent(self._fresh)

    def _mean(self) -> Array:
        """Return the mean acceptance f64 [proposers, K]; a half before anything was seen."""
        return (self.held + 1.0) / (self.seen + 2.0)

    def _fresh(self) -> Record:
        values: list[float] = expected_tokens(self._mean()).tolist()
        return Record([0.0] * len(values), values)

    def decide(self, view: BatchView) -> Plan:
        """Draw each row's proposer."""
        regret = np.array([r.regret for r in self.known.of(view)])
        weight = normal_hedge(regret.reshape(len(view), len(self.proposers)))
        flips = np.random.default_rng((self.seed, self.draws)).random(len(view))
        self.draws += 1
        arm = (flips[:, None] > weight.cumsum(axis=1)[:, :-1]).sum(axis=1)
        k = np.full(len(view), self.k)
        plan = rows_plan(view, self.proposers[arm], k, Reason.EXPLORE)
        plan.propensity[:] = weight[np.arange(len(view)), arm]
        if DRAFT_MODEL in self.proposers:
            plan.shadow[:] = plan.proposer != DRAFT_MODEL
        return plan

    def observe(self, outcome: StepOutcome) -> None:
        """Open a round for each row, value what can be valued, and settle what is known."""
        rows = np.flatnonzero(outcome.emitted > 0).tolist()
        ids = outcome.request_id.tolist()
        told = [(row, r) for row in rows if (r := self.known.get(ids[row])) is not None]
        self.held, self.seen = self.held * _DISCOUNT, self.seen * _DISCOUNT
        value = self._values(outcome)
        if told:
            weight = normal_hedge(np.array([r.regret for _, r in told])).tolist()
            for (row, record), w in zip(told, weight, strict=True):
                record.rounds.append(Round(record.emitted, w, value[row].tolist()))
                record.emitted += int(outcome.emitted[row])
        self._hear(outcome)
        for _, record in told:
            self._settle(record)

    def _values(self, outcome: StepOutcome) -> Array:
        """Return f64 [rows, proposers]: what each brought or would have, nan where it is open."""
        rows, shadow = len(outcome), outcome.shadow
        value = np.full((rows, len(self.proposers)), np.nan)
        row_of = {r: i for i, r in enumerate(outcome.request_id.tolist())}
        at = np.array([row_of.get(r, -1) for r in shadow.request_id.tolist()], np.intp)
        scored = (shadow.kind == ShadowKind.OVERLAP) & (shadow.observed > 0) & (at >= 0)
        for expert, proposer in enumerate(self.proposers):
            if proposer == NGRAM:
                value[outcome.match_tokens == 0, expert] = 1.0
            mine = np.flatnonzero(scored & (shadow.proposer == proposer))
            overlap, seen = shadow.matched[mine].astype(float), shadow.observed[mine]
            # Of overlaps every place is seen, and its share of their sum is a chance to hold.
            held = np.repeat((overlap / np.maximum(seen, 1))[:, None], self.k, axis=1)
            value[at[mine], expert] = self._worth(expert, held, seen)
            used = np.flatnonzero((outcome.proposer == proposer) & (outcome.verified_k > 0))
            matched, seen = outcome.accepted[used], outcome.verified_k[used]
            value[used, expert] = self._worth(expert, *self._run(matched, seen))
        return value

    def _hear(self, outcome: StepOutcome) -> None:
        """Value the rounds over which a guess reaches that is decided now.

        It began in the first round in which its proposer is not valued: one is kept at a time.
        """
        shadow = outcome.shadow
        match = np.flatnonzero((shadow.kind == ShadowKind.MATCH) & (shadow.observed > 0))
        for place in match.tolist():
            record = self.known.get(int(shadow.request_id[place]))
            expert = np.flatnonzero(self.proposers == shadow.proposer[place])
            if record is None or not len(expert):
                continue
            one = int(expert[0])
            self.reported[one] = True
            waiting = [r for r in record.rounds if math.isnan(r.value[one])]
            if waiting:
                gone = np.array([r.start - waiting[0].start for r in waiting])
                left = float(shadow.matched[place]) - gone, int(shadow.observed[place]) - gone
                for r, v in zip(waiting, self._worth(one, *self._run(*left)).tolist(), strict=True):
                    r.value[one] = v

    def _run(self, matched: Array, seen: Array) -> tuple[Array, Array]:
        """Return bool [drafts, K], which places held, and how many of them could be seen."""
        held = np.arange(self.k) < matched[:, None]
        return held, np.minimum(matched + 1, seen)

    def _worth(self, expert: int, held: Array, seen: Array) -> Array:
        """Return the tokens f64 [drafts] that places [drafts, K] bring, and learn their means.

        seen [drafts]: how many of the places show; the others hold as often as they mostly do.
        """
        shown = np.arange(self.k) < seen[:, None]
        self.held[expert] += (held * shown).sum(axis=0)
        self.seen[expert] += shown.sum(axis=0)
        return expected_tokens(np.where(shown, held, self._mean()[expert]))

    def _settle(self, record: Record) -> None:
        """Move a request's regrets by its oldest rounds, as far as nothing more is to be told."""
        while record.rounds:
            first = record.rounds[0]
            known = [not math.isnan(v) for v in first.value]
            complete = all(k or not told for k, told in zip(known, self.reported, strict=True))
            if not complete and len(record.rounds) <= _MOST_OPEN:
                return
            del record.rounds[0]
            pairs = zip(known, first.value, record.latest, strict=True)
            record.latest = [value if k else last for k, value, last in pairs]
            loss = [(self.k + 1.0 - value) / self.k for value in record.latest]
            mean = sum(w * one for w, one in zip(first.weight, loss, strict=True))
            record.regret = [r + mean - one for r, one in zip(record.regret, loss, strict=True)]

    def state(self) -> dict[str, Array]:
        """Return every request's record and its open rounds, mean acceptances, count of draws."""
        items, experts = self.known.items(), len(self.proposers)
        rounds = [(place, r) for place, (_, v) in enumerate(items) for r in v.rounds]
        records = [(v.regret, v.latest) for _, v in items]
        columns = [(r.weight, r.value) for _, r in rounds]
        return {
            "request_id": np.array([r for r, _ in items], np.uint64),
            "record": np.array(records, float).reshape(len(items), 2, experts),
            "emitted": np.array([v.emitted for _, v in items], np.int64),
            "round_at": np.array([(p, r.start) for p, r in rounds], np.int64).reshape(-1, 2),
            "round": np.array(columns, float).reshape(len(rounds), 2, experts),
            "held": self.held.copy(),
            "seen": self.seen.copy(),
            "reported": self.reported.copy(),
            "draws": np.asarray(self.draws),
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        ids, experts = np.asarray(state.get("request_id", ())).tolist(), len(self.proposers)
        fits = set(state) == set(self.state()) and np.shape(state["held"]) == self.held.shape
        if not fits or np.shape(state["record"]) != (len(ids), 2, experts):
            raise ValueError("hedge_spec: the state is of another policy, k or set of proposers")
        kept = zip(state["record"].tolist(), state["emitted"].tolist(), strict=True)
        records = [Record(regret, latest, n) for (regret, latest), n in kept]
        for (place, start), (weight, value) in zip(
            state["round_at"].tolist(), state["round"].tolist(), strict=True
        ):
            records[place].rounds.append(Round(start, weight, value))
        self.known.load(ids, records)
        self.held, self.seen = np.array(state["held"]), np.array(state["seen"])
        self.reported = np.array(state["reported"], bool)
        self.draws = int(state["draws"])
