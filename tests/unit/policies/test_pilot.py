"""The flagship: goodput's plan where every token counts the same, another where it does not."""

import numpy as np
import pytest
from tests.unit.policies.synthetic import LIMITS, make_request, play, view_of

from parlay.policies.guard import Guard, guarded
from parlay.policies.pilot import Pilot, PilotSettings
from parlay.policies.policy import Policy, Stateless, make_policy
from parlay.policies.synthetic import LIMITS as SYNTHETIC
from parlay.policies.synthetic import History
from parlay.policies.types import Array, BatchView, Plan, StepOutcome

TAGS = ["edit", "chat", "logs", "hostile"] * 2


def unguarded() -> Pilot:
    return Pilot(PilotSettings(guard=False), LIMITS)


class Targeted:
    """The pilot in a world where some rows have latency targets."""

    def __init__(self, target_ms: float, rows: slice) -> None:
        self.inner, self.target_ms, self.rows = unguarded(), target_ms, rows
        self.weights: list[Array] = []

    def decide(self, view: BatchView) -> Plan:
        view.tpot_target_ms[self.rows] = self.target_ms
        plan = self.inner.decide(view)
        self.weights.append(self.inner._urgency(view))
        return plan

    def observe(self, outcome: StepOutcome) -> None:
        self.inner.observe(outcome)


@pytest.mark.parametrize("tags", [["chat"], TAGS])
def test_without_target_scarcity_or_unlike_needs_it_plans_as_goodput_does(
    tags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pilot, goodput = unguarded(), make_policy("goodput", {}, LIMITS)
    # As if every rung had been taken.
    pilot.staircase.tries[:] = 99
    if len(tags) > 1:
        monkeypatch.setattr(pilot, "_need", lambda: np.ones(len(pilot._at)))
    plays = [play(policy, tags, 60) for policy in (pilot, goodput)]
    for one, other in zip(plays[0].plans, plays[1].plans, strict=True):
        assert (one.proposer == other.proposer).all()
        assert (one.k == other.k).all()


def weights(target_ms: float) -> Array:
    policy = Targeted(target_ms, slice(0, 4))
    play(policy, TAGS, 80)  # type: ignore[arg-type]
    return np.stack(policy.weights[40:])


def test_a_request_behind_its_target_counts_more_and_one_with_time_to_spare_less() -> None:
    hurried, relaxed = weights(20.0), weights(5000.0)
    assert hurried[:, :4].mean() > 1.5
    assert relaxed[:, :4].mean() < 0.6
    assert hurried.max() <= 4.0
    assert (hurried[:, 4:] == 1.0).all()


def test_a_token_that_counts_more_is_drafted_for_more() -> None:
    policy = unguarded()
    play(policy, TAGS, 150)
    requests = [make_request(5, n, tag) for n, tag in enumerate(["chat"] * 16)]
    view = view_of(requests, 200)
    policy._keep(view.request_id)
    core = policy.core
    weight = np.ones(16)
    even = core.weighted(view, weight, 0.0)
    weight[:4] = 4.0
    uneven = core.weighted(view, weight, 0.0)
    assert uneven.k[:4].sum() >= even.k[:4].sum()
    assert uneven.k[:4].sum() > uneven.k[4:8].sum()


def test_a_full_cache_makes_drafting_dear() -> None:
    policy = unguarded()
    play(policy, ["logs"] * 8, 150)
    requests = [make_request(5, n, "logs") for n in range(8)]
    drafted = []
    for free in (1000, 40, 0):
        view = view_of(requests, 200)
        view.free_blocks, view.total_blocks = free, 1000
        policy.decide(view)  # a token's worth is the last plan's
        drafted.append(int(policy.decide(view).k.sum()))
    assert drafted[0] > drafted[1] > drafted[2] == 0


def test_nobody_waits_for_ever_while_others_draft() -> None:
    policy = Pilot(PilotSettings(guard=False, starved_steps=10), LIMITS)
    view = view_of([make_request(1, n, "chat") for n in range(3)], 0)
    policy.decide(view)
    policy._waited[:] = [0, 9, 10]
    assert policy._urgency(view).tolist() == [1.0, 1.0, 8.0]


def test_a_request_whose_tokens_come_one_by_one_counts_more() -> None:
    policy = unguarded()
    play(policy, ["logs", "hostile"] * 4, 120)
    view = view_of([make_request(0, n, "chat") for n in range(2)], 0)
    policy._keep(view.request_id)
    assert policy._need().tolist() == [1.0, 1.0], "nothing is known of them"
    policy._pace_ms[:] = [1.0, 3.0]
    assert policy._need() == pytest.approx([0.5**0.375, 1.5**0.375])
    policy._pace_ms[:] = [1.0, np.nan]
    assert policy._need().tolist() == [1.0, 1.0]
    policy._pace_ms[:] = [1.0, 999.0]
    assert policy._need().min() == pytest.approx(0.2**0.375)


def test_the_guard_is_around_it_unless_it_is_off() -> None:
    assert isinstance(make_policy("pilot", {}, LIMITS), Guard)
    assert isinstance(make_policy("pilot", {"guard": "false"}, LIMITS), Pilot)


def test_a_policy_that_expects_much_is_not_tested_at_once() -> None:
    def controls(expected: float) -> int:
        policy = make_policy("pilot", {}, LIMITS)
        assert isinstance(policy, Guard)
        core = policy.policy
        assert isinstance(core, Pilot)
        played = 0

        class Said:
            name = "said"
            expected_gain = expected

            def __getattr__(self, what: str) -> object:
                return getattr(core, what)

        policy.policy = Said()  # type: ignore[assignment]
        for plan in play(policy, TAGS, 120).plans:
            played += bool((plan.propensity == 0.5).all() and not plan.k.any())
        return played

    assert controls(1.0) > 0
    assert controls(2.5) == 0


@pytest.mark.parametrize("guard", ["true", "false"])
def test_saved_and_loaded_it_goes_on_with_the_same_decisions(guard: str) -> None:
    def made() -> Policy:
        return make_policy("pilot", {"guard": guard}, LIMITS)

    whole, first = made(), made()
    play(first, TAGS, 90)
    saved = {key: np.array(value) for key, value in first.state().items()}
    second = made()
    second.load(saved)
    play(whole, TAGS, 90)
    for policy in (whole, second):
        # The same requests again, under new numbers.
        policy.plans = play(policy, TAGS, 40, seed=3).plans  # type: ignore[attr-defined]
    for one, other in zip(whole.plans, second.plans, strict=True):  # type: ignore[attr-defined]
        assert (one.k == other.k).all()
        assert (one.proposer == other.proposer).all()


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="incomplete"):
        unguarded().load({"ids": np.zeros(2)})


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"k_max": "0"}, "k_max"), ({"starved_steps": "0"}, "starved"), ({"seed": "-1"}, "seed")],
)
def test_settings_out_of_range_are_refused(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_policy("pilot", settings)


def test_plans_say_who_made_them() -> None:
    view = view_of([make_request(1, n, "chat") for n in range(3)], 0)
    plan = unguarded().decide(view)
    assert plan.policy_version == "pilot/1"


def test_steps_told_at_once_are_measured_by_the_guard_and_teach_the_paces() -> None:
    single, together = (make_policy("pilot", {}, SYNTHETIC) for _ in range(2))
    assert isinstance(single, Guard)
    assert isinstance(together, Guard)
    history = History(4)
    for _ in range(30):
        told = []
        for _ in range(4):
            plan = single.decide(history.view())
            together.decide(history.view())
            told.append(history.step(plan))
            single.observe(told[-1])
        together.observe_all(told)
    assert together.report().elapsed_s == pytest.approx(single.report().elapsed_s)
    assert single.report().elapsed_s > 0.5
    paces = [p.policy._pace_ms for p in (single, together) if isinstance(p.policy, Pilot)]
    np.testing.assert_allclose(paces[1], paces[0], rtol=0.2)


def test_a_guard_tells_a_policy_that_hears_one_step_at_a_time_so() -> None:
    heard = []

    class One(Stateless):
        name = "one"

        def decide(self, view: BatchView) -> Plan:
            return make_policy("none", None, SYNTHETIC).decide(view)

        def observe(self, outcome: StepOutcome) -> None:
            heard.append(outcome.step_id)

    history, guard = History(2), guarded(One())
    told = [history.step(guard.decide(history.view())) for _ in range(3)]
    guard.observe_all(told)
    assert heard == [outcome.step_id for outcome in told]
