"""What the baselines share: a plan without estimates, and settings checked by name."""

from __future__ import annotations

import numpy as np

from parlay.policies.types import (
    K_LIMIT,
    Array,
    BatchView,
    Plan,
    Proposer,
    Reason,
    TaskDefaults,
)

_DRAFTERS = {p.name.lower(): p for p in Proposer if p is not Proposer.NONE}


def rows_plan(
    view: BatchView,
    proposer: Array | Proposer,
    k: Array,
    reason: Reason = Reason.FIXED,
    default: tuple[Proposer, int] | None = None,
) -> Plan:
    """Return a plan that is applied as it stands: proposer (or one for all) and k [rows].

    default: what a request gets that the plan has no row for.
    """
    rows = len(view)
    who, many = default or (Proposer.NONE, 0)
    return Plan(
        request_id=view.request_id,
        proposer=np.broadcast_to(np.asarray(proposer, np.uint8), (rows,)).copy(),
        k=k.astype(np.int16),
        shadow=np.zeros(rows, bool),
        propensity=np.ones(rows, np.float32),
        reason=np.full(rows, reason, np.uint8),
        defaults=TaskDefaults(
            np.zeros(1, np.uint32), np.array([who], np.uint8), np.array([many], np.int16)
        ),
        step_id=view.step_id,
    )


def batch_plan(view: BatchView, proposer: Proposer, k: int, reason: Reason = Reason.FIXED) -> Plan:
    """Return a plan in which every request, also one that joins later, has one proposer and k."""
    return rows_plan(view, proposer, np.full(len(view), k), reason, default=(proposer, k))


def slot_of(least: Array, requests: int) -> int:
    """Return the range of batch sizes that holds `requests`; least: where each begins, from 1."""
    return int(np.searchsorted(least, max(requests, 1), side="right")) - 1


def drafter(policy: str, name: str) -> Proposer:
    """Return the proposer called `name`; raises ValueError where there is none that drafts."""
    if name not in _DRAFTERS:
        known = ", ".join(_DRAFTERS)
        raise ValueError(f"{policy}: unknown proposer '{name}'; choose one of {known}")
    return _DRAFTERS[name]


def check_k(policy: str, setting: str, k: int, least: int = 0) -> None:
    """Raise ValueError where k is not a whole number in [least, K_LIMIT]."""
    if not isinstance(k, int) or isinstance(k, bool) or not least <= k <= K_LIMIT:
        raise ValueError(f"{policy}: {setting} must be between {least} and {K_LIMIT}, not {k}")
