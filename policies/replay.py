"""Replay of policies on a decision log: what each would have done, and what that would take.

A policy decides on each logged view and then observes the logged outcome. That it learns from what
the log's policy drafted, and meets the batches of the log, is the bias of every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from parlay.policies.acceptance import channel_of
from parlay.policies.allocate import fit_plan
from parlay.policies.cost import StepTime
from parlay.policies.estimators import Choices, Rows
from parlay.policies.log_schema import LoggedStep, planned
from parlay.policies.policy import Policy
from parlay.policies.types import DRAFT_MODEL, MEDUSA, NGRAM, NONE, Array, BatchView

StepMs = Callable[[BatchView, Array, Array], float]
"""Modelled ms of a step from the view, each row's proposer, and the tokens it drafts."""

_YOUNG_TOKENS = 2


@dataclass(slots=True)
class Replay:
    """A log and what other policies would have done in it, one Choices and share_ms [rows] a seed.

    share_ms: modelled time laid to each row; logged_ms, modelled_ms [steps]: step times as measured
    and as modelled for what was really drafted.
    """

    rows: Rows
    choices: list[Choices]
    share_ms: list[Array]
    logged_ms: Array
    modelled_ms: Array


@dataclass(slots=True)
class _Gathered:
    rows: dict[str, list[Array]] = field(default_factory=dict)
    choices: list[dict[str, list[Array]]] = field(default_factory=list)
    logged_ms: list[float] = field(default_factory=list)
    modelled_ms: list[float] = field(default_factory=list)


def replay(policies: list[Policy], steps: Iterable[LoggedStep], cost: StepMs) -> Replay:
    """Run every policy over the log; raises ValueError where it is empty or a sample."""
    gathered = _Gathered(choices=[{} for _ in policies])
    for step in steps:
        if step.rows_in_step > len(step.view):
            raise ValueError(
                f"the log keeps {len(step.view)} of {step.rows_in_step} requests of step"
                f" {step.view.step_id}: what a batch takes can be told from whole batches only,"
                " log with sample_rate 1"
            )
        _gather_rows(gathered, step, cost)
        for policy, choices in zip(policies, gathered.choices, strict=True):
            _gather_choices(choices, policy, step, cost)
    if not gathered.logged_ms:
        raise ValueError("the log is empty: there is nothing to evaluate on")
    columns = {name: np.concatenate(parts) for name, parts in gathered.rows.items()}
    chosen = [{n: np.concatenate(p) for n, p in c.items()} for c in gathered.choices]
    return Replay(
        rows=_rows(columns),
        choices=[Choices(c["proposer"], c["k"], c["agrees"]) for c in chosen],
        share_ms=[c["share_ms"] for c in chosen],
        logged_ms=np.asarray(gathered.logged_ms),
        modelled_ms=np.asarray(gathered.modelled_ms),
    )


def learned_cost(steps: Iterable[LoggedStep]) -> StepMs:
    """Return a cost model learned from a log's own step times (`cost.StepTime`)."""
    step_time = StepTime()
    for step in steps:
        drafts = step.outcome.proposer == DRAFT_MODEL
        step_time.observe(step.outcome, float(step.view.draft_kv_lag[drafts].sum()))

    def cost(view: BatchView, proposer: Array, drafted: Array) -> float:
        prompt = view.prefill_tokens
        tokens = float(np.where(prompt > 0, prompt, 1).sum() + drafted.sum())
        edges = view.bucket_edges
        if len(edges) and tokens <= edges[-1]:
            tokens = float(edges[np.searchsorted(edges, tokens)])
        ms = float(step_time.verify_ms(np.array([tokens]), float(view.kv_tokens))[0])
        a_pass, token_ms, catch_up = step_time.draft_ms()
        drafts = (proposer == DRAFT_MODEL) & (drafted > 0)
        ms += a_pass * int(drafted[drafts].max(initial=0)) + float(token_ms[proposer] @ drafted)
        if ((proposer == MEDUSA) & (drafted > 0)).any():
            ms += step_time.heads_ms()
        return ms + catch_up * float(view.draft_kv_lag[drafts].sum())

    return cost


def _gather_rows(gathered: _Gathered, step: LoggedStep, cost: StepMs) -> None:
    view, outcome = step.view, step.outcome
    rows = len(view)
    columns = {
        "engine": np.full(rows, step.engine),
        "request_id": view.request_id,
        "output_tokens": view.output_tokens,
        "task": view.task,
        "proposer": np.where(outcome.verified_k > 0, outcome.proposer, NONE),
        "match_tokens": outcome.match_tokens,
        "ngram_match_tokens": view.match_tokens,
        "verified": outcome.verified_k,
        "accepted": outcome.accepted,
        "emitted": outcome.emitted,
        "ends": outcome.truncated_by > 0,
        "prompt": view.prefill_tokens > 0,
        "forced": (view.prefill_tokens > 0) | (view.max_k <= 0) | (view.proposer_mask <= 1),
        "propensity": step.fit.propensity,
    }
    for name, values in columns.items():
        gathered.rows.setdefault(name, []).append(values)
    gathered.logged_ms.append(outcome.step_ms)
    gathered.modelled_ms.append(cost(view, outcome.proposer, outcome.drafted_k.astype(np.int64)))


def _gather_choices(
    choices: dict[str, list[Array]], policy: Policy, step: LoggedStep, cost: StepMs
) -> None:
    view, outcome = step.view, step.outcome
    plan = policy.decide(view)
    fit = fit_plan(plan, view)
    proposer, k = planned(view, fit, plan)
    agrees = (proposer == step.planned_proposer) & (k == step.planned_k)
    agrees &= (fit.proposer == step.fit.proposer) & (fit.k == step.fit.k)
    ended = (fit.proposer == step.fit.proposer) & (outcome.drafted_k < outcome.requested_k)
    k = np.where(ended, np.minimum(fit.k, outcome.drafted_k), fit.k).astype(np.int64)
    proposer = np.where(k > 0, fit.proposer, NONE)
    policy.observe(outcome)
    share_ms = shared_ms(view, proposer, k, cost)
    found = {"proposer": proposer.astype(np.int64), "k": k, "agrees": agrees, "share_ms": share_ms}
    for name, values in found.items():
        choices.setdefault(name, []).append(values)


def shared_ms(view: BatchView, proposer: Array, k: Array, cost: StepMs) -> Array:
    """Return what of the step's modelled time is laid to each row, f64 [rows].

    An even share, and by how much the row's own drafts prolong the step more than other rows' do.
    """
    full = cost(view, proposer, k)
    alike = np.unique(np.stack([proposer, k]), axis=1, return_index=True, return_inverse=True)
    own = np.zeros(alike[0].shape[1])
    for place, row in enumerate(alike[1].tolist()):
        if k[row] > 0:
            without = k.copy()
            without[row] = 0
            own[place] = full - cost(view, np.where(without > 0, proposer, NONE), without)
    own = own[alike[2]]
    found: Array = full / len(view) + own - own.mean()
    return found


def _rows(columns: dict[str, Array]) -> Rows:
    request, turn = _requests(columns)
    proposer = columns["proposer"].astype(np.int64)
    always_ngram = np.full(len(proposer), NGRAM)
    return Rows(
        request=request,
        turn=turn,
        task=np.unique(columns["task"], return_inverse=True)[1],
        channel=channel_of(proposer, columns["match_tokens"]),
        ngram_channel=channel_of(always_ngram, columns["ngram_match_tokens"]),
        young=columns["output_tokens"] < _YOUNG_TOKENS,
        proposer=proposer,
        **{name: columns[name].astype(np.int64) for name in ("verified", "accepted", "emitted")},
        ends=columns["ends"],
        forced=columns["forced"],
        propensity=columns["propensity"].astype(float),
    )


def _requests(columns: dict[str, Array]) -> tuple[Array, Array]:
    """Return each row's request 0.. and how many decoding rows of it came before.

    Less output than before is another request: an engine that restarts counts ids from 1 again.
    """
    rows = len(columns["request_id"])
    engine = np.unique(columns["engine"], return_inverse=True)[1]
    order = np.lexsort((np.arange(rows), columns["request_id"], engine))
    ids, engine = columns["request_id"][order], engine[order]
    output = columns["output_tokens"][order]
    new = np.ones(rows, bool)
    new[1:] = (ids[1:] != ids[:-1]) | (engine[1:] != engine[:-1]) | (output[1:] < output[:-1])
    request, turn = np.empty(rows, np.intp), np.empty(rows, np.int64)
    group = np.cumsum(new) - 1
    request[order] = group
    decodes = ~columns["prompt"][order]
    before = np.cumsum(decodes) - decodes
    # One first seen after its first token was decoding before the log began.
    began = (columns["output_tokens"][order] <= 1)[new]
    turn[order] = before - before[new][group] + ~began[group]
    return request, turn
