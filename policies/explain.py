"""Why a request got its plan: what each choice would have brought, by the policy's own estimates.

Every option is priced for the whole batch, all other rows as planned, for a step's time is shared.
Survivals and token prices are those that the plan was made with; step times are as the policy has
learned them by now. Nothing here changes the policy.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from parlay.policies.goodput import Goodput
from parlay.policies.policy import Policy
from parlay.policies.solver import StepCosts, no_speculation, priced, usable
from parlay.policies.types import (
    NGRAM,
    NO_BUDGET,
    NONE,
    PROPOSERS,
    Array,
    BatchView,
    Plan,
    Proposer,
    Reason,
)

BECAUSE = {
    Reason.UNSPECIFIED: "the policy does not say why",
    Reason.FIXED: "the policy's settings say so",
    Reason.BEST_GOODPUT: "it emits the most tokens a second",
    Reason.NO_GAIN: "no draft pays for its time",
    Reason.NO_MATCH: "the n-gram has no match",
    Reason.GATE: "the policy's gate says so",
    Reason.EXPLORE: "it is tried, to learn from it",
    Reason.WARM_UP: "the policy is warming up",
    Reason.NOT_ALLOWED: "the request or the engine does not allow it",
    Reason.HEURISTIC: "the policy's rule of thumb says so",
}
"""Each reason in words, to follow "because"."""
BY_GUARD = "the guard has nobody draft in this step"
PROMPT = "its prompt is being computed"
NOTHING_LEFT = "it has no token left to draft"
"""The engine allows it none: the next token is its last, or speculation is off for it."""


@dataclass(slots=True, frozen=True)
class Option:
    """What one request could draft: its expected tokens a step (the bonus token counted), and the
    whole batch's time and rate with it.
    """  # noqa: D205

    proposer: str
    k: int
    tokens: float
    step_ms: float
    batch_tokens_per_s: float


@dataclass(slots=True, frozen=True)
class Explanation:
    """One row of a plan, and what else it could have been.

    survival: by proposer, P(first j drafts hold) for j = 1, 2, ... as far as the row may draft,
    empty where it may not.
    options: no drafts, each proposer at its best k, and the chosen one with its neighbours; empty
    where the policy has no estimates. runner_up: the best with another proposer. prices in ms: what
    an emitted token is worth, what verifying one more costs, and drafting one, by proposer; nan
    none.
    """

    request_id: int
    step_id: int
    policy_version: str
    task: int
    rows: int
    context_tokens: int
    output_tokens: int
    prefill_tokens: int
    max_k: int
    match_tokens: int
    draft_kv_lag: int
    temperature: float
    tpot_target_ms: float
    proposer: str
    k: int
    reason: Reason
    by_guard: bool
    propensity: float
    survival: dict[str, list[float]]
    options: list[Option]
    chosen: Option | None
    runner_up: Option | None
    plain_tokens_per_s: float
    planned_tokens_per_s: float
    token_value_ms: float
    token_price_ms: float
    draft_price_ms: dict[str, float]
    notes: list[str]

    @property
    def choice(self) -> str:
        """Return what the plan has the row do, in words."""
        return words(self.proposer, self.k)

    @property
    def because(self) -> str:
        """Return why, in words."""
        return because(self.reason, self.prefill_tokens > 0, self.max_k, self.by_guard)

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values; None stands for nan."""
        plain = asdict(self) | {"reason": self.reason.name.lower()}
        plain |= {"choice": self.choice, "because": self.because}
        found: dict[str, Any] = _finite(plain)
        return found


def because(reason: Reason, prompt: bool, max_k: int, guards: bool) -> str:
    """Return why a row does what it does: what leaves no choice comes before what was chosen.

    prompt: its prompt is being computed; max_k: what the engine allows; guards: see `by_guard`.
    """
    if prompt:
        return PROMPT
    if not max_k:
        return NOTHING_LEFT
    return BY_GUARD if guards else BECAUSE[reason]


def words(proposer: str, k: int) -> str:
    """Return a choice in words."""
    of = {"ngram": "from the n-gram", "draft_model": "with the draft model"}
    how = of.get(proposer, f"with {proposer}")
    return f"draft {k} token{'s' * (k != 1)} {how}" if k else "draft nothing"


def explain(policy: Policy, view: BatchView, plan: Plan, request_id: int) -> Explanation:
    """Explain what `plan`, which `policy` made from `view`, has a request do.

    Raises ValueError where the request is not in it.
    """
    place, found = (
        np.flatnonzero(view.request_id == request_id),
        np.flatnonzero(plan.request_id == request_id),
    )
    if not len(place) or not len(found):
        raise ValueError(f"request {request_id} is not in the plan of step {view.step_id}")
    row, at = int(place[0]), int(found[0])
    k = int(plan.k[at])
    proposer = int(plan.proposer[at]) if k else NONE
    core = estimator_of(policy)
    survival = _survival(core, view, plan)
    options, chosen, plain, planned = _options(core, view, plan, survival, row, proposer, k)
    others = [o for o in options if o.proposer != name_of(proposer)]
    limit = 0 if view.prefill_tokens[row] else int(view.max_k[row])
    return Explanation(
        request_id=request_id,
        step_id=view.step_id,
        policy_version=plan.policy_version or policy.name,
        task=int(view.task[row]),
        rows=len(view),
        context_tokens=int(view.context_tokens[row]),
        output_tokens=int(view.output_tokens[row]),
        prefill_tokens=int(view.prefill_tokens[row]),
        max_k=limit,
        match_tokens=int(view.match_tokens[row]),
        draft_kv_lag=int(view.draft_kv_lag[row]),
        temperature=float(view.temperature[row]),
        tpot_target_ms=float(view.tpot_target_ms[row]),
        proposer=name_of(proposer),
        k=k,
        reason=Reason(int(plan.reason[at])) if int(plan.reason[at]) in BECAUSE else Reason(0),
        by_guard=by_guard(policy, plan),
        propensity=float(plan.propensity[at]),
        survival=_by_proposer(view, survival, row, limit),
        options=options,
        chosen=chosen,
        runner_up=max(others, key=lambda o: o.batch_tokens_per_s, default=None),
        plain_tokens_per_s=plain,
        planned_tokens_per_s=planned,
        token_value_ms=plan.token_value_ms,
        token_price_ms=plan.marginal_token_price_ms,
        draft_price_ms={
            name_of(p): float(plan.draft_token_price_ms[p])
            for p in range(1, PROPOSERS)
            if view.proposer_mask[row] >> p & 1
        },
        notes=_notes(core, view, plan, row, proposer),
    )


def estimator_of(policy: Any) -> Goodput | None:
    """Return the estimates that a policy decides by, through the wrappers around it; None: none."""
    while policy is not None and not isinstance(policy, Goodput):
        policy = getattr(policy, "policy", None) or getattr(policy, "core", None)
    return policy


def by_guard(policy: Any, plan: Plan) -> bool:
    """Return whether a guard made the plan: it is without the estimates that its policy has."""
    return plan.survival is None and estimator_of(policy) is not None


def step_costs(core: Goodput, view: BatchView, plan: Plan) -> StepCosts:
    """Return the price list of a step of `view`, with the plan's own token prices if it has any."""
    costs = core.costs(view)
    if math.isfinite(plan.token_value_ms):
        costs = replace(costs, token_ms=plan.draft_token_price_ms.astype(float))
    return costs


def name_of(proposer: int) -> str:
    """Return a proposer's name as it is written everywhere."""
    return Proposer(proposer).name.lower()


def _survival(core: Goodput | None, view: BatchView, plan: Plan) -> Array | None:
    """Return what the plan was made with; where it had none, what the policy would estimate."""
    same = len(plan) == len(view) and bool((plan.request_id == view.request_id).all())
    if plan.survival is not None and same:
        return plan.survival
    if core is None:
        return None
    known = copy.deepcopy(core.acceptance)  # looking a request up adds it to the tables
    rows = known.rows_of(view.request_id, view.task, view.output_tokens)
    return known.survival(known.frailty(rows), view.match_tokens)


def _by_proposer(
    view: BatchView, survival: Array | None, row: int, limit: int
) -> dict[str, list[float]]:
    if survival is None or not limit:
        return {}
    allowed = [p for p in range(1, PROPOSERS) if view.proposer_mask[row] >> p & 1]
    return {name_of(p): [float(s) for s in survival[row, p, :limit]] for p in allowed}


def _options(
    core: Goodput | None,
    view: BatchView,
    plan: Plan,
    survival: Array | None,
    row: int,
    proposer: int,
    k: int,
) -> tuple[list[Option], Option | None, float, float]:
    """Return options, the chosen one, and the batch's tokens/s without drafts and as planned."""
    if core is None or survival is None or len(plan) != len(view):
        return [], None, math.nan, math.nan
    costs, worth = step_costs(core, view, plan), usable(view, survival)
    emits = max(float(len(view)), 1.0)
    planned_k = np.minimum(plan.k, survival.shape[2]).astype(np.int32)
    room = len(costs.verify_ms) - 1 - int(planned_k.sum() - planned_k[row])

    def option(of: int, deep: int) -> Option:
        proposers, depths = plan.proposer.copy(), planned_k.copy()
        proposers[row], depths[row] = of, deep
        found = priced(worth, costs, emits, proposers, depths, 0.0)
        own = 1.0 if view.prefill_tokens[row] == 0 else 0.0
        tokens = own + float(worth[row, of, :deep].sum())
        return Option(name_of(of), deep, tokens, found.step_ms, 1e3 / found.ms_per_token)

    plain = 1e3 / no_speculation(len(view), emits, costs).ms_per_token
    if k > min(room, survival.shape[2]):
        return [], None, plain, math.nan
    chosen = option(proposer, k)
    options = [] if k == 0 else [option(NONE, 0)]
    for of in range(1, PROPOSERS):
        deepest = min(int((worth[row, of] > 0.0).sum()), room)
        if of == proposer:
            options += [option(of, deep) for deep in (k - 1, k + 1) if 1 <= deep <= deepest]
        elif deepest:
            tried = [option(of, deep) for deep in range(1, deepest + 1)]
            options.append(max(tried, key=lambda o: o.batch_tokens_per_s))
    options.append(chosen)
    options.sort(key=lambda o: -o.batch_tokens_per_s)
    return options, chosen, plain, chosen.batch_tokens_per_s


def _notes(core: Goodput | None, view: BatchView, plan: Plan, row: int, proposer: int) -> list[str]:
    """Return what a reader of the figures should know besides."""
    notes = []
    if core is None:
        notes.append(
            "this policy keeps no estimates of what drafts bring: only its reason is known"
        )
    elif plan.survival is None:
        notes.append(
            "the guard measures or has turned the policy off; estimates are the policy's of now"
        )
    if math.isfinite(view.tpot_target_ms[row]):
        notes.append("its latency target makes its tokens count more or less; figures leave it out")
    if plan.budget_tokens != NO_BUDGET:
        notes.append(f"the batch verifies {plan.budget_tokens} drafted tokens at most in the step")
    if view.match_tokens[row] <= 0 and view.proposer_mask[row] >> NGRAM & 1 and not proposer:
        notes.append("the n-gram found no match in its text")
    return notes


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
