"""Hostile messages are refused with a reason or ignored and counted; honest engines never notice.

What a stream carries goes through the sidecar's own servicer, all but gRPC: `test_sidecar_fuzz`
sends some through a real socket.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

import grpc
import numpy as np
import pytest
from tests.fuzz import Fuzzer

from parlay.controller.host import MAX_SESSIONS, Host
from parlay.controller.observatory import Observatory
from parlay.controller.service import Servicer
from parlay.controller.session import Session
from parlay.policies.allocate import fit_plan
from parlay.policies.policy import make_policy, registry
from parlay.policies.synthetic import LIMITS, History
from parlay.policies.types import PROPOSERS, Plan
from parlay.protos import codec
from parlay.v1 import policy_pb2 as typed

REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
}
HONEST_STEPS = 60


class Ended(Exception):
    """The call was aborted."""


class Context:
    """What a servicer needs of gRPC: how a call was ended."""

    def __init__(self) -> None:
        self.code, self.details = grpc.StatusCode.OK, ""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        self.code, self.details = code, details
        raise Ended


def hello(engine_id: str, run_id: int = 0) -> bytes:
    return codec.encode_request(codec.Hello(engine_id, LIMITS, run_id))


def recorded(steps: int = 12) -> tuple[list[bytes], list[bytes], list[bytes], list[bytes]]:
    """Return what an engine and a sidecar said: on a stream, its answers, Decides, Reports."""
    history, policy = History(5), make_policy("goodput", None, LIMITS)
    asked, answered = [hello("attacker-0")], [codec.encode_response(codec.Welcome("p", True, 3))]
    decides, reports = [], []
    outcome = None
    for _ in range(steps):
        view = history.view()
        asked.append(codec.encode_request(codec.StepReport(outcome, view)))
        decides.append(codec.encode_decide(codec.Hello("attacker-1", LIMITS), view))
        plan = policy.decide(view)
        answered.append(codec.encode_response(plan))
        outcome = history.step(plan)
        policy.observe(outcome)
        asked.append(codec.encode_request(codec.StepReport(outcome, None)))
        reports.append(codec.encode_report("attacker-1", outcome))
    asked.append(codec.encode_request(codec.Bye("done")))
    answered.append(codec.encode_response(codec.Config(draining=True)))
    return asked, answered, decides, reports


class Attack:
    """Sends hostile messages to a servicer, by streams and unary calls, and counts what becomes."""

    def __init__(self, servicer: Servicer, seed: int) -> None:
        asked, _, decides, reports = recorded()
        self.servicer = servicer
        self.codes: Counter[grpc.StatusCode] = Counter()
        self.streams = 0
        self._asked = Fuzzer(seed, asked, typed.SteerRequest)
        self._decides = Fuzzer(seed + 1, decides, typed.DecideRequest)
        self._reports = Fuzzer(seed + 2, reports, typed.ReportRequest)

    async def send(self, count: int) -> None:
        """Send so many messages; one in ten by unary calls."""
        left = iter(range(count))
        for number in left:
            if number % 10 == 0:
                await self._call(self.servicer.decide, self._decides.message())
            elif number % 10 == 5:
                await self._call(self.servicer.report, self._reports.message())
            else:
                await self._stream(left)

    async def _call(self, method: Any, data: bytes) -> None:
        context = Context()
        try:
            answer = await method(data, context)
        except Ended:
            self._note(context, data)
            return
        if method == self.servicer.decide:
            codec.decode_decision(answer)

    async def _stream(self, left: Iterator[int]) -> None:
        """Send messages until one of them ends the stream, or for a while."""
        self.streams += 1
        last = b""

        async def requests() -> AsyncIterator[bytes]:
            nonlocal last
            yield hello(f"attacker-{self.streams % 5}", self.streams % 3)
            for _ in zip(range(20), left, strict=False):
                last = self._asked.message()
                yield last

        context: Any = Context()
        try:
            async for answer in self.servicer.steer(requests(), context):
                # Whatever was asked, the answer is one that an engine takes.
                codec.decode_response(answer)
        except Ended:
            self._note(context, last)

    def _note(self, context: Context, data: bytes) -> None:
        self.codes[context.code] += 1
        assert context.code in REFUSALS, (context.code, context.details, data.hex())
        assert "\n" not in context.details


class Honest:
    """An engine that goes on as if nothing was."""

    def __init__(self, host: Host) -> None:
        self.host, self.history = host, History(6, seed=4)
        self.stream = host.new_stream()
        self.session, _ = host.hello(codec.Hello("honest", LIMITS), self.stream)
        self._outcome: Any = None

    def step(self) -> bytes:
        """Run a step and return its plan, encoded."""
        data = codec.encode_request(codec.StepReport(self._outcome, self.history.view()))
        report = codec.decode_request(data)
        assert isinstance(report, codec.StepReport)
        plan = self.host.report(self.session, self.stream, report)
        assert plan is not None
        self.host.settle(self.session)
        self._outcome = self.history.step(plan)
        return codec.encode_response(plan)


def poisoned(session: Session) -> set[str]:
    """Return the names of arrays with a number that is none, but where it was so from the start."""
    found = set()
    fresh = session.spec.make(session.limits).state()
    for name, values in session.policy.state().items():
        array, before = np.asarray(values), np.asarray(fresh[name])
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            # Each request's pace begins as unknown.
            unknown = np.isnan(before) if before.shape == array.shape else name == "policy.pace_ms"
            if not (np.isfinite(array) | (np.isnan(array) & unknown)).all():
                found.add(name)
    return found


def attacked(policy: str, count: int, seed: int) -> Attack:
    """Attack a host in between the steps of an honest engine; assert that nothing comes of it."""
    alone, host = Honest(Host(policy, late=True)), Host(policy, watch=Observatory(), late=True)
    attack, honest = Attack(Servicer(host), seed), Honest(host)
    for _ in range(HONEST_STEPS):
        # A number at an end of its range warns at most; what it leaves is looked at below.
        with np.errstate(all="ignore"):
            asyncio.run(attack.send(count // HONEST_STEPS))
        assert honest.step() == alone.step()
    assert host.watch is not None
    host.watch.fold()
    assert len(host.sessions) <= MAX_SESSIONS
    usual = poisoned(alone.session)
    for engine_id, session in host.sessions.items():
        assert poisoned(session) <= usual, engine_id
    return attack


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    # Each refusal is said; what fails is an error.
    caplog.set_level(logging.ERROR, "parlay.controller")


@pytest.mark.parametrize(
    ("policy", "count"),
    [("pilot", 3000), ("goodput", 2000), pytest.param("pilot", 100_000, marks=pytest.mark.slow)],
)
def test_hostile_messages_are_refused_or_ignored(policy: str, count: int) -> None:
    attack = attacked(policy, count, seed=count)
    counts = [s.counts for s in attack.servicer.host.sessions.values()]
    assert attack.codes[grpc.StatusCode.INVALID_ARGUMENT] > count / 50
    assert sum(c.ignored_outcomes for c in counts) > count / 500
    assert sum(c.ignored_views for c in counts) > count / 500
    assert sum(c.outcomes for c in counts) > count / 100


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(registry()))
def test_every_policy_outlives_hostile_messages(policy: str) -> None:
    attacked(policy, 6000, seed=7)


@pytest.mark.parametrize("count", [1000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_hostile_sidecar_makes_no_engine_draft_what_it_cannot(count: int) -> None:
    _, answered, _, _ = recorded()
    fuzzer, view = Fuzzer(count, answered, typed.SteerResponse), History(5).view()
    plans = 0
    for _ in range(count):
        data = fuzzer.message()
        try:
            response = codec.decode_response(data)
        except ValueError:
            continue
        if isinstance(response, Plan):
            plans += 1
            with np.errstate(all="ignore"):
                fit = fit_plan(response, view)
            assert (fit.k >= 0).all(), data.hex()
            assert (fit.k <= view.max_k).all(), data.hex()
            assert (fit.verify_k <= fit.k).all(), data.hex()
            allowed = (view.proposer_mask >> fit.proposer) & 1
            assert (allowed.astype(bool) | (fit.k == 0)).all(), data.hex()
            assert (fit.proposer < PROPOSERS).all()
    assert plans > count / 20


def test_an_outcome_that_is_not_before_its_view_is_refused() -> None:
    history = History(3)
    outcome = history.step(None)
    for step_id in (1, 7):
        late = dataclasses.replace(outcome, step_id=step_id)
        data = codec.encode_request(codec.StepReport(late, history.view()))
        with pytest.raises(ValueError, match="must be before"):
            codec.decode_request(data)


def test_a_view_whose_number_came_damaged_silences_one_stream_at_most() -> None:
    host, history = Host("none"), History(3)
    stream = host.new_stream()
    session, _ = host.hello(codec.Hello("e", LIMITS, 5), stream)
    far = dataclasses.replace(history.view(), step_id=2**60)
    assert host.report(session, stream, codec.StepReport(None, far)) is not None
    assert host.report(session, stream, codec.StepReport(None, history.view())) is None
    again = host.new_stream()
    host.hello(codec.Hello("e", LIMITS, 5), again)
    assert host.report(session, again, codec.StepReport(None, history.view())) is not None


def test_a_unary_call_takes_no_engine_from_the_stream_that_is_steered() -> None:
    host, history = Host("none"), History(3)
    stream = host.new_stream()
    session, _ = host.hello(codec.Hello("e", LIMITS, 5), stream)
    for other in (
        codec.Hello("e", LIMITS, 6),
        codec.Hello("e", dataclasses.replace(LIMITS, k_max=2), 5),
    ):
        with pytest.raises(ValueError, match="steered on a stream"):
            host.hello(other)
    assert host.report(session, stream, codec.StepReport(None, history.view())) is not None
