from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.tiny import AnyPlan
from tests.unit.plugins.fake_vllm import (
    FakeRequest,
    FakeScheduler,
    Output,
    Propose,
    Status,
    config,
    often_right,
)

from parlay.engine.planner import LocalPlanner
from parlay.engine.plugins import vllm_scheduler
from parlay.engine.plugins.vllm_scheduler import steered
from parlay.engine.plugins.vllm_steering import Steering
from parlay.engine.sparing import SparingPlanner
from parlay.policies.goodput import Goodput, GoodputSettings
from parlay.policies.policy import EngineLimits
from parlay.policies.types import (
    DRAFT_MODEL,
    NGRAM,
    NONE,
    BatchView,
    Plan,
    Proposer,
    StepOutcome,
    Truncated,
    task_id,
)


class Spy(AnyPlan):
    """Draws each row's proposer and k, or plans one k for all; keeps what it is shown and told."""

    def __init__(self, proposers: tuple[int, ...], k: int | None = None) -> None:
        most = 4 if k is None else k
        super().__init__(tuple(map(Proposer, proposers)), most, fixed_k=k is not None)
        self.views: list[BatchView] = []
        self.heard: list[StepOutcome] = []

    def decide(self, view: BatchView) -> Plan:
        self.views.append(view)
        return super().decide(view)

    def observe(self, outcome: StepOutcome) -> None:
        self.heard.append(outcome)


@pytest.fixture(autouse=True)
def module_of_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake = SimpleNamespace(SchedulerOutput=Output)
    monkeypatch.setitem(sys.modules, "vllm.v1.core.sched.output", fake)
    for name in ("PARLAY_POLICY", "PARLAY_SET", "PARLAY_SIDECAR", "PARLAY_VLLM_ROWS"):
        monkeypatch.delenv(name, raising=False)
    return iter(())


def made(
    spy: Spy, method: str = "draft_model", propose: Propose | None = None, **settings: Any
) -> Any:
    """A steered scheduler whose policy is the spy."""
    kind: Any = steered(FakeScheduler)
    scheduler = kind(config(method=method), propose or often_right(), **settings)
    scheduler.parlay.adapter.planner = LocalPlanner(spy)
    return scheduler


def request(
    name: str, tokens: int = 60, prompt: int = 10, seed: int = 0, **extra: Any
) -> FakeRequest:
    rng = np.random.default_rng((seed, len(name), *name.encode()))
    words = rng.integers(0, 5, prompt + tokens).tolist()
    sampling = SimpleNamespace(extra_args=extra or None, temperature=0.5, seed=7)
    return FakeRequest(name, words[:prompt], words[prompt:], sampling)


def run(scheduler: Any, count: int = 5) -> list[FakeRequest]:
    requests = [
        scheduler.add(request(f"r{i}", tokens=40 + 7 * i, prompt=6 + i)) for i in range(count)
    ]
    scheduler.run()
    return requests


def drafted(spy: Spy, proposer: int) -> int:
    return sum(int(o.drafted_k[o.proposer == proposer].sum()) for o in spy.heard)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "ngram", "medusa", "suffix"])
def test_answers_stay_and_every_token_is_told(method: str, asynchronous: bool) -> None:
    if asynchronous and method in ("ngram", "medusa", "suffix"):
        pytest.skip("vLLM does not schedule these asynchronously")
    column = {"ngram": NGRAM, "suffix": NGRAM, "medusa": 3}.get(method, DRAFT_MODEL)
    spy = Spy((NONE, NGRAM, column))
    scheduler = made(spy, method, chunk=4, asynchronous=asynchronous)
    requests = run(scheduler)
    assert all(r.all_token_ids[r.num_prompt_tokens :] == r.answer for r in requests)
    assert scheduler.parlay is not None
    assert drafted(spy, column) > 20
    for outcome in spy.heard:
        assert (outcome.accepted <= outcome.verified_k).all()
        assert (outcome.verified_k <= outcome.drafted_k).all()
        assert (outcome.drafted_k <= outcome.requested_k).all()
        assert ((outcome.emitted == outcome.accepted + 1) | (outcome.emitted == 0)).all()
        # Scheduled ahead, a step may be of requests that have ended meanwhile.
        assert outcome.emitted.any() or outcome.prefill_tokens or asynchronous
    # The first token comes from the prompt's last step, before there is a decision to report on.
    emitted = sum(int(o.emitted.sum()) for o in spy.heard)
    told = sum(len(r.answer) for r in requests) - emitted
    assert 0 <= told <= len(requests)


def test_what_was_verified_is_what_vllm_scheduled() -> None:
    spy = Spy((DRAFT_MODEL,))
    scheduler = made(spy)
    run(scheduler)
    scheduled = [sum(lengths.values()) for _, lengths in scheduler.steps]
    assert sum(scheduled) == sum(int(o.verified_k.sum()) for o in spy.heard) > 50


def test_the_drafter_goes_as_deep_as_the_deepest_request() -> None:
    spy = Spy((DRAFT_MODEL, NGRAM))
    scheduler = made(spy)
    run(scheduler)
    depths = [depth for depth, _ in scheduler.steps]
    planned = [o.draft_depth for o in spy.heard]
    assert set(depths) == {0, 1, 2, 3, 4}
    assert planned == depths[: len(planned)]


def test_heads_are_always_asked_for_all() -> None:
    scheduler = made(Spy((3,), k=1), "medusa")
    run(scheduler)
    assert {depth for depth, _ in scheduler.steps} == {4}
    assert max(max(lengths.values(), default=0) for _, lengths in scheduler.steps) == 1


def test_our_ngram_drafts_what_followed_before() -> None:
    spy = Spy((NGRAM,), k=4)
    scheduler = made(spy, "ngram", propose=lambda request, k: [9] * k)
    words = [1, 2, 3, 4, 5, 6]
    one = scheduler.add(FakeRequest("a", words * 2, words * 5))
    scheduler.run()
    assert one.all_token_ids == words * 7
    assert {depth for depth, _ in scheduler.steps} == {0}
    counters = scheduler.parlay.adapter.counters if scheduler.parlay else None
    assert counters is not None
    assert counters.accepted[NGRAM] == counters.drafted[NGRAM] >= 20


def test_hints_are_kept_to() -> None:
    spy = Spy((DRAFT_MODEL,), k=4)
    scheduler = made(spy)
    scheduler.add(request("off", parlay_speculate="false"))
    scheduler.add(request("two", parlay_max_k=2, parlay_task="code"))
    scheduler.add(request("odd", parlay_max_k="many"))
    scheduler.run()
    seen: dict[str, set[int]] = {}
    for _, lengths in scheduler.steps:
        for name, k in lengths.items():
            seen.setdefault(name, set()).add(k)
    assert "off" not in seen
    assert max(seen["two"]) == 2
    assert max(seen["odd"]) == 4
    assert any((view.task == task_id("code")).any() for view in spy.views)
    assert scheduler.parlay.adapter.counters.fallbacks["hints left aside"] == 1


@pytest.mark.parametrize("tokens", range(20, 26))
def test_nothing_is_drafted_beyond_the_end(tokens: int) -> None:
    for method, proposer in (("draft_model", DRAFT_MODEL), ("medusa", 3)):
        spy = Spy((proposer,), k=4)
        scheduler = made(spy, method, propose=often_right(right=1.0))
        scheduler.add(request("a", tokens=tokens))
        scheduler.run()
        # All drafts hold, but for those beyond the end.
        assert all((o.verified_k == o.accepted).all() for o in spy.heard)


def test_end_and_reason_are_told() -> None:
    spy = Spy((DRAFT_MODEL,), k=3)
    scheduler = made(spy)
    one = scheduler.add(request("a", tokens=20))
    scheduler.run()
    assert one.status is Status.FINISHED_LENGTH_CAPPED
    last = spy.heard[-1]
    assert last.truncated_by.tolist() == [Truncated.LENGTH]
    assert all((o.truncated_by == 0).all() for o in spy.heard[:-1])


def test_a_session_whose_answer_becomes_a_prompt_is_looked_at_anew() -> None:
    scheduler = made(Spy((DRAFT_MODEL,)))
    one, rows = scheduler.add(request("a")), scheduler.parlay.rows
    assert rows.group(["a"], [one]) is rows.group(["a"], [one])
    one.resumable = True
    rows.forget(["a"])
    first = rows.group(["a"], [one])
    one.prompt_token_ids = [*one.prompt_token_ids, 1, 2]
    assert rows.group(["a"], [one]).prompt_tokens.tolist() == [12] != first.prompt_tokens.tolist()


def test_requests_that_leave_are_forgotten() -> None:
    scheduler = made(Spy((DRAFT_MODEL, NGRAM)))
    first = scheduler.add(request("a"))
    scheduler.add(request("b", tokens=90))
    scheduler.abort(first)
    scheduler.run()
    scheduler.add(request("c"))
    scheduler.run()
    scheduler.add(request("d", tokens=2))
    scheduler.run()
    assert len(scheduler.parlay.rows) <= 1
    assert len(scheduler.parlay._steps) == 0


def test_a_batch_that_is_gone_is_not_told_of_the_next() -> None:
    spy = Spy((DRAFT_MODEL, NGRAM))
    scheduler = made(spy)
    for name in ("a", "b", "c"):
        scheduler.add(request(name))
        scheduler.run()
    assert all(outcome.emitted.any() for outcome in spy.heard)
    assert len(scheduler.parlay.adapter._requests) == 1  # the last, until another step


def test_an_unknown_output_is_left_alone() -> None:
    scheduler = made(Spy((DRAFT_MODEL,)))
    scheduler.add(request("a"))
    out = scheduler._schedule()
    assert scheduler.parlay.verdict(Output({"b": 1}, {}, set(), 1), None) is None
    assert scheduler.parlay.verdict(out, None) is None  # passed over


def test_a_prompt_in_parts_is_shown_as_such() -> None:
    spy = Spy((DRAFT_MODEL,))
    scheduler = made(spy, chunk=4)
    scheduler.add(request("a", prompt=10))
    scheduler.run()
    assert [view.prefill_tokens.tolist() for view in spy.views[:3]] == [[6], [2], [0]]
    assert [outcome.prefill_tokens for outcome in spy.heard[:3]] == [4, 2, 0]


def test_the_drafters_time_is_told_with_its_drafts() -> None:
    spy = Spy((DRAFT_MODEL,), k=3)
    scheduler = made(spy)
    asked = []

    def split(ms: float, tokens: int, kv: int, prompt: int, passes: int, rows: int) -> Any:
        asked.append((tokens, passes, rows))
        return ms / 4, 3 * ms / 4

    scheduler.parlay.times.split = split
    scheduler.add(request("a"))
    scheduler.run()
    assert set(asked) == {(4, 2, 1)} | set(asked[-2:])
    for outcome in spy.heard[1:]:
        drafting = float(outcome.draft_ms[DRAFT_MODEL])
        assert drafting > 0.0
        assert outcome.step_ms == pytest.approx(
            outcome.verify_ms + drafting + float(outcome.draft_ms[NGRAM]), rel=1e-3
        )


def test_our_ngram_is_scored_where_it_does_not_draft() -> None:
    spy = Spy((DRAFT_MODEL,), k=2)
    scheduler = made(spy)
    words = [1, 2, 3, 4, 5, 6]
    scheduler.add(FakeRequest("a", words * 2, words * 5))
    scheduler.run()
    shadows = [outcome.shadow for outcome in spy.heard if len(outcome.shadow)]
    assert shadows
    assert all((s.proposer == NGRAM).all() and (s.matched == s.observed).all() for s in shadows)


class Slow(Goodput):
    """A policy whose every call takes long, so that its plans serve again; hears like the Spy."""

    def __init__(self, limits: EngineLimits) -> None:
        super().__init__(GoodputSettings(), limits)
        self.heard: list[StepOutcome] = []
        self.asked = 0

    def decide(self, view: BatchView) -> Plan:
        self.asked += 1
        time.sleep(0.002)
        return super().decide(view)

    def observe(self, outcome: StepOutcome) -> None:
        self.heard.append(outcome)
        super().observe(outcome)

    def observe_all(self, outcomes: Sequence[StepOutcome]) -> None:
        self.heard.extend(outcomes)
        super().observe_all(outcomes)


def test_steps_between_decisions_are_told_all_the_same() -> None:
    kind: Any = steered(FakeScheduler)
    scheduler = kind(config(method="ngram"), lambda request, k: [9] * k)
    adapter = scheduler.parlay.adapter
    policy = Slow(adapter.limits)
    adapter.planner = SparingPlanner(policy, share=0.01, most_steps=8)
    words = [1, 2, 3, 4, 5, 6]
    requests = [scheduler.add(FakeRequest(f"r{i}", words * 3, words * (9 + i))) for i in range(3)]
    for _ in range(20):
        scheduler._finish(scheduler._schedule())
    requests += [scheduler.add(FakeRequest(f"n{i}", words * 2, words * 7)) for i in range(2)]
    hints = (
        {"parlay_speculate": "false"},
        {"parlay_proposers": "draft_model"},
        {"parlay_max_k": 1},
    )
    for hint in hints:
        asked = SimpleNamespace(extra_args=hint, temperature=0.0, seed=None)
        requests.append(scheduler.add(FakeRequest(str(hint), words * 2, words * 7, asked)))
    scheduler.run()
    assert all(r.all_token_ids[r.num_prompt_tokens :] == r.answer for r in requests)
    counters = adapter.counters
    # What is heard last is told when nobody runs any more, and waits for the next decision.
    assert counters.steps == len(policy.heard) + len(adapter.planner._untold)
    told = [*policy.heard, *(make() for make in adapter.planner._untold)]
    assert policy.asked < len(told) / 2
    assert [o.step_id for o in told] == sorted({o.step_id for o in told})
    # Each request's first token comes before there is a decision to report on.
    assert sum(int(o.emitted.sum()) for o in told) == sum(len(r.answer) - 1 for r in requests)
    scheduled = sum(sum(lengths.values()) for _, lengths in scheduler.steps)
    assert scheduled == sum(int(o.verified_k.sum()) for o in told) > 50
    assert sum(int((o.truncated_by == Truncated.LENGTH).sum()) for o in told) == len(requests)
    assert all((o.accepted <= o.verified_k).all() for o in told)
    lengths = {name: k for _, ks in scheduler.steps for name, k in sorted(ks.items()) if k}
    assert lengths.keys() & set(map(str, hints)) == {str(hints[2])}
    assert lengths[str(hints[2])] == 1
    ends = {int(i): o for o in told for i in o.request_id[o.truncated_by > 0]}
    assert len(ends) == len(requests)
    assert counters.drafted[NGRAM] == scheduled


def test_one_k_for_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARLAY_VLLM_ROWS", "uniform")
    scheduler = made(Spy((DRAFT_MODEL,)), propose=often_right(right=0.3))
    for i in range(5):
        scheduler.add(request(f"r{i}", tokens=60))
    scheduler.run()
    mixed = [set(lengths.values()) for _, lengths in scheduler.steps if len(lengths) == 5]
    assert len(mixed) > 10
    assert sum(len(ks) == 1 for ks in mixed) >= len(mixed) - 3  # but for the last of a request


def test_where_the_policy_fails_nobody_speculates() -> None:
    class Broken(Spy):
        def decide(self, view: BatchView) -> Plan:
            raise RuntimeError("no idea")

    scheduler = made(Broken((DRAFT_MODEL,)))
    requests = run(scheduler)
    assert all(r.all_token_ids[r.num_prompt_tokens :] == r.answer for r in requests)
    assert not any(lengths for _, lengths in scheduler.steps)
    assert scheduler.parlay.adapter.counters.errors > 0


@pytest.mark.parametrize("part", ["schedule", "cut_placeholders", "drafts", "verdict", "commit"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_where_we_fail_vllm_goes_on_as_configured(
    part: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = made(Spy((DRAFT_MODEL,), k=2), asynchronous=asynchronous)
    calls, ordinary = [], getattr(Steering, part)

    def fail(self: Steering, *args: Any) -> Any:
        calls.append(part)
        if len(calls) == 5:
            raise RuntimeError("a mistake of ours")
        return ordinary(self, *args)

    monkeypatch.setattr(Steering, part, fail)
    with caplog.at_level(logging.INFO, "vllm.parlay"):
        requests = run(scheduler)
    assert all(r.all_token_ids[r.num_prompt_tokens :] == r.answer for r in requests)
    if asynchronous and part == "drafts":
        assert not calls
        return
    assert scheduler.parlay is None
    assert caplog.text.count("parlay stops steering") == 1
    assert max(max(lengths.values(), default=0) for _, lengths in scheduler.steps[-9:]) == 4


def test_says_in_one_line_what_it_does_and_what_it_did(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.parlay"):
        scheduler = made(Spy((NONE,)))
        scheduler.shutdown()
    first, last = (r.getMessage() for r in caplog.records)
    assert first == (
        "parlay steers this engine: draft_model or our n-gram, up to 4 tokens, a k for each"
        " request, synchronous scheduling, decided by pilot"
    )
    assert last.startswith("parlay: {'steps': 0")


def test_a_setting_that_makes_no_sense_leaves_the_engine_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PARLAY_POLICY", "wishful")
    kind: Any = steered(FakeScheduler)
    with caplog.at_level(logging.INFO, "vllm.parlay"):
        scheduler = kind(config(), often_right())
    assert scheduler.parlay is None
    assert [r.getMessage()[:61] for r in caplog.records] == [
        "parlay does not steer this engine: unknown policy 'wishful'; "
    ]
    requests = run(scheduler)
    assert all(r.all_token_ids[r.num_prompt_tokens :] == r.answer for r in requests)


def test_a_subclass_is_made_once() -> None:
    assert steered(FakeScheduler) is steered(FakeScheduler)
    assert vllm_scheduler.steered(FakeScheduler).__name__ == "ParlayFakeScheduler"
