"""The environments: what the libraries' checkers say, honest rewards, masks, speed."""

from __future__ import annotations

import copy
import time

import numpy as np
import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("stable_baselines3")

from gymnasium.utils.env_checker import check_env as gymnasium_check
from stable_baselines3.common.env_checker import check_env as sb3_check

from parlay.policies.features import ACTION_NAMES, FEATURES, K_OF, LAST, PROPOSER_OF
from parlay.sim.env import BatchEnv, Reward, Scaler, SlotVecEnv, fitted_scaler
from parlay.sim.fast import FastLoop
from parlay.sim.kinds import Kind, kinds_of
from parlay.sim.scenario import load_scenario


def kinds(name: str = "mixed") -> list[Kind]:
    return kinds_of(load_scenario(name), seed=3)


def test_the_checkers_of_both_libraries_are_content() -> None:
    env = BatchEnv(kinds("chat_low")[0], episode_steps=20)
    gymnasium_check(env, skip_render_check=True)
    sb3_check(env)


def test_an_episode_is_cut_and_repeats_with_its_seed() -> None:
    env = BatchEnv(kinds("chat_low")[0], episode_steps=5)
    runs = []
    for seed in (1, 1, 2):
        seen, _ = env.reset(seed=seed)
        steps = [env.step(np.full(2, 11)) for _ in range(5)]
        assert [step[3] for step in steps] == [False] * 4 + [True]
        assert steps[-1][4]["goodput"] > 0.0
        runs.append([seen, *(step[0] for step in steps)])
    np.testing.assert_array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])
    assert env.action_masks().shape == (2 * len(ACTION_NAMES),)
    with pytest.raises(ValueError, match="episode_steps"):
        BatchEnv(kinds("chat_low")[0], episode_steps=0)


def test_every_slot_is_a_row() -> None:
    env = SlotVecEnv([*kinds() * 2, *kinds("chat_low")], seed=1)
    assert env.num_envs == 24 + 24 + 2
    assert env.reset().shape == (50, len(FEATURES))
    masks = np.stack(env.env_method("action_masks"))
    np.testing.assert_array_equal(masks, env.action_masks())
    assert env.has_attr("action_masks")
    env.step_async(np.zeros(50, np.int64))
    seen, reward, done, infos = env.step_wait()
    assert seen.dtype == reward.dtype == np.float32
    assert env.observation_space.contains(seen[0])
    assert not done.any()
    assert len(infos) == 50


def test_now_and_then_a_whole_batch_sees_nothing_of_its_last_step() -> None:
    """Else a large batch learns nothing of where nobody drafts, and stays there."""
    env = SlotVecEnv(kinds() * 2, seed=1)
    draft = np.full(48, ACTION_NAMES.index("medusa:1"))
    hidden: list[list[bool]] = []
    for _ in range(200):
        env.step_async(draft)
        seen, *_ = env.step_wait()
        blind = np.count_nonzero(np.asarray(seen)[:, LAST], axis=1) == 0
        hidden.append([bool(blind[:24].all()), bool(blind[24:].all())])
        assert blind.sum() == 24 * sum(hidden[-1])
    share = np.mean(hidden)
    assert 0.05 < share < 0.15
    assert any(a != b for a, b in hidden)


def test_an_action_that_may_not_be_done_does_nothing() -> None:
    env, same = SlotVecEnv(kinds(), seed=1), SlotVecEnv(kinds(), seed=1)
    for _ in range(20):
        barred = ~env.action_masks()
        action = np.where(barred.any(axis=1), barred.argmax(axis=1), 0)
        seen = env.step(action)[0]
        np.testing.assert_array_equal(seen, same.step(np.zeros(24, np.int64))[0])


def test_a_row_gains_what_its_batch_gains() -> None:
    loop = FastLoop(kinds(), seed=2)
    rng = np.random.default_rng(0)
    for _ in range(20):
        loop.step(np.full(24, 3), np.full(24, 2))
    reward = Reward(loop)
    may = loop.allowed()
    action = (rng.random(may.shape) * may).argmax(axis=1)

    def of(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        fresh = copy.deepcopy(reward)
        return fresh.of(fresh.loop.step(PROPOSER_OF[chosen], K_OF[chosen]))

    rows, batches = of(action)
    for row in np.flatnonzero(action)[:8]:
        without = action.copy()
        without[row] = 0
        other_rows, other_batches = of(without)
        gain = float(batches[0] - other_batches[0])
        assert rows[row] - other_rows[row] == pytest.approx(gain, abs=1e-4)


def test_the_reward_of_a_batch_is_nought_on_average_once_its_goodput_is_known() -> None:
    loop = FastLoop(kinds() * 4, seed=2)
    reward, n = Reward(loop), 24 * 4
    plan = np.full(n, 3), np.full(n, 3)
    found = [reward.of(loop.step(*plan))[1] for _ in range(1000)]
    # A step emits about 50 tokens; at first they are paid as without speculation.
    assert abs(np.mean(found[-300:])) < 0.5
    assert np.mean(found[:20]) > 5.0


def test_a_latency_target_costs_what_a_request_is_late() -> None:
    loop = FastLoop(kinds("chat_low"), seed=3)
    free, bound = Reward(copy.deepcopy(loop)), Reward(copy.deepcopy(loop), tpot_target_ms=4.0)
    lost, steps, ms = 0.0, 60, 0.0
    for step in range(steps):
        done = [r.loop.step(np.zeros(2, np.intp), np.zeros(2, np.int64)) for r in (free, bound)]
        rows = [r.of(d)[0] for r, d in zip((free, bound), done, strict=True)]
        if (bound.loop.output <= 1).any() and step > 0:
            break
        lost += float((rows[0] - rows[1])[0])
        ms += float(done[0].step_ms[0])
    assert step > 3
    assert lost == pytest.approx((ms - 4.0 * step) / 4.0, rel=0.05)


def test_the_scaler_brings_features_near_one() -> None:
    scaler = fitted_scaler(FastLoop(kinds(), seed=1, vary=0.3), 20, seed=0)
    env = SlotVecEnv(kinds() * 4, seed=2, vary=0.3, scaler=scaler)
    rng = np.random.default_rng(1)
    draws = (rng.integers(0, len(ACTION_NAMES), 96) for _ in range(40))
    seen = np.concatenate([env.step(action)[0] for action in draws])
    assert np.abs(seen).max() <= 8.0
    assert np.abs(seen.mean(axis=0)).max() < 3.0
    np.testing.assert_array_equal(Scaler()(np.full((1, len(FEATURES)), 99.0, np.float32)), 8.0)


@pytest.mark.slow
def test_it_is_quick() -> None:
    env = SlotVecEnv(kinds() * 256, seed=1, vary=0.3, life_steps=1000)
    rng = np.random.default_rng(0)
    actions = rng.integers(0, len(ACTION_NAMES), (8, env.num_envs))
    for action in actions:
        env.step(action)
    start_s = time.process_time()
    for action in (*actions, *actions, *actions):
        env.step(action)
    rate = 24 * env.num_envs / (time.process_time() - start_s)
    # Above 500,000 on an idle core; half of that on one that is shared.
    assert rate > 250_000, f"{rate:,.0f} request-steps a second of CPU time"
