"""The demo's adaptive mode under a sidecar that is really another process."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from parlay.engine.backend import Batch, Drafts, Verified
from parlay.engine.demo.modes import demo_modes, open_lanes, sidecar_figures
from parlay.engine.demo.prompts import TASKS, demo_prompts
from parlay.engine.demo.workload import Cell, run_cell
from parlay.engine.scheduler import EngineConfig
from parlay.engine.sidecar import sidecar
from parlay.engine.virtual import Hazards, Task, VirtualBackend
from parlay.policies.types import Array, PlanSource, Proposer

pytestmark = pytest.mark.slow
SURE = Task({Proposer.NGRAM: (1.0,)})


class Unhurried(VirtualBackend):
    """The virtual clock runs far ahead of the wire: this lets a plan come between two steps."""

    def verify(self, batch: Batch, drafts: Drafts, verify_k: Array) -> Verified:
        """Verify, 10 ms later."""
        time.sleep(0.01)
        return super().verify(batch, drafts, verify_k)


def test_plans_come_from_the_sidecar_and_speed_decoding_up() -> None:
    prompts = demo_prompts()
    ids = [[i + 1] * 8 for i in range(len(prompts))]
    adaptive = next(m for m in demo_modes("goodput") if m.sidecar)
    with ExitStack() as stack:
        backend = Unhurried(Hazards(dict.fromkeys(TASKS, SURE)))
        (lane,) = lanes = open_lanes(stack, (adaptive,), backend, EngineConfig(), ())
        edit = tuple(i for i, p in enumerate(prompts) if p.task == "edit")
        cell = Cell("edit", 1, edit)
        for _ in range(50):
            run = run_cell(lane.engine, cell, prompts, ids, [40] * len(ids))
            if run.steps.mean_acceptance_length > 2:
                break
        figures = sidecar_figures(lanes)
    # Without its plans nothing would be speculated.
    assert run.steps.mean_acceptance_length > 2
    assert run.steps.sources[PlanSource.REMOTE] > 0
    assert figures["reconnects"] == 0
    assert figures["engine_thread_us_p50"] > 0


def test_a_sidecar_that_cannot_start_says_why() -> None:
    with pytest.raises(ValueError, match="unknown policy 'wish'"), sidecar("wish"):
        pass
