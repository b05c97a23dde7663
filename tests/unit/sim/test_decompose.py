"""What pilot lacks, part by part: the parts multiply to the whole, and what is told is true."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from parlay.policies.cli import run as parlay
from parlay.policies.policy import EngineLimits
from parlay.policies.types import DRAFT_MODEL, MEDUSA, PROPOSERS
from parlay.sim.backend import SimBackend
from parlay.sim.costs import Work, load_costs
from parlay.sim.decompose import CHAIN, DELAY, PILOT, decompose
from parlay.sim.latent import Latents
from parlay.sim.laws import tasks
from parlay.sim.scenario import Scenario, load_scenario
from parlay.sim.simulate import Job, run_jobs
from parlay.sim.speed import Speed, stages_of
from parlay.sim.told import TOLD, Told


def short(name: str, steps: int) -> Scenario:
    return dataclasses.replace(load_scenario(name).shortened(steps), warm_up_steps=10)


def test_the_parts_multiply_to_what_the_oracle_is_ahead() -> None:
    scenario = short("chat_low", 200)
    parts = decompose(scenario, [1], 200, 1)
    assert [part.part for part in parts] == list(CHAIN)
    players = ("none", PILOT, "filtering_oracle")
    none, pilot, oracle = run_jobs([Job(scenario, name, 1, 200) for name in players])
    speed = Speed(stages_of(scenario, 200), [none])
    ahead = math.prod(part.ratio for part in parts)
    assert ahead == pytest.approx(speed([oracle]) / speed([pilot]))
    assert all(part.ci95[0] <= part.ratio <= part.ci95[1] for part in parts)


def test_late_plans_are_a_part_of_their_own() -> None:
    # Two steps late, as `stale` has it, costs little: plans are fitted to the matches of now.
    stale = dataclasses.replace(short("stale", 200), plan_delay_steps=24)
    parts = {part.part: part for part in decompose(stale, [1], 200, 1)}
    assert parts[DELAY].ratio > 1.02


def test_a_recording_cannot_be_taken_apart() -> None:
    recorded = dataclasses.replace(short("mixed", 40), acceptance="some.jsonl")
    with pytest.raises(ValueError, match="has no oracle"):
        decompose(recorded, [1], 40, 1)


def told(name: str, costs: str = "h200_8b") -> Told:
    limits = EngineLimits(k_max=8, token_budget=2048)
    luck = Latents([tasks()["chat"].law], 8, 1)
    backend = SimBackend(luck, load_costs(costs), limits, {"chat": 0}, catches_up=True)
    policy = TOLD[name](backend, limits)
    assert isinstance(policy, Told)
    return policy


@pytest.mark.parametrize("costs", ["h200_8b", "cpu_smollm", "h200_moe"])
def test_told_costs_are_the_simulators(costs: str) -> None:
    policy, price = told("told_all", costs), load_costs(costs).time
    own = policy.core.step_time
    assert own is policy.prices  # type: ignore[comparison-overlap]
    policy.prices.rows, policy.prices.kv_tokens = 64, 4000
    took = price(Work(64 + 24, 64, 4000))
    assert own.verify_ms(np.array([88]), 4000.0)[0] == pytest.approx(
        took.verify_ms + took.overhead_ms
    )
    a_pass, token_ms, catch_up_ms = own.draft_ms()
    full = price(Work(0, 0, 0, draft_rows=(64,), draft_kv_tokens=4000)).draft_ms[DRAFT_MODEL]
    assert a_pass + 63 * token_ms[DRAFT_MODEL] == pytest.approx(full)
    late = price(Work(0, 0, 0, draft_rows=(1,), catch_up_tokens=512)).draft_ms[DRAFT_MODEL]
    assert a_pass + 512 * catch_up_ms == pytest.approx(late)
    heads = price(Work(0, 0, 0, medusa_rows=64)).draft_ms[MEDUSA]
    assert own.heads_ms() == pytest.approx(heads)


def test_who_is_told_not_to_try_never_tries() -> None:
    assert not any(told("told_all_no_tries").core.explorer.limits.has(p) for p in range(PROPOSERS))
    assert told("told_all").core.explorer.limits.has(DRAFT_MODEL)


def test_the_command_writes_the_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, small = tmp_path / "rows.json", tmp_path / "small.toml"
    stage = "[[stage]]\nconcurrency = 2\nmix = { chat = 1.0 }\n"
    small.write_text(f'title = "s"\ncosts = "h200_8b"\nsteps = 20\nwarm_up_steps = 0\n{stage}')
    argv = ["--scenario", str(small), "--seeds", "1", "--workers", "1"]
    assert parlay(["simulate", *argv, "--policy", "none", "--decompose", "--json", str(file)]) == 0
    parts = json.loads(file.read_text())["parts"]
    assert [part["part"] for part in parts] == list(CHAIN)
    assert "what pilot would gain" in capsys.readouterr().out
