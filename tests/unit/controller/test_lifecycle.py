"""Which policy decides, and how that changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.unit.controller.trials import (
    DEEP,
    DRAFTS,
    WRONG,
    Running,
    SlowDrafts,
    Watched,
    registered,
)

from parlay.controller.canary import on_canary
from parlay.controller.candidate import Stage
from parlay.controller.host import Host, UnknownEngine
from parlay.controller.lifecycle import MOST_CANDIDATES
from parlay.controller.session import spec_of
from parlay.controller.shadow import value_of
from parlay.controller.standing import NotNow
from parlay.policies.policy import make_policy
from parlay.policies.synthetic import LIMITS, History
from parlay.policies.types import PlanSource
from parlay.protos.codec import Hello

# --- Shadow --------------------------------------------------------------------------------------


def test_a_shadow_changes_no_decision_and_is_counted() -> None:
    plain, watched = Running(Host("goodput")), Running(Host("goodput"))
    candidate = watched.host.lifecycle.shadow(DRAFTS, enabled=True)
    for (_, ours, _), (_, theirs, _) in zip(plain.run(60), watched.run(60), strict=True):
        np.testing.assert_array_equal(ours.k, theirs.k)
        np.testing.assert_array_equal(ours.propensity, theirs.propensity)
        assert ours.policy_version == theirs.policy_version
    assert candidate.decisions == 60
    assert candidate.their_k > 0
    assert candidate.our_k / candidate.rows == pytest.approx(3.0, abs=0.3)
    assert 0 <= candidate.agreed < candidate.rows


def test_a_shadow_of_the_same_choices_agrees_always() -> None:
    engine = Running(Host("fixed", {"proposer": "draft_model", "k": "3"}))
    same = spec_of("fixed", {"k": "3", "proposer": "draft_model"})
    with pytest.raises(NotNow, match="is the active policy"):
        engine.host.lifecycle.shadow(same, enabled=True)
    engine.host.lifecycle.activate(spec_of("batch_table"))
    engine.host.lifecycle.activate(spec_of("fixed"))
    candidate = engine.host.lifecycle.shadow(spec_of("fixed", {"k": "3"}), enabled=True)
    engine.run(30)
    assert candidate.agreed == candidate.rows > 0


def test_the_value_of_a_shadow_is_estimated_from_the_steps_it_was_beside() -> None:
    engine = Running(Host("fixed", {"proposer": "draft_model", "k": "8"}), SlowDrafts(8))
    candidate = engine.host.lifecycle.shadow(spec_of("none"), enabled=True)
    engine.run(300)
    found = value_of(engine.host.lifecycle.beside(candidate))
    none = Running(Host("none"), SlowDrafts(8))
    outcomes = [outcome for _, _, outcome in none.run(300)]
    tokens = sum(int(outcome.emitted.sum()) for outcome in outcomes)
    real = 1e3 * tokens / sum(outcome.step_ms for outcome in outcomes)
    assert found.estimator == "replay"
    assert found.goodput == pytest.approx(real, rel=0.1)
    assert found.low > found.logged_goodput


def test_a_value_that_the_steps_do_not_support_is_refused() -> None:
    engine = Running(Host("none"))
    candidate = engine.host.lifecycle.shadow(DRAFTS, enabled=True)
    with pytest.raises(ValueError, match="the log is empty"):
        value_of(engine.host.lifecycle.beside(candidate))
    engine.run(200)
    with pytest.raises(ValueError, match="never tried in the log"):
        value_of(engine.host.lifecycle.beside(candidate))


# --- Canary --------------------------------------------------------------------------------------


def test_requests_on_canary_get_the_candidate_and_keep_it() -> None:
    engine = Running(Host("none"))
    engine.host.lifecycle.canary(DRAFTS, 0.4)
    seen: dict[int, set[bool]] = {}
    for view, plan, outcome in engine.run(80):
        ours = on_canary("e", view.request_id, 0.4)
        drafts = (plan.k > 0) & (plan.proposer > 0)
        may = (view.max_k > 0) & (view.prefill_tokens == 0)
        np.testing.assert_array_equal(drafts[may], ours[may])
        np.testing.assert_array_equal(outcome.requested_k > 0, ours & may)
        for request_id, arm in zip(view.request_id.tolist(), ours.tolist(), strict=True):
            seen.setdefault(request_id, set()).add(arm)
    assert all(len(arms) == 1 for arms in seen.values())
    assert {True, False} == {arm for arms in seen.values() for arm in arms}


def test_the_share_of_requests_is_that_asked_for_and_grows_by_adding() -> None:
    ids = np.arange(20_000, dtype=np.uint64)
    few, more = on_canary("a", ids, 0.05), on_canary("a", ids, 0.3)
    assert few.mean() == pytest.approx(0.05, abs=0.01)
    assert more.mean() == pytest.approx(0.3, abs=0.02)
    assert more[few].all()
    other = on_canary("b", ids, 0.3)
    assert (more & other).mean() == pytest.approx(0.09, abs=0.01)
    assert not on_canary("a", ids, 0.0).any()
    assert on_canary("a", ids, 1.0).all()


def test_each_policy_is_told_only_of_rows_that_followed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    active, ours = registered(monkeypatch, "watched-1", Watched)
    spec, theirs = registered(monkeypatch, "watched-2", Watched)
    engine = Running(Host(active.name))
    engine.host.lifecycle.canary(spec, 0.5)
    engine.run(20)
    for mine, other in zip(ours[-1].outcomes, theirs[-1].outcomes, strict=True):
        arm = on_canary("e", mine.request_id, 0.5)
        np.testing.assert_array_equal(mine.plan_source == PlanSource.REMOTE, ~arm)
        np.testing.assert_array_equal(other.plan_source == PlanSource.REMOTE, arm)
        np.testing.assert_array_equal(mine.emitted, other.emitted)


def test_a_canary_whose_requests_lose_is_taken_out() -> None:
    notes: list[tuple[str, str, str]] = []
    engine = Running(Host("none"), SlowDrafts(16))
    engine.host.lifecycle.note = lambda *note: notes.append(note)
    engine.host.lifecycle.canary(DEEP, 0.5)
    engine.run_until(lambda: not engine.host.lifecycle.candidates)
    assert notes[0][:2] == ("roll back", "fixed")
    assert "its requests lost more than 10%" in notes[0][2]
    assert not engine.step()[1].k.any()


def test_only_one_policy_is_on_canary() -> None:
    cycle = Host("none").lifecycle
    cycle.canary(DRAFTS, 0.1)
    with pytest.raises(NotNow, match="'fixed' is on canary"):
        cycle.canary(spec_of("goodput"), 0.1)
    with pytest.raises(NotNow, match="other settings"):
        cycle.canary(DEEP, 0.1)
    assert cycle.canary(DRAFTS, 0.2).share == 0.2
    cycle.canary(DRAFTS, 0.0)
    assert not cycle.candidates
    with pytest.raises(NotNow, match="neither shadowed nor on canary: its canary was ended"):
        cycle.canary(DRAFTS, 0.0)
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="between 0 and 1"):
            cycle.canary(DRAFTS, share)


# --- Switch-back ---------------------------------------------------------------------------------


def test_a_faster_candidate_is_promoted_by_its_lower_bound() -> None:
    engine = Running(Host("none"))
    cycle = engine.host.lifecycle
    cycle.canary(DRAFTS, 0.0, switch_back=True)
    early = cycle.promote("fixed")
    assert not early.promoted
    assert "no pairs of blocks were measured yet" in early.words
    assert engine.session.spec.name == "none"
    engine.run_until(lambda: cycle.candidates["fixed"].speed.lower > 0.0)
    verdict = cycle.promote("fixed")
    assert verdict.promoted
    assert 1.0 < verdict.speed.low < verdict.speed.ratio < verdict.speed.high
    assert engine.session.spec == DRAFTS
    assert engine.host.policy == "fixed"
    assert not cycle.candidates
    assert (engine.step()[1].k == 3).any()


def test_blocks_are_of_the_whole_batch_and_half_of_the_time() -> None:
    engine = Running(Host("none"))
    engine.host.lifecycle.canary(DRAFTS, 0.0, switch_back=True)
    halves = []
    for view, plan, _ in engine.run(300):
        may = (view.max_k > 0) & (view.prefill_tokens == 0)
        assert len(set((plan.k[may] > 0).tolist())) == 1
        if plan.propensity[0] == 0.5:
            halves.append(bool((plan.k > 0).any()))
    assert 0.4 < np.mean(halves) < 0.6
    assert len(halves) > 150


def test_a_slower_candidate_is_taken_out_and_not_promoted() -> None:
    notes: list[tuple[str, str, str]] = []
    engine = Running(Host("none"), SlowDrafts(8))
    cycle = engine.host.lifecycle
    cycle.note = lambda *note: notes.append(note)
    cycle.canary(DEEP, 0.0, switch_back=True)
    engine.run_until(lambda: not cycle.candidates)
    assert "to the incumbent, more than" in notes[0][2] or "slower" in notes[0][2]
    with pytest.raises(NotNow, match="neither shadowed nor on canary: "):
        cycle.promote("fixed")
    assert not engine.step()[1].k.any()


@pytest.mark.slow
def test_a_policy_alike_is_neither_promoted_nor_taken_out() -> None:
    for seed in range(8):
        engine = Running(Host("fixed"), History(8, seed))
        cycle = engine.host.lifecycle
        cycle.canary(spec_of("fixed", {"k": "3"}), 0.3, switch_back=True)
        engine.run(500)
        candidate = cycle.candidates["fixed"]
        assert candidate.speed.count > 4
        assert candidate.speed.lower < 0.0 < candidate.speed.upper
        assert not cycle.promote("fixed").promoted


def test_force_promotes_whatever_was_measured() -> None:
    engine = Running(Host("none"))
    engine.host.lifecycle.shadow(DRAFTS, enabled=True)
    assert not engine.host.lifecycle.promote("fixed").promoted
    verdict = engine.host.lifecycle.promote("fixed", force=True)
    assert verdict.promoted
    assert "by force" in verdict.words
    assert engine.session.spec == DRAFTS


def test_the_incumbent_is_asked_only_for_steps_it_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    active, ours = registered(monkeypatch, "watched-1", Watched)
    spec, theirs = registered(monkeypatch, "watched-2", Watched)
    engine = Running(Host(active.name))
    engine.host.lifecycle.canary(spec, 0.0, switch_back=True)
    engine.run(100)
    assert not set(ours[-1].views) & set(theirs[-1].views)
    assert sorted(ours[-1].views + theirs[-1].views) == list(range(100))
    assert len(ours[-1].outcomes) == len(theirs[-1].outcomes) == 100


# --- Candidates that go wrong --------------------------------------------------------------------


@pytest.mark.parametrize("spoil", WRONG)
@pytest.mark.parametrize("stage", ["shadow", "canary", "switch-back"])
def test_a_wrong_candidate_is_taken_out_and_the_step_goes_on(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[..., Any], stage: str
) -> None:
    active, ours = registered(monkeypatch, "active", Watched)
    spec, theirs = registered(monkeypatch, "wrong", lambda: Watched(spoil))
    engine, notes = Running(Host(active.name)), list[tuple[str, str, str]]()
    cycle = engine.host.lifecycle
    cycle.note = lambda *note: notes.append(note)
    if stage == "shadow":
        cycle.shadow(spec, enabled=True)
    else:
        cycle.canary(spec, 0.5 if stage == "canary" else 0.0, switch_back=stage != "canary")
    for view, plan, _ in engine.run(60):
        np.testing.assert_array_equal(plan.request_id, view.request_id)
        assert plan.step_id == view.step_id
        may = (view.max_k > 1) & (view.prefill_tokens == 0)
        assert set(plan.k[may].tolist()) == {2}
    assert len(notes) == 1
    assert "\n" not in notes[0][2]
    assert not cycle.candidates
    assert not engine.session.trials
    # Each step was decided once: by the active policy, or by the candidate before it went wrong.
    assert len(ours[-1].views) == len(set(ours[-1].views))
    assert set(range(60)) <= set(ours[-1].views) | set(theirs[-1].views)
    assert engine.step()[2].step_id == 60


def test_a_candidate_that_cannot_learn_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(Watched):
        def observe(self, outcome: Any) -> None:
            raise KeyError("state")

    spec, _ = registered(monkeypatch, "deaf", Deaf)
    engine = Running(Host("goodput"))
    engine.host.lifecycle.shadow(spec, enabled=True)
    engine.run(3)
    assert engine.host.lifecycle.ended["deaf"] == "KeyError: 'state'"


def test_a_candidate_that_cannot_be_made_for_a_new_engine_is_taken_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = iter(range(100))

    def once() -> Watched:
        if next(made) >= 1:
            raise ValueError("no more")
        return Watched()

    spec, _ = registered(monkeypatch, "rare", once)
    host = Host("none")
    host.lifecycle.shadow(spec, enabled=True)
    engine = Running(host)
    assert host.lifecycle.ended["rare"] == "engine 'e': no more"
    engine.run(3)


def test_candidates_are_bounded_and_may_be_ended() -> None:
    cycle = Host("none").lifecycle
    names = ["fixed", "goodput", "svip", "thompson", "linucb"]
    for name in names[:MOST_CANDIDATES]:
        cycle.shadow(spec_of(name), enabled=True)
    with pytest.raises(NotNow, match="the most at a time"):
        cycle.shadow(spec_of(names[-1]), enabled=True)
    cycle.shadow(spec_of("svip"), enabled=False)
    cycle.shadow(spec_of(names[-1]), enabled=True)
    for wrong in (spec_of("best"), spec_of("goodput", {"speed": "11"})):
        with pytest.raises(ValueError, match=r"unknown policy|no setting"):
            Host("none").lifecycle.shadow(wrong, enabled=True)


# --- An active policy that goes wrong ------------------------------------------------------------


def spoilt(when: int) -> Callable[[Any], Any]:
    def spoil(plan: Any) -> Any:
        if plan.step_id >= when:
            raise RuntimeError("a bug\nof two lines")
        return plan

    return spoil


@pytest.mark.parametrize("learning", [False, True])
def test_a_policy_that_raises_soon_makes_way_for_the_one_before(
    monkeypatch: pytest.MonkeyPatch, learning: bool
) -> None:
    spec, made = registered(monkeypatch, "spoilt", lambda: Watched(None if learning else spoilt(9)))
    engine, notes = Running(Host("none")), list[tuple[str, str, str]]()
    other = Running(engine.host, engine_id="f")
    cycle = engine.host.lifecycle
    cycle.note = lambda *note: notes.append(note)
    cycle.activate(DRAFTS)
    cycle.activate(spec)
    engine.run(5)
    assert engine.session.spec == other.session.spec == spec
    if learning:
        made[-1].observe = made[-2].observe = lambda outcome: spoilt(0)(outcome)
    for view, plan, _ in engine.run(20):
        np.testing.assert_array_equal(plan.request_id, view.request_id)
    assert engine.session.spec == other.session.spec == cycle.standing.spec == DRAFTS
    assert notes == [("roll back", "spoilt", "RuntimeError: a bug of two lines")]
    assert cycle.automatic == 1
    assert cycle.roll_back()[0].name == "none"


def test_what_cannot_be_rolled_back_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, _ = registered(monkeypatch, "spoilt", lambda: Watched(spoilt(9)))
    first = Running(Host("spoilt"))
    with pytest.raises(RuntimeError, match="a bug"):
        first.run(20)
    monkeypatch.setattr("parlay.controller.lifecycle.PROBATION_STEPS", 4)
    old = Running(Host("none"))
    old.host.lifecycle.activate(spec)
    with pytest.raises(RuntimeError, match="a bug"):
        old.run(20)
    assert old.session.spec == spec


# --- Activate and roll back ----------------------------------------------------------------------


def test_rolling_back_is_instant_and_keeps_what_was_learned() -> None:
    engine = Running(Host("goodput"))
    engine.run(30)
    learned = engine.session.policy
    assert engine.host.lifecycle.activate(DRAFTS) == (DRAFTS, spec_of("goodput"))
    engine.run(10)
    assert engine.host.lifecycle.roll_back() == (spec_of("goodput"), DRAFTS)
    assert engine.session.policy is learned
    engine.run(10)
    with pytest.raises(NotNow, match="nothing to roll back"):
        engine.host.lifecycle.roll_back()


def test_rolling_back_takes_the_canary_out_first() -> None:
    host = Host("goodput")
    host.lifecycle.activate(spec_of("none"))
    host.lifecycle.canary(DRAFTS, 0.2)
    assert host.lifecycle.roll_back("it smells") == (spec_of("none"), DRAFTS)
    assert host.lifecycle.ended["fixed"] == "rolled back: it smells"
    assert host.lifecycle.roll_back() == (spec_of("goodput"), spec_of("none"))


def test_one_engine_may_have_a_policy_of_its_own() -> None:
    host = Host("none")
    one, two = Running(host, engine_id="one"), Running(host, engine_id="two")
    host.lifecycle.shadow(spec_of("goodput"), enabled=True)
    host.lifecycle.activate(DRAFTS, "one")
    assert (one.session.spec, two.session.spec) == (DRAFTS, spec_of("none"))
    assert (len(one.session.trials), len(two.session.trials)) == (0, 1)
    assert host.hello(Hello("one", LIMITS, 7), host.new_stream())[1].policy == "fixed"
    assert host.lifecycle.roll_back() == (spec_of("none"), DRAFTS)
    assert (len(one.session.trials), len(two.session.trials)) == (1, 1)
    with pytest.raises(UnknownEngine, match="'three'"):
        host.lifecycle.activate(DRAFTS, "three")


def test_a_policy_that_cannot_be_made_leaves_everything_as_it_was() -> None:
    engine = Running(Host("goodput"))
    before = engine.session.policy
    with pytest.raises(ValueError, match="unknown policy"):
        engine.host.lifecycle.activate(spec_of("best"))
    with pytest.raises(ValueError, match="set path to a network"):
        engine.host.lifecycle.activate(spec_of("learned"))
    assert engine.session.policy is before
    assert engine.host.policy == "goodput"


def test_what_was_measured_against_another_policy_is_forgotten() -> None:
    engine = Running(Host("none"))
    candidate = engine.host.lifecycle.canary(DRAFTS, 0.0, switch_back=True)
    engine.run_until(lambda: candidate.speed.count > 3)
    learner = engine.session.trials[0].policy
    engine.host.lifecycle.activate(spec_of("goodput"))
    assert candidate.speed.count == 0
    assert candidate.stage is Stage.CANARY
    assert engine.session.trials[0].policy is learner


def test_a_new_run_of_step_ids_goes_on_with_the_trial() -> None:
    engine = Running(Host("none"))
    candidate = engine.host.lifecycle.canary(DRAFTS, 0.3, switch_back=True)
    engine.run(40)
    engine.host.hello(Hello("e", LIMITS, run_id=9), engine.stream)
    engine.history = History(8, seed=5)
    engine.run_until(lambda: candidate.speed.count > 3)


def test_without_candidates_decisions_are_those_of_the_policy_alone() -> None:
    engine, alone, history = (
        Running(Host("goodput")),
        make_policy("goodput", {}, LIMITS),
        History(8),
    )
    for _, plan, _ in engine.run(40):
        ours = alone.decide(history.view())
        alone.observe(history.step(ours, PlanSource.REMOTE))
        np.testing.assert_array_equal(plan.k, ours.k)
    assert engine.session.waiting.views == {}
