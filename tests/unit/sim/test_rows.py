"""What rows say of waits and of what plans cost besides."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from parlay.sim.rows import Slo, rows_of
from parlay.sim.scenario import Scenario, load_scenario
from parlay.sim.simulate import Job, run_jobs
from parlay.sim.speed import Speed, stages_of
from parlay.sim.tally import Episode


def waited(ttft_s: list[float], tpot_ms: list[float]) -> Episode:
    return Episode(ttft_s=ttft_s, tpot_ms=tpot_ms)


def test_a_request_keeps_its_promise_in_both_or_not_at_all() -> None:
    own = [waited([1.0, 1.0, 3.0], [9.0, 11.0, 9.0]), waited([1.0], [float("nan")])]
    assert Slo(2.0, 10.0).kept(own) == 0.5
    assert math.isnan(Slo(2.0, 10.0).kept([Episode()]))


def test_what_is_left_open_is_what_nine_in_ten_get() -> None:
    none = [waited(list(np.arange(0.0, 101.0)), [float("nan"), *np.arange(1.0, 101.0)])]
    assert Slo().filled(none).tpot_ms == pytest.approx(90.1)
    assert Slo().filled(none).ttft_s == 90.0
    assert Slo(2.0).filled(none).ttft_s == 2.0


def short(name: str, steps: int) -> Scenario:
    return dataclasses.replace(load_scenario(name).shortened(steps), warm_up_steps=20)


def test_a_promise_that_nobody_keeps_and_one_that_all_do() -> None:
    scenario = short("chat_low", 400)
    names = ["none", "fixed:proposer=medusa/k=2"]
    none, fixed = run_jobs([Job(scenario, name, 1, 400) for name in names])
    speed = Speed(stages_of(scenario, 400), [none])
    for slo, kept in ((Slo(1e-6, 1e-6), 0.0), (Slo(1e6, 1e6), 1.0)):
        rows = rows_of("chat_low", {"none": [none], "fixed": [fixed]}, speed, slo, {})
        assert [row.slo_kept for row in rows] == [kept, kept]
    # Twice as quick: all keep what nine in ten get without.
    rows = rows_of("chat_low", {"none": [none], "fixed": [fixed]}, speed, Slo().filled([none]), {})
    assert rows[0].slo_kept < rows[1].slo_kept


def test_who_plans_to_learn_says_so() -> None:
    scenario = short("mixed", 150)
    bandit, fixed = run_jobs(
        [Job(scenario, name, 1, 150) for name in ("ucb_spec", "fixed:proposer=ngram/k=2")]
    )
    assert fixed.tries == 0
    assert bandit.tries == bandit.bucket_rows.sum()


def test_catching_up_is_paid_where_the_draft_model_was_at_rest() -> None:
    """And nothing where scenarios let it read along."""
    scenario = short("small_gpu", 60)
    drafts = "fixed:proposer=draft_model/k=2"
    paid, free = (
        run_jobs([Job(dataclasses.replace(scenario, catches_up=c), drafts, 1, 60)])[0]
        for c in (True, False)
    )
    assert free.catch_up_s == 0.0
    assert 0.0 < paid.catch_up_s < paid.draft_s
    # What is noted is what the steps were longer for it: nothing else differs in their prices.
    assert paid.catch_up_s == pytest.approx(paid.draft_s - free.draft_s, rel=0.25)


def test_oracles_have_waits_too() -> None:
    scenario = short("chat_low", 400)
    plain, oracle = run_jobs([Job(scenario, n, 1, 400) for n in ("none", "hazard_oracle")])
    assert len(plain.ttft_s) == len(plain.tpot_ms)
    assert np.nanmedian(oracle.tpot_ms) < np.nanmedian(plain.tpot_ms)
