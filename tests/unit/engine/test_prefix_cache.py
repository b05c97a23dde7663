"""Requests that begin alike share blocks: what is found is what was computed, and nothing leaks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.tiny import CONFIG, AnyPlan, fewer, tiny_backend

from parlay.engine.backend import Batch, Drafts, Verified
from parlay.engine.kv_cache import BlockCache
from parlay.engine.planner import LocalPlanner
from parlay.engine.request import Request, SamplingParams, SpeculationParams
from parlay.engine.scheduler import EngineConfig, Scheduler
from parlay.engine.step import Engine
from parlay.engine.torch_backend import TorchBackend
from parlay.engine.virtual import Hazards, Task, VirtualBackend
from parlay.policies.policy import EngineLimits
from parlay.policies.types import Array, Proposer

NONE, NGRAM, DRAFT = Proposer.NONE, Proposer.NGRAM, Proposer.DRAFT_MODEL
TASK = Task({NGRAM: (0.6, 0.8), DRAFT: (0.5, 0.6)}, match_rate=0.7)
SPEAK = SpeculationParams(task="t")
VOCAB = 40


class Memory(VirtualBackend):
    """Writes at each slot which text led to it, and demands that a row finds its own there."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(Hazards({"t": TASK}), engine=EngineLimits(0b0111, 12, (), 32))
        self.slots = [0] * (config.target_blocks * config.block_tokens)
        self.book: BlockCache | None = None

    def keeps(self, book: BlockCache) -> bool:
        return self.book is book

    def verify(self, batch: Batch, drafts: Drafts, verify_k: Array) -> Verified:
        self.book = batch.target
        for row, request in enumerate(batch.requests):
            text = self.read(batch.target, request)
            fed = request.tokens[request.computed : request.computed + int(batch.chunk[row])]
            fed += drafts.tokens[row, : verify_k[row]].tolist()
            for place, token in enumerate(fed, request.computed):
                self.slots[self.slot(batch.target, request, place)] = text = hash((text, token))
        return super().verify(batch, drafts, verify_k)

    def read(self, cache: BlockCache, request: Request) -> int:
        text = 0
        for place, token in enumerate(request.tokens[: request.computed]):
            text = hash((text, token))
            assert self.slots[self.slot(cache, request, place)] == text
        return text

    def slot(self, cache: BlockCache, request: Request, place: int) -> int:
        size = cache.block_tokens
        return cache.tables[request.request_id][place // size] * size + place % size


def engine_on(backend: Any, config: EngineConfig, seed: int = 0, k_max: int = 9) -> Engine:
    return Engine(backend, LocalPlanner(AnyPlan((NONE, NGRAM, DRAFT), k_max, seed)), config)


def check(engine: Engine) -> None:
    target = engine.scheduler.target
    target.check()
    engine.scheduler.draft.check()
    held = sum(target.held_by(request_id) for request_id in target.tables)
    assert held == pytest.approx(target.total - target.free)
    assert set(target.tables) == {r.request_id for r in engine.scheduler.running}


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def serve(engine: Engine, prompt: list[int], tokens: int = 8, **sampling: Any) -> Request:
    request = engine.add(prompt, SamplingParams(max_tokens=tokens, **sampling), SPEAK)
    run(engine)
    return request


class Sharing(RuleBasedStateMachine):
    """Requests begin alike, go on from one another, end, lose their blocks, are overwritten."""

    SIZES = EngineConfig(
        max_running=6, token_budget=32, block_tokens=4, target_blocks=40, draft_blocks=16,
        draft_window_tokens=12, context_tokens=128,
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.backend = Memory(self.SIZES)
        self.engine = engine_on(self.backend, self.SIZES)
        self.other = engine_on(self.backend, self.SIZES)
        self.requests: list[Request] = []

    @rule(first=st.integers(1, 2), same=st.integers(1, 50), own=st.integers(0, 9), data=st.data())
    def add(self, first: int, same: int, own: int, data: st.DataObject) -> None:
        begin = [first] * same
        follows: bool = data.draw(st.booleans())
        if self.requests and follows:
            begin = data.draw(st.sampled_from(self.requests)).tokens[: 2 * same]
        prompt = begin + data.draw(st.lists(st.integers(1, 3), min_size=own, max_size=own))
        sampling = SamplingParams(max_tokens=data.draw(st.integers(1, 25)))
        self.requests.append(self.engine.add(prompt, sampling, SPEAK))

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()
            check(self.engine)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(self.engine.scheduler.running)))

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        scheduler = self.engine.scheduler
        scheduler.preempt(data.draw(st.sampled_from(scheduler.running)))

    @rule(first=st.integers(1, 2), same=st.integers(1, 50))
    def others_write(self, first: int, same: int) -> None:
        self.other.add([first] * same, SamplingParams(max_tokens=2), SPEAK)
        self.other.step()

    @invariant()
    def nothing_leaks(self) -> None:
        check(self.engine)
        check(self.other)
        if self.backend.book is self.engine.scheduler.target:
            for request in self.engine.scheduler.running:
                self.backend.read(self.engine.scheduler.target, request)

    def teardown(self) -> None:
        run(self.engine)
        assert self.engine.scheduler.target.free == self.SIZES.target_blocks
        assert all(r.finished for r in self.requests)


def play_machine(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Sharing,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_sequence_of_moves_finds_only_what_was_computed() -> None:
    play_machine(20, 30)


@pytest.mark.slow
def test_ten_thousand_moves_find_only_what_was_computed() -> None:
    play_machine(200, 50)


@pytest.mark.slow
def test_ten_thousand_steps_under_pressure_find_only_what_was_computed() -> None:
    config = dataclasses.replace(Sharing.SIZES, target_blocks=60)
    engine, rng = engine_on(Memory(config), config, 1), np.random.default_rng(2)
    live: list[Request] = []
    preempted = cached = 0
    for _ in range(10_000):
        if len(live) < 10 and rng.random() < 0.5:
            prompt = [int(rng.integers(1, 4))] * int(rng.integers(1, 60))
            if live and rng.random() < 0.3:
                prompt = list(live[0].tokens[:90])
            sampling = SamplingParams(max_tokens=int(rng.integers(1, 30)))
            live.append(engine.add(prompt, sampling, SPEAK))
        if live and rng.random() < 0.02:
            engine.abort(live[int(rng.integers(len(live)))])
        engine.step()
        check(engine)
        done = [r for r in live if r.finished]
        preempted += sum(r.preemptions for r in done)
        cached += sum(r.cached_tokens for r in done)
        live = [r for r in live if not r.finished]
    run(engine)
    assert engine.scheduler.target.free == config.target_blocks
    assert preempted > 20
    assert cached > 10_000


def test_the_last_token_is_always_computed() -> None:
    config = Sharing.SIZES
    engine = engine_on(Memory(config), config)
    assert serve(engine, [1] * 16, 1).cached_tokens == 0
    assert serve(engine, [1] * 16, 1).cached_tokens == 12
    assert serve(engine, [1] * 17, 1).cached_tokens == 16
    assert serve(engine, [2] + [1] * 16, 1).cached_tokens == 0, "other text before it"
    assert serve(engine, [1], 1).cached_tokens == 0


def test_without_the_prefix_cache_nothing_is_shared_or_kept() -> None:
    config = dataclasses.replace(Sharing.SIZES, prefix_cache=False)
    engine = engine_on(Memory(config), config)
    for _ in range(2):
        assert serve(engine, [1] * 30).cached_tokens == 0
    assert not engine.scheduler.target.prefixes.idle


def test_a_drafts_block_is_known_only_once_its_tokens_are_accepted() -> None:
    config = Sharing.SIZES
    engine = engine_on(Memory(config), config, seed=4, k_max=12)
    request = engine.add([1] * 9, SamplingParams(max_tokens=60), SPEAK)
    seen = 0
    while not request.finished:
        engine.step()
        prefixes = engine.scheduler.target.prefixes
        full = request.computed // config.block_tokens
        assert len(prefixes.refs) == full
        assert len(prefixes.find(request.tokens, 99)) == full
        seen += request.drafted > request.accepted
    assert seen > 5


def test_prompts_that_come_at_once_end_up_in_the_same_blocks() -> None:
    """Each computes the prompt, for none was done first; then they hold one copy."""
    config = dataclasses.replace(Sharing.SIZES, token_budget=128)
    engine = engine_on(Memory(config), config)
    several = [engine.add([1] * 21, SamplingParams(max_tokens=9), SPEAK) for _ in range(3)]
    engine.step()
    target = engine.scheduler.target
    tables = [target.tables[r.request_id] for r in several]
    assert tables[0][:5] == tables[1][:5] == tables[2][:5]
    assert len({table[5] for table in tables}) == 3
    assert target.total - target.free == 5 + 3
    assert [target.held_by(r.request_id) for r in several] == pytest.approx([5 / 3 + 1] * 3)


def test_what_is_shared_with_a_running_request_needs_no_room() -> None:
    config = dataclasses.replace(Sharing.SIZES, target_blocks=20, prefix_cache=True)
    engine = engine_on(Memory(config), config, k_max=0)
    first = engine.add([1] * 48, SamplingParams(max_tokens=20), SPEAK)
    engine.step()
    engine.step()
    like = engine.add([1] * 50, SamplingParams(max_tokens=5), SPEAK)
    engine.step()
    other = engine.add([2] * 50, SamplingParams(max_tokens=5), SPEAK)
    engine.step()
    assert engine.scheduler.running == [first, like], "13 blocks, but 12 of them are there"
    assert list(engine.scheduler.waiting) == [other]
    run(engine)
    assert (first.preemptions, like.preemptions) == (0, 0)


def test_a_long_prompt_that_waits_is_looked_up_only_when_it_may_fit() -> None:
    config = dataclasses.replace(Sharing.SIZES, target_blocks=30)
    engine = engine_on(Memory(config), config, k_max=0)
    first = engine.add([1] * 90, SamplingParams(max_tokens=24), SPEAK)
    while not first.output:
        engine.step()
    waits = engine.add([1] * 60 + [2] * 40, SamplingParams(max_tokens=2), SPEAK)
    looked = []
    find = engine.scheduler.target.prefixes.find
    engine.scheduler.target.prefixes.find = lambda *a: looked.append(1) or find(*a)  # type: ignore
    while waits.phase.value == "waiting":
        engine.step()
    assert len(looked) < 6
    assert first.finished
    assert waits.cached_tokens == 60


@pytest.mark.parametrize("blocks", [24, 32, 60])
def test_a_prompt_that_is_not_looked_up_could_not_have_come_in(blocks: int) -> None:
    config = dataclasses.replace(Sharing.SIZES, target_blocks=blocks)

    def orders(always: bool) -> list[list[int]]:
        engine, rng, seen = engine_on(Memory(config), config, 3), np.random.default_rng(blocks), []
        for _ in range(300):
            if len(engine.scheduler.waiting) < 3 and rng.random() < 0.3:
                prompt = [int(rng.integers(1, 3))] * int(rng.integers(1, 60)) + [9]
                engine.add(prompt, SamplingParams(max_tokens=int(rng.integers(1, 30))), SPEAK)
            if always:
                engine.scheduler._blocked = (0, 0)
            engine.step()
            seen.append([r.request_id for r in engine.scheduler.running])
        return seen

    assert orders(always=False) == orders(always=True)


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    config = Sharing.SIZES
    engine = engine_on(Memory(config), config)
    request = engine.add([1] * 30, SamplingParams(max_tokens=30), SPEAK)
    while request.output_tokens < 5:
        engine.step()
    computed = request.computed
    engine.scheduler.preempt(request)
    outcome = engine.step()
    assert outcome is not None
    assert outcome.prefill_tokens < config.block_tokens
    assert request.computed >= computed
    assert request.cached_tokens == 0, "its own are not another's"


def test_the_longest_idle_goes_first_and_the_end_of_a_text_before_its_beginning() -> None:
    config = dataclasses.replace(Sharing.SIZES, target_blocks=12)
    engine = engine_on(Memory(config), config, k_max=0)
    for first in (1, 2):
        serve(engine, [first] * 17, 1)
    serve(engine, [1] * 17, 1)
    serve(engine, [3] * 21, 1)  # 6 blocks, 4 of them free
    known = engine.scheduler.target.prefixes
    assert [len(known.find([first] * 16, 4)) for first in (1, 2, 3)] == [4, 2, 4]


def test_blocks_that_several_lack_are_counted_once_each() -> None:
    with pytest.raises(ValueError, match="target_blocks must be"):
        EngineConfig(target_blocks=0)
    scheduler = Scheduler(EngineConfig(target_blocks=8, block_tokens=4))
    cache = scheduler.target
    assert cache.reserve(1, 20)
    cache.settle(1, list(range(20)), 18)
    assert cache.adopt(2, cache.prefixes.find(list(range(20)), 4)) == 16
    assert (cache.held_by(1), cache.held_by(2), cache.free) == (3.0, 2.0, 3)
    assert not cache.reserve(2, 16 + 16)
    cache.release(1)
    assert cache.reserve(2, 16 + 16)
    assert (cache.held_by(2), cache.free) == (8.0, 0)
    cache.check()


# --- on a model -----------------------------------------------------------------------------------


def prompts_alike(count: int, seed: int) -> list[list[int]]:
    """Return prompts of 20 to 60 tokens, most of which begin as others do."""
    rng = np.random.default_rng(seed)
    begins = [rng.integers(0, VOCAB, 40).tolist() for _ in range(4)]
    return [
        begins[rng.integers(4)][: rng.integers(10, 41)]
        + rng.integers(0, VOCAB, rng.integers(3, 20)).tolist()
        for _ in range(count)
    ]


@pytest.mark.parametrize("state_layers", [(), (1, 2)])
@pytest.mark.parametrize("window", [8, 128])
def test_the_draft_model_accepts_as_much_behind_a_prefix_that_was_found(
    state_layers: tuple[int, ...], window: int
) -> None:
    config = dataclasses.replace(CONFIG, draft_window_tokens=window)
    prompts = prompts_alike(12, 5)

    def counts(prefix_cache: bool) -> tuple[list[tuple[int, int, list[int]]], Array, int]:
        sizes = dataclasses.replace(config, prefix_cache=prefix_cache)
        backend = tiny_backend(VOCAB, config=sizes, state_layers=state_layers)
        engine = Engine(backend, LocalPlanner(AnyPlan((DRAFT,), 4, fixed_k=True)), sizes)
        found, confidences = [], []
        for at in range(0, len(prompts), 3):
            group = [
                engine.add(p, SamplingParams(max_tokens=fewer(25, 2), temperature=1.0, seed=i))
                for i, p in enumerate(prompts[at : at + 3], at)
            ]
            while engine.has_work:
                outcome = engine.step()
                assert outcome is not None
                confidences.append(np.sort(outcome.confidences.ravel()))
            found += [(r.drafted, r.accepted, r.output) for r in group]
            cached = sum(r.cached_tokens for r in group)
        shown = np.concatenate(confidences)
        return found, shown[np.isfinite(shown)], cached

    plain, shown, none = counts(prefix_cache=False)
    shared, shown_too, cached = counts(prefix_cache=True)
    assert shared == plain
    np.testing.assert_allclose(shown_too, shown, atol=1e-5)
    assert (none, cached > 20) == (0, True)
    assert sum(accepted for _, accepted, _ in plain) > fewer(30, 3)


def soaked(config: EngineConfig, seed: int, prompts: list[list[int]]) -> tuple[Any, Engine, int]:
    """Decode prompts greedily and coupled, some coming later; return the most blocks held too."""
    backend = tiny_backend(VOCAB, config=config, state_layers=(1, 2))
    engine = engine_on(backend, config, seed, k_max=8)
    requests, waiting, most = [], list(enumerate(prompts)), 0
    while waiting or engine.has_work:
        for i, prompt in waiting[:8]:
            sampling = SamplingParams(
                max_tokens=10 + i % 40, temperature=i % 2 * 0.9, seed=i if i % 2 else None
            )
            requests.append(engine.add(prompt, sampling))
        del waiting[:8]
        engine.step()
        target = engine.scheduler.target
        check(engine)
        most = max(most, target.total - target.free)
    return requests, engine, most


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_hundred_requests_in_a_third_of_the_cache_say_the_same(seed: int) -> None:
    prompts = prompts_alike(100, seed)
    plenty = dataclasses.replace(CONFIG, max_running=16, target_blocks=4096, draft_blocks=1024)
    alone, _, most = soaked(dataclasses.replace(plenty, prefix_cache=False), seed + 10, prompts)
    third = dataclasses.replace(
        plenty, target_blocks=most // 3, draft_blocks=80, draft_window_tokens=16
    )
    pressed, engine, _ = soaked(third, seed, prompts)
    for request, expected in zip(pressed, alone, strict=True):
        assert request.output == expected.output
    assert sum(r.preemptions for r in pressed) > 5
    assert sum(r.cached_tokens for r in pressed) > 500
    assert engine.scheduler.target.free == third.target_blocks
    assert engine.scheduler.draft.free == third.draft_blocks


def test_engines_that_share_a_backend_do_not_take_each_others_blocks_for_theirs() -> None:
    backend: TorchBackend = tiny_backend(VOCAB, state_layers=(1, 2))
    first, second = (engine_on(backend, CONFIG, seed) for seed in (1, 2))
    prompts = prompts_alike(6, 3)
    expected = [serve(engine_on(tiny_backend(VOCAB), CONFIG), p, 12).output for p in prompts]
    for prompt, text in zip(prompts, expected, strict=True):
        assert serve(first, prompt, 12).output == text
        assert serve(second, prompt[::-1], 12).cached_tokens == 0
    assert serve(first, prompts[0], 12).output == expected[0]
    again = serve(first, prompts[0], 12)
    assert (again.output, again.cached_tokens > 0) == (expected[0], True)


def test_an_engine_that_another_wrote_over_computes_what_runs_again() -> None:
    backend = tiny_backend(VOCAB)
    prompt, other = prompts_alike(2, 8)
    expected = serve(engine_on(tiny_backend(VOCAB), CONFIG), prompt, 20).output
    engine = engine_on(backend, CONFIG)
    request = engine.add(prompt, SamplingParams(max_tokens=20))
    while request.output_tokens < 8:
        engine.step()
    serve(Engine(backend, LocalPlanner(AnyPlan((NONE,), 0)), CONFIG), other, 10)
    run(engine)
    assert request.output == expected
    assert request.preemptions == 1
