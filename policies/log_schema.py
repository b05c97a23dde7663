"""The decision log's one row format: one row a request and step, for sidecar and simulator alike.

A row holds the request's BatchView row, what was planned and what was fitted, with which
probability, the request's StepOutcome row, and the versions that made it. What is batch-wide stands
on every row of its step, so that any sample of requests can be read alone. In memory rows are a
dict of columns, each an array [rows]; a list column holds the values of all rows end to end, and
its count column how many belong to each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from parlay.policies.types import Array, BatchView, Fitted, Plan, ShadowRows, StepOutcome

SCHEMA_VERSION = 1
_ODD, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(slots=True, frozen=True)
class Column:
    """One column: name, numpy dtype of a value, what it is with its unit, and, where a row holds a
    list, the name of the column of counts.
    """  # noqa: D205

    name: str
    dtype: str
    meaning: str
    count: str = ""


COLUMNS = (
    # Which step of what; the decision's versions.
    Column("schema_version", "i2", "version of this table"),
    Column("engine", "str", "name of the engine (replica) that ran the step"),
    Column("step_id", "i8", "the engine's number of the step"),
    Column("rows_in_step", "i4", "requests in the step, of which the log may keep a sample"),
    Column("policy_version", "str", "version of the policy that planned"),
    Column("state_version", "i8", "version of what the policy had learned"),
    # BatchView, by row.
    Column("request_id", "u8", "request"),
    Column("task", "u4", "hash of the task's tag, 0 unknown"),
    Column("context_tokens", "i4", "tokens so far"),
    Column("output_tokens", "i4", "output tokens so far"),
    Column("prefill_tokens", "i4", "prompt tokens computed in this step"),
    Column("temperature", "f4", "0 greedy"),
    Column("max_k", "i4", "most tokens the request may draft"),
    Column("proposer_mask", "u1", "bit p set where proposer p may draft"),
    Column("tpot_target_ms", "f4", "ms an output token, nan none"),
    Column("recent_accept", "f4", "discounted mean of emitted tokens a step"),
    Column("match_tokens", "i4", "the n-gram's longest suffix match"),
    Column("draft_kv_lag", "i4", "tokens the draft model must catch up"),
    Column("seeded", "bool", "the request has a seed of its own"),
    # BatchView, batch-wide.
    Column("running", "i4", "requests running"),
    Column("waiting", "i4", "requests waiting"),
    Column("free_blocks", "i4", "KV blocks free"),
    Column("total_blocks", "i4", "KV blocks in all"),
    Column("kv_tokens", "i8", "KV tokens held before the step"),
    Column("bucket_edges", "i4", "padded token counts a step can have", "bucket_edges_count"),
    # The decision: as planned (whose propensity it is), then fitted to the batch.
    Column("planned_proposer", "u1", "proposer in the plan"),
    Column("planned_k", "i2", "tokens to draft in the plan"),
    Column("propensity", "f4", "probability with which the planned (proposer, k) was chosen"),
    Column("reason", "u1", "why, see Reason"),
    Column("follows", "bool", "the plan had a row for the request (else a default)"),
    Column("shadow", "bool", "the draft model was to run only to observe"),
    Column("fitted_proposer", "u1", "proposer after fit_plan"),
    Column("fitted_k", "i4", "tokens to draft after fit_plan"),
    Column("verify_k", "i4", "tokens to verify after fit_plan"),
    # StepOutcome, by row.
    Column("proposer", "u1", "proposer that ran"),
    Column("requested_k", "i2", "tokens asked of it"),
    Column("drafted_k", "i2", "tokens it drafted"),
    Column("verified_k", "i2", "drafted tokens verified"),
    Column("accepted", "i2", "drafted tokens accepted, before anything cropped them"),
    Column("emitted", "i2", "tokens committed"),
    Column("draft_match_tokens", "i4", "the match length the draft was made with"),
    Column("truncated_by", "u1", "what cropped the tokens, see Truncated"),
    Column("plan_source", "u1", "where the plan came from, see PlanSource"),
    Column("plan_step_id", "u8", "the step whose view the plan was computed from"),
    Column("confidences", "f4", "the drafter's largest probability by place", "confidences_count"),
    Column("shadow_proposer", "u1", "shadow drafts scored: proposer", "shadow_count"),
    Column("shadow_offered_k", "i2", "tokens it proposed", "shadow_count"),
    Column("shadow_matched", "f4", "how many held", "shadow_count"),
    Column("shadow_observed", "i2", "places that could be seen", "shadow_count"),
    Column("shadow_match_tokens", "i4", "match length when it proposed", "shadow_count"),
    Column("shadow_kind", "u1", "how it was scored, see ShadowKind", "shadow_count"),
    # StepOutcome, batch-wide.
    Column("padded_tokens", "i4", "rows of the verify pass"),
    Column("step_prefill_tokens", "i4", "prompt tokens among them"),
    Column("step_kv_tokens", "i8", "KV tokens read"),
    Column("draft_ms", "f4", "ms by proposer", "draft_ms_count"),
    Column("draft_depth", "i4", "passes of the draft model"),
    Column("verify_ms", "f8", "ms of the verify pass"),
    Column("step_ms", "f8", "ms from the end of the step before to the end of this"),
)
_DTYPE = {c.name: np.dtype(c.dtype) for c in COLUMNS}
_NAMES = [c.name for c in COLUMNS]
_VIEW_ROWS = tuple(_NAMES[_NAMES.index("request_id") : _NAMES.index("running")])
_VIEW_BATCH = ("step_id", "running", "waiting", "free_blocks", "total_blocks", "kv_tokens")
_FIT = {"proposer": "fitted_proposer", "k": "fitted_k"} | {
    name: name for name in ("verify_k", "follows", "shadow", "propensity", "reason")
}
_OUTCOME_ROWS = {"match_tokens": "draft_match_tokens"} | {
    name: name
    for name in (
        *("proposer", "requested_k", "drafted_k", "verified_k", "accepted", "emitted"),
        *("truncated_by", "plan_source", "plan_step_id"),
    )
}
_OUTCOME_BATCH = {"prefill_tokens": "step_prefill_tokens", "kv_tokens": "step_kv_tokens"} | {
    name: name for name in ("padded_tokens", "draft_depth", "verify_ms", "step_ms")
}
_SHADOW = ("proposer", "offered_k", "matched", "observed", "match_tokens", "kind")

Columns = dict[str, Array]


@dataclass(slots=True)
class LoggedStep:
    """One step read back: what the policy saw, what was planned [rows] and fitted, what came of it.

    rows_in_step is more than len(view) where the log keeps a sample of requests.
    """

    view: BatchView
    planned_proposer: Array
    planned_k: Array
    fit: Fitted
    outcome: StepOutcome
    engine: str = ""
    policy_version: str = ""
    state_version: int = 0
    rows_in_step: int = 0


def rows_of(
    view: BatchView, fit: Fitted, plan: Plan | None, outcome: StepOutcome, engine: str = ""
) -> Columns:
    """Return a step's rows, in the view's order.

    plan None: nothing was planned. Shadow drafts of requests that are not in the view are left out.
    Raises ValueError where the outcome is not that of the view's step and requests.
    """
    rows = len(view)
    if outcome.step_id != view.step_id or not np.array_equal(outcome.request_id, view.request_id):
        raise ValueError(
            f"the outcome is of step {outcome.step_id} and the view of step {view.step_id}, or of"
            " other requests: log each view with the outcome of its own step"
        )
    batch = {name: getattr(view, name) for name in _VIEW_BATCH}
    batch |= {to: getattr(outcome, name) for name, to in _OUTCOME_BATCH.items()}
    batch |= {"schema_version": SCHEMA_VERSION, "engine": engine, "rows_in_step": rows}
    batch["policy_version"] = plan.policy_version if plan else ""
    batch["state_version"] = plan.state_version if plan else 0
    found = {name: _filled(rows, value, _DTYPE[name]) for name, value in batch.items()}
    found |= {name: getattr(view, name) for name in _VIEW_ROWS}
    found |= {to: getattr(fit, name) for name, to in _FIT.items()}
    found |= {to: getattr(outcome, name) for name, to in _OUTCOME_ROWS.items()}
    found["planned_proposer"], found["planned_k"] = planned(view, fit, plan)
    for name, values in (("bucket_edges", view.bucket_edges), ("draft_ms", outcome.draft_ms)):
        found[name] = np.tile(values, rows)
        found[f"{name}_count"] = np.full(rows, len(values), np.int32)
    found["confidences"] = outcome.confidences.ravel()
    found["confidences_count"] = np.full(rows, outcome.confidences.shape[1], np.int32)
    found |= _shadow_lists(view, outcome.shadow)
    return {
        name: np.asarray(values, _DTYPE[name]) if name in _DTYPE and name not in batch else values
        for name, values in found.items()
    }


def planned(view: BatchView, fit: Fitted, plan: Plan | None) -> tuple[Array, Array]:
    """Return the plan's (proposer u8, k i16) [rows]; what was fitted where it had no row."""
    proposer, k = fit.proposer.astype(np.uint8), fit.k.astype(np.int16)
    if plan is not None and fit.follows.any():
        order = np.argsort(plan.request_id)
        place = np.searchsorted(plan.request_id, view.request_id[fit.follows], sorter=order)
        index = order[place]
        proposer[fit.follows], k[fit.follows] = plan.proposer[index], plan.k[index]
    return proposer, k


def steps_of(columns: Mapping[str, Array]) -> Iterator[LoggedStep]:
    """Yield the steps of rows that lie together, in their order; arrays are views into columns."""
    cut = {c.count: np.concatenate([[0], np.cumsum(columns[c.count])]) for c in COLUMNS if c.count}
    for start, stop in step_ranges(columns):
        part = {
            c.name: columns[c.name][cut[c.count][start] : cut[c.count][stop]]
            if c.count
            else columns[c.name][start:stop]
            for c in COLUMNS
        }
        part |= {name: columns[name][start:stop] for name in cut}
        yield _step(part)


def step_ranges(columns: Mapping[str, Array]) -> list[tuple[int, int]]:
    """Return (first row, row after the last) of each step."""
    step, engine = columns["step_id"], columns["engine"]
    if not len(step):
        return []
    change = np.flatnonzero((step[1:] != step[:-1]) | (engine[1:] != engine[:-1])) + 1
    edges = [0, *change.tolist(), len(step)]
    return list(pairwise(edges))


def kept_rows(columns: Mapping[str, Array], keep: Array) -> Columns:
    """Return the rows where keep, bool [rows], holds."""
    per_row = {c.name: np.repeat(keep, columns[c.count]) for c in COLUMNS if c.count}
    return {name: values[per_row.get(name, keep)] for name, values in columns.items()}


def joined(parts: Sequence[Mapping[str, Array]]) -> Columns:
    """Return the rows of all parts, one after the other; at least one part."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def in_sample(request_id: Array, rate: float) -> Array:
    """Return bool [rows]: does a log that keeps `rate` of all requests keep this one.

    By a hash of the request (SplitMix64's finaliser), so that each is kept or left as a whole.
    """
    with np.errstate(over="ignore"):
        x = request_id.astype(np.uint64) + np.uint64(_ODD)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
        x ^= x >> np.uint64(31)
    kept: Array = (x >> np.uint64(11)) * 2.0**-53 < rate
    return kept


def _filled(rows: int, value: object, dtype: np.dtype[np.generic]) -> Array:
    return np.full(rows, value, np.asarray(value).dtype if dtype.kind == "U" else dtype)


def _shadow_lists(view: BatchView, shadow: ShadowRows) -> Columns:
    order = np.argsort(view.request_id)
    place = np.searchsorted(view.request_id, shadow.request_id, sorter=order)
    row = order[np.minimum(place, len(order) - 1)] if len(order) else np.zeros(0, np.intp)
    row = row[: len(shadow)]
    there = np.flatnonzero(view.request_id[row] == shadow.request_id[: len(row)])
    there = there[np.argsort(row[there], kind="stable")]
    found = {f"shadow_{name}": getattr(shadow, name)[there] for name in _SHADOW}
    count = np.bincount(row[there], minlength=len(view))
    return found | {"shadow_count": count.astype(np.int32)}


def _step(part: Mapping[str, Array]) -> LoggedStep:
    rows = len(part["request_id"])
    request_id, task = part["request_id"], part["task"]
    shadow = {name: part[f"shadow_{name}"] for name in _SHADOW}
    who = np.repeat(request_id, part["shadow_count"])
    edges, draft_ms = (part[n][: int(part[f"{n}_count"][0])] for n in ("bucket_edges", "draft_ms"))
    view: dict[str, Any] = {name: part[name] for name in _VIEW_ROWS}
    view |= {name: int(part[name][0]) for name in _VIEW_BATCH}
    outcome: dict[str, Any] = {name: part[column] for name, column in _OUTCOME_ROWS.items()}
    outcome |= {name: part[column][0].item() for name, column in _OUTCOME_BATCH.items()}
    return LoggedStep(
        view=BatchView(**view, bucket_edges=edges),
        planned_proposer=part["planned_proposer"],
        planned_k=part["planned_k"],
        fit=Fitted(**{name: part[column] for name, column in _FIT.items()}),
        outcome=StepOutcome(
            request_id=request_id,
            task=task,
            **outcome,
            confidences=part["confidences"].reshape(rows, -1),
            shadow=ShadowRows(request_id=who, **shadow),
            step_id=int(part["step_id"][0]),
            draft_ms=draft_ms,
        ),
        engine=str(part["engine"][0]),
        policy_version=str(part["policy_version"][0]),
        state_version=int(part["state_version"][0]),
        rows_in_step=int(part["rows_in_step"][0]),
    )
