"""Change-points of acceptance: found soon where it changes, hardly ever where it does not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import pytest
from tests.unit.policies.processes import KINDS, K, Process
from tests.unit.policies.synthetic import LIMITS as PLAY_LIMITS
from tests.unit.policies.synthetic import play

from parlay.policies.acceptance import Acceptance
from parlay.policies.change_point import ChangePoints
from parlay.policies.pilot import Pilot, PilotSettings
from parlay.policies.policy import EngineLimits
from parlay.policies.types import DRAFT_MODEL, NGRAM, NONE

LIMITS = EngineLimits(0b0111, K)
STEADY = {
    **KINDS,
    "short phases": dataclasses.replace(KINDS["phase-switching"], phase_tokens=20.0),
    "few hold": dataclasses.replace(KINDS["iid"], accept=(0.25, 0.2)),
}


def drafts(process: Process, learner: Acceptance, steps: int) -> Iterator[None]:
    """Let `steps` steps be learned from, k by each request's own last step; pause after each."""
    last = np.ones(process.rows, int)
    for _ in range(steps):
        proposer = np.where(process.match > 0, NGRAM, DRAFT_MODEL)
        learner.rows_of(process.ids, process.task, process.output)
        outcome = process.step(proposer, np.clip(last + 1, 1, 4))
        learner.observe(outcome)
        last = outcome.accepted.astype(int)
        yield


def watched(process: Process, steps: int) -> int:
    """Return how many changes are found in so many steps of a process."""
    learner, changes, found = Acceptance(K), ChangePoints(), 0
    learner.watch = changes.note
    for _ in drafts(process, learner, steps):
        for task, who in changes.found():
            learner.forget(task, who, 1200)
            found += 1
    assert found == changes.found_in_all
    return found


@pytest.mark.parametrize("kind", STEADY)
def test_a_steady_process_rings_no_alarm(kind: str) -> None:
    assert watched(Process(STEADY[kind], rows=4, seed=3), 1000) == 0


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8, 48])
@pytest.mark.parametrize("kind", STEADY)
def test_twenty_thousand_steady_steps_ring_hardly_ever(kind: str, rows: int) -> None:
    steps = 20_000 if rows < 48 else 5_000
    found = watched(Process(STEADY[kind], rows, seed=5, tasks=min(rows, 4)), steps)
    print(f"{kind}, {rows} rows: {found}")
    assert found <= 1


@functools.cache
def switching(hears: bool, rows: int, seed: int) -> tuple[float, int]:
    """Return how far off two places are foretold in the 80 steps after each of five switches."""
    process = Process(KINDS["decaying"], rows, seed)
    policy = Pilot(PilotSettings(k_max=K), LIMITS)
    if not hears:
        policy.core.acceptance.watch = None
    acceptance, off = policy.core.acceptance, []
    last = np.ones(rows, int)
    for step in range(6 * 300):
        process.shift = -2.0 if step // 300 % 2 else 0.0
        proposer = np.where(process.match > 0, NGRAM, DRAFT_MODEL)
        frailty = acceptance.frailty(acceptance.rows_of(process.ids, process.task, process.output))
        own = acceptance.survival(frailty, process.match)[np.arange(rows), proposer]
        if step >= 300 and step % 300 < 80:
            true = np.cumprod(process.chance(proposer), axis=1)
            off.append(float(np.abs(own[:, :2] - true[:, :2]).mean()))
        outcome = process.step(proposer, np.clip(last + 1, 1, 4))
        policy.observe(outcome)
        last = outcome.accepted.astype(int)
    return float(np.mean(off)), policy.changes.found_in_all


@pytest.mark.parametrize(("rows", "most"), [(2, 1.05), (8, 0.88)])
def test_a_switching_process_is_followed_faster(rows: int, most: float) -> None:
    (hears, _), (deaf, unheard) = switching(True, rows, seed=1), switching(False, rows, seed=1)
    assert unheard == 0
    assert hears < most * deaf


FEW = pytest.param(2, 3, marks=pytest.mark.xfail(reason="1: two rows show little in a phase"))


@pytest.mark.parametrize(("rows", "least"), [FEW, (8, 5)])
def test_its_changes_are_found(rows: int, least: int) -> None:
    assert switching(True, rows, seed=1)[1] >= least


def test_a_steady_load_loses_nothing() -> None:
    tags = ["edit", "chat", "logs", "hostile"] * 2
    ratio = []
    for seed in range(3):
        hears, deaf = (Pilot(PilotSettings(), PLAY_LIMITS) for _ in range(2))
        deaf.core.acceptance.watch = None
        speed = [play(policy, tags, 250, seed).tokens_per_s for policy in (hears, deaf)]
        ratio.append(speed[0] / speed[1])
    assert np.mean(ratio) > 0.995


def test_either_sign_rings_and_a_lasting_bias_does_not() -> None:
    rng = np.random.default_rng(0)
    for sign in (1.0, -1.0):
        changes = ChangePoints()
        for step in range(400):
            late = step >= 300
            excess = rng.normal(size=1) + 0.3 + sign * 2.0 * late
            changes.note(np.array([3]), np.array([NGRAM]), excess, np.array([1.01]))
            found = changes.found()
            assert not found or late
            if found:
                assert found == [(3, NGRAM)]
                assert step < 320
                break
        else:
            raise AssertionError("a shift of two standard deviations was not found")


def test_forgetting_ages_one_task_and_proposer() -> None:
    learner = Acceptance(4)
    process = Process(KINDS["iid"], 8, 0, tasks=2)
    for _ in drafts(process, learner, 60):
        pass
    before = learner.state()
    learner.forget(1, DRAFT_MODEL, 400.0)
    after = learner.state()
    moved = after["task_counts"] / np.where(before["task_counts"] > 0, before["task_counts"], 1.0)
    row = before["task_id"].tolist().index(1)
    assert moved[:, row, DRAFT_MODEL] == pytest.approx([0.5, 0.5])
    assert moved[:, row, NGRAM] == pytest.approx([1.0, 1.0])
    other = before["task_id"].tolist().index(2)
    assert moved[:, other, DRAFT_MODEL] == pytest.approx([1.0, 1.0])
    # Half of what is known of the draft model's hazards is this task's.
    kept = after["exposed"].sum(axis=1) / np.maximum(before["exposed"].sum(axis=1), 1e-9)
    assert 0.75 < kept[-2] < 0.85
    assert kept[4] == pytest.approx(1.0)
    assert not after["request_counts"][:, :, NONE].any()


def test_saved_and_loaded_it_rings_alike() -> None:
    one = Pilot(PilotSettings(k_max=K), LIMITS)
    process = Process(KINDS["decaying"], 12, 2, tasks=3)
    last = np.ones(12, int)
    for _ in range(120):
        process.step_id += 1
        outcome = process.step(np.full(12, DRAFT_MODEL), np.clip(last + 1, 1, 4))
        one.observe(outcome)
    two = Pilot(PilotSettings(k_max=K), LIMITS)
    two.load(one.state())
    process.shift = -4.0
    for _ in range(120):
        outcome = process.step(np.full(12, DRAFT_MODEL), np.full(12, 3))
        one.observe(outcome)
        two.observe(outcome)
    assert one.changes.found_in_all == two.changes.found_in_all > 0
    for name, array in one.state().items():
        np.testing.assert_array_equal(two.state()[name], array, err_msg=name)
    with pytest.raises(ValueError, match="change-points"):
        two.load({k: v for k, v in one.state().items() if not k.startswith("changes.")})
