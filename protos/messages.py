"""BatchView, Plan and StepOutcome <-> messages, whose columns are checked as they are read.

Writing fills messages of the twin schema `parlay.wire.v1`, in their places: a part that is made
first is copied. Reading takes those of either, with the `Read` that fits them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from parlay.policies.types import (
    K_LIMIT,
    MATCH_EDGES,
    NO_BUDGET,
    PROPOSERS,
    Array,
    BatchView,
    Plan,
    ShadowRows,
    StepOutcome,
    StopKind,
    StopRule,
    TaskDefaults,
    no_shadows,
)
from parlay.protos import columns as c
from parlay.wire.v1 import policy_pb2 as raw

MAX_ROWS = 4096
MAX_SHADOW_ROWS = 4 * MAX_ROWS
MAX_EDGES = 1024
MATCH_BUCKETS = len(MATCH_EDGES) + 1
_STOP_KINDS = frozenset(StopKind)


def write_view(message: raw.BatchView, view: BatchView) -> None:
    """Write the view into a message that is empty."""
    message.rows = len(view)
    message.step_id = view.step_id
    message.running = view.running
    message.waiting = view.waiting
    message.free_blocks = view.free_blocks
    message.total_blocks = view.total_blocks
    message.kv_tokens = view.kv_tokens
    message.bucket_edge_count = len(view.bucket_edges)
    message.bucket_edges = c.write(view.bucket_edges, c.EDGES)
    c.write_columns(message, view, c.VIEW, len(view))


def write_outcome(message: raw.StepOutcome, outcome: StepOutcome) -> None:
    """Write the outcome into a message that is empty; raises ValueError where lengths differ."""
    rows, depth = outcome.confidences.shape
    if rows != len(outcome):
        raise ValueError(f"confidences has {rows} rows, not {len(outcome)}")
    message.rows = rows
    message.step_id = outcome.step_id
    message.padded_tokens = outcome.padded_tokens
    message.prefill_tokens = outcome.prefill_tokens
    message.kv_tokens = outcome.kv_tokens
    message.draft_depth = outcome.draft_depth
    message.verify_ms = outcome.verify_ms
    message.step_ms = outcome.step_ms
    message.draft_ms = c.write(outcome.draft_ms, c.DRAFT_MS)
    message.k_columns = depth
    message.confidences = c.write(outcome.confidences, c.CONFIDENCES)
    c.write_columns(message, outcome, c.OUTCOME, rows)
    if shadows := len(outcome.shadow):
        message.shadow.rows = shadows
        c.write_columns(message.shadow, outcome.shadow, c.SHADOW, shadows)


def write_plan(message: raw.Plan, plan: Plan) -> None:
    """Write the plan into a message that is empty."""
    message.rows = len(plan)
    message.step_id = plan.step_id
    message.state_version = plan.state_version
    message.policy_version = plan.policy_version
    message.expires_after_steps = plan.expires_after_steps
    message.token_value_ms = plan.token_value_ms
    message.marginal_token_price_ms = plan.marginal_token_price_ms
    message.draft_token_price_ms = c.write(plan.draft_token_price_ms, c.PRICES)
    if plan.budget_tokens != NO_BUDGET:
        message.budget_tokens = plan.budget_tokens
    kind: Any = int(plan.stop_rule.kind)
    message.stop_rule.kind = kind
    message.stop_rule.threshold = plan.stop_rule.threshold
    c.write_columns(message, plan, c.PLAN, len(plan))
    if plan.calibration is not None:
        message.calibration.slope = c.write(plan.calibration[:, 0], c.SLOPE)
        message.calibration.offset = c.write(plan.calibration[:, 1], c.OFFSET)
    if plan.survival is not None:
        _write_survival(message.survival, plan.survival)
    if plan.match_hazard is not None and plan.match_frailty is not None:
        message.match_model.k_columns = plan.match_hazard.shape[1]
        message.match_model.hazard = c.write(plan.match_hazard, c.HAZARD)
        message.match_model.frailty = c.write(plan.match_frailty, c.FRAILTY)
    if plan.defaults is not None:
        message.defaults.rows = len(plan.defaults.task)
        c.write_columns(message.defaults, plan.defaults, c.DEFAULTS, len(plan.defaults.task))


def _write_survival(message: raw.Survival, survival: Array) -> None:
    """Write the survivals of the proposers that have any: most of the array is zeros."""
    there = np.flatnonzero(survival.any(axis=(0, 2))).tolist()
    message.k_columns = survival.shape[2]
    message.proposer_mask = sum(1 << proposer for proposer in there)
    message.values = c.write(survival[:, _together(there)], c.SURVIVAL)


def read_view(message: Any, read: c.Read) -> BatchView:
    """Read a view; raises ValueError where it is malformed or impossible."""
    rows = _rows(message, MAX_ROWS)
    count = _at_most("bucket edges", message.bucket_edge_count, MAX_EDGES)
    edges = c.read_column(read, message, c.EDGES, count)
    if len(edges) > 1 and (np.diff(edges) <= 0).any():
        raise ValueError("bucket_edges must rise")
    columns = c.read_columns(read, message, c.VIEW, rows)
    _unique(columns["request_id"])
    return BatchView(
        **columns,
        step_id=_step_id(message.step_id),
        running=message.running,
        waiting=message.waiting,
        free_blocks=message.free_blocks,
        total_blocks=message.total_blocks,
        kv_tokens=message.kv_tokens,
        bucket_edges=edges,
    )


def read_outcome(message: Any, read: c.Read) -> StepOutcome:
    """Read an outcome; raises ValueError where it is malformed or impossible."""
    rows = _rows(message, MAX_ROWS)
    depth = _at_most("k_columns", message.k_columns, K_LIMIT)
    columns = c.read_columns(read, message, c.OUTCOME, rows)
    _unique(columns["request_id"])
    if (columns["accepted"] > columns["verified_k"]).any():
        raise ValueError("accepted must not be above verified_k")
    if (columns["verified_k"] > columns["drafted_k"]).any():
        raise ValueError("verified_k must not be above drafted_k")
    return StepOutcome(
        **columns,
        confidences=c.read_column(read, message, c.CONFIDENCES, rows * depth).reshape(rows, depth),
        shadow=_read_shadow(message, read),
        step_id=_step_id(message.step_id),
        padded_tokens=message.padded_tokens,
        prefill_tokens=message.prefill_tokens,
        kv_tokens=message.kv_tokens,
        draft_ms=c.read_column(read, message, c.DRAFT_MS, PROPOSERS),
        draft_depth=message.draft_depth,
        verify_ms=_duration("verify_ms", message.verify_ms),
        step_ms=_duration("step_ms", message.step_ms),
    )


def read_plan(message: Any, read: c.Read) -> Plan:
    """Read a plan; raises ValueError where it is malformed or impossible."""
    rows = _rows(message, MAX_ROWS)
    hazard, frailty = _read_match(message, read, rows)
    return Plan(
        **c.read_columns(read, message, c.PLAN, rows),
        survival=_read_survival(message, read, rows),
        match_hazard=hazard,
        match_frailty=frailty,
        defaults=_read_defaults(message, read),
        token_value_ms=message.token_value_ms,
        marginal_token_price_ms=message.marginal_token_price_ms,
        draft_token_price_ms=c.read_column(read, message, c.PRICES, PROPOSERS),
        budget_tokens=message.budget_tokens if message.HasField("budget_tokens") else NO_BUDGET,
        stop_rule=_read_stop_rule(message),
        calibration=_read_calibration(message, read),
        step_id=_step_id(message.step_id),
        state_version=message.state_version,
        policy_version=message.policy_version,
        expires_after_steps=message.expires_after_steps,
    )


def _read_shadow(message: Any, read: c.Read) -> ShadowRows:
    if not message.HasField("shadow"):
        return no_shadows()
    rows = _rows(message.shadow, MAX_SHADOW_ROWS)
    return ShadowRows(**c.read_columns(read, message.shadow, c.SHADOW, rows))


def _read_survival(message: Any, read: c.Read, rows: int) -> Array | None:
    if not message.HasField("survival"):
        return None
    part = message.survival
    depth = _depth(part)
    mask = _at_most("survival's proposer_mask", part.proposer_mask, (1 << PROPOSERS) - 1)
    there = [p for p in range(PROPOSERS) if mask >> p & 1]
    survival = np.zeros((rows, PROPOSERS, depth), np.float32)
    values = c.read_column(read, part, c.SURVIVAL, rows * len(there) * depth)
    values = values.reshape(rows, len(there), depth)
    survival[:, _together(there)] = values
    return survival


def _together(proposers: list[int]) -> slice | list[int]:
    """Return numbers that rise as a slice where they follow each other: it copies faster."""
    if proposers and proposers[-1] - proposers[0] == len(proposers) - 1:
        return slice(proposers[0], proposers[-1] + 1)
    return proposers


def _read_match(message: Any, read: c.Read, rows: int) -> tuple[Array | None, Array | None]:
    if not message.HasField("match_model"):
        return None, None
    part = message.match_model
    depth = _depth(part)
    if message.HasField("survival") and depth != message.survival.k_columns:
        raise ValueError(
            f"match_model has {depth} k_columns, but survival has {message.survival.k_columns}"
        )
    hazard = c.read_column(read, part, c.HAZARD, MATCH_BUCKETS * depth).reshape(
        MATCH_BUCKETS, depth
    )
    return hazard, c.read_column(read, part, c.FRAILTY, rows)


def _read_defaults(message: Any, read: c.Read) -> TaskDefaults | None:
    if not message.HasField("defaults"):
        return None
    rows = _rows(message.defaults, MAX_ROWS)
    return TaskDefaults(**c.read_columns(read, message.defaults, c.DEFAULTS, rows))


def _read_stop_rule(message: Any) -> StopRule:
    kind, threshold = message.stop_rule.kind, message.stop_rule.threshold
    if kind not in _STOP_KINDS:
        raise ValueError(f"stop rule {kind} is not known")
    if not math.isfinite(threshold):
        raise ValueError("the stop rule's threshold must be finite")
    return StopRule(StopKind(kind), threshold)


def _read_calibration(message: Any, read: c.Read) -> Array | None:
    if not message.HasField("calibration"):
        return None
    part = message.calibration
    count = len(part.slope) // (c.SLOPE.wire.itemsize if isinstance(part.slope, bytes) else 1)
    # A line a proposer, or one for each of its places.
    places = min(max(count // PROPOSERS, 1), K_LIMIT)
    shape = (PROPOSERS, places) if places > 1 else (PROPOSERS,)
    lines = np.empty((PROPOSERS, 2, *shape[1:]), np.float32)
    for place, column in enumerate((c.SLOPE, c.OFFSET)):
        found = c.read_column(read, part, column, PROPOSERS * places)
        lines[:, place] = found.reshape(shape)
    return lines


def _depth(message: Any) -> int:
    if not message.k_columns:
        raise ValueError("k_columns must be at least 1")
    return _at_most("k_columns", message.k_columns, K_LIMIT)


def _rows(message: Any, limit: int) -> int:
    return _at_most("rows", message.rows, limit)


def _at_most(name: str, value: int, limit: int) -> int:
    if value > limit:
        raise ValueError(f"{name} must be at most {limit}, not {value}")
    return value


def _step_id(value: int) -> int:
    return _at_most("step_id", value, 2**63 - 1)


def _duration(name: str, value: float) -> float:
    if not 0.0 <= value <= c.MOST_MS:
        raise ValueError(f"{name} must be between 0 and {c.MOST_MS:g}, not {value}")
    return value


def _unique(request_id: Array) -> None:
    ids = request_id.copy()
    ids.sort()
    if (ids[1:] == ids[:-1]).any():
        raise ValueError("request_id names a request twice")
