import numpy as np
import pytest

from parlay.sim.costs import Work
from parlay.sim.step_costs import StepLog, fit_costs


def steps(count: int, spikes: float = 0.0) -> StepLog:
    """Steps of a machine that takes 16 rows at a time, and whose caches drafts empty."""
    rng, log = np.random.default_rng(0), StepLog()
    for _ in range(count):
        rows, depth, kv = int(rng.integers(1, 6)), int(rng.choice([0, 0, 1, 2, 4, 8])), 600.0
        tokens, kv = rows * (1 + int(rng.integers(0, 9))), kv * rng.random()
        ms = 7.0 + 3.0 * -(-tokens // 16) + kv / 1000.0
        ms += (2.0 + 0.8 * depth + 0.05 * rows * depth) * (depth > 0)
        ms *= 1.0 + 0.02 * rng.standard_normal() + 3.0 * (rng.random() < spikes)
        drafted = float(rows * depth)
        log.did.append(
            (float(tokens), kv / 4096, rows, float(depth > 0), float(depth), drafted, 0.0, 0.0)
        )
        log.step_ms.append(ms)
    return log


@pytest.mark.parametrize("spikes", [0.0, 0.05])
def test_a_stair_and_what_drafts_evict_are_found(spikes: float) -> None:
    costs = fit_costs(steps(600, spikes))
    for tokens, ms in ((4, 10.0), (16, 10.0), (17, 13.0), (32, 13.0), (40, 16.0)):
        assert costs.time(Work(tokens, 4, 300)).step_ms == pytest.approx(ms + 0.3, rel=0.04)
    alone, drafting = costs.time(Work(16, 4, 300)), costs.time(Work(16, 4, 300, (4,) * 3, 300))
    assert drafting.step_ms - alone.step_ms == pytest.approx(2.0 + 3 * 0.8 + 0.6, rel=0.15)
    assert drafting.verify_ms == alone.verify_ms


def test_time_rises_with_tokens_also_beyond_those_seen() -> None:
    costs = fit_costs(steps(300))
    took = [costs.time(Work(tokens, 1, 0)).step_ms for tokens in (1, 8, 40, 60, 100, 1000)]
    assert took == sorted(took)
    assert took[-1] > 5.0 * took[0]


def test_few_steps_teach_nothing() -> None:
    with pytest.raises(ValueError, match="63 steps are too few"):
        fit_costs(steps(63))
