"""Policies that know what no policy can: true hazards, or the coins themselves, and true costs.

The hazard oracle knows every request's hazards of now, not its coins nor its next phase; nobody who
learns can beat it but by luck. The clairvoyant sees the coins: a ceiling that nobody reaches.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from parlay.policies.cost import behind, padded
from parlay.policies.policy import EngineLimits, Stateless
from parlay.policies.solver import (
    DWELL_STEPS,
    Allocation,
    StepCosts,
    best_plan,
    best_plan_at,
    usable,
)
from parlay.policies.types import (
    DRAFT_MODEL,
    MEDUSA,
    NGRAM,
    PROPOSERS,
    Array,
    BatchView,
    Plan,
    Reason,
    StepOutcome,
)
from parlay.sim.backend import SimBackend
from parlay.sim.costs import Work
from parlay.sim.latent import Latents
from parlay.sim.noted import prompts_ms
from parlay.sim.true_prices import TruePrices

Survival = Callable[[Array, Array], Array]
"""From latents' rows and output positions to survival f64 [n, PROPOSERS, K]."""
_FADING = 0.998
_SETS = ((), (NGRAM,), (DRAFT_MODEL,), (MEDUSA,), (NGRAM, DRAFT_MODEL), (NGRAM, MEDUSA),
         (NGRAM, DRAFT_MODEL, MEDUSA))  # fmt: skip


class Oracle(Stateless):
    """Plans on given survivals and the simulator's own costs."""

    def __init__(
        self, name: str, backend: SimBackend, limits: EngineLimits, survival: Survival
    ) -> None:
        self.name, self.backend, self.limits, self.survival = name, backend, limits, survival
        self._spent: dict[int, tuple[float, float]] = {}

    def observe(self, outcome: StepOutcome) -> None:
        """Keep what an emitted token takes in the long run at such a load: that is its worth.

        Time for prompts is left out: every token brings the next prompt nearer by as much.
        """
        tokens, ms = self._spent.get(load := _load(len(outcome)), (0.0, 0.0))
        tokens = _FADING * tokens + float(outcome.emitted.sum())
        net_ms = outcome.step_ms - prompts_ms(self.backend.costs, outcome)
        ms = _FADING * ms + max(net_ms, 0.0)
        self._spent[load] = tokens, ms

    def expected(self, view: BatchView) -> Array:
        """Return f64 [rows, PROPOSERS, K]: P(first j hold), as far as it is known."""
        rows = np.array([self.backend.rows[int(i)] for i in view.request_id], np.intp)
        return self.survival(rows, view.output_tokens.astype(np.intp))

    def decide(self, view: BatchView) -> Plan:
        """Return the best plan found among those that leave some proposers out."""
        survival = usable(view, self.expected(view))
        tokens, ms = self._spent.get(_load(len(view)), (0.0, 0.0))
        value_ms = ms / tokens if tokens else None
        best = best_true_plan(self.backend, view, survival, self.limits, value_ms)
        n = len(view)
        reason = np.where(best.k > 0, Reason.BEST_GOODPUT, Reason.NO_GAIN).astype(np.uint8)
        return Plan(
            request_id=view.request_id,
            proposer=best.proposer,
            k=best.k.astype(np.int16),
            shadow=np.zeros(n, bool),
            propensity=np.ones(n, np.float32),
            reason=reason,
            step_id=view.step_id,
            policy_version=f"{self.name}/1",
        )


def _load(rows: int) -> int:
    """Return the octave of a number of requests at once."""
    return rows.bit_length()


def latents_of(backend: SimBackend) -> Latents:
    """Return the law behind a backend; raises ValueError where it replays a recording."""
    if not isinstance(backend.luck, Latents):
        raise ValueError("a recorded trace has no hazards to know: leave the oracles out")
    return backend.luck


def hazard_oracle(backend: SimBackend, limits: EngineLimits) -> Oracle:
    """Return the policy that knows every request's hazards of now."""
    return Oracle("hazard_oracle", backend, limits, latents_of(backend).survival_now)


def clairvoyant(backend: SimBackend, limits: EngineLimits) -> Oracle:
    """Return the policy that sees what would be accepted."""
    luck = backend.luck

    def survival(rows: Array, at: Array) -> Array:
        out = np.zeros((len(rows), PROPOSERS, luck.depth))
        for proposer in (NGRAM, DRAFT_MODEL, MEDUSA):
            held = luck.held(rows, at, proposer)
            out[:, proposer] = np.arange(luck.depth) < held[:, None]
        out[:, NGRAM] *= (luck.match[rows, at] > 0)[:, None]
        return out

    return Oracle("clairvoyant", backend, limits, survival)


def best_true_plan(
    backend: SimBackend,
    view: BatchView,
    survival: Array,
    limits: EngineLimits,
    value_ms: float | None,
) -> Allocation:
    """Return the best plan at a token's value (None: most tokens a ms), of one a proposer set.

    The solver prices drafting by lines; each plan is then priced by the cost model itself.
    """
    emits = float(max((view.prefill_tokens == 0).sum(), 1))
    costs = _true_costs(backend, view, survival.shape[2], limits)
    found: list[tuple[float, Allocation]] = []
    for kept in _SETS:
        masked = np.zeros_like(survival)
        masked[:, list(kept)] = survival[:, list(kept)]
        if kept and not masked.any():
            continue
        if value_ms is None:
            plan = best_plan(masked, costs, emits)
            loss = _true_ms(backend, view, plan) / plan.emitted_tokens
        else:
            plan = best_plan_at(masked, costs, emits, value_ms)
            loss = _true_ms(backend, view, plan) - value_ms * plan.emitted_tokens
        found.append((loss, plan))
    return min(found, key=lambda pair: pair[0])[1]


def _true_costs(
    backend: SimBackend, view: BatchView, depth: int, limits: EngineLimits
) -> StepCosts:
    fixed = int(np.where(view.prefill_tokens > 0, view.prefill_tokens, 1).sum())
    decoding = int((view.prefill_tokens == 0).sum())
    most = max(min(decoding * depth, limits.token_budget - decoding), 0)
    prices = TruePrices(backend)
    prices.look(view)
    tokens = padded(fixed + np.arange(most + 1), view.bucket_edges)
    a_pass, token_ms, catch_up_ms = prices.draft_ms()
    switch_ms = behind(view.draft_kv_lag) * catch_up_ms / DWELL_STEPS
    return StepCosts(prices.verify_ms(tokens, view.kv_tokens), a_pass, token_ms, switch_ms)


def _true_ms(backend: SimBackend, view: BatchView, plan: Allocation) -> float:
    fixed = int(np.where(view.prefill_tokens > 0, view.prefill_tokens, 1).sum())
    decoding = int((view.prefill_tokens == 0).sum())
    drafts = (plan.proposer == DRAFT_MODEL) & (plan.k > 0)
    work = Work(
        tokens=fixed + int(plan.k.sum()),
        requests=decoding,
        kv_tokens=view.kv_tokens,
        draft_rows=tuple(int((plan.k[drafts] > j).sum()) for j in range(plan.depth)),
        draft_kv_tokens=int(view.context_tokens[drafts].sum()),
        medusa_rows=int(((plan.proposer == MEDUSA) & (plan.k > 0)).sum()),
        ngram_rows=int(((plan.proposer == NGRAM) & (plan.k > 0)).sum()),
        catch_up_tokens=_owed(backend, view, drafts),
    )
    return backend.costs.time(work).step_ms


def _owed(backend: SimBackend, view: BatchView, drafts: Array) -> int:
    """Return the draft tokens to catch up, spread over the steps that they serve."""
    if not backend.catches_up:
        return 0
    return int(behind(view.draft_kv_lag[drafts]).sum() / DWELL_STEPS)
