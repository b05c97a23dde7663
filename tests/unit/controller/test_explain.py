"""Explanations, against the policy's own plan and against pricing the batch anew."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.watching import Clock, run_steps

from parlay.controller.explain import explained, screen
from parlay.controller.host import Host
from parlay.controller.observatory import Observatory, Unknown
from parlay.controller.overview import overview
from parlay.controller.top import screen as top_screen
from parlay.policies.baselines.rows import rows_plan
from parlay.policies.explain import BECAUSE, explain
from parlay.policies.policy import EngineLimits
from parlay.policies.types import Proposer, Reason


def watched(policy: str, steps: int = 120, **more: Any) -> tuple[Host, Observatory, Any]:
    observatory = Observatory(Clock())
    host = Host(policy, watch=observatory)
    _, seen = run_steps(host, "e", steps, **more)
    observatory.fold()
    return host, observatory, seen


def text_of(found: Any, columns: int = 200) -> str:
    console = Console(width=columns)
    with console.capture() as capture:
        console.print(found)
    return capture.get()


@pytest.mark.parametrize("edges", [(), (8, 16, 32, 64)])
def test_the_chosen_options_rate_is_the_plans_own(edges: tuple[int, ...]) -> None:
    """A plan's token value is one over its rate: the explanation must come to the same."""
    limits = EngineLimits(proposer_mask=0b111, k_max=8, token_budget=4096, bucket_edges=edges)
    observatory = Observatory(Clock())
    host = Host("goodput", watch=observatory)
    session, seen = run_steps(host, "e", 150, limits=limits)
    for _ in range(40):
        view = copy.copy(seen[-1][0])
        view.step_id = session.last_view + 1
        made = host.decide(session, view)
        assert made is not None
        plan = made
        if (plan.reason == Reason.BEST_GOODPUT).any() and not (plan.reason == Reason.EXPLORE).any():
            break
    else:
        pytest.fail("no step drafted without a try")
    row = int(np.flatnonzero(plan.k > 0)[0])
    why = explain(session.policy, view, plan, int(view.request_id[row]))
    assert why.planned_tokens_per_s == pytest.approx(1e3 / plan.token_value_ms, rel=1e-5)
    assert why.chosen in why.options
    assert why.chosen is not None
    assert (why.chosen.proposer, why.chosen.k) == (why.proposer, int(plan.k[row]))


def test_the_runner_up_is_the_best_of_another_proposer_and_beats_nothing_chosen() -> None:
    host, observatory, seen = watched("goodput")
    decision = observatory.engines["e"].newest[-1]
    policy = host.session("e").policy
    checked = 0
    for request_id in decision.view.request_id.tolist():
        why = explain(policy, decision.view, decision.plan, request_id)
        if why.runner_up is None or why.chosen is None:
            continue
        others = [o for o in why.options if o.proposer != why.proposer]
        assert max(o.batch_tokens_per_s for o in others) == why.runner_up.batch_tokens_per_s
        if why.reason is Reason.BEST_GOODPUT:
            assert why.runner_up.batch_tokens_per_s <= 1.02 * why.chosen.batch_tokens_per_s
            checked += 1
    assert checked
    assert seen


def test_explaining_leaves_the_policy_as_it_was() -> None:
    host, observatory, _ = watched("pilot")
    policy = host.session("e").policy
    before = {name: np.array(array) for name, array in policy.state().items()}
    view = copy.copy(observatory.engines["e"].newest[-1].view)
    view.request_id = view.request_id + np.uint64(10_000)  # requests that it has never seen
    plan = rows_plan(view, Proposer.NONE, np.zeros(len(view), np.int16), Reason.NO_GAIN)
    why = explain(policy, view, plan, int(view.request_id[0]))
    assert why.by_guard
    assert why.survival
    for name, array in policy.state().items():
        np.testing.assert_array_equal(array, before[name])


def test_a_policy_without_estimates_says_only_why() -> None:
    _, observatory, seen = watched("ngram_gate", 5)
    found = explained(observatory, int(seen[-1][0].request_id[0]))
    assert found["options"] == []
    assert found["survival"] == {}
    assert found["because"] in {*BECAUSE.values(), "its prompt is being computed"}
    assert found["because"] in text_of(screen(found))


def test_what_is_shown_says_estimates_costs_and_the_runner_up() -> None:
    _, observatory, _ = watched("pilot")
    plan = observatory.engines["e"].newest[-1].plan
    row = int(np.flatnonzero(plan.k > 0)[0])
    found = explained(observatory, int(plan.request_id[row]))
    text = text_of(screen(found))
    assert f"request {plan.request_id[row]}" in text
    assert f"draft {plan.k[row]} token" in text
    assert "runner-up" in text
    assert "tokens/s as planned" in text
    assert "a token is worth" in text
    assert found["against"][found["options"].index(found["chosen"])] == 0.0


def test_a_request_or_engine_that_is_not_known_is_said_in_a_line() -> None:
    _, observatory, _ = watched("fixed", 2)
    with pytest.raises(Unknown, match="request 999999 is in no decision that is kept"):
        explained(observatory, 999_999)
    kept = int(observatory.engines["e"].newest[-1].view.request_id.max())
    with pytest.raises(Unknown, match=f"kept are, among others, {kept}"):
        explained(observatory, 999_999)
    with pytest.raises(Unknown, match="none is kept yet"):
        explained(Observatory(), 999_999)
    with pytest.raises(Unknown, match="no engine 'x' was heard; known: e"):
        explained(observatory, 1, "x")


@pytest.mark.parametrize("columns", [80, 160])
def test_top_fits_its_terminal_and_shows_what_matters(columns: int) -> None:
    _, observatory, seen = watched("pilot")
    text = text_of(top_screen(overview(observatory) | {"policy": "pilot"}, columns), columns)
    assert max(len(line) for line in text.splitlines()) <= columns
    for word in ("pilot", "tokens/s", "measured", "draft_model", "because", "summarise"):
        assert word in text
    assert str(seen[-1][0].request_id[0]) in text
