"""The decision log of a real sidecar process: what an engine did is what is read back."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.unit.policies.logged import assert_same

from parlay.engine.planner import LocalPlanner
from parlay.engine.remote import EngineInfo, RemotePlanner
from parlay.engine.request import SamplingParams, SpeculationParams
from parlay.engine.scheduler import EngineConfig
from parlay.engine.step import Engine
from parlay.engine.virtual import Hazards, Task, VirtualBackend
from parlay.policies.allocate import fit_plan
from parlay.policies.decision_log import LogReader, log_files
from parlay.policies.log_schema import LoggedStep, in_sample, planned
from parlay.policies.policy import EngineLimits, make_policy
from parlay.policies.synthetic import History
from parlay.policies.types import BatchView, Plan, PlanSource, Proposer, StepOutcome

pytest.importorskip("pyarrow")
WAIT_S = 30.0
LIMITS = EngineLimits(0b0111, 8, (), 64)
TASK = Task({Proposer.NGRAM: (0.7,), Proposer.DRAFT_MODEL: (0.7, 0.6)}, match_rate=0.5)


class Sidecar:
    """A `parlay serve` process that logs; stopped by its own id only."""

    def __init__(self, folder: Path, *more: str, policy: str = "thompson") -> None:
        self.target = f"unix:{folder}/s"
        command = [sys.executable, "-m", "parlay.controller", "--listen", self.target]
        command += ["--policy", policy, "--log", str(folder / "log"), *more]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
        assert self.process.stdout is not None
        assert "serving on" in self.process.stdout.readline(), self.stop()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Return the exit status and what it wrote to stderr."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, errors


@dataclass
class Done:
    """What an engine did in a step."""

    view: BatchView
    plan: Plan | None
    source: PlanSource
    outcome: StepOutcome


class Recorded:
    """A planner that keeps what went through it."""

    def __init__(self, planner: RemotePlanner, pace_s: float = 0.0) -> None:
        self.planner, self.pace_s = planner, pace_s
        self.done: list[Done] = []

    def plan(self, view: BatchView) -> tuple[Plan | None, PlanSource]:
        self._last = (view, *self.planner.plan(view))
        return self._last[1:]

    def observe(self, outcome: StepOutcome) -> None:
        self.done.append(Done(*self._last, outcome))
        self.planner.observe(outcome)
        time.sleep(self.pace_s)

    def close(self) -> None:
        self.planner.close()


@contextlib.contextmanager
def connected(target: str, synchronous: bool, name: str = "engine") -> Iterator[RemotePlanner]:
    fallback = LocalPlanner(make_policy("none"))
    planner = RemotePlanner(target, EngineInfo(name, LIMITS), fallback, synchronous)
    with contextlib.closing(planner):
        wait_for(lambda: planner.connected)
        yield planner


def decode(planner: Recorded, requests: int = 6) -> list[Done]:
    backend = VirtualBackend(Hazards({"edit": TASK}, seed=5), engine=LIMITS)
    engine = Engine(backend, planner, EngineConfig(max_running=4, token_budget=64))
    for i in range(requests):
        speculation = SpeculationParams(task="edit")
        engine.add(list(range(1, 30 + 9 * i)), SamplingParams(max_tokens=40), speculation)
    while engine.has_work:
        engine.step()
    return planner.done


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def read(folder: Path) -> list[LoggedStep]:
    return list(LogReader(folder / "log"))


def assert_logged(step: LoggedStep, done: Done) -> None:
    """Check a step that followed a plan of the sidecar's against what the engine did."""
    view, plan, outcome = done.view, done.plan, done.outcome
    assert_same(step.view, view)
    assert plan is not None
    fit = fit_plan(plan, view)
    if outcome.drafted_k.any():
        drafted = outcome.drafted_k.astype(np.int32)
        fit = fit_plan(plan, view, drafted, outcome.confidences)
    assert_same(step.fit, dataclasses.replace(fit, survival=None))  # no column of the log
    proposer, k = planned(view, fit, plan)
    np.testing.assert_array_equal(step.planned_proposer, proposer)
    np.testing.assert_array_equal(step.planned_k, k)
    for name in ("drafted_k", "verified_k", "accepted", "emitted", "plan_source", "plan_step_id"):
        np.testing.assert_array_equal(
            getattr(step.outcome, name), getattr(outcome, name), err_msg=name
        )
    assert step.outcome.step_ms == pytest.approx(outcome.step_ms, rel=1e-6)
    assert (step.engine, step.state_version) == ("engine", plan.state_version)


def test_every_step_is_logged_as_it_was_done(tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path)
    with connected(sidecar.target, synchronous=True) as planner:
        done = decode(Recorded(planner))
    assert sidecar.stop() == (0, "")
    steps = read(tmp_path)
    assert [s.view.step_id for s in steps] == [d.view.step_id for d in done]
    for step, one in zip(steps, done, strict=True):
        assert one.source is PlanSource.REMOTE
        assert step.policy_version == "thompson"
        assert_logged(step, one)
    propensity = np.concatenate([step.fit.propensity for step in steps])
    assert ((propensity > 0.0) & (propensity <= 1.0)).all()
    assert (propensity < 1.0).any()


@pytest.mark.slow
def test_a_late_plan_is_logged_with_the_step_that_followed_it(tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path, policy="goodput")
    with connected(sidecar.target, synchronous=False) as planner:
        done = {one.view.step_id: one for one in decode(Recorded(planner, pace_s=0.02), 12)}
    assert sidecar.stop() == (0, "")
    steps = read(tmp_path)
    assert len(steps) > 0.5 * len(done)
    followed = 0
    for step in steps:
        one = done[step.view.step_id]
        if one.source is PlanSource.REMOTE:
            assert one.plan is not None
            assert one.plan.step_id < step.view.step_id
            assert_logged(step, one)
            followed += 1
        else:
            assert np.isnan(step.fit.propensity).all()
            assert step.policy_version == ""
    assert followed > 0.5 * len(steps)


@pytest.mark.slow
def test_a_sample_keeps_whole_requests_and_says_how_many_there_were(tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path, "--log-sample", "0.5")
    with connected(sidecar.target, synchronous=True) as planner:
        done = {one.view.step_id: one.view for one in decode(Recorded(planner), 12)}
    assert sidecar.stop() == (0, "")
    kept: dict[int, int] = {}
    for step in read(tmp_path):
        assert step.rows_in_step == len(done[step.view.step_id])
        for request in step.view.request_id.tolist():
            kept[request] = kept.get(request, 0) + 1
    rows = np.concatenate([view.request_id for view in done.values()])
    sampled = np.unique(rows[in_sample(rows, 0.5)])
    assert 0 < len(sampled) < 12
    assert kept == {int(r): int((rows == r).sum()) for r in sampled}


def steer(planner: RemotePlanner, history: History, steps: int) -> None:
    """Decode a made-up batch; every plan must be the sidecar's."""
    for _ in range(steps):
        plan, source = planner.plan(history.view())
        assert source is PlanSource.REMOTE
        planner.observe(history.step(plan, source))


@pytest.mark.slow
def test_what_was_flushed_outlives_a_kill_and_the_next_sidecar_goes_on(tmp_path: Path) -> None:
    first, history = Sidecar(tmp_path), History(4, limits=LIMITS)
    with connected(first.target, synchronous=True) as planner:
        steer(planner, history, 20)
        wait_for(lambda: bool(log_files(tmp_path / "log")))
        flushed = read(tmp_path)
        steer(planner, history, 20)
        first.stop(signal.SIGKILL)
    assert [s.view.step_id for s in flushed] == list(range(19))
    assert [s.view.step_id for s in read(tmp_path)] == list(range(19))
    (tmp_path / "log" / "decisions-000000000007.unfinished").write_text("half a file")
    second = Sidecar(tmp_path)
    with connected(second.target, synchronous=True, name="other") as planner:
        steer(planner, History(4, limits=LIMITS), 5)
    assert second.stop() == (0, "")
    steps = read(tmp_path)
    assert [s.view.step_id for s in steps] == [*range(19), *range(5)]
    assert [s.engine for s in steps] == 19 * ["engine"] + 5 * ["other"]
    assert len(list((tmp_path / "log").iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["removed", "taken by a file"])
def test_a_folder_that_is_lost_meanwhile_disturbs_no_decision(tmp_path: Path, harm: str) -> None:
    sidecar, history, log = Sidecar(tmp_path), History(4, limits=LIMITS), tmp_path / "log"
    with connected(sidecar.target, synchronous=True) as planner:
        steer(planner, history, 10)
        wait_for(lambda: bool(log_files(log)))
        for path in log.iterdir():
            path.unlink()
        log.rmdir()
        if harm == "taken by a file":
            log.write_text("in the way")
        steer(planner, history, 10)
        assert sidecar.process.stderr is not None
        line = sidecar.process.stderr.readline()
        assert "decision log cannot be written" in line
        steer(planner, history, 10)
        if log.is_file():
            log.unlink()
            log.mkdir()
        steer(planner, history, 10)
    status, errors = sidecar.stop()
    assert status == 0
    assert "Traceback" not in errors
    assert "failed_writes=1" in errors
    assert read(tmp_path)[-1].view.step_id == 39


def refusal(*arguments: str) -> str:
    """Run `parlay serve`, which must fail with one line; return that line."""
    command = [sys.executable, "-m", "parlay.controller", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 1, done
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def test_a_folder_that_cannot_be_written_is_one_line_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    listen = ("--listen", f"unix:{tmp_path}/s")
    line = refusal(*listen, "--log", str(tmp_path / "file" / "log"))
    assert line.startswith("parlay serve: cannot write the decision log into ")
    assert line.endswith(": Not a directory")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.slow
def test_a_share_that_cannot_be_and_a_folder_in_use_are_one_line(tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path)
    listen, log = ("--listen", f"unix:{tmp_path}/other"), str(tmp_path / "log")
    assert "another process does" in refusal(*listen, "--log", log)
    assert sidecar.stop() == (0, "")
    line = refusal(*listen, "--log", log, "--log-sample", "1.5")
    assert line == "parlay serve: --log-sample '1.5': must be a number, 0 to 1"
