import dataclasses

import numpy as np
import pytest

from parlay.policies.policy import EngineLimits, Stateless, make_policy
from parlay.policies.types import BatchView, Plan, PlanSource, StepOutcome
from parlay.sim import episode as module
from parlay.sim.backend import SimBackend
from parlay.sim.episode import LatePlanner, MakePolicy, run_episode
from parlay.sim.filtering import FilteringOracle, filtering_oracle
from parlay.sim.load import arrivals_of, check_trace
from parlay.sim.oracle import clairvoyant, hazard_oracle, latents_of
from parlay.sim.scenario import Scenario, load_scenario
from parlay.sim.tally import Episode


def named(name: str, **settings: object) -> MakePolicy:
    return lambda limits, _: make_policy(name, settings, limits)


def run(scenario: Scenario, make: MakePolicy, steps: int, seed: int = 1) -> Episode:
    short = dataclasses.replace(scenario.shortened(steps), warm_up_steps=20)
    return run_episode(short, make, arrivals_of(short), seed)


def test_a_closed_loop_keeps_its_concurrency() -> None:
    episode = run(load_scenario("mixed"), named("none"), 60)
    assert episode.steps == 60
    assert episode.bucket_rows.sum() == 60 * 24
    assert 0 < episode.tokens <= 60 * 24


def test_the_same_seed_and_policy_make_the_same_episode() -> None:
    first, again = (run(load_scenario("mixed"), named("goodput"), 40) for _ in range(2))
    assert (first.tokens, first.step_s) == (again.tokens, again.step_s)
    assert run(load_scenario("mixed"), named("goodput"), 40, seed=2).tokens != first.tokens


def test_accepted_tokens_are_those_of_the_latents() -> None:
    seen: list[tuple[int, int]] = []

    class Recorder(Stateless):
        name = "recorder"

        def __init__(self, limits: EngineLimits, backend: SimBackend) -> None:
            self.inner = make_policy("fixed", {"proposer": "draft_model", "k": 3}, limits)
            self.backend = backend

        def decide(self, view: BatchView) -> Plan:
            rows = np.array([self.backend.rows[i] for i in view.request_id.tolist()])
            held = latents_of(self.backend).held(rows, view.output_tokens, 2)
            self.expected = dict(zip(view.request_id.tolist(), held.tolist(), strict=True))
            return self.inner.decide(view)

        def observe(self, outcome: StepOutcome) -> None:
            for i in np.flatnonzero(outcome.verified_k):
                k, want = int(outcome.verified_k[i]), self.expected[int(outcome.request_id[i])]
                seen.append((int(outcome.accepted[i]), min(k, want)))

    run(load_scenario("mixed"), Recorder, 40)
    assert len(seen) > 500
    assert all(accepted == want for accepted, want in seen)


def test_drafting_takes_time_and_emits_more() -> None:
    none = run(load_scenario("chat_low"), named("none"), 200)
    draft = run(load_scenario("chat_low"), named("fixed", proposer="draft_model", k=3), 200)
    assert draft.tokens > 1.5 * none.tokens
    assert draft.draft_s > 0.0 == none.draft_s
    assert draft.step_s / draft.steps > none.step_s / none.steps


def test_an_open_loop_serves_the_same_requests_whatever_the_policy() -> None:
    scenario = load_scenario("code_burst")
    scenario = dataclasses.replace(scenario, arrivals={**scenario.arrivals, "rate_scale": 2.0})
    none = run(scenario, named("none"), 60)
    fast = run(scenario, named("fixed", proposer="medusa", k=3), 60)
    assert len(none.ttft_s) > 20
    assert abs(fast.tokens - none.tokens) < 0.35 * none.tokens
    assert fast.steps < none.steps
    assert min(none.ttft_s) > 0.0


def test_a_small_cache_holds_fewer_requests_and_none_is_lost() -> None:
    scenario = load_scenario("small_gpu")
    tight = dataclasses.replace(scenario, kv_requests=4)
    episode = run(tight, named("fixed", proposer="ngram", k=8), 200)
    assert episode.bucket_rows.sum() < 0.9 * 200 * 32
    assert episode.tokens > 0


def test_late_plans_are_those_of_two_steps_before() -> None:
    handed: list[tuple[int, int]] = []

    class Spy(LatePlanner):
        def plan(self, view: BatchView) -> tuple[Plan | None, PlanSource]:
            plan, source = super().plan(view)
            if plan is not None:
                handed.append((view.step_id, plan.step_id))
            return plan, source

    policy = make_policy("goodput", {}, EngineLimits())
    spy = Spy(policy, 2)
    scenario = dataclasses.replace(load_scenario("mixed"), warm_up_steps=0).shortened(10)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LatePlanner", lambda made, delay: spy)
        late = dataclasses.replace(scenario, plan_delay_steps=2)
        run_episode(late, lambda limits, _: policy, arrivals_of(late), 1)
    assert handed
    assert all(now - made == 2 for now, made in handed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed", "chat_low"])
def test_who_knows_more_does_better(name: str) -> None:
    scenario = load_scenario(name)
    makes: dict[str, MakePolicy] = {
        "draft": named("fixed", proposer="draft_model", k=3),
        "medusa": named("fixed", proposer="medusa", k=3),
        "filter": lambda limits, backend: filtering_oracle(backend, limits),
        "hazard": lambda limits, backend: hazard_oracle(backend, limits),
        "clairvoyant": lambda limits, backend: clairvoyant(backend, limits),
    }
    speed = {key: run(scenario, make, 800).goodput for key, make in makes.items()}
    assert speed["clairvoyant"] > speed["hazard"] > 0.99 * speed["filter"]
    assert speed["filter"] > 0.99 * max(speed["draft"], speed["medusa"])


def test_the_filters_beliefs_are_calibrated() -> None:
    believed: list[float] = []
    right: list[float] = []
    before: list[float] = []

    class Checked(FilteringOracle):
        def decide(self, view: BatchView) -> Plan:
            plan = super().decide(view)
            rows = self._rows_of(view.request_id)
            old = view.output_tokens > 30
            at = view.output_tokens.astype(np.intp)
            believed.extend(self.filter.expected(rows, at)[old, 2, 0])
            right.extend(latents_of(self.backend).held(rows, at, 2)[old] > 0)
            before.extend(latents_of(self.backend).chance(rows, at, 2)[old, 0])
            return plan

    run(load_scenario("mixed"), lambda limits, backend: Checked(backend, limits), 150)
    expected, held, true = np.array(believed), np.array(right, float), np.array(before)
    assert len(held) > 2000
    assert abs(expected.mean() - held.mean()) < 0.03
    # Each request's own acceptance is tracked, not only its task's.
    assert np.corrcoef(expected, true)[0, 1] > 0.75


def test_an_unknown_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="azure_code"):
        check_trace("nowhere.csv")
