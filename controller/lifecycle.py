"""Which policy decides, which are on trial, and how one becomes the other; the same on each engine.

A candidate is shadowed (decides, is not applied), or on canary: it decides for a share of the
requests, and with switch-back for short blocks of steps that are compared with like ones of the
active policy. It is promoted when the lower bound of that comparison is above 1. A candidate that
raises, returns a plan that no engine could follow, or loses more than `candidate` allows is taken
out at once; the active policy decides the same step. One that raises soon after it became active
makes way for the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from parlay.controller.candidate import Candidate, Stage, in_words, ratio_of
from parlay.controller.heard import HeardStep
from parlay.controller.session import Session, Spec
from parlay.controller.shadow import Beside
from parlay.controller.standing import NotNow, Standing, UnknownEngine, Verdict
from parlay.controller.trial import CandidateFailed, Trial, only_following
from parlay.policies.policy import Policy
from parlay.policies.types import BatchView, Plan, StepOutcome

MOST_CANDIDATES = 4
MOST_KEPT = 2
"""Policies that were active before, kept by each session as they were left."""
_MOST_BEFORE = 16
PROBATION_STEPS = 10_000
"""A policy that raises within so many steps of becoming active is rolled back."""


def _unheard(what: str, policy: str, why: str) -> None:
    """Tell nobody."""


class Lifecycle:
    """Policies of all sessions; changes are whole: a ValueError leaves everything as it was.

    note: is told what happens without anybody's call: (what, policy, why); automatic: how often.
    """

    def __init__(self, active: Spec, sessions: Mapping[str, Session]) -> None:
        active.make()
        self.standing = Standing(active)
        self.candidates: dict[str, Candidate] = {}
        self.ended: dict[str, str] = {}
        self.note: Callable[[str, str, str], None] = _unheard
        self._sessions = sessions
        self._before: list[Standing] = []
        self.automatic = 0

    # --- Every step of an engine with candidates -------------------------------------------------

    def decide(self, session: Session, view: BatchView) -> Plan:
        """Return the plan to apply, and let shadows decide beside it; never fails for them."""
        leading, plan, why = _leading(session), None, ""
        if leading is None:
            plan = session.policy.decide(view)
        else:
            plan, why = leading.lead(session, view)
            if why:
                self._take_out(leading.candidate, why)
        for trial in [t for t in session.trials if t.candidate.stage is Stage.SHADOW]:
            try:
                trial.beside(view, plan)
            except CandidateFailed as error:
                self._take_out(trial.candidate, str(error))
        return plan

    def observe(self, session: Session, outcome: StepOutcome, step: HeardStep | None) -> None:
        """Let every policy learn, each told which rows followed it; end what loses too much."""
        leading, nobody = _leading(session), np.zeros(len(outcome), bool)
        theirs = nobody if leading is None else leading.theirs(outcome)
        session.policy.observe(only_following(outcome, ~theirs))
        for trial in tuple(session.trials):
            try:
                why = trial.observe(outcome, theirs if trial is leading else nobody, step)
            except CandidateFailed as error:
                why = str(error)
            if why:
                self._take_out(trial.candidate, why)

    def join(self, session: Session) -> None:
        """Put every candidate beside the policy of a session that is new, or stands anew."""
        if session.engine_id in self.standing.own:
            session.trials = []
            return
        there = {trial.candidate.spec: trial for trial in session.trials}
        session.trials = []
        for candidate in tuple(self.candidates.values()):
            trial = there.get(candidate.spec)
            try:
                policy = trial.policy if trial else candidate.spec.make(session.limits)
            except ValueError as error:
                self._take_out(candidate, f"engine '{session.engine_id}': {error}")
                continue
            fresh = Trial(candidate, policy, session.engine_id)
            keeps = trial is not None and trial.candidate is candidate
            session.trials.append(trial if trial is not None and keeps else fresh)

    # --- What people ask for ---------------------------------------------------------------------

    def activate(self, spec: Spec, engine_id: str | None = None) -> tuple[Spec, Spec]:
        """Make a policy active at once, on one engine or on all; return it and the one before.

        Raises ValueError where it cannot be made, UnknownEngine.
        """
        if engine_id is not None and engine_id not in self._sessions:
            raise UnknownEngine(f"engine '{engine_id}' has not said hello")
        spec.make()
        now = self.standing
        before = now.spec if engine_id is None else now.of(engine_id)
        own = {} if engine_id is None else {**now.own, engine_id: spec}
        new = Standing(spec if engine_id is None else now.spec, own)
        if new != now:
            self._stand(new)
            self._before = [*self._before, now][-_MOST_BEFORE:]
        return spec, before

    def shadow(self, spec: Spec, enabled: bool) -> Candidate:
        """Let a policy decide beside the active one, or no more; raises NotNow, ValueError."""
        if not enabled:
            found = self._candidate(spec.name)
            if found.stage is not Stage.SHADOW:
                raise NotNow(f"'{spec.name}' is on canary, not shadowed: end it with share 0")
            self._drop(found, "its shadowing was ended")
            return found
        return self._try(spec, Stage.SHADOW, 0.0, switch_back=False)

    def canary(self, spec: Spec, share: float, switch_back: bool = False) -> Candidate:
        """Let a policy decide for a share of the requests, or no more (0 without switch_back).

        Raises NotNow where another one is on canary, ValueError.
        """
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"share must be between 0 and 1, not {share}")
        if share == 0.0 and not switch_back:
            found = self._candidate(spec.name)
            if found.stage is not Stage.CANARY:
                raise NotNow(f"'{spec.name}' is shadowed, not on canary")
            self._drop(found, "its canary was ended")
            return found
        other = self.on_canary
        if other is not None and other.spec.name != spec.name:
            raise NotNow(f"'{other.spec.name}' is on canary: end it first, one at a time")
        return self._try(spec, Stage.CANARY, share, switch_back)

    def promote(self, name: str, force: bool = False) -> Verdict:
        """Make a candidate active if it is measured to be faster, or by force; raises NotNow."""
        candidate = self._candidate(name)
        speed = ratio_of(candidate.speed)
        words = in_words(speed, "blocks")
        if not (force or speed.low > 1.0):
            ask = "" if candidate.switch_back else ": put it on canary with switch-back to measure"
            refusal = f"not promoted, {words}; its lower bound is not above 1{ask}"
            return Verdict(False, speed, refusal)
        now = self.standing
        self._stand(Standing(candidate.spec, now.own))
        self._before = [*self._before, now][-_MOST_BEFORE:]
        forced = "" if speed.low > 1.0 else "by force, "
        return Verdict(True, speed, f"promoted {forced}{words}")

    def roll_back(self, why: str = "") -> tuple[Spec, Spec]:
        """Take the canary out, or go back to what was active before; return (active, taken out).

        Raises NotNow where there is nothing to go back to.
        """
        leading = self.on_canary
        if leading is not None:
            self._drop(leading, f"rolled back{f': {why}' if why else ''}")
            return self.standing.spec, leading.spec
        if not self._before:
            raise NotNow("nothing to roll back: no policy is on canary and none was active before")
        out, back = self.standing, self._before[-1]
        self._stand(back)
        self._before.pop()
        changed = [e for e in {**out.own, **back.own} if out.of(e) != back.of(e)]
        if out.spec == back.spec and changed:
            return back.of(changed[0]), out.of(changed[0])
        return back.spec, out.spec

    def fell(self, session: Session, error: Exception) -> None:
        """Go back to what was active before a policy that raised, on every engine.

        Raises the error where nothing was, or where the policy has decided for long: what is wrong
        then came from elsewhere.
        """
        out, place = session.spec, len(self._before)
        while place and self._before[place - 1].of(session.engine_id) == out:
            place -= 1
        if not place or self.decided(out)[0] > PROBATION_STEPS:
            raise error
        self._stand(self._before[place - 1])
        self._before = self._before[: place - 1]
        text = " ".join(str(error).split())
        self._noted(out, f"{type(error).__name__}: {text}")

    # --- Where they stand ------------------------------------------------------------------------

    @property
    def on_canary(self) -> Candidate | None:
        """The candidate that decides for some, None where there is none."""
        return next((c for c in self.candidates.values() if c.stage is Stage.CANARY), None)

    def decided(self, spec: Spec) -> tuple[int, int]:
        """Return (steps, state version) of an active policy, over all engines."""
        on = [s for s in self._sessions.values() if s.spec == spec]
        steps = sum(s.counts.plans - s.plans_before for s in on)
        return steps, max((s.state_version for s in on), default=0)

    def beside(self, candidate: Candidate) -> list[Beside]:
        """Return the steps that a shadow was beside, of all engines, to estimate its value from."""
        trials = [t for s in self._sessions.values() for t in s.trials]
        return [b for t in trials if t.candidate is candidate for b in t.memory.steps()]

    # --- Inside ----------------------------------------------------------------------------------

    def _candidate(self, name: str) -> Candidate:
        found = self.candidates.get(name)
        if found is None:
            ended = f": {self.ended[name]}" if name in self.ended else ""
            raise NotNow(f"'{name}' is neither shadowed nor on canary{ended}")
        return found

    def _try(self, spec: Spec, stage: Stage, share: float, switch_back: bool) -> Candidate:
        spec.make()
        if spec == self.standing.spec:
            raise NotNow(f"'{spec.name}' with these settings is the active policy")
        old = self.candidates.get(spec.name)
        if old is not None and old.spec != spec:
            raise NotNow(f"'{spec.name}' is on trial with other settings: end that first")
        if old is None and len(self.candidates) >= MOST_CANDIDATES:
            raise NotNow(f"{MOST_CANDIDATES} policies are on trial, which is the most at a time")
        if old is not None and old.stage is stage:
            old.share, old.switch_back = share, switch_back
            return old
        for session in self._sessions.values():
            spec.make(session.limits)
        new = Candidate(spec, stage, share, switch_back)
        self.candidates[spec.name] = new
        self.ended.pop(spec.name, None)
        for session in self._sessions.values():
            self.join(session)
        return new

    def _take_out(self, candidate: Candidate, why: str) -> None:
        """End a trial without anybody's call."""
        if self.candidates.get(candidate.spec.name) is candidate:
            self._drop(candidate, why)
            self._noted(candidate.spec, why)

    def _noted(self, out: Spec, why: str) -> None:
        self.automatic += 1
        self.note("roll back", out.name, why)

    def _drop(self, candidate: Candidate, why: str) -> None:
        del self.candidates[candidate.spec.name]
        self.ended[candidate.spec.name] = why
        for session in self._sessions.values():
            session.trials = [t for t in session.trials if t.candidate is not candidate]

    def _stand(self, new: Standing) -> None:
        """Change who is active, everywhere or (ValueError) nowhere; trials begin anew."""
        made = [(s, _policy_for(s, new.of(s.engine_id))) for s in self._sessions.values()]
        self.standing = new
        self.candidates = {n: c for n, c in self.candidates.items() if c.spec != new.spec}
        for candidate in self.candidates.values():
            candidate.forget()
        for session, policy in made:
            spec = new.of(session.engine_id)
            if session.spec != spec:
                kept = {**session.kept, session.spec: session.policy}
                kept.pop(spec, None)
                session.kept = dict(list(kept.items())[-MOST_KEPT:])
                session.policy, session.spec = policy, spec
                session.plans_before = session.counts.plans
            self.join(session)
            for trial in session.trials:
                trial.anew()


def _leading(session: Session) -> Trial | None:
    """Return the trial that may decide for this engine, None where there is none."""
    return next((t for t in session.trials if t.candidate.stage is Stage.CANARY), None)


def _policy_for(session: Session, spec: Spec) -> Policy:
    """Return an engine's policy object for a spec, with what it has learned where there is one."""
    if spec == session.spec:
        return session.policy
    on_trial = next((t.policy for t in session.trials if t.candidate.spec == spec), None)
    known = session.kept.get(spec) if on_trial is None else on_trial
    return spec.make(session.limits) if known is None else known
