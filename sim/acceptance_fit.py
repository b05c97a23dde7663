"""Fit how tasks accept to logged drafts: the likelihood of the simulator's own process.

Each text has a shift (normal, on a grid) and a phase (two states, a hidden Markov chain along the
output; Rabiner, Proc. IEEE 1989); given both, a draft's tokens hold by place. The parameters of a
task maximise the likelihood of all its texts: odds by place of each proposer, shift_sd,
phase_shift and cold_factor. The gradient is the expected one of hidden states and drafts together
(Fisher's identity). A phase that turns within a draft is left out, as in the filtering oracle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.sparse import csr_array
from scipy.special import expit, logit

from parlay.policies.types import Array
from parlay.sim.acceptance_log import DEPTH, Observed
from parlay.sim.latent import COLD_TOKENS, PHASE_TOKENS, TaskLaw

GRID, _WIDEST_SD = 21, 2.8
"""Shifts of the grid, evenly from -_WIDEST_SD to _WIDEST_SD standard deviations."""
FEWEST_DRAFTS = 30
"""A place of a draft has odds of its own where so many drafts came to it, a task is fitted."""
_MOST_ODDS, _MOST_SD, _MOST_TURNS = 7.0, 1.5, 200
_START_SD, _START_PHASE, _START_COLD = 0.5, 0.3, 0.7
_CELLS = 60_000
"""Texts are taken together as long as they fill no more drafts than this."""


@dataclass(slots=True, frozen=True)
class Model:
    """The process of one task: odds of each proposer [proposers, DEPTH], the rest as in TaskLaw."""

    proposers: tuple[int, ...]
    odds: Array
    shift_sd: float
    phase_shift: float
    cold_factor: float

    def chance(self) -> Array:
        """Return f64 [COLD_TOKENS + 1, proposers, states, DEPTH]: P(a place holds | reached).

        First axis: outputs before the draft, COLD_TOKENS or more the last. States: `GRID` shifts
        in the low phase, then in the high one.
        """
        warm = expit(self.odds[:, None, :] + self.shifts()[None, :, None])
        return np.where(_cold()[:, None, None, :], self.cold_factor, 1.0) * warm

    def shifts(self) -> Array:
        """Return f64 [2 GRID]: the shift of each state."""
        own = self.shift_sd * _nodes()[0]
        return np.concatenate([own - self.phase_shift, own + self.phase_shift])


class Drafts:
    """A task's drafts as the likelihood wants them: kinds of draft, and texts side by side.

    Drafts that are alike in coldness, proposer, offered and held are of one kind: cold, who,
    offered, held i64 [kinds].
    """

    def __init__(self, observed: Observed) -> None:
        self.proposers = tuple(np.unique(observed.proposer).tolist())
        who = np.searchsorted(self.proposers, observed.proposer)
        cold = np.minimum(observed.at, COLD_TOKENS)
        rows = np.stack([cold, who, observed.offered, observed.held], axis=1)
        kinds, code = np.unique(rows, axis=0, return_inverse=True)
        self.cold, self.who, self.offered, self.held = kinds.T
        self.batches = list(_batches(observed, code.ravel()))

    def reached(self) -> Array:
        """Return i64 [proposers, DEPTH]: drafts that came to each place."""
        place = np.arange(DEPTH)
        return self.counted((place <= self.held[:, None]) & (place < self.offered[:, None]))

    def counted(self, of_kind: Array) -> Array:
        """Return i64 [proposers, DEPTH]: how many drafts are of a kind for which a place is so.

        of_kind: bool [kinds, DEPTH].
        """
        counts = sum(np.bincount(b.code[b.there], minlength=len(self.who)) for b in self.batches)
        out = np.zeros((len(self.proposers), DEPTH), np.int64)
        np.add.at(out, self.who, of_kind * np.asarray(counts)[:, None])
        return out


@dataclass(slots=True)
class Batch:
    """Texts side by side [steps, texts]: kind of draft, whether there is one, and how likely its
    phase is that of the next draft (stay).

    index [steps, texts]: the draft's row among all.
    """  # noqa: D205

    code: Array
    there: Array
    stay: Array
    index: Array


def fit(observed: Observed) -> Model:
    """Return the most likely model of one task's drafts; raises ValueError where they are few."""
    if len(observed) < FEWEST_DRAFTS:
        raise ValueError(f"{len(observed)} drafts are too few to fit: it needs {FEWEST_DRAFTS}")
    drafts = Drafts(observed)
    places = np.maximum((drafts.reached() >= FEWEST_DRAFTS).sum(axis=1), 1)
    # Where an offer was never longer, no place beyond it was seen: the last value repeats.
    index = np.minimum(np.arange(DEPTH), places[:, None] - 1)
    index += (np.cumsum(places) - places)[:, None]
    count = int(places.sum())

    def model(x: Array) -> Model:
        return Model(drafts.proposers, x[:count][index], *(float(v) for v in x[count:]))

    def loss(x: Array) -> tuple[float, Array]:
        value, odds, rest = likelihood(model(x), drafts)
        slope = np.bincount(index.ravel(), odds.ravel(), minlength=count)
        return -value / len(observed), -np.concatenate([slope, rest]) / len(observed)

    start = np.concatenate([_start(drafts, index), [_START_SD, _START_PHASE, _START_COLD]])
    bounds = [(-_MOST_ODDS, _MOST_ODDS)] * count + [(0.01, _MOST_SD), (0.0, _MOST_SD), (0.02, 1.0)]
    found = minimize(
        loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": _MOST_TURNS}
    )
    return model(found.x)


def law_of(model: Model, match_rate: float) -> TaskLaw:
    """Return the simulator's law of a fitted model; places that repeat the last are left out."""
    accept = {}
    for proposer, odds in zip(model.proposers, model.odds, strict=True):
        changes = np.flatnonzero(odds != odds[-1])
        last = int(changes[-1]) + 2 if len(changes) else 1
        accept[proposer] = tuple(round(float(p), 4) for p in expit(odds[:last]))
    numbers = (model.shift_sd, model.phase_shift, model.cold_factor)
    return TaskLaw(round(match_rate, 4), accept, *(round(v, 4) for v in numbers))


def likelihood(model: Model, drafts: Drafts) -> tuple[float, Array, Array]:
    """Return the log-likelihood and its slopes.

    Slopes: odds f64 [proposers, DEPTH]; and (shift_sd, phase_shift, cold_factor).
    """
    chance, hidden = model.chance(), 0.0
    logs = _log_kinds(chance, drafts)
    weight = np.zeros(logs.shape)
    for batch in drafts.batches:
        after, value = _smoothed(batch, np.exp(logs))
        hidden += value
        flat = np.flatnonzero(batch.there.ravel())
        code = batch.code.ravel()[flat]
        shape = (len(logs), len(flat))
        kinds = csr_array((np.ones(len(flat)), (code, np.arange(len(flat)))), shape)
        weight += kinds @ after.reshape(-1, logs.shape[1])[flat]
    return hidden, *_slopes(model, drafts, chance, weight)


def predicted(model: Model, observed: Observed) -> Array:
    """Return f64 [drafts, states]: what each draft's text is thought to be like before it."""
    drafts = Drafts(observed)
    logs = _log_kinds(model.chance(), drafts)
    out = np.zeros((len(observed), logs.shape[1]))
    for batch in drafts.batches:
        before, _, _ = _filtered(batch, np.exp(logs))
        out[batch.index[batch.there]] = before[batch.there]
    return out


def _log_kinds(chance: Array, drafts: Drafts) -> Array:
    """Return f64 [kinds, states]: the log-probability of each kind of draft."""
    of_kind = np.clip(chance[drafts.cold, drafts.who], 1e-12, 1.0 - 1e-12)
    place = np.arange(DEPTH)
    right = place < drafts.held[:, None, None]
    logs: Array = np.where(right, np.log(of_kind), 0.0).sum(axis=2)
    missed = drafts.held < drafts.offered
    end = np.minimum(drafts.held, DEPTH - 1)[:, None, None]
    wrong = np.log1p(-np.take_along_axis(of_kind, end, 2)[:, :, 0])
    return logs + np.where(missed[:, None], wrong, 0.0)


def _slopes(model: Model, drafts: Drafts, chance: Array, weight: Array) -> tuple[Array, Array]:
    """Return the slopes from the expected number of times f64 [kinds, states] of each kind."""
    of_kind = np.clip(chance[drafts.cold, drafts.who], 1e-12, 1.0 - 1e-12)
    cold = _cold()[drafts.cold][:, None, :]
    warm = of_kind / np.where(cold, model.cold_factor, 1.0)
    place, held = np.arange(DEPTH), drafts.held[:, None, None]
    right = place < held
    wrong = (place == held) & (place < drafts.offered[:, None, None])
    miss = np.where(wrong, of_kind / (1.0 - of_kind), 0.0)
    by_odds = weight[:, :, None] * (1.0 - warm) * (right - miss)
    by_cold = weight[:, :, None] * cold * (right - miss) / model.cold_factor
    odds = np.zeros((len(drafts.proposers), DEPTH))
    np.add.at(odds, drafts.who, by_odds.sum(axis=1))
    of_state = by_odds.sum(axis=(0, 2))
    node = np.tile(_nodes()[0], 2)
    side = np.repeat([-1.0, 1.0], GRID)
    return odds, np.array([of_state @ node, of_state @ side, float(by_cold.sum())])


def _filtered(batch: Batch, kinds: Array) -> tuple[Array, Array, float]:
    """Return f64 [steps, texts, states] before each draft, its likelihoods, and the log of all."""
    steps, texts = batch.code.shape
    before = np.zeros((steps, texts, 2 * GRID))
    held = np.where(batch.there[:, :, None], kinds[batch.code], 1.0)
    now = np.tile(0.5 * np.tile(_nodes()[1], 2), (texts, 1))
    total = 0.0
    for step in range(steps):
        before[step] = now
        now = now * held[step]
        size = now.sum(axis=1, keepdims=True)
        total += float(np.log(size).sum())
        now = _turned(now / size, batch.stay[step])
    return before, held, total


def _smoothed(batch: Batch, kinds: Array) -> tuple[Array, float]:
    """Return f64 [steps, texts, states], what each text was like given all of it; the log."""
    before, held, total = _filtered(batch, kinds)
    later = np.ones(before.shape[1:])
    for step in range(len(before) - 1, -1, -1):
        seen = held[step] * _turned(later, batch.stay[step])
        before[step] *= seen
        before[step] /= before[step].sum(axis=1, keepdims=True)
        later = seen / seen.max(axis=1, keepdims=True)
    return before, total


def _turned(belief: Array, stay: Array) -> Array:
    """Let phases turn, each staying with probability `stay` f64 [texts]; its own transpose."""
    low, high, stay = belief[:, :GRID], belief[:, GRID:], stay[:, None]
    return np.concatenate(
        [stay * low + (1.0 - stay) * high, stay * high + (1.0 - stay) * low], axis=1
    )


def _batches(observed: Observed, code: Array) -> list[Batch]:
    """Lay texts side by side, the longest first, so that little is empty."""
    sizes = np.diff(np.append(observed.first, len(observed)))
    order, found, start = np.argsort(-sizes, kind="stable"), [], 0
    while start < len(order):
        longest = int(sizes[order[start]])
        chosen = order[start : start + max(_CELLS // longest, 1)]
        start += len(chosen)
        step = np.arange(longest)[:, None]
        there = step < sizes[chosen]
        index = np.where(there, observed.first[chosen] + step, 0)
        at = observed.at[index]
        gap = np.where(there[1:], at[1:] - at[:-1], 0)
        gap = np.concatenate([gap, np.zeros((1, len(chosen)), at.dtype)])
        stay = 0.5 * (1.0 + (1.0 - 2.0 / PHASE_TOKENS) ** gap)
        found.append(Batch(code[index], there, stay, index))
    return found


def _start(drafts: Drafts, index: Array) -> Array:
    """Return the odds of each free place, as if all texts were alike."""
    held = np.minimum(drafts.held, drafts.offered)[:, None]
    counts = drafts.reached(), drafts.counted(np.arange(DEPTH) < held)
    total, good = (np.bincount(index.ravel(), x.ravel()) for x in counts)
    return np.clip(logit((good + 0.5) / (total + 1.0)), -_MOST_ODDS + 1, _MOST_ODDS - 1)


def _nodes() -> tuple[Array, Array]:
    """Return the grid f64 [GRID] in standard deviations, of standard deviation 1, and weights."""
    node = np.linspace(-_WIDEST_SD, _WIDEST_SD, GRID)
    weight = np.exp(-0.5 * node**2)
    weight /= weight.sum()
    return node / np.sqrt(weight @ node**2), weight


def _cold() -> Array:
    """Return bool [COLD_TOKENS + 1, DEPTH]: the places that fall on the first outputs."""
    return np.arange(COLD_TOKENS + 1)[:, None] + np.arange(DEPTH) < COLD_TOKENS
