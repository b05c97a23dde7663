from __future__ import annotations

import sys
from dataclasses import dataclass, make_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.unit.plugins.fake_vllm import FakeScheduler, Output, config, often_right

from parlay.engine.plugins import vllm
from parlay.engine.plugins.step_clock import StepClock
from parlay.engine.plugins.tracked import Tracked, view_of
from parlay.engine.plugins.vllm_ability import Ability, ability_of
from parlay.engine.plugins.vllm_scheduler import words_of
from parlay.engine.plugins.vllm_uniform import uniform
from parlay.engine.request import SpeculationParams
from parlay.policies.allocate import fit_plan
from parlay.policies.policy import EngineLimits
from parlay.policies.types import DRAFT_MODEL, MEDUSA, NGRAM


def ability(asynchronous: bool = False, second: bool = False, **spec: Any) -> Ability:
    scheduler = FakeScheduler(config(**spec), often_right(), asynchronous=asynchronous)
    scheduler.use_v2_model_runner = second  # type: ignore[attr-defined]
    return ability_of(scheduler, Output, {})


def refusal(**parts: Any) -> str:
    given = config()
    for name, value in parts.items():
        setattr(given, name, value)
    scheduler = FakeScheduler(config(), often_right())
    scheduler.vllm_config = given
    with pytest.raises(ValueError, match=r".") as error:
        ability_of(scheduler, Output, {})
    return str(error.value)


@pytest.mark.parametrize(
    ("method", "column", "by_depth", "own"),
    [
        ("ngram", NGRAM, False, True),
        ("ngram_gpu", NGRAM, False, True),
        ("suffix", NGRAM, False, False),
        ("medusa", MEDUSA, False, True),
        ("draft_model", DRAFT_MODEL, True, True),
        ("eagle3", DRAFT_MODEL, True, True),
        ("deepseek_mtp", DRAFT_MODEL, True, True),
        ("dflash", DRAFT_MODEL, False, True),
    ],
)
def test_what_each_method_lets_us(method: str, column: int, by_depth: bool, own: bool) -> None:
    found = ability(method=method)
    assert (found.column, found.steers_depth, found.own_ngram) == (column, by_depth, own)
    assert found.decides_early is by_depth
    limits = found.limits(512)
    assert limits.has(column)
    assert limits.has(NGRAM) is (own or column == NGRAM)


def test_only_lengths_where_the_drafts_stay_with_the_worker() -> None:
    assert not ability(asynchronous=True).own_ngram
    assert not ability(second=True).own_ngram
    assert not ability(draft_sample_method="probabilistic").own_ngram
    assert ability(asynchronous=True, method="medusa").decides_early
    assert not ability(second=True).steers_depth
    assert ability(second=True, method="eagle").steers_depth


def test_drafting_none_takes_the_drafters_first_pass_as_well() -> None:
    assert [ability().passes(k) for k in range(4)] == [0, 0, 1, 2]
    assert ability(method="medusa").passes(4) == 0


def test_refuses_what_it_cannot_steer() -> None:
    parallel = {"data_parallel_size": 1, "pipeline_parallel_size": 1}
    assert "data parallel" in refusal(
        parallel_config=SimpleNamespace(**{**parallel, "data_parallel_size": 2})
    )
    assert "pipeline parallel" in refusal(
        parallel_config=SimpleNamespace(**{**parallel, "pipeline_parallel_size": 2})
    )
    assert "--speculative-config" in refusal(speculative_config=None)
    hidden = SimpleNamespace(method="extract_hidden_states", num_speculative_tokens=1)
    assert "extract_hidden_states" in refusal(speculative_config=hidden)


def test_refuses_a_vllm_without_our_hooks() -> None:
    scheduler = FakeScheduler(config(), often_right())
    scheduler.update_draft_token_ids = None  # type: ignore[assignment, method-assign]
    with pytest.raises(ValueError, match="has no update_draft_token_ids"):
        ability_of(scheduler, Output)
    older = make_dataclass("Older", ["total_num_scheduled_tokens"])
    with pytest.raises(ValueError, match=r"no num_spec_tokens_to_schedule; 0\.26 to 0\.33"):
        ability_of(FakeScheduler(config(), often_right()), older)


def test_graphs_of_one_length_ask_for_one_k() -> None:
    scheduler = FakeScheduler(
        config(num_speculative_tokens_per_batch_size=[(1, 8, 4), (9, 64, 2)]), often_right()
    )
    mode = SimpleNamespace(decode_mode=lambda: SimpleNamespace(name="FULL"))
    scheduler.vllm_config.compilation_config = SimpleNamespace(cudagraph_mode=mode)
    assert not ability_of(scheduler, Output, {}).uniform
    scheduler.vllm_config.model_config.enforce_eager = False
    found = ability_of(scheduler, Output, {})
    assert (found.uniform, found.lengths) == (True, (2, 4))
    assert "one k for the batch" in words_of(found)
    assert not ability_of(scheduler, Output, {"PARLAY_VLLM_ROWS": "ragged"}).uniform
    with pytest.raises(ValueError, match="uniform or ragged, not 'mixed'"):
        ability_of(scheduler, Output, {"PARLAY_VLLM_ROWS": "mixed"})


def test_one_k_is_about_as_many_tokens_in_all() -> None:
    limits = EngineLimits(1 | 1 << DRAFT_MODEL, 8)
    rows = [Tracked(i, SpeculationParams()) for i in range(6)]
    rows[4].speculation = SpeculationParams(max_k=0)
    rows[5].prefill_tokens = 9
    view = view_of(rows, limits)
    fit = fit_plan(None, view)
    fit.k[:4] = [5, 0, 3, 2]
    fit.proposer[[0, 2, 3]] = DRAFT_MODEL
    even = uniform(fit, view, DRAFT_MODEL)
    assert even.k.tolist() == [3, 3, 3, 3, 0, 0]
    assert even.proposer.tolist() == [DRAFT_MODEL] * 4 + [0, 0]
    assert uniform(even, view, DRAFT_MODEL, (2, 4)).k.tolist() == [2, 2, 2, 2, 0, 0]
    assert uniform(even, view, DRAFT_MODEL, (4, 8)).k.max() == 0


def test_the_clock_tells_the_drafters_part() -> None:
    clock, rng = StepClock(), np.random.default_rng(0)
    shares = []
    for _ in range(200):
        passes, tokens = int(rng.integers(0, 6)), int(rng.integers(1, 40))
        verify, draft = 20.0 + 0.3 * tokens, 3.0 * passes
        ms = (verify + draft) * float(rng.normal(1.0, 0.02))
        found = clock.split(ms, tokens, 1000, 0, passes, 1)
        assert sum(found) == pytest.approx(ms)
        shares.append((found[1], draft))
    found_ms, true_ms = np.asarray(shares[100:]).T
    assert found_ms.sum() == pytest.approx(true_ms.sum(), rel=0.15)
    assert (found_ms[true_ms == 0] == 0).all()


def test_long_prompts_teach_the_clock_nothing() -> None:
    one, other = StepClock(), StepClock()
    for _ in range(30):
        one.split(30.0, 8, 0, 0, 2, 4)
        other.split(30.0, 8, 0, 0, 2, 4)
        other.split(900.0, 800, 0, 792, 2, 4)
    assert one.split(30.0, 8, 0, 0, 2, 4) == other.split(30.0, 8, 0, 0, 2, 4)


@dataclass
class Config:
    scheduler_cls: Any = FakeScheduler

    def get_scheduler_cls(self) -> Any:
        return self.scheduler_cls


def test_registers_once_and_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(SchedulerConfig=Config)
    monkeypatch.setitem(sys.modules, "vllm.config.scheduler", fake)
    monkeypatch.setattr(Config, "get_scheduler_cls", Config.get_scheduler_cls)
    monkeypatch.delenv("PARLAY", raising=False)
    vllm.register()
    assert Config().get_scheduler_cls() is FakeScheduler
    monkeypatch.setenv("PARLAY", "1")
    vllm.register()
    vllm.register()
    chosen = Config().get_scheduler_cls()
    assert chosen.__name__ == "ParlayFakeScheduler"
    assert Config(chosen).get_scheduler_cls() is chosen
    assert Config(vllm.make_scheduler).get_scheduler_cls() is vllm.make_scheduler
    vllm.unregister()
    assert Config().get_scheduler_cls() is FakeScheduler


def test_the_factory_keeps_to_vllms_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Async(FakeScheduler):
        pass

    for module, kind in (("scheduler", "Scheduler"), ("async_scheduler", "AsyncScheduler")):
        base = Async if kind.startswith("Async") else FakeScheduler
        fake = SimpleNamespace(**{kind: base})
        monkeypatch.setitem(sys.modules, f"vllm.v1.core.sched.{module}", fake)
    output = SimpleNamespace(SchedulerOutput=Output)
    monkeypatch.setitem(sys.modules, "vllm.v1.core.sched.output", output)
    for asynchronous, name in ((False, "ParlayFakeScheduler"), (True, "ParlayAsync")):
        given = config()
        given.scheduler_config = SimpleNamespace(async_scheduling=asynchronous)
        made = vllm.make_scheduler(given, propose=often_right())
        assert type(made).__name__ == name
        assert made.parlay is not None
