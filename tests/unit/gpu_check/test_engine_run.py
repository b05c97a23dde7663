"""The engine on a backend of real passes and synthetic verdicts, and what is made of its steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from parlay.engine.backend import Batch, Drafts
from parlay.engine.gpu_check import gaps
from parlay.engine.gpu_check.budget import Budget
from parlay.engine.gpu_check.engine_run import (
    MODES,
    STATICS,
    Lane,
    Mode,
    blocks_for,
    run_batch,
    steady_config,
)
from parlay.engine.gpu_check.gaps import gaps_of, measure_gaps
from parlay.engine.gpu_check.shape_check import speedups
from parlay.engine.gpu_check.shapes import SHAPES, random_llama
from parlay.engine.gpu_check.synthetic import MIX, SyntheticBackend
from parlay.engine.planner import LocalPlanner
from parlay.engine.request import SamplingParams, SpeculationParams
from parlay.engine.step import Engine
from parlay.engine.torch_backend import DraftModel, TorchBackend
from parlay.engine.virtual import Hazards, Task
from parlay.policies.policy import make_policy
from parlay.policies.types import Array, Proposer

CPU = torch.device("cpu")
CONTEXT = 32
NGRAM_3 = Mode("ngram-3", "fixed", {"proposer": "ngram", "k": 3})
BY_NAME = {mode.name: mode for mode in (*MODES, NGRAM_3)}


def backend(batch: int) -> TorchBackend:
    shape, config = SHAPES["tiny"], steady_config(batch, CONTEXT, blocks_for(batch, CONTEXT))
    draft = random_llama(shape.draft, torch.float32, CPU, 1)
    target = random_llama(shape.target, torch.float32, CPU)
    return TorchBackend(target, DraftModel(draft, torch.arange(shape.draft.vocab)), config)


class Counted(SyntheticBackend):
    """Counts the target's passes and the tokens that the draft model drafted."""

    passes = drafted = 0

    def verify(self, batch: Batch, drafts: Drafts, verify_k: Array):  # type: ignore[no-untyped-def]
        inner = self.inner.verify

        def seen(*args):  # type: ignore[no-untyped-def]
            Counted.passes += 1
            return inner(*args)

        self.inner.verify = seen  # type: ignore[method-assign]
        try:
            return super().verify(batch, drafts, verify_k)
        finally:
            self.inner.verify = inner  # type: ignore[method-assign]


def said(mode: Mode, tokens: int = 40) -> tuple[list[list[int]], int]:
    """Return what two requests of each task say under a mode, and in how many steps, all added."""
    real = backend(8)
    synthetic = Counted(real, Hazards(MIX, seed=1))
    planner = LocalPlanner(make_policy(mode.policy, mode.settings, real.limits()))
    engine = Engine(synthetic, planner, real.config)
    requests = [
        engine.add([3, 1, 4], SamplingParams(max_tokens=tokens), SpeculationParams(task=task))
        for task in [*MIX, *MIX]
    ]
    while engine.has_work:
        engine.step()
    return [request.output for request in requests], sum(r.steps for r in requests)


def test_text_and_coins_are_the_same_whatever_drafts() -> None:
    plain, steps = said(BY_NAME["none"])
    assert steps == 8 * 40
    for name in ("draft-1", "draft-7", "ngram-3"):
        output, fewer = said(BY_NAME[name])
        assert output == plain
        assert fewer < steps
    again, _ = said(BY_NAME["draft-7"])
    assert again == plain


def test_accepted_tokens_are_as_the_hazards_say() -> None:
    task = Task({Proposer.DRAFT_MODEL: (0.8, 0.5)})
    real = backend(8)
    synthetic = SyntheticBackend(real, Hazards({"": task}, seed=2))
    planner = LocalPlanner(make_policy("fixed", {"proposer": "draft_model", "k": 2}, real.limits()))
    engine = Engine(synthetic, planner, real.config)
    for _ in range(8):
        engine.add([1, 2], SamplingParams(max_tokens=300))
    held: list[int] = []
    while engine.has_work:
        outcome = engine.step()
        assert outcome is not None
        held += outcome.accepted[outcome.drafted_k == 2].tolist()
    law = np.bincount(held, minlength=3) / len(held)
    assert law == pytest.approx([0.2, 0.4, 0.4], abs=4 * 0.5 / len(held) ** 0.5)


def test_prompts_take_no_pass_and_both_models_have_read_them() -> None:
    Counted.passes = 0
    lane = Lane(STATICS[1], Counted(backend(4), Hazards(MIX)), 4, CONTEXT)
    requests = lane.begin()
    assert Counted.passes == 0
    assert all(r.pending == 1 and r.output_tokens == 1 for r in requests)
    assert all(r.draft_computed == len(r.tokens) - 1 for r in requests)
    outcome = lane.engine.step()
    assert outcome is not None
    assert Counted.passes == 1
    assert outcome.drafted_k.tolist() == [3] * 4, "nothing is left to catch up"
    assert not outcome.prefill_tokens
    lane.end(requests)
    assert not lane.engine.has_work
    lane.engine.scheduler.target.check()
    lane.engine.scheduler.draft.check()


def test_modes_take_turns_and_deeper_drafts_emit_more() -> None:
    modes = [BY_NAME[name] for name in ("none", "draft-1", "draft-7", "goodput")]
    rows = {r["mode"]: r for r in run_batch(backend(4), 4, CONTEXT, Budget.of(1.0), modes)}
    assert rows["none"]["emitted_per_step"] == 1.0
    assert rows["none"]["drafted_per_step"] == 0.0
    assert 1.2 < rows["draft-1"]["emitted_per_step"] <= 2.0
    assert rows["draft-7"]["emitted_per_step"] > rows["draft-1"]["emitted_per_step"]
    for row in rows.values():
        assert len(row["tokens_per_s_by_turn"]) == 2
        assert row["tokens_per_s"] > 0
        assert row["step_ms"] >= row["verify_ms"] > 0
    assert rows["draft-7"]["draft_ms"] > 0


def test_a_lone_request_sees_every_task_and_no_time_measures_a_few_steps() -> None:
    synthetic = SyntheticBackend(backend(1), Hazards(MIX))
    tasks: list[str] = []
    lane = Lane(BY_NAME["none"], synthetic, 1, CONTEXT)
    begin = lane.begin

    def watched(part: int = 0):  # type: ignore[no-untyped-def]
        requests = begin(part)
        tasks.extend(r.speculation.task for r in requests)
        return requests

    lane.begin = watched  # type: ignore[method-assign]
    lane.turn(0.0)
    assert tasks == list(MIX)
    assert len(lane.tally.step_ms) == len(MIX)


def test_speedups_are_over_the_best_static_of_a_batch() -> None:
    speeds = {"none": 10.0, "draft-1": 14.0, "draft-7": 12.0, "goodput": 21.0, "pilot": 7.0}
    rows = [{"batch": 8, "mode": m, "tokens_per_s": s} for m, s in speeds.items()]
    (found,) = speedups(rows)
    assert found == {
        "batch": 8, "best_static": "draft-1", "over_none": 1.4, "goodput_over_best": 1.5,
        "pilot_over_best": 0.5,
    }  # fmt: skip


def test_gaps_are_between_the_last_kernel_and_the_first() -> None:
    steps = [(0.0, 95.0), (100.0, 190.0), (200.0, 290.0), (300.0, 390.0)]
    kernels = [(10.0, 40.0), (30.0, 80.0), (120.0, 170.0), (165.0, 205.0), (206.0, 280.0)]
    found = gaps_of(kernels[::-1], steps)
    # The third step's first kernel begins before the second one's last has ended: no gap but 1 us.
    assert found.between_us == [40.0, 1.0]
    assert found.idle_us == [30.0, 20.0, 21.0]
    assert gaps_of([], steps).between_us == []


def test_without_a_gpu_the_gap_is_the_hosts_part_of_a_step() -> None:
    for mode in (gaps.MODES[0], gaps.MODES[-1]):
        lane = Lane(mode, SyntheticBackend(backend(1), Hazards(MIX)), 1, CONTEXT)
        found = measure_gaps(lane, 5)
        assert found["gap_us"] > 0.0
        assert found["idle_us"] is None
        assert "host clock" in found["how"]
        assert not lane.engine.has_work


def test_the_gap_of_a_policy_that_decides_between_steps_is_only_told() -> None:
    waits = [
        {"mode": mode.name, "gap_us": us, "passed": us <= 200.0, "how": "by hand"}
        for mode, us in zip(gaps.MODES, (90.0, 150.0, 900.0, 120.0), strict=True)
    ]
    assert gaps.bar_of(waits)["passed"]
    assert gaps.bar_of(waits)["gap_us"] == 150.0
    waits[3] |= {"gap_us": 300.0, "passed": False}
    assert not gaps.bar_of(waits)["passed"]
    assert not gaps.bar_of([])["passed"]
