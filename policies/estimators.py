"""Estimators of what another policy would have earned, on rows of a decision log.

A direct model (hazards by task, channel and place, a gamma frailty for each request and proposer,
fitted by EM) serves three ends: as the direct part of the doubly robust estimate, to fill in what
censoring hides, and for the occupancy: under a policy that emits more a step a request is seen in
fewer steps, so a logged row counts for (tokens a step under the log's policy) / (under the other),
both by the model, from other rows of the same request. That is a marginalised importance weight
(Xie et al. 2019, arXiv:1906.03393) with the sample splitting of Chernozhukov et al. 2016
(arXiv:1608.00060).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parlay.policies.acceptance import CHANNELS, channel_of
from parlay.policies.allocate import HAZARD_CEILING
from parlay.policies.types import NGRAM, PROPOSERS, Array

_FRAILTY_STRENGTH = 6.0
_CELL_ROWS = 6.0
_PLACE_ROWS = 4.0
_START_HAZARD = 0.4
_EM_STEPS = 4
_OCCUPANCY_ROWS = 4.0


@dataclass(slots=True)
class Rows:
    """What the log says, one row a request and step [rows].

    request intp, 0..; turn i64, decoding rows of it before; task intp, 0..; channel intp
    (`acceptance.channel_of`, any where k was 0) and ngram_channel, which it would be were the
    n-gram asked; young bool, among the first output tokens; proposer, verified, accepted i64;
    emitted i64, tokens; ends bool, the tokens were cropped because the request ended; forced bool,
    no policy could have drafted; propensity f64.
    """

    request: Array
    turn: Array
    task: Array
    channel: Array
    ngram_channel: Array
    young: Array
    proposer: Array
    verified: Array
    accepted: Array
    emitted: Array
    ends: Array
    forced: Array
    propensity: Array

    def __len__(self) -> int:
        return len(self.request)


@dataclass(slots=True)
class Choices:
    """What the other policy would have done in each row [rows].

    proposer, k i64 (NONE and 0 go together); agrees bool, the log's policy chose the very same.
    """

    proposer: Array
    k: Array
    agrees: Array


@dataclass(slots=True)
class Model:
    """hazard f64 [cells, K] and frailty f64 [requests, PROPOSERS], which multiplies it."""

    hazard: Array
    frailty: Array


def weights(rows: Rows, choices: Choices) -> Array:
    """Return pi / pi_0 f64 [rows]: 1 / propensity where both chose the same, else 0; 1 if forced.

    The other policy's choice is a draw from its own distribution; over its seeds the mean of these
    weights is its probability over the propensity. A propensity of 0 or nan is unknown: weight 0.
    """
    known = rows.propensity > 0.0
    inverse = np.divide(1.0, rows.propensity, out=np.zeros(len(rows)), where=known)
    return np.where(rows.forced, 1.0, inverse * choices.agrees)


def ips(reward: Array, weight: Array) -> float:
    """Return mean(w r): inverse propensity scoring (Horvitz and Thompson 1952)."""
    return float((weight * reward).mean())


def snips(reward: Array, weight: Array) -> float:
    """Return sum(w r) / sum(w): self-normalised (Swaminathan and Joachims 2015)."""
    return float((weight * reward).sum() / weight.sum())


def doubly_robust(reward: Array, weight: Array, direct: Array, direct_logged: Array) -> Array:
    """Return direct + w (r - direct_logged) [rows], whose mean is the estimate.

    direct, direct_logged: the model's reward of the other policy's and of the log's choice (Dudik
    et al. 2011, arXiv:1103.4601).
    """
    found: Array = direct + weight * (reward - direct_logged)
    return found


def effective_size(weight: Array) -> float:
    """Return (sum w)^2 / sum w^2 (Kish 1965); 0 where there is no weight."""
    square = float((weight**2).sum())
    return float(weight.sum()) ** 2 / square if square else 0.0


def known_tokens(rows: Rows, choices: Choices) -> tuple[Array, Array]:
    """Return what the log tells of the tokens f64 [rows] and whether that is all, bool [rows].

    A verification of m tokens of which a held tells the tokens of every k of the same proposer:
    min(a, k) + 1 where k <= m or a < m. Where all m < k held, that is a lower bound; of another
    proposer nothing is told but the one token that the target model emits. Where the request ended
    in this step, no k emits more than it did.
    """
    same = (choices.proposer == rows.proposer) | (choices.k == 0)
    held = np.where(same, np.minimum(rows.accepted, choices.k), 0)
    censored = same & (rows.accepted >= rows.verified) & (choices.k > rows.verified)
    told = np.where(rows.ends, np.minimum(held + 1, rows.emitted), held + 1)
    told = np.where(rows.forced, rows.emitted, told)
    whole = rows.forced | (same & ~censored) | (rows.ends & (told >= rows.emitted))
    return told.astype(float), whole


def cell_of(rows: Rows, proposer: Array) -> Array:
    """Return each row's cell of the hazards for `proposer` [rows]; any where it is NONE."""
    other = channel_of(proposer, np.zeros(len(rows)))
    other = np.where(proposer == NGRAM, rows.ngram_channel, other)
    channel = np.where(proposer == rows.proposer, rows.channel, other)
    cell: Array = (rows.task * CHANNELS + channel) * 2 + rows.young
    return cell


def fit_model(rows: Rows, depth: int, use: Array) -> Model:
    """Fit hazards over `depth` places and frailties by EM, from rows where `use` bool [rows] holds.

    Censoring and choices made from a request's own history are ignorable for this likelihood.
    """
    model = Model(np.zeros((0, depth)), np.ones((int(rows.request.max()) + 1, PROPOSERS)))
    for _ in range(_EM_STEPS):
        model.hazard = fit_hazards(rows, depth, use.astype(float), model.frailty)
        model.frailty = fit_frailty(rows, model.hazard, use)
    return model


def fit_hazards(rows: Rows, depth: int, weight: Array, frailty: Array) -> Array:
    """Return hazards [cells, depth] given frailties: rejections over weighted exposures.

    A cell is shrunk to its channel over all tasks, which is shrunk to its own place before.
    """
    cells = (int(rows.task.max()) + 1) * CHANNELS * 2
    cell = cell_of(rows, rows.proposer)
    weight = np.where(rows.verified > 0, weight, 0.0)
    z = frailty[rows.request, rows.proposer]
    at_risk = np.minimum(rows.accepted + 1, rows.verified)
    exposed = _at_least(cell, at_risk, weight * z, cells, depth)
    failed = rows.accepted < rows.verified
    place = np.minimum(rows.accepted, depth - 1)
    rejected = np.bincount(cell * depth + place, weight * failed, minlength=cells * depth)
    rejected = rejected.reshape(cells, depth)
    pooled = np.empty((CHANNELS, depth))
    rejected_all, exposed_all = (
        t.reshape(-1, CHANNELS, 2, depth).sum(axis=(0, 2)) for t in (rejected, exposed)
    )
    before = np.full(CHANNELS, _START_HAZARD)
    for j in range(depth):
        before = (_PLACE_ROWS * before + rejected_all[:, j]) / (_PLACE_ROWS + exposed_all[:, j])
        pooled[:, j] = before
    parent = np.tile(np.repeat(pooled, 2, axis=0), (cells // CHANNELS // 2, 1))
    hazard: Array = (_CELL_ROWS * parent + rejected) / (_CELL_ROWS + exposed)
    return hazard


def seen_at(rows: Rows, depth: int) -> Array:
    """Return how many logged rows were at risk at each place of each cell, f64 [cells, depth]."""
    cells = (int(rows.task.max()) + 1) * CHANNELS * 2
    at_risk = np.minimum(rows.accepted + 1, rows.verified)
    return _at_least(cell_of(rows, rows.proposer), at_risk, np.ones(len(rows)), cells, depth)


def fit_frailty(rows: Rows, hazard: Array, use: Array) -> Array:
    """Return each request's posterior mean frailty by proposer, f64 [requests, PROPOSERS]."""
    depth = hazard.shape[1]
    use = use & (rows.verified > 0)
    at_risk = np.minimum(np.minimum(rows.accepted + 1, rows.verified), depth)
    summed = np.concatenate([np.zeros((len(hazard), 1)), np.cumsum(hazard, axis=1)], axis=1)
    expected = np.where(use, summed[cell_of(rows, rows.proposer), at_risk], 0.0)
    rejected = use & (rows.accepted < rows.verified)
    size = (int(rows.request.max()) + 1) * PROPOSERS
    key = rows.request * PROPOSERS + rows.proposer
    many, much = (np.bincount(key, x, minlength=size) for x in (rejected, expected))
    frailty: Array = (_FRAILTY_STRENGTH + many) / (_FRAILTY_STRENGTH + much)
    return frailty.reshape(-1, PROPOSERS)


def expected_held(rows: Rows, model: Model, proposer: Array, start: Array, stop: Array) -> Array:
    """Return f64 [rows]: how many of places start..stop - 1 hold, given that those before did."""
    found, some = np.zeros(len(rows)), np.flatnonzero(stop > start)
    if len(some):
        cell = cell_of(rows, proposer)[some]
        z = model.frailty[rows.request[some], proposer[some]]
        place = np.arange(int(stop[some].max()))
        hazard = model.hazard[cell][:, : len(place)]
        inside = (place >= start[some, None]) & (place < stop[some, None])
        keep = np.where(inside, 1.0 - np.minimum(z[:, None] * hazard, HAZARD_CEILING), 1.0)
        found[some] = (np.cumprod(keep, axis=1) * inside).sum(axis=1)
    return found


def direct_tokens(rows: Rows, model: Model, proposer: Array, k: Array) -> Array:
    """Return the model's tokens f64 [rows] of drafting k; what is forced is known."""
    held = expected_held(rows, model, proposer, np.zeros(len(rows), np.int64), k)
    return np.where(rows.forced, rows.emitted, 1.0 + held)


def replayed_tokens(rows: Rows, choices: Choices, model: Model) -> tuple[Array, Array]:
    """Return the tokens f64 [rows], as known as they are, and how many of them the model fills in.

    No propensity is used: right where k <= verified with the same proposer, or after a rejection
    (Li et al. 2010, arXiv:1003.5956, is the replay without censoring).
    """
    told, whole = known_tokens(rows, choices)
    same = choices.proposer == rows.proposer
    start = np.where(same, rows.verified, 0)
    hidden = expected_held(rows, model, choices.proposer, start, np.where(whole, start, choices.k))
    hidden = np.where(rows.ends, np.minimum(hidden, np.maximum(rows.emitted - told, 0)), hidden)
    return told + hidden, hidden


def occupancy(rows: Rows, choices: list[Choices], model: Model) -> Array:
    """Return f64 [rows]: how often a row's state is met under the other policy, against the log.

    1 up to a request's first step after its prompt. Each half of a request's rows is weighed by
    what the model makes of the other half, shrunk to the request's task.
    """
    weight = np.ones(len(rows))
    free = ~rows.forced
    for fold in (0, 1):
        seen = free & (rows.turn % 2 == fold)
        half = Model(model.hazard, fit_frailty(rows, model.hazard, seen))
        ours = direct_tokens(rows, half, rows.proposer, rows.verified)
        theirs = np.mean([direct_tokens(rows, half, c.proposer, c.k) for c in choices], axis=0)
        ratio = _shrunk(rows, seen, ours) / _shrunk(rows, seen, theirs)
        later = (rows.turn % 2 != fold) & (rows.turn > 0)
        weight[later] = ratio[rows.request[later]]
    return weight


def _shrunk(rows: Rows, seen: Array, value: Array) -> Array:
    """Return the mean of each request's seen rows, f64 [requests], shrunk to that of its task."""
    task, request = rows.task[seen], rows.request[seen]
    tasks, requests = int(rows.task.max()) + 1, int(rows.request.max()) + 1
    many = np.bincount(task, minlength=tasks)
    usual = float(value[seen].mean()) if seen.any() else 1.0
    mean = (usual + np.bincount(task, value[seen], minlength=tasks)) / (1.0 + many)
    task_of = np.zeros(requests, np.intp)
    task_of[rows.request] = rows.task
    total = np.bincount(request, value[seen], minlength=requests)
    count = np.bincount(request, minlength=requests)
    found: Array = (_OCCUPANCY_ROWS * mean[task_of] + total) / (_OCCUPANCY_ROWS + count)
    return found


def _at_least(cell: Array, reach: Array, weight: Array, cells: int, depth: int) -> Array:
    """Return [cells, depth]: summed weight of rows that reach beyond each place."""
    key = cell * (depth + 1) + np.minimum(reach, depth)
    count = np.bincount(key, weight, minlength=cells * (depth + 1)).reshape(cells, depth + 1)
    beyond: Array = count[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
    return beyond
