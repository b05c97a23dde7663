"""Off-policy evaluation: what goodput would another policy have earned on a decision log.

The policy is replayed: it decides on each logged view and observes each logged outcome. What that
carries with it: it learns from what the log's policy drafted, not from its own drafts; batches are
as large as in the log, though a faster policy would have emptied them sooner; lookups and stop
rules end drafts where the log saw them end. So estimates screen candidates; measured switch-back
blocks decide.

Goodput is tokens per second of step time, once the mix of requests in the batch is the policy's
own. Tokens of a logged row come from an estimator, which sees one step ahead: weights over a whole
request would multiply out of bounds. How often a request's states are met under the policy comes
from a model (`estimators.occupancy`), and each task must emit what it emitted in the log: a task's
rows count more where they are estimated to give less. Time comes from a cost model, which is only
believed in ratios: it is scaled to be right for the log as a whole. A step's time is laid to its
rows evenly, plus what each row's own drafts add (`replay.shared_ms`): a request carries what its
drafts cost all others. Requests are then independent but for the noise of the steps they share:
intervals are percentiles of a bootstrap over whole requests for tokens and modelled time, times an
independent one over blocks of steps for the scale of time. (Blocks of steps alone cut requests, and
short logs have few; resampling both ways at once, Owen 2007, arXiv:0712.1111, counts the noise of a
row thrice.) The model's frailties and the states met are held fixed in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from parlay.policies.estimators import (
    Choices,
    Model,
    Rows,
    direct_tokens,
    doubly_robust,
    effective_size,
    fit_hazards,
    fit_model,
    known_tokens,
    occupancy,
    replayed_tokens,
    seen_at,
    weights,
)
from parlay.policies.log_schema import LoggedStep
from parlay.policies.policy import Policy
from parlay.policies.replay import Replay, StepMs, replay
from parlay.policies.types import Array

ESTIMATORS = ("snips", "dr", "replay")
LEAST_EFFECTIVE_REQUESTS = 30.0
MOST_UNSUPPORTED = 0.1
"""Share of choices that the log's policy never makes; found as what weights lack of a mean of 1."""
MOST_UNKNOWN = 0.01
"""Share of rows without a propensity."""
LEAST_SEEN = 10
"""Rows of the log that must have been at risk at a place, for the replay to fill it in."""
EXPLORING = "exp3_spec, thompson, nightjar or beg_mab"
_RESAMPLES = 400
_BLOCK_STEPS = 10


@dataclass(slots=True, frozen=True)
class Estimate:
    """goodput, tokens/s, within [low, high] at 95%; that of the log's own policy, measured; the
    effective number of requests; unsupported, the share of choices (replay: of drafted tokens) of
    which the log tells nothing; requests and steps in the log.
    """  # noqa: D205

    estimator: str
    goodput: float
    low: float
    high: float
    logged_goodput: float
    effective_requests: float
    unsupported: float
    requests: int
    steps: int


def evaluate(
    make: Callable[[int], Policy],
    steps: Iterable[LoggedStep],
    cost: StepMs,
    estimators: tuple[str, ...] = ESTIMATORS,
    seeds: int = 1,
) -> dict[str, Estimate]:
    """Estimate the goodput of the policies that `make` makes from seeds 0.. on a log.

    seeds: how many times a policy that draws is replayed; one that does not needs no more than one.
    Raises ValueError where the log is empty or a sample, or does not support the policy's choices.
    """
    replayed = replay([make(seed) for seed in range(seeds)], steps, cost)
    model, met = direct_model(replayed)
    return {name: estimate(replayed, name, model, met) for name in estimators}


def direct_model(replayed: Replay) -> tuple[Model, Array]:
    """Return the model of a replayed log, and how often each row's state is met f64 [rows]."""
    rows, choices = replayed.rows, replayed.choices
    depth = 1 + int(max(rows.verified.max(), *(c.k.max() for c in choices)))
    model = fit_model(rows, depth, np.ones(len(rows), bool))
    return model, occupancy(rows, choices, model)


def estimate(replayed: Replay, estimator: str, model: Model, met: Array) -> Estimate:
    """Estimate goodput from a replay; raises ValueError where the log does not support it."""
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown estimator '{estimator}'; choose one of {', '.join(ESTIMATORS)}")
    rows, choices = replayed.rows, replayed.choices
    time = _by_request(rows, met * np.mean(replayed.share_ms, axis=0))
    if estimator == "replay":
        effective, unsupported = _replay_support(rows, choices, model)
        tokens = _replay_tokens(rows, choices, model, met)
    else:
        weight = np.mean([weights(rows, c) for c in choices], axis=0)
        effective, unsupported = _weight_support(rows, weight)
        if estimator == "snips":
            tokens = _snips_tokens(rows, weight, met)
        else:
            tokens = _dr_tokens(rows, choices, model, weight, met)
    strata, emitted = strata_of(rows), _by_request(rows, rows.emitted)

    def goodput(many: Array, scale: float) -> float:
        found = tokens(many)
        sums = [np.bincount(strata, many * x, minlength=len(found)) for x in (emitted, time)]
        return 1e3 * float(sums[0].sum() / (scale * (sums[0] * sums[1] / found).sum()))

    rng = np.random.default_rng(0)
    scale = replayed.logged_ms.sum() / replayed.modelled_ms.sum()
    found = goodput(np.ones(len(time)), scale)
    draws = np.empty(_RESAMPLES)
    for b in range(_RESAMPLES):
        many = np.bincount(rng.integers(0, len(time), len(time)), minlength=len(time))
        draws[b] = goodput(many.astype(float), _resampled_scale(replayed, rng))
    low, high = np.quantile(draws, [0.025, 0.975])
    logged = 1e3 * float(rows.emitted.sum()) / float(replayed.logged_ms.sum())
    size = (len(time), len(replayed.logged_ms))
    return Estimate(
        estimator, found, float(low), float(high), logged, effective, unsupported, *size
    )


def _by_request(rows: Rows, value: Array) -> Array:
    """Return the sum over each request's rows, f64 [requests]."""
    return np.bincount(rows.request, value, minlength=int(rows.request.max()) + 1)


def strata_of(rows: Rows) -> Array:
    """Return each request's stratum intp [requests]: its task, or 0 where that has few requests."""
    task = np.zeros(int(rows.request.max()) + 1, np.intp)
    task[rows.request] = rows.task
    many = np.bincount(task) >= LEAST_EFFECTIVE_REQUESTS
    stratum: Array = np.where(many, np.cumsum(many), 0)[task]
    return stratum


Tokens = Callable[[Array], Array]
"""Estimated tokens by stratum, given how many times each request [requests] was drawn."""


def _by_stratum(rows: Rows, value: Array) -> Tokens:
    """Return the sum over each stratum, f64 [strata], of a value [rows], above 0."""
    strata, each = strata_of(rows), _by_request(rows, value)
    size = int(strata.max()) + 1
    return lambda many: np.maximum(np.bincount(strata, many * each, minlength=size), 1e-9)


def _snips_tokens(rows: Rows, weight: Array, met: Array) -> Tokens:
    reward = _by_stratum(rows, met * weight * rows.emitted)
    weighted, states = _by_stratum(rows, met * weight), _by_stratum(rows, met)
    return lambda many: reward(many) / weighted(many) * states(many)


def _dr_tokens(
    rows: Rows, choices: list[Choices], model: Model, weight: Array, met: Array
) -> Tokens:
    direct = np.mean([direct_tokens(rows, model, c.proposer, c.k) for c in choices], axis=0)
    logged = direct_tokens(rows, model, rows.proposer, rows.verified)
    return _by_stratum(rows, met * doubly_robust(rows.emitted, weight, direct, logged))


def _replay_tokens(rows: Rows, choices: list[Choices], model: Model, met: Array) -> Tokens:
    """Return the replay's tokens; hazards are fitted anew for each draw, for they are shared."""

    def tokens(many: Array) -> Array:
        hazard = fit_hazards(rows, model.hazard.shape[1], many[rows.request], model.frailty)
        drawn_model = Model(hazard, model.frailty)
        each = [replayed_tokens(rows, c, drawn_model)[0] for c in choices]
        return _by_stratum(rows, met * np.mean(each, axis=0))(many)

    return tokens


def _weight_support(rows: Rows, weight: Array) -> tuple[float, float]:
    """Return (effective requests, unsupported share of choices), or raise ValueError."""
    free = ~rows.forced
    unknown = free & ~(rows.propensity > 0.0)
    count = max(int(free.sum()), 1)
    if unknown.sum() > MOST_UNKNOWN * count:
        raise ValueError(
            f"{unknown.sum() / count:.0%} of the log's decisions have no propensity above 0: its"
            " policy has to say with which probability it chose, or use the estimator replay"
        )
    share = float(weight[free].sum()) / count
    spread = np.sqrt(float((_by_request(rows, np.where(free, weight - share, 0.0)) ** 2).sum()))
    unsupported = max(0.0, 1.0 - share)
    if share + 2.0 * spread / count < 1.0 - MOST_UNSUPPORTED:
        raise ValueError(
            f"the log's policy never makes about {unsupported:.0%} of the policy's choices (at most"
            f" {MOST_UNSUPPORTED:.0%} may be): log with a policy that explores them, such as"
            f" {EXPLORING}"
        )
    return _enough(effective_size(_by_request(rows, np.where(free, weight, 0.0)))), unsupported


def _replay_support(rows: Rows, choices: list[Choices], model: Model) -> tuple[float, float]:
    """Return (effective requests, share of drafted tokens never seen), or raise ValueError."""
    seen = seen_at(rows, model.hazard.shape[1]) >= LEAST_SEEN
    blind = Model(np.where(seen, model.hazard, 1.0), model.frailty)
    free = ~rows.forced
    drafted, filled = 0.0, 0.0
    for choice in choices:
        tokens, hidden = replayed_tokens(rows, choice, model)
        drafted += float((tokens - 1.0)[free].sum())
        filled += float((hidden - replayed_tokens(rows, choice, blind)[1])[free].sum())
    unsupported = max(0.0, filled) / max(drafted, 1e-9)
    if unsupported > MOST_UNSUPPORTED:
        raise ValueError(
            f"{unsupported:.0%} of the tokens that the policy's drafts would give (at most"
            f" {MOST_UNSUPPORTED:.0%} may be) were never tried in the log: log with a policy that"
            " drafts as deep, with the same proposers"
        )
    whole = np.mean([known_tokens(rows, c)[1] for c in choices], axis=0)
    return _enough(effective_size(_by_request(rows, np.where(free, whole, 0.0)))), unsupported


def _enough(effective: float) -> float:
    if effective < LEAST_EFFECTIVE_REQUESTS:
        raise ValueError(
            f"the log is worth {effective:.1f} requests under this policy, but it takes"
            f" {LEAST_EFFECTIVE_REQUESTS:.0f}: log for longer, or with a policy nearer to this one"
        )
    return effective


def _resampled_scale(replayed: Replay, rng: np.random.Generator) -> float:
    """Return measured over modelled time of steps drawn in circular blocks."""
    steps = len(replayed.logged_ms)
    start = rng.integers(0, steps, -(-steps // _BLOCK_STEPS))
    drawn = ((start[:, None] + np.arange(min(_BLOCK_STEPS, steps))) % steps).ravel()
    return float(replayed.logged_ms[drawn].sum() / replayed.modelled_ms[drawn].sum())
