"""The published baselines do what their sources say; bad settings get one clear line."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.policies.synthetic import LIMITS, play
from tests.unit.policies.test_acceptance import outcome_of
from tests.unit.policies.test_allocate import view_of

from parlay.policies.allocate import fit_plan
from parlay.policies.policy import EngineLimits, make_policy, registry
from parlay.policies.types import (
    DRAFT_MODEL,
    K_LIMIT,
    NGRAM,
    NONE,
    Proposer,
    StopKind,
)

DATA = Path(os.environ.get("PARLAY_DATA", "../shared/data"))
REPLAY = DATA / "acceptance/specbench_bnukhkadiev"
REPLAY /= "spec_bench.vicuna-7b-v1.3-sps-68m-float16-temp-0.0.jsonl"


def decided(name: str, settings: dict[str, Any], rows: int = 3, **changes: Any) -> Any:
    policy = make_policy(name, settings, LIMITS)
    view = view_of(list(range(rows)), **changes)
    return fit_plan(policy.decide(view), view)


def test_none_is_a_true_bypass() -> None:
    fit = decided("none", {})
    assert not fit.k.any()
    assert fit.proposer.tolist() == [NONE] * 3


@pytest.mark.parametrize(("proposer", "column"), [("ngram", NGRAM), ("draft_model", DRAFT_MODEL)])
def test_fixed_gives_every_row_the_same(proposer: str, column: int) -> None:
    fit = decided("fixed", {"proposer": proposer, "k": 5})
    assert fit.k.tolist() == [5] * 3
    assert fit.proposer.tolist() == [column] * 3
    assert not decided("fixed", {"proposer": proposer, "k": 0}).k.any()


def test_a_request_that_joins_late_gets_the_same_too() -> None:
    plan = make_policy("fixed", {"k": 4}, LIMITS).decide(view_of([1, 2]))
    assert fit_plan(plan, view_of([1, 2, 3])).k.tolist() == [4, 4, 4]


def test_the_gate_goes_by_match_length() -> None:
    fit = decided(
        "ngram_gate",
        {"min_match": 4, "k_ngram": 7, "k_draft": 2},
        match_tokens=np.array([3, 4, 9], np.int32),
    )
    assert fit.proposer.tolist() == [DRAFT_MODEL, NGRAM, NGRAM]
    assert fit.k.tolist() == [2, 7, 7]


def test_the_gate_without_a_draft_model_is_the_ngram_alone() -> None:
    limits = EngineLimits(proposer_mask=1 << Proposer.NGRAM)
    view = view_of([1, 2], match_tokens=np.array([1, 9], np.int32))
    fit = fit_plan(make_policy("ngram_gate", {}, limits).decide(view), view)
    assert fit.k.tolist() == [0, 7]


@pytest.mark.parametrize(
    ("running", "k"), [(1, 4), (4, 4), (5, 2), (8, 2), (9, 1), (32, 1), (33, 0), (500, 0)]
)
def test_the_tables_keys_are_upper_bounds(running: int, k: int) -> None:
    policy = make_policy("batch_table", {"up_to_running": (4, 8, 32), "k": (4, 2, 1)}, LIMITS)
    view = view_of([1, 2])
    view.running = running
    assert fit_plan(policy.decide(view), view).k.tolist() == [k, k]


def test_hf_heuristic_moves_by_two_up_and_one_down() -> None:
    policy = make_policy("hf_heuristic", {"k_start": 2}, LIMITS)
    view = view_of([1, 2])
    seen = []
    for held in ([2, 0], [4, 0], [0, 0], [5, 1]):
        k = policy.decide(view).k
        seen.append(k.tolist())
        accepted = np.minimum(held, k)
        policy.observe(outcome_of(view.request_id, np.full(2, DRAFT_MODEL), k, accepted))
    assert seen == [[2, 2], [4, 1], [6, 1], [5, 1]]
    assert policy.decide(view).k.tolist() == [7, 3]


def test_hf_heuristic_starts_anew_or_goes_on() -> None:
    for transient, start in ((True, 5), (False, 7)):
        policy = make_policy("hf_heuristic", {"transient": transient}, LIMITS)
        policy.decide(view_of([1]))
        five, draft = np.array([5]), np.array([DRAFT_MODEL])
        policy.observe(outcome_of(np.array([1]), draft, five, five))
        assert policy.decide(view_of([1, 2])).k.tolist() == [7, start]
        # An id without output is a new request, though an older one had the same.
        fresh = view_of([1, 2], output_tokens=np.zeros(2, np.int32))
        assert policy.decide(fresh).k.tolist() == [start, start]


def test_gamma_tune_goes_beyond_what_held_or_towards_it() -> None:
    policy, view, seen = make_policy("gamma_tune", {}, LIMITS), view_of([1]), []
    for accepted in (3, 2, 3):
        k = policy.decide(view).k
        policy.observe(
            outcome_of(view.request_id, np.full(1, DRAFT_MODEL), k, np.array([accepted]))
        )
        seen.append(int(policy.decide(view).k[0]))
    assert seen == [5, 3, 5]
    again = make_policy("gamma_tune", {}, LIMITS)
    again.load(policy.state())
    assert again.decide(view).k.tolist() == [5]


@pytest.mark.parametrize(
    ("name", "kind", "threshold"),
    [("spec_dec_pp", StopKind.SURVIVAL, 0.7), ("svip", StopKind.ENTROPY, 0.3)],
)
def test_stoppers_draft_deep_and_leave_the_end_to_the_rule(
    name: str, kind: StopKind, threshold: float
) -> None:
    plan = make_policy(name, {"k_max": 6}, LIMITS).decide(view_of([1, 2]))
    assert plan.stop_rule.kind is kind
    assert plan.stop_rule.threshold == pytest.approx(threshold)
    assert plan.k.tolist() == [6, 6]
    assert set(plan.proposer) == {DRAFT_MODEL}


def tiers(policy: Any, running: int, accepted: int, batches: int) -> list[int]:
    """Return k after each of some batches in which every row accepts `accepted` or all its k."""
    view, ks = view_of(list(range(running))), []
    view.running = running
    for _ in range(batches):
        k = policy.decide(view).k
        held = np.minimum(k, accepted)
        policy.observe(outcome_of(view.request_id, np.full(running, DRAFT_MODEL), k, held))
        ks.append(int(policy.decide(view).k[0]))
    return ks


def test_ema_tiers_climb_and_step_down_every_five_batches() -> None:
    policy = make_policy("ema_tiers", {}, LIMITS)
    rising = tiers(policy, 2, accepted=9, batches=40)
    assert rising[:14] == [3] * 14, "it warms up for ten batches and moves at the fifteenth"
    assert rising[14] == 5
    assert rising[-1] == 7
    assert tiers(policy, 2, accepted=0, batches=60)[-1] == 1
    assert tiers(policy, 70, accepted=9, batches=20) == [0] * 20, "a large batch has one tier"


def test_ema_tiers_keeps_batch_sizes_apart() -> None:
    policy = make_policy("ema_tiers", {}, LIMITS)
    tiers(policy, 8, accepted=0, batches=60)
    assert tiers(policy, 2, accepted=9, batches=1) == [3]
    again = make_policy("ema_tiers", {}, LIMITS)
    again.load(policy.state())
    assert (
        again.decide(view_of(list(range(9)))).k.tolist()
        == [int(policy.decide(view_of(list(range(9)))).k[0])] * 9
    )
    with pytest.raises(ValueError, match="tier that there is not"):
        again.load({**policy.state(), "tier": np.array([9, 0, 0, 0])})


@pytest.mark.skipif(not REPLAY.exists(), reason="set PARLAY_DATA to the folder of public data")
def test_hf_heuristic_replays_a_logged_run() -> None:
    steps = violations = 0
    for line in REPLAY.read_text().splitlines()[:40]:
        choice = json.loads(line)["choices"][0]
        lengths = iter(choice["accept_lengths"])
        for turn, count in enumerate(choice["decoding_steps"]):
            policy = make_policy("hf_heuristic", {}, EngineLimits(k_max=K_LIMIT))
            ids = np.array([turn], np.uint64)
            for _ in range(count):
                k = policy.decide(view_of([turn])).k
                accepted = np.array([next(lengths) - 1])
                violations += int(accepted[0] > k[0])
                steps += 1
                policy.observe(outcome_of(ids, np.full(1, DRAFT_MODEL), k, accepted))
    assert steps > 3000
    assert violations == 0


def test_hf_heuristics_state_goes_round() -> None:
    policy = make_policy("hf_heuristic", {}, LIMITS)
    play(policy, ["chat", "edit"], 30)
    other = make_policy("hf_heuristic", {}, LIMITS)
    other.load(policy.state())
    ids = sorted(int(i) for i in policy.state()["request_id"])
    assert other.decide(view_of(ids)).k.tolist() == policy.decide(view_of(ids)).k.tolist()
    with pytest.raises(ValueError, match="incomplete"):
        other.load({"k": np.zeros(1)})


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("fastest", {}, "unknown policy 'fastest'; choose one of ada_edl, batch_table"),
        ("fixed", {"gamma": 3}, "no setting 'gamma'; it has k, proposer"),
        ("fixed", {"k": "many"}, "k=many should be of type int"),
        ("fixed", {"k": -1}, "k must be between 0 and 64, not -1"),
        ("fixed", {"k": "65"}, "k must be between 0 and 64, not 65"),
        ("fixed", {"k": 2.5}, "k must be between 0 and 64, not 2.5"),
        ("fixed", {"proposer": "eagle"}, "unknown proposer 'eagle'; choose one of ngram, draft"),
        ("hf_heuristic", {"k_start": 0}, "k_start must be between 1 and 64, not 0"),
        ("hf_heuristic", {"proposer": "none"}, "unknown proposer 'none'"),
        ("hf_heuristic", {"transient": "maybe"}, "transient=maybe should be of type bool"),
        ("batch_table", {"k": (1,)}, "need one entry a range"),
        ("batch_table", {"up_to_running": (4, 4, 8)}, "must rise"),
        ("batch_table", {"k": (4, 99, 1)}, "not 99"),
        ("batch_table", {"k": "4,x,1"}, "k=4,x,1 should be values of type int"),
        ("ngram_gate", {"min_match": 0}, "min_match must be 1 or more, not 0"),
        ("ngram_gate", {"k_draft": 70}, "k_draft must be between 0 and 64, not 70"),
        ("goodput", {"k_max": 0}, "k_max must be between 1 and 64, not 0"),
        ("gamma_tune", {"eta": 1.0}, "eta must be at least 0 and below 1"),
        ("gamma_tune", {"delta": 0}, "delta must be between 1 and 64"),
        ("spec_dec_pp", {"threshold": 1.5}, "threshold must be between 0 and 1"),
        ("svip", {"threshold": "0"}, "threshold must be above 0"),
        ("ema_tiers", {"proposer": "oracle"}, "unknown proposer 'oracle'"),
        ("suffix_length", {"least_chance": 0.0}, "least_chance must be between 0 and 1"),
        ("goodput_batch", {"k_max": 0}, "k_max must be between 1 and 64"),
        ("hf_confidence", {"threshold": -0.1}, "threshold must be between 0 and 1"),
        ("ucb_spec", {"arms": "ngram:3"}, "two or more"),
        ("ucb_spec", {"arms": "ngram:3,ngram"}, "should be proposer:k"),
        ("ucb_spec", {"arms": "ngram:3,oracle:2"}, "unknown proposer 'oracle'"),
        ("ucb_spec", {"arms": "ngram:3,ngram:99"}, "must be between 1 and 64"),
        ("ucb_spec", {"delta": 1}, "delta must be between 0 and 1"),
        ("exp3_spec", {"seed": -1}, "seed must be 0 or more"),
        ("linucb", {"alpha": -1}, "alpha must be 0 or more"),
        ("thompson", {"scale": 0}, "scale must be above 0"),
        ("beg_mab", {"epsilon": 0}, "epsilon must be between 0 and 1"),
        ("none", {"k": 1}, "has no setting 'k'; it has none"),
    ],
)
def test_bad_settings_get_one_clear_line(name: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        make_policy(name, settings, LIMITS)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_settings_may_be_strings() -> None:
    policy = make_policy("batch_table", {"up_to_running": "2,6", "k": "3,1"}, LIMITS)
    view = view_of([1, 2])
    view.running = 5
    assert policy.decide(view).k.tolist() == [1, 1]


@pytest.mark.parametrize("name", sorted(registry()))
def test_every_policy_keeps_the_protocol(name: str) -> None:
    policy = make_policy(name, {}, LIMITS)
    assert policy.name == name
    played = play(policy, ["edit", "chat"], 12)
    assert min(played.tokens) >= 2
    again = make_policy(name, {}, LIMITS)
    again.load(policy.state())
    again.merge([policy.delta(0)])
    empty = policy.decide(view_of([]))
    assert len(empty) == 0
