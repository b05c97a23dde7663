"""What is foretold of drafts comes true as often as foretold, on five processes and public logs."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from tests.unit.policies.processes import KINDS, Bins, K, Process, reached
from tests.unit.policies.test_acceptance import outcome_of

from parlay.policies.acceptance import Acceptance
from parlay.policies.allocate import fit_plan
from parlay.policies.pilot import Pilot, PilotSettings
from parlay.policies.policy import EngineLimits
from parlay.policies.types import Array, Proposer
from parlay.sim.acceptance_log import Observed, read_logs

DATA = Path(os.environ.get("PARLAY_DATA", "../shared/data")) / "acceptance/specbench_bnukhkadiev"
LIMITS = EngineLimits(0b0111, K)
MOST = 0.02
LOGS = {
    "medusa": "mt_bench.vicuna-7b-v1.3-medusa-float16-temperature-0.0.jsonl",
    "68M draft": "spec_bench.vicuna-7b-v1.3-sps-68m-float16-temp-0.0.jsonl",
    "eagle": "spec_bench.vicuna-7b-v1.3-eagle-float16-temperature-0.0.jsonl",
}


def error_of(kind: str, steps: int, warm_up: int, rows: int = 4) -> tuple[float, float]:
    """Return the pilot's calibration error with k as it chooses, and that of a naive rate.

    The naive rate is accepted over drafted tokens, of each proposer, whatever the place.
    """
    process, policy = Process(KINDS[kind], rows, seed=1), Pilot(PilotSettings(k_max=K), LIMITS)
    ours, naive, counts = Bins(), Bins(), np.ones((2, len(Proposer)))
    for step in range(warm_up + steps):
        view = process.view()
        plan = policy.decide(view)
        fit = fit_plan(plan, view)
        outcome = process.step(fit.proposer, fit.k, plan)
        policy.observe(outcome)
        drafted = np.flatnonzero(fit.k > 0)
        who, accepted, k = fit.proposer[drafted], outcome.accepted[drafted], fit.k[drafted]
        if step >= warm_up and len(drafted):
            assert fit.survival is not None
            ours.add(*reached(fit.survival[drafted].astype(float), accepted, k))
            rate = (counts[0] / counts[1])[who]
            naive.add(*reached(rate[:, None] ** np.arange(1, K + 1), accepted, k))
        np.add.at(counts[0], who, accepted)
        np.add.at(counts[1], who, k)
    return ours.error, naive.error


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_steps_are_foretold_roughly(kind: str) -> None:
    assert error_of(kind, 700, 300)[0] < 2 * MOST


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_thousand_steps_are_foretold(kind: str) -> None:
    ours, naive = error_of(kind, 20_000, 500)
    print(f"{kind}: {ours:.4f}, naive {naive:.4f}")
    assert ours <= MOST
    assert naive > MOST, "a rate of accepted over drafted tokens would pass as well"


def replayed(observed: dict[str, Observed], at_once: int = 16) -> float:
    """Return the calibration error over logged drafts, texts side by side, a fifth as warm-up."""
    texts: deque[tuple[int, Array, Array, Array]] = deque()
    for task, columns in enumerate(observed.values(), 1):
        ends = np.append(columns.first[1:], len(columns))
        for begin, end in zip(columns.first.tolist(), ends.tolist(), strict=True):
            part = slice(begin, end)
            texts.append((task, columns.offered[part], columns.held[part], columns.proposer[part]))
    order = np.random.default_rng(0).permutation(len(texts))
    texts = deque(texts[i] for i in order)
    drafts, total = 0, sum(len(t[1]) for t in texts)
    learner, bins, running = Acceptance(8), Bins(), list[list[int]]()
    held_by: dict[int, tuple[int, Array, Array, Array]] = {}
    number = 0
    while texts or running:
        while texts and len(running) < at_once:
            number += 1
            held_by[number] = texts.popleft()
            running.append([number, 0])
        ids = np.array([r[0] for r in running])
        tasks = np.array([held_by[i][0] for i in ids.tolist()])
        now = [tuple(int(c[at]) for c in held_by[i][1:]) for i, at in running]
        offered, held, proposer = (np.array(column) for column in zip(*now, strict=True))
        rows = learner.rows_of(ids, tasks)
        survival = learner.survival(learner.frailty(rows), np.zeros(len(ids)))
        if drafts > 0.2 * total:
            own = survival[np.arange(len(ids)), proposer].astype(float)
            bins.add(*reached(own, held, offered))
        outcome = outcome_of(ids, proposer, offered, held)
        outcome.task[:] = tasks
        learner.observe(outcome)
        drafts += len(ids)
        for one in running:
            one[1] += 1
        running = [r for r in running if r[1] < len(held_by[r[0]][1])]
    return bins.error


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="set PARLAY_DATA to the folder of public data")
@pytest.mark.parametrize("log", LOGS)
def test_public_logs_are_foretold(log: str) -> None:
    error = replayed(read_logs([DATA / LOGS[log]]).observed())
    print(f"{log}: {error:.4f}")
    assert error <= MOST


def test_the_bins_see_what_is_foretold_badly() -> None:
    rng, good, bad = np.random.default_rng(0), Bins(), Bins()
    chance = rng.random(20_000)
    held = rng.random(20_000) < chance
    good.add(chance, held)
    bad.add(np.clip(chance + 0.1, 0.0, 1.0), held)
    assert good.error < 0.01
    assert bad.error > 0.08


def test_a_place_that_was_not_reached_says_nothing() -> None:
    survival = np.array([[0.9, 0.45, 0.4]])
    chance, held = reached(survival, np.array([1]), np.array([3]))
    assert chance == pytest.approx([0.9, 0.5])
    assert held.tolist() == [True, False]
