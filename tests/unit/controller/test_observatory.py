"""What the observatory adds up, against counting row by row."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.watching import Clock, run_steps

from parlay.controller.history import BUCKET_S, History
from parlay.controller.host import Host
from parlay.controller.observatory import KEPT_PLANS, MOST_WAITING, SPARSE_STEPS, Observatory
from parlay.controller.tally import POSITIONS, calibration_error
from parlay.policies.types import NGRAM, PROPOSERS, PlanSource


def watched(policy: str = "goodput", **settings: Any) -> tuple[Host, Observatory, Clock]:
    clock = Clock()
    observatory = Observatory(clock)
    return Host(policy, settings, watch=observatory), observatory, clock


def test_sums_are_those_of_counting_every_row() -> None:
    host, observatory, clock = watched()
    _, seen = run_steps(host, "e", 60, clock=clock)
    observatory.fold()
    total = observatory.engines["e"].total
    reached, held = np.zeros((PROPOSERS, POSITIONS)), np.zeros((PROPOSERS, POSITIONS))
    drafted = emitted = planned = 0
    for view, plan, outcome in seen:
        planned += int((view.prefill_tokens == 0).sum())
        for row in range(len(outcome)):
            verified, accepted = int(outcome.verified_k[row]), int(outcome.accepted[row])
            reached[outcome.proposer[row], : min(accepted + 1, verified)] += 1
            held[outcome.proposer[row], :accepted] += 1
            drafted += int(outcome.drafted_k[row])
            emitted += int(outcome.emitted[row])
        assert plan.step_id == view.step_id
    np.testing.assert_array_equal(total.reached, reached)
    np.testing.assert_array_equal(total.held, held)
    assert held.sum() > 0
    assert total.emitted[0] == emitted
    assert total.decisions.sum() == planned
    assert total.steps[0] == len(seen)
    assert total.step_ms[0] == pytest.approx(sum(o.step_ms for _, _, o in seen))
    assert sum(float(task[1].sum()) for task in total.tasks.values()) == drafted
    assert total.sources[PlanSource.REMOTE] == sum(len(o) for _, _, o in seen)
    assert total.ages[0] == total.sources[PlanSource.REMOTE]


@given(cuts=st.lists(st.integers(1, 39), max_size=6))
def test_how_often_it_is_folded_changes_no_total(cuts: list[int]) -> None:
    (host, one, clock), (_, other, _) = watched("fixed"), watched()
    session, seen = run_steps(host, "e", 40, rows=3, clock=clock)
    one.fold()
    for place, (view, plan, outcome) in enumerate(seen):
        other.decided(session, view, plan)
        other.observed(session, outcome)
        if place in cuts:
            other.fold()
    other.fold()
    ours, theirs = one.engines["e"].total, other.engines["e"].total
    for name in ("decisions", "reached", "held", "sources", "ages", "bins", "emitted"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name))


def test_the_age_of_a_plan_and_fallbacks_are_told_apart() -> None:
    host, observatory, _ = watched()
    session, seen = run_steps(host, "e", 4)
    outcome = copy.deepcopy(seen[-1][2])
    outcome.plan_source[:2] = PlanSource.LOCAL
    outcome.plan_step_id[:] = outcome.step_id - 3
    observatory.fold()
    before = observatory.engines["e"].total.ages.copy()
    observatory.observed(session, outcome)
    observatory.fold()
    total = observatory.engines["e"].total
    added = total.ages - before
    assert added[3] == len(outcome) - 2
    assert added.sum() == len(outcome) - 2
    assert total.sources[PlanSource.LOCAL] == 2


def test_a_perfect_prediction_has_no_calibration_error_and_a_wrong_one_its_distance() -> None:
    bins = np.zeros((PROPOSERS, 10, 3))
    bins[NGRAM, 7] = (75.0, 75.0, 100.0)
    bins[2, 9] = (95.0, 45.0, 100.0)
    error = calibration_error(bins)
    assert error[NGRAM] == 0.0
    assert error[2] == pytest.approx(0.5)
    assert math.isnan(error[3])


def test_estimates_of_a_policy_that_learns_are_nearly_calibrated() -> None:
    host, observatory, clock = watched()
    run_steps(host, "e", 400, rows=16, clock=clock)
    observatory.fold()
    recent = observatory.engines["e"].recent
    error = calibration_error(recent.bins)
    drafted = recent.bins[:, :, 2].sum(axis=1) > 200
    assert drafted.any()
    assert (error[drafted] < 0.1).all()
    # Told that everything holds, they are not.
    wrong = recent.bins.copy()
    wrong[:, :, 0] = wrong[:, :, 2]
    assert (calibration_error(wrong)[drafted] > 0.2).all()


def test_gain_is_one_where_nothing_is_drafted_and_unknown_where_a_policy_says_none() -> None:
    host, observatory, _ = watched()
    session, seen = run_steps(host, "e", 60)
    view, plan, _ = seen[-1]
    bypass = copy.deepcopy(plan)
    bypass.k[:] = 0
    observatory.decided(session, view, bypass)
    observatory.fold()
    *others, newest = observatory.engines["e"].newest
    assert newest.gain == 1.0
    assert max(d.gain for d in others) > 1.0
    host, observatory, _ = watched("fixed")
    run_steps(host, "e", 3)
    observatory.fold()
    assert all(math.isnan(d.gain) for d in observatory.engines["e"].newest)


def test_old_decisions_thin_out_and_memory_is_bounded() -> None:
    host, observatory, _ = watched("fixed")
    session, seen = run_steps(host, "e", 4 * KEPT_PLANS)
    observatory.fold()
    engine = observatory.engines["e"]
    assert len(engine.newest) == KEPT_PLANS
    assert len(engine.sparse) == 4 * KEPT_PLANS // SPARSE_STEPS
    asked = int(seen[SPARSE_STEPS][0].request_id[0])
    found = engine.decision_of(asked)
    assert found is not None
    assert asked in found.view.request_id
    assert engine.decision_of(2**40) is None
    for _ in range(MOST_WAITING + 5):
        observatory.observed(session, seen[0][2])
    assert len(observatory._observed) == 5


def test_recent_fades_and_total_stays() -> None:
    host, observatory, clock = watched("fixed")
    run_steps(host, "e", 10)
    observatory.fold()
    clock.now_s += 300.0
    run_steps(host, "e", 1)
    observatory.fold()
    engine = observatory.engines["e"]
    assert engine.total.decide_s.sum() == 11
    assert engine.recent.decide_s.sum() == pytest.approx(1.0, abs=1e-3)


def test_a_history_forgets_a_span_when_its_place_is_needed() -> None:
    history = History()
    at_s = np.array([100.0, 100.0 + 600.0])
    history.add(at_s[:1], {"steps": np.array([3.0])})
    history.add(at_s[1:], {"steps": np.array([5.0])})
    starts, sums = history.until(700.0 + BUCKET_S)
    assert sums["steps"].sum() == 5.0
    assert starts[np.flatnonzero(sums["steps"])[0]] == 700.0
