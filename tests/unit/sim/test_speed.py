import numpy as np
import pytest

from parlay.sim.scenario import load_scenario
from parlay.sim.speed import Speed, stages_of
from parlay.sim.tally import BUCKETS, Episode

ONE_STAGE = np.zeros(BUCKETS, int)


def episode(tokens: np.ndarray, time_s: np.ndarray) -> Episode:
    return Episode(int(tokens.sum()), float(time_s.sum()), bucket_tokens=tokens, bucket_s=time_s)


def test_an_interval_covers_the_ratio_and_narrows_with_the_noise() -> None:
    rng = np.random.default_rng(3)
    widths = []
    for noise in (0.2, 0.02):
        time_s = np.exp(noise * rng.standard_normal(200))
        own = episode(np.full(200, 12.0), time_s)
        other = episode(np.full(200, 10.0), np.exp(noise * rng.standard_normal(200)))
        low, high = Speed(ONE_STAGE, [other]).interval([own], [other])
        assert low < 1.2 < high
        widths.append(high - low)
    assert widths[1] < 0.3 * widths[0]


def test_blocks_are_drawn_together_so_that_shared_noise_cancels() -> None:
    time_s = np.exp(np.random.default_rng(4).standard_normal(200))
    own, other = episode(np.full(200, 12.0), time_s), episode(np.full(200, 10.0), time_s)
    low, high = Speed(ONE_STAGE, [other]).interval([own], [other])
    assert high - low < 1e-9


def test_with_one_stage_speed_is_tokens_over_time() -> None:
    time_s = np.linspace(0.5, 1.5, BUCKETS)
    own, none = episode(np.full(BUCKETS, 12.0), time_s), episode(np.full(BUCKETS, 7.0), time_s)
    assert Speed(ONE_STAGE, [none])([own]) == pytest.approx(own.goodput)


def test_a_stage_counts_as_much_as_no_speculation_emits_in_it() -> None:
    """Twice as fast in each stage is twice as fast, however the steps of the stages mix."""
    stage = np.repeat([0, 1], BUCKETS // 2)
    tokens = np.where(stage, 128.0, 4.0)
    none = episode(tokens, np.where(stage, 10.0, 4.0))
    # Nine tokens a step where few run: tokens over time would make .94 of this.
    deep = episode(np.where(stage, 128.0, 36.0), np.where(stage, 10.0, 18.0))
    speed = Speed(stage, [none])
    assert speed([none]) == pytest.approx(none.goodput)
    assert speed([deep]) / speed([none]) == pytest.approx(14.0 / (10.0 + 2.0))
    assert deep.goodput / none.goodput < 0.8
    twice = episode(2.0 * tokens, np.where(stage, 10.0, 4.0))
    assert speed([twice]) / speed([none]) == pytest.approx(2.0)
    low, high = speed.interval([twice], [none])
    assert low == pytest.approx(2.0)
    assert high == pytest.approx(2.0)


def test_ratios_of_stages_are_those_of_all_seeds() -> None:
    stage = np.repeat([0, 1], BUCKETS // 2)
    none = [episode(np.full(BUCKETS, 10.0), np.full(BUCKETS, s)) for s in (1.0, 2.0)]
    speed = Speed(stage, none)
    assert speed(none) == pytest.approx(10.0 / 1.5)


def test_prompts_count_as_long_as_they_take_without_speculation() -> None:
    """Twice as fast is twice as fast though a longer prompt fell into its steps by chance."""
    ones = np.ones(BUCKETS)
    none = episode(4.0 * ones, 5.0 * ones)
    none.bucket_prompts_s[:] = 1.0
    fast = episode(8.0 * ones, 4.0 * ones + np.where(np.arange(BUCKETS) == 7, 500.0, 0.0))
    fast.bucket_prompts_s[7] = 500.0
    speed = Speed(ONE_STAGE, [none])
    assert speed([none]) == pytest.approx(none.goodput)
    assert speed([fast]) / speed([none]) == pytest.approx(5.0 / (2.0 + 1.0))
    low, high = speed.interval([fast], [none])
    assert high - low < 1e-9


def test_buckets_know_their_stage() -> None:
    scenario = load_scenario("phase_shift")
    stage = stages_of(scenario, scenario.steps)
    # 200 steps of warm-up, 100 steps a bucket: the first stage's rest is 13 buckets long.
    assert stage[:13].tolist() == [0] * 13
    assert stage[13:28].tolist() == [1] * 15
    assert stage[28:43].tolist() == [2] * 15
    assert stage[43:45].tolist() == [0, 0]
    assert set(stages_of(load_scenario("mixed"), 1000).tolist()) == {0}
