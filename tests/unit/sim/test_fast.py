"""The fast loop: the costs of the cost models, the engine's loop in distribution, honest credit."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from parlay.policies.features import ACTION_NAMES, K_OF, PROPOSER_OF
from parlay.policies.policy import make_policy
from parlay.policies.types import DRAFT_MODEL, MEDUSA, NGRAM, NONE, Array
from parlay.sim.costs import TableCosts, Work, load_costs
from parlay.sim.episode import TOKEN_BUDGET, run_episode
from parlay.sim.fast import FastLoop
from parlay.sim.fast_costs import FastCosts
from parlay.sim.fast_seen import features_of
from parlay.sim.kinds import Kind, kinds_of
from parlay.sim.load import arrivals_of
from parlay.sim.scenario import load_scenario


def kinds(name: str) -> list[Kind]:
    return kinds_of(load_scenario(name), seed=3)


def at_random(loop: FastLoop, steps: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        may = loop.allowed()
        action = (rng.random(may.shape) * may).argmax(axis=1)
        loop.step(PROPOSER_OF[action], K_OF[action])


def test_costs_are_those_of_the_cost_models() -> None:
    models = []
    for name in ("h200_8b", "h200_8b_stale", "cpu_smollm"):
        found = load_costs(name)
        assert isinstance(found, TableCosts)
        models.append(found)
    costs, batch = FastCosts(models, np.arange(3), 3000, 60), np.arange(3)
    rng = np.random.default_rng(0)
    for _ in range(100):
        tokens, requests, rows = (rng.integers(0, most, 3) for most in (2500, 200, 100))
        kv, behind = rng.integers(0, 200_000, 3), rng.integers(0, 9000, 3)
        attention = costs.attention(batch, requests, kv)
        verify = costs.verify_ms(batch, tokens, attention)
        passes = costs.draft_pass_ms(batch, rows, kv / np.maximum(rows, 1), behind)
        heads, lookups = costs.medusa_ms(batch, rows), costs.ngram_ms(batch, rows)
        for i, model in enumerate(models):
            work = Work(
                tokens=int(tokens[i]),
                requests=int(requests[i]),
                kv_tokens=int(kv[i]),
                draft_rows=(int(rows[i]),),
                draft_kv_tokens=int(kv[i]),
                medusa_rows=int(rows[i]),
                ngram_rows=int(rows[i]),
                catch_up_tokens=int(behind[i]),
            )
            took = model.time(work)
            assert verify[i] == took.verify_ms
            drafting = np.array([0.0, lookups[i], passes[i], heads[i]], np.float32)
            np.testing.assert_array_equal(took.draft_ms, drafting)


@pytest.mark.parametrize("name", ["mixed", "small_gpu"])
def test_a_row_is_charged_by_how_much_longer_its_draft_made_the_step(name: str) -> None:
    loop = FastLoop(kinds(name), seed=2)
    at_random(loop, 30)
    rng = np.random.default_rng(1)
    may = loop.allowed()
    action = (rng.random(may.shape) * may).argmax(axis=1)
    who, k = PROPOSER_OF[action], K_OF[action]
    both = copy.deepcopy(loop).step(who, k)
    assert {NGRAM, DRAFT_MODEL, MEDUSA} <= set(who[k > 0].tolist())
    for row in range(len(k)):
        without = k.copy()
        without[row] = 0
        alone = copy.deepcopy(loop).step(who, without)
        added = both.step_ms[0] - alone.step_ms[0]
        assert both.caused_ms[row] == pytest.approx(added, abs=1e-9)


def test_prompts_share_the_budget_and_requests_keep_their_length() -> None:
    loop = FastLoop(kinds("mixed") * 4, seed=4)
    ended = 0
    for step in range(120):
        before = loop.length - loop.output
        at_random(loop, 1, step)
        assert (np.bincount(loop.batch, loop.chunk) <= TOKEN_BUDGET).all()
        assert (loop.output < loop.length).all()
        assert (loop.max_k <= loop.length - loop.output - 1).all()
        assert (loop.chunk[loop.decodes] == 1).all()
        ended += int((loop.output == 0).sum() > 0)
        assert (before > 0).all()
    assert ended > 20


def test_older_prompts_are_computed_first() -> None:
    loop = FastLoop(kinds("mixed"), seed=0)
    loop.pending[:4], loop._order[:4] = 1500, [3, 1, 2, 0]
    loop.schedule()
    room = TOKEN_BUDGET - (len(loop.batch) - 4)
    assert loop.chunk[:4].tolist() == [0, room - 1500, 0, 1500]


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [FastLoop(kinds("mixed"), seed=seed, vary=0.3, life_steps=20) for seed in (5, 5, 6)]
    for loop in runs:
        at_random(loop, 50)
    seen = [features_of(loop) for loop in runs]
    np.testing.assert_array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[0], seen[2])
    assert np.isfinite(seen[0]).all()


def test_what_may_not_be_drafted_is_not() -> None:
    loop = FastLoop(kinds("mixed"), seed=1)
    at_random(loop, 40)
    n = len(loop.batch)
    matched = copy.deepcopy(loop)
    done = matched.step(np.full(n, NGRAM), np.full(n, 8))
    assert (done.emitted[loop.match == 0] <= 1).all()
    done = copy.deepcopy(loop).step(np.full(n, MEDUSA), np.full(n, 8))
    assert (done.emitted <= np.maximum(loop.max_k, 0) + 1).all()
    may = loop.allowed()
    assert not may[loop.match == 0][:, PROPOSER_OF == NGRAM].any()
    assert (may.sum(axis=1)[~loop.decodes] == 1).all()
    assert may.shape == (n, len(ACTION_NAMES))


def test_guesses_of_the_hazards_come_true() -> None:
    loop = FastLoop(kinds("chat_high"), seed=1)
    n = len(loop.batch)
    for _ in range(150):
        loop.step(np.full(n, MEDUSA), np.full(n, 4))
    expected = emitted = 0.0
    for _ in range(30):
        seen = features_of(loop)[:, [-1]]
        may = loop.max_k >= 4
        expected += float(seen[may].sum())
        emitted += float((loop.step(np.full(n, MEDUSA), np.full(n, 4)).emitted - 1)[may].sum())
    assert expected == pytest.approx(emitted, rel=0.1)


def fast_goodput(name: str, who: int, k: int, copies: int) -> float:
    loop = FastLoop(kinds(name) * copies, seed=1)
    n = len(loop.batch)
    plan: tuple[Array, Array] = np.full(n, who), np.full(n, k)
    for _ in range(250):
        loop.step(*plan)
    tokens = ms = 0.0
    for _ in range(500):
        done = loop.step(*plan)
        tokens, ms = tokens + done.tokens.sum(), ms + done.step_ms.sum()
    return 1e3 * tokens / ms


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "k"), [(NONE, 0), (NGRAM, 5), (DRAFT_MODEL, 3), (MEDUSA, 3)], ids=str
)
def test_goodput_is_that_of_the_engines_loop(who: int, k: int) -> None:
    scenario = load_scenario("mixed")
    names = {NGRAM: "ngram", DRAFT_MODEL: "draft_model", MEDUSA: "medusa"}
    policy, settings = ("fixed", {"proposer": names[who], "k": k}) if k else ("none", {})
    goodput = [
        run_episode(
            scenario.shortened(1500),
            lambda limits, _: make_policy(policy, settings, limits),
            arrivals_of(scenario),
            seed,
        ).goodput
        for seed in range(5, 10)
    ]
    assert fast_goodput("mixed", who, k, 16) == pytest.approx(float(np.mean(goodput)), rel=0.03)
