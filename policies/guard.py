"""Never slower than no speculation: a wrapper that measures a policy's gain and turns it off.

Now and then it runs two short blocks of steps over the whole batch in random order, one with the
wrapped policy's plan and one that drafts nothing (a switch-back pair), and compares their goodput
per decoding row. A step that drafts nothing emits one token a row, so only its time has to be
measured. The policy is off while the upper bound of its gain is below 1, or once its estimated loss
passes a small share of the time. Off, the same pairs are probes, at growing intervals; a draft
model pays for them, so they too may cost a share of the time only. Steps off and blocks without
drafts do not even ask the wrapped policy, which observes every step all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace

import numpy as np

from parlay.policies.baselines.rows import rows_plan
from parlay.policies.confidence import GainSequence
from parlay.policies.guard_terms import TRANSITION_STEPS, GuardReport, GuardSettings
from parlay.policies.policy import Policy
from parlay.policies.switchback import (
    FIRST_GAP_STEPS,
    GAP,
    LOAD_CHANGE,
    PREFILL_MOST,
    Ledger,
    Schedule,
    Step,
    filled,
    log_gain,
    plan_of,
    step_of,
)
from parlay.policies.types import (
    Array,
    BatchView,
    Plan,
    Proposer,
    Reason,
    StepOutcome,
)

_LONGEST, _WITH_PROMPTS = 4, 2
"""A block ends after so many times its length in decisions, whatever could be measured; and after
so many times its length in steps measured with prompts and without."""
_UNSETTLED_PAIRS = 24
_ON_GAP_STEPS = 64
_SURE, _SURE_PAIRS, _SURE_GAP_STEPS = math.log(1.05), 3, 192
"""Where the gain is three standard errors above this, pairs only watch for its end; the bounds that
turn the policy off are others and do not depend on it."""
_OFF_GAP_STEPS = 32
_GRANT_STEPS, _PROBE_GRANT_STEPS = 8, 3
"""Loss, and what pairs cost, are allowed this many steps beyond their shares, so that a cold start
is optimistic and its first pairs need not wait; probes while off get none."""
_PLAIN_GAIN = 1.05
"""A policy that expects more is not put to the test before its share of the time has paid for it;
whether it is right is found out all the same, a few hundred steps later."""
_DEAR_GAIN, _DEAR_STEPS, _DEAR_SHARE = 1.2, 3, 0.5
"""Of a policy that expects as much, a plain step costs much and shows much: fewer are measured, and
of what pairs may cost half is enough for as many of them."""
_EXPECTS_STEPS = 16
_PATIENT_STEPS = 64
_RETURN_SIGMAS = 3.0
_PLANS = 64


class Guard:
    """A policy around a policy; deterministic from its settings' seed and its history.

    The wrapped policy observes every step, and decides only those in which its plan is applied.
    """

    def __init__(self, policy: Policy, settings: GuardSettings) -> None:
        self.policy = policy
        self.settings = settings
        self.name = f"guard:{policy.name}"
        self.gains = GainSequence(settings.alpha)
        self._at, self._ledger = Schedule(), Ledger()
        # By step_id modulo their number: step_id, block, treated, in a pair.
        self._plans = np.full((_PLANS, 4), -1, np.int64)
        # Block of the pair, (without, with) prompts: steps, tokens, ms, log rows, prefill, drafted.
        self._sums = np.zeros((2, 2, 6))

    @property
    def learns_late(self) -> bool:
        """Say whether a step's outcome may come after the next decision."""
        return bool(getattr(self.policy, "learns_late", False))

    @property
    def on(self) -> bool:
        """Whether the wrapped policy decides, pairs aside."""
        return self._at.on

    def decide(self, view: BatchView) -> Plan:
        """Return the wrapped policy's plan, or one that drafts nothing."""
        at = self._at
        if len(view):
            self._next_block(len(view), int(view.prefill_tokens.sum()))
            at.decided += 1
        treated, paired = at.treated(), at.phase != GAP
        self._plans[view.step_id % _PLANS] = (view.step_id, at.block, treated, paired)
        if treated:
            plan = self.policy.decide(view)
            at.inner_version = plan.state_version
            self._expect(view)
            return replace(plan, propensity=0.5 * plan.propensity) if paired else plan
        reason = Reason.EXPLORE if paired and at.on else Reason.NO_GAIN
        plan = rows_plan(view, Proposer.NONE, np.zeros(len(view), np.int16), reason)
        plan.state_version = at.inner_version
        if paired:
            plan.propensity[:] = 0.5
        return plan

    def observe(self, outcome: StepOutcome) -> None:
        """Let the wrapped policy learn, then learn what the step says of its gain."""
        self.policy.observe(outcome)
        self._measure(outcome)

    def observe_all(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn from some steps at once, where the wrapped policy can."""
        at_once = getattr(self.policy, "observe_all", None)
        if at_once is not None:
            at_once(outcomes)
        for outcome in outcomes:
            if at_once is None:
                self.policy.observe(outcome)
            self._measure(outcome)

    def _measure(self, outcome: StepOutcome) -> None:
        """Learn what a step says of the gain."""
        if not (1e-4 <= outcome.step_ms <= 1e7):
            return
        ms = self._ledger.tick(outcome.step_id, outcome.step_ms)
        step, plan = step_of(outcome, ms), plan_of(outcome)
        found = self._plans[plan % _PLANS].tolist() if plan >= 0 else [-1] * 4
        ours = found[0] == plan and not (step.drafted and not found[2])
        if step.rows and ours:
            self._account(step, block=found[1], treated=bool(found[2]), paired=bool(found[3]))

    def _account(self, step: Step, block: int, treated: bool, paired: bool) -> None:
        """Book a step's cost; count it where it belongs to the block that is running."""
        at, ledger = self._at, self._ledger
        if block < at.seen_block:
            return
        at.seen = at.seen + 1 if block == at.seen_block else 1
        at.seen_block = block
        first = at.seen <= TRANSITION_STEPS
        clean = step.prefill <= PREFILL_MOST
        if clean and (first or (paired and treated != at.on)):
            excess_ms = ledger.excess_ms(at.on, step.tokens, step.ms)
            ledger.probing_ms = max(0.0, ledger.probing_ms + excess_ms)
        elif at.on and not treated:
            ledger.probing_ms += ledger.missed_ms(step.tokens)
        ledger.pending_ms += step.ms if at.on and treated else 0.0
        ledger.loss_ms = max(0.0, ledger.loss_ms - self.settings.loss_share * step.ms)
        if first:
            return
        if clean:
            ledger.learn(treated, step.tokens, step.ms)
        if at.phase != GAP and block == at.block:
            what = (1.0, step.tokens, step.ms, math.log(step.rows), step.prefill, step.drafted)
            self._sums[at.phase - 1, int(not clean) :] += what
            at.measured += clean
            wanted = self.settings.block_steps if treated else at.plain_steps
            if max(at.measured, self._sums[at.phase - 1, 1, 0] / _WITH_PROMPTS) >= wanted:
                self._advance()

    def _next_block(self, rows: int, prefill_tokens: int) -> None:
        """Begin a pair where one is due and paid for; end a block that can measure nothing."""
        at = self._at
        if abs(math.log(rows) - self._ledger.load) > LOAD_CHANGE:
            at.this_gap = min(at.this_gap, FIRST_GAP_STEPS)  # what was sure was of another load
        if at.phase != GAP:
            if at.decided >= _LONGEST * (self.settings.block_steps + TRANSITION_STEPS):
                self._advance()
        elif (
            at.decided >= at.this_gap
            and not (at.on and prefill_tokens > PREFILL_MOST and at.decided < self._patience())
            and self._ledger.probing_ms + self._dear_ms() <= self._allowed_ms()
        ):
            at.pair += 1
            at.treated_first = bool(self._draw() < 0.5)
            at.plain_steps = self._plain_steps()
            self._sums[:] = 0.0
            self._advance()

    def _patience(self) -> int:
        """Return by when a pair begins though prompts are read, which blur and lengthen it."""
        return self._at.this_gap + _PATIENT_STEPS

    def _allowed_ms(self) -> float:
        """Return what pairs may have cost by now."""
        shared = self.settings.probe_share * self._ledger.elapsed_ms
        if self._dear():
            shared *= _DEAR_SHARE
        granted = self._at.on and self._likely_gain() < _PLAIN_GAIN
        return shared + (_PROBE_GRANT_STEPS * self._ledger.mean_ms if granted else 0.0)

    def _dear_ms(self) -> float:
        """Return what a pair is likely to cost: a step without drafts is dear where they gain."""
        if not self._at.on or self._likely_gain() < _PLAIN_GAIN:
            return 0.0
        steps = self._plain_steps() + TRANSITION_STEPS
        return steps * self._ledger.mean_ms * (1.0 - 1.0 / self._likely_gain())

    def _dear(self) -> bool:
        """Say whether a step without drafts costs much, as the wrapped policy has it."""
        return self._at.on and self._likely_gain() >= _DEAR_GAIN

    def _plain_steps(self) -> int:
        """Return how many steps without drafts a pair that begins now measures."""
        steps = self.settings.block_steps
        return min(_DEAR_STEPS, steps) if self._dear() else steps

    def _likely_gain(self) -> float:
        """Return what the wrapped policy expects to gain of late, 1 where it does not say."""
        return math.exp(self._at.expects)

    def _expect(self, view: BatchView) -> None:
        """Hear what the wrapped policy expects of its plan; one alone says little, but at first."""
        at, gain = self._at, float(getattr(self.policy, "expected_gain", 1.0))
        if gain > 0.0 and not view.prefill_tokens.all():
            at.heard = min(at.heard + 1, _EXPECTS_STEPS)
            at.expects += (math.log(gain) - at.expects) / at.heard

    def _advance(self) -> None:
        at = self._at
        at.phase = (at.phase + 1) % 3
        at.block += 1
        at.decided = at.measured = 0
        if at.phase == GAP:
            self._close()
            at.this_gap = int(at.gap * (0.5 + self._draw(1)))

    def _draw(self, purpose: int = 0) -> float:
        key = (self.settings.seed, self._at.pair, purpose)
        return float(np.random.default_rng(key).random())

    def _close(self) -> None:
        """Learn from a finished pair, and turn the policy off or on."""
        at, ledger, gains = self._at, self._ledger, self.gains
        treated, bypass = self._sums if at.treated_first else self._sums[::-1]
        measured = log_gain(treated, bypass, self.settings.block_steps, at.plain_steps)
        if measured is None:
            return
        gain, load = measured
        ledger.probes += 1
        moved = ledger.moves_to(load)
        if moved:
            gains.reset()
        changed = gains.add(gain) or moved
        # Only now is it known what the steps since the last pair were worth.
        lost_ms = -math.expm1(gains.hopeful) * ledger.pending_ms
        ledger.loss_ms, ledger.pending_ms = max(0.0, ledger.loss_ms + lost_ms), 0.0
        ledger.resets += changed
        if at.on:
            likely = gains.mean - 3.0 * gains.spread / math.sqrt(max(gains.count, 1))
            sure = gains.count >= _SURE_PAIRS and likely > _SURE
            settled = sure or gains.lower > 0.0 or gains.count > _UNSETTLED_PAIRS
            longest = _SURE_GAP_STEPS if sure else _ON_GAP_STEPS
            at.gap = min(4 * at.gap, longest) if settled else FIRST_GAP_STEPS
            if gains.upper < 0.0 or self._lost():
                self._switch(on=False)
            return
        ledger.hope = max(0.0, ledger.hope + gain)
        if ledger.hope > _RETURN_SIGMAS * gains.spread:
            self._switch(on=True)
        elif ledger.hope > 0.0 or moved:
            at.gap = FIRST_GAP_STEPS
        else:
            at.gap = min(2 * at.gap, self.settings.last_gap_steps)

    def _lost(self) -> bool:
        return self._ledger.loss_ms > _GRANT_STEPS * self._ledger.mean_ms

    def _switch(self, on: bool) -> None:
        at, ledger = self._at, self._ledger
        at.on, ledger.hope = on, 0.0
        ledger.switches += 1
        if on:
            self.gains.level()
        at.gap = FIRST_GAP_STEPS if on else _OFF_GAP_STEPS
        at.decided, at.block = 0, at.block + 1

    def report(self) -> GuardReport:
        """Return where the guard stands."""
        gains, ledger = self.gains, self._ledger
        return GuardReport(
            on=self._at.on,
            gain=math.exp(gains.mean) if gains.count else math.nan,
            lower=math.exp(gains.lower),
            upper=math.exp(gains.upper),
            loss_s=1e-3 * ledger.loss_ms,
            elapsed_s=1e-3 * ledger.elapsed_ms,
            probing_s=1e-3 * ledger.probing_ms,
            probing_share=ledger.probing_ms / max(ledger.elapsed_ms, 1e-9),
            switches=ledger.switches,
            probes=ledger.probes,
            resets=ledger.resets,
        )

    def state(self) -> dict[str, Array]:
        """Return everything that later decisions depend on; the wrapped policy's under policy."""
        own = {
            "guard.schedule": np.array(astuple(self._at), float),
            "guard.ledger": np.array(astuple(self._ledger), float),
            "guard.gains": self.gains.state(),
            "guard.plans": self._plans.copy(),
            "guard.sums": self._sums.copy(),
        }
        return own | {f"policy.{key}": value for key, value in self.policy.state().items()}

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        for key, own in self.state().items():
            if key.startswith("guard.") and np.shape(state.get(key, 0)) != own.shape:
                raise ValueError(f"guard: the state lacks {key}, or it is of another version")
        head = "policy."
        self.policy.load({k.removeprefix(head): v for k, v in state.items() if k.startswith(head)})
        self._at = filled(Schedule(), state["guard.schedule"])
        self._ledger = filled(Ledger(), state["guard.ledger"])
        self.gains.load(state["guard.gains"])
        self._plans = np.array(state["guard.plans"], np.int64)
        self._sums = np.array(state["guard.sums"], float)

    def delta(self, since: int) -> dict[str, Array]:
        """Return what the wrapped policy shares; gains are of this engine alone."""
        return self.policy.delta(since)

    def merge(self, deltas: list[dict[str, Array]]) -> None:
        """Hand other replicas' deltas to the wrapped policy."""
        self.policy.merge(deltas)


def guarded(policy: Policy, settings: GuardSettings | None = None) -> Guard:
    """Return `policy` under a guard."""
    return Guard(policy, settings or GuardSettings())
