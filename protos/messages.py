"""BatchView, Plan and StepOutcome <-> messages, whose columns are checked as they are read.

Writing makes messages of the twin schema `parlay.wire.v1`; reading takes those of either, with the
`Read` that fits them.
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
from parlay.v1 import policy_pb2 as typed
from parlay.wire.v1 import policy_pb2 as raw

MAX_ROWS = 4096
MAX_SHADOW_ROWS = 4 * MAX_ROWS
MAX_EDGES = 1024
MATCH_BUCKETS = len(MATCH_EDGES) + 1


def view_message(view: BatchView) -> raw.BatchView:
    """Return the view as a message."""
    return raw.BatchView(
        rows=len(view),
        step_id=view.step_id,
        running=view.running,
        waiting=view.waiting,
        free_blocks=view.free_blocks,
        total_blocks=view.total_blocks,
        kv_tokens=view.kv_tokens,
        bucket_edge_count=len(view.bucket_edges),
        bucket_edges=c.write(view.bucket_edges, c.EDGES),
        **c.write_columns(view, c.VIEW, len(view)),
    )


def outcome_message(outcome: StepOutcome) -> raw.StepOutcome:
    """Return the outcome as a message."""
    rows, depth = outcome.confidences.shape
    if rows != len(outcome):
        raise ValueError(f"confidences has {rows} rows, not {len(outcome)}")
    shadow = None
    if len(outcome.shadow):
        shadow = raw.ShadowRows(
            rows=len(outcome.shadow),
            **c.write_columns(outcome.shadow, c.SHADOW, len(outcome.shadow)),
        )
    return raw.StepOutcome(
        rows=len(outcome),
        step_id=outcome.step_id,
        padded_tokens=outcome.padded_tokens,
        prefill_tokens=outcome.prefill_tokens,
        kv_tokens=outcome.kv_tokens,
        draft_depth=outcome.draft_depth,
        verify_ms=outcome.verify_ms,
        step_ms=outcome.step_ms,
        draft_ms=c.write(outcome.draft_ms, c.DRAFT_MS),
        k_columns=depth,
        confidences=c.write(outcome.confidences, c.CONFIDENCES),
        shadow=shadow,
        **c.write_columns(outcome, c.OUTCOME, len(outcome)),
    )


def plan_message(plan: Plan) -> raw.Plan:
    """Return the plan as a message."""
    calibration = None
    if plan.calibration is not None:
        calibration = raw.Calibration(
            slope=c.write(plan.calibration[:, 0], c.SLOPE),
            offset=c.write(plan.calibration[:, 1], c.OFFSET),
        )
    defaults = None
    if plan.defaults is not None:
        defaults = raw.TaskDefaults(
            rows=len(plan.defaults.task),
            **c.write_columns(plan.defaults, c.DEFAULTS, len(plan.defaults.task)),
        )
    kind: Any = int(plan.stop_rule.kind)
    return raw.Plan(
        rows=len(plan),
        step_id=plan.step_id,
        state_version=plan.state_version,
        policy_version=plan.policy_version,
        expires_after_steps=plan.expires_after_steps,
        token_value_ms=plan.token_value_ms,
        marginal_token_price_ms=plan.marginal_token_price_ms,
        draft_token_price_ms=c.write(plan.draft_token_price_ms, c.PRICES),
        budget_tokens=None if plan.budget_tokens == NO_BUDGET else plan.budget_tokens,
        stop_rule=typed.StopRule(kind=kind, threshold=plan.stop_rule.threshold),
        calibration=calibration,
        survival=_survival_message(plan.survival),
        match_model=_match_message(plan),
        defaults=defaults,
        **c.write_columns(plan, c.PLAN, len(plan)),
    )


def _survival_message(survival: Array | None) -> raw.Survival | None:
    """Return the survivals of the proposers that have any: most of the array is zeros."""
    if survival is None:
        return None
    there = survival.any(axis=(0, 2))
    return raw.Survival(
        k_columns=survival.shape[2],
        proposer_mask=int((there << np.arange(PROPOSERS)).sum()),
        values=c.write(survival[:, there], c.SURVIVAL),
    )


def _match_message(plan: Plan) -> raw.MatchModel | None:
    if plan.match_hazard is None or plan.match_frailty is None:
        return None
    return raw.MatchModel(
        k_columns=plan.match_hazard.shape[1],
        hazard=c.write(plan.match_hazard, c.HAZARD),
        frailty=c.write(plan.match_frailty, c.FRAILTY),
    )


def read_view(message: Any, read: c.Read) -> BatchView:
    """Read a view; raises ValueError where it is malformed or impossible."""
    rows = _rows(message, MAX_ROWS)
    edges = read(message, c.EDGES, _at_most("bucket edges", message.bucket_edge_count, MAX_EDGES))
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
        confidences=read(message, c.CONFIDENCES, rows * depth).reshape(rows, depth),
        shadow=_read_shadow(message, read),
        step_id=_step_id(message.step_id),
        padded_tokens=message.padded_tokens,
        prefill_tokens=message.prefill_tokens,
        kv_tokens=message.kv_tokens,
        draft_ms=read(message, c.DRAFT_MS, PROPOSERS),
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
        draft_token_price_ms=read(message, c.PRICES, PROPOSERS),
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
    there = np.flatnonzero(mask >> np.arange(PROPOSERS) & 1)
    survival = np.zeros((rows, PROPOSERS, depth), np.float32)
    values = read(part, c.SURVIVAL, rows * len(there) * depth)
    survival[:, there] = values.reshape(rows, len(there), depth)
    return survival


def _read_match(message: Any, read: c.Read, rows: int) -> tuple[Array | None, Array | None]:
    if not message.HasField("match_model"):
        return None, None
    part = message.match_model
    depth = _depth(part)
    if message.HasField("survival") and depth != message.survival.k_columns:
        raise ValueError(
            f"match_model has {depth} k_columns, but survival has {message.survival.k_columns}"
        )
    hazard = read(part, c.HAZARD, MATCH_BUCKETS * depth).reshape(MATCH_BUCKETS, depth)
    return hazard, read(part, c.FRAILTY, rows)


def _read_defaults(message: Any, read: c.Read) -> TaskDefaults | None:
    if not message.HasField("defaults"):
        return None
    rows = _rows(message.defaults, MAX_ROWS)
    return TaskDefaults(**c.read_columns(read, message.defaults, c.DEFAULTS, rows))


def _read_stop_rule(message: Any) -> StopRule:
    kind, threshold = message.stop_rule.kind, message.stop_rule.threshold
    if kind not in tuple(StopKind):
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
    lines = [read(part, column, PROPOSERS * places) for column in (c.SLOPE, c.OFFSET)]
    return np.stack([line.reshape(shape) for line in lines], axis=1)


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
    ids = np.sort(request_id)
    if (ids[1:] == ids[:-1]).any():
        raise ValueError("request_id names a request twice")
