"""Ranks in processes: outputs are those of one process, and a rank that is lost is one line."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.serving import WAIT_S, post, tiny_checkpoint, until
from tests.tiny import CONFIG, CPU, AnyPlan, tiny_config, tiny_llama, tiny_weights
from tests.tiny_heads import headed_backend, tiny_heads
from tests.unit.engine.test_branches import WIDE, Priced, run

from parlay.engine.demo.prompts import demo_prompts
from parlay.engine.kv_cache import BlockCache
from parlay.engine.llm import load_backend
from parlay.engine.model_config import ModelConfig
from parlay.engine.models import Llama
from parlay.engine.parallel_model import load_parallel
from parlay.engine.parallel_orders import DRAFT, TARGET, Move
from parlay.engine.parallel_team import RankLost, Team, open_team
from parlay.engine.planner import LocalPlanner
from parlay.engine.request import SamplingParams
from parlay.engine.runner import Model, Runner
from parlay.engine.scheduler import EngineConfig, Scheduler
from parlay.engine.spans import Spans
from parlay.engine.step import Engine
from parlay.engine.torch_backend import DraftModel, TorchBackend
from parlay.policies.types import Proposer

NONE, NGRAM, MODEL, MEDUSA = Proposer
VOCAB = 20
TIGHT = dataclasses.replace(WIDE, max_running=8, target_blocks=56, draft_blocks=60)
"""Some requests are preempted, and trees fall short."""


@contextmanager
def team_of(target: int, draft: int = 1, deadline_s: float = 60.0) -> Iterator[Team]:
    with open_team(target, draft, deadline_s) as team:
        assert team is not None
        yield team


def placed(
    team: Team, role: int, layers: int, seed: int, state_layers: tuple[int, ...] = ()
) -> Model:
    """Return `tests.tiny.tiny_llama` on a role's ranks."""
    if team.degrees[role] == 1:
        return tiny_llama(VOCAB, layers, seed, state_layers=state_layers)
    config = dataclasses.replace(tiny_config(VOCAB, layers), state_layers=state_layers)
    rng = torch.Generator().manual_seed(seed)
    weights = tiny_weights(config.tensor_shapes(), rng)
    if state_layers:
        width = len(state_layers) * config.hidden
        weights["state_proj.weight"] = torch.randn(config.hidden, width, generator=rng)
    embedding = weights["model.embed_tokens.weight"]
    return load_parallel(team, role, config, weights, embedding, torch.float32, CPU)


def check_outputs(team: Team, monkeypatch: pytest.MonkeyPatch) -> TorchBackend:
    """Greedy and coupled, over random drafts and trees, with preemption and shared prefixes."""
    seen: list[str] = []

    def counted(of: type[Scheduler] | type[BlockCache], name: str) -> None:
        plain = getattr(of, name)

        def call(self: Any, *given: Any) -> Any:
            made = plain(self, *given)
            seen.extend([name] if made != 0 else [])
            return made

        monkeypatch.setattr(of, name, call)

    counted(Scheduler, "preempt")
    counted(BlockCache, "adopt")
    target, draft = placed(team, TARGET, 2, 3), placed(team, DRAFT, 1, 7, (1,))
    drafter = DraftModel(draft, torch.arange(VOCAB))
    backend = TorchBackend(target, drafter, TIGHT, seed=1, heads=tiny_heads(VOCAB))
    for temperature in (0.0, 0.8):
        plain, _ = run(headed_backend(VOCAB, 1), CONFIG, AnyPlan((NONE,), 0), temperature)
        assert len({tuple(o) for o in plain}) > 6
        seen.clear()
        plans = Priced((NONE, NGRAM, MODEL, MEDUSA), 5)
        outputs, outcomes = run(backend, TIGHT, plans, temperature)
        assert outputs == plain
        assert sum(int(o.accepted.sum()) for o in outcomes) > 20
        assert sum(int((o.emitted > o.accepted + 1).sum()) for o in outcomes) > 3, "no branch"
        assert {"adopt", "preempt"} <= set(seen), "no prefix was shared, or nobody made way"
    return backend


def test_two_ranks_and_a_draft_on_one_say_what_one_process_says_until_one_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with team_of(2) as team:
        backend = check_outputs(team, monkeypatch)
        team.processes[0].kill()
        with pytest.raises(RankLost, match=r"^rank 1 ended \(killed by signal 9\)$"):
            run(backend, TIGHT, AnyPlan((NONE,), 0), 0.0)


@pytest.mark.slow
def test_so_do_a_target_and_a_draft_on_two_ranks_each(monkeypatch: pytest.MonkeyPatch) -> None:
    with team_of(2, 2) as team:
        check_outputs(team, monkeypatch)


@pytest.mark.slow
def test_so_do_a_target_on_one_rank_and_a_draft_on_two(monkeypatch: pytest.MonkeyPatch) -> None:
    with team_of(1, 2) as team:
        check_outputs(team, monkeypatch)


def tiny(team: Team, dtype: torch.dtype = torch.float32, invariant: bool = False) -> Model:
    """Return a model of three KV heads on a team's target ranks: they do not divide by two."""
    config, weights = three_heads()
    embedding = weights["model.embed_tokens.weight"]
    return load_parallel(team, TARGET, config, weights, embedding, dtype, CPU, invariant)


def three_heads() -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    config = dataclasses.replace(
        tiny_config(VOCAB, 2), hidden=64, ffn=96, heads=6, kv_heads=3, head_dim=16
    )
    return config, tiny_weights(config.tensor_shapes(), torch.Generator().manual_seed(4))


def read(model: Model, rows: int = 3, runner: Runner | None = None) -> torch.Tensor:
    """Return the logits of a batch of prompts, then of one token each."""
    runner, made = runner or Runner(model, 8 * rows, 16), []
    tables = [list(range(8 * r, 8 * r + 8)) for r in range(rows)]
    with torch.inference_mode():
        for start, length in ((0, 30), (30, 1)):
            fed = [[(7 * r + t) % VOCAB for t in range(length)] for r in range(rows)]
            spans = Spans(tables, [start] * rows, [length] * rows)
            made.append(model.logits(runner.read(fed, spans)))
    return torch.cat(made)


@pytest.mark.slow
def test_three_ranks_in_bfloat16_are_as_near_to_float32_as_one_is() -> None:
    config, weights = three_heads()
    embedding = weights["model.embed_tokens.weight"]
    exact, alone = (
        read(Llama(config, weights, embedding, dtype, CPU))
        for dtype in (torch.float32, torch.bfloat16)
    )
    with team_of(3) as team:
        model = tiny(team, torch.bfloat16, invariant=True)
        made, crowd = read(model), read(model, 9)
    noise = (alone.float() - exact).square().mean().sqrt()
    assert 0.0 < (made.float() - exact).square().mean().sqrt() < 2.0 * noise
    # invariant: a row's bits are those it has among others
    assert torch.equal(crowd[: 3 * 30], made[: 3 * 30])
    assert torch.equal(crowd[9 * 30 :][:3], made[3 * 30 :])


@pytest.mark.slow
@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_is_one_line_within_the_deadline(
    signum: signal.Signals, idle: bool
) -> None:
    says = "rank 1 ended (killed by signal 9)"
    if signum is signal.SIGSTOP:
        says = f"{'rank 1' if idle else 'a rank'} did not answer within 2 s"
    with team_of(2, deadline_s=2.0) as team:
        model = tiny(team)
        runner = None if idle else Runner(model, 24, 16)
        assert torch.isfinite(read(model, runner=runner)).all()
        (process,) = team.processes
        process.send_signal(signum)
        start_s = time.monotonic()
        for _ in range(2):  # it stays lost
            with pytest.raises(RankLost) as lost:
                read(model, runner=runner)
            assert str(lost.value) == says
        assert time.monotonic() - start_s < 10.0
    assert process.poll() == -signal.SIGKILL


@pytest.mark.slow
def test_what_a_rank_fails_of_is_said_by_rank_0() -> None:
    with team_of(2) as team:
        model, none = tiny(team), np.zeros(0, np.int64)
        with team.together(TARGET, Move(TARGET, 7, none, none)):
            pass  # there is no such cache
        with pytest.raises(RankLost, match=r"^rank 1 failed: IndexError: list index out of range$"):
            read(model)


@pytest.mark.slow
def test_one_team_a_process() -> None:
    with team_of(2) as first, team_of(2) as second:
        first.join()
        with pytest.raises(ValueError, match=r"torch.distributed is in use"):
            second.join()


LEADER = """
import os, torch
from parlay.engine.parallel_team import Team
team = Team(2)
team.join()
print(team.processes[0].pid, flush=True)
os.kill(os.getpid(), {number})
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_rank_0(number: signal.Signals) -> None:
    program = LEADER.format(number=int(number))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -number
    follower = Path(f"/proc/{int(done.stdout)}")
    until(lambda: not follower.exists() or "\nState:\tZ" in (follower / "status").read_text())


GENERATE = [sys.executable, "-m", "parlay.policies.cli", "generate", "abcabcabc", "--dtype"]


def said(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*GENERATE, "float32", "--raw", "--json", *options],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny-model")


@pytest.mark.slow
def test_the_command_generates_the_same_text(folder: Path) -> None:
    model = ["--model", str(folder), "--max-tokens", "40"]
    one, two = (said(*model, "--tensor-parallel", degree) for degree in "12")
    assert (one.returncode, two.returncode, two.stderr) == (0, 0, "")
    assert json.loads(one.stdout)["text"] == json.loads(two.stdout)["text"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "says"),
    [
        (["0"], "tensor_parallel must be at least 1, not 0"),
        (["3"], "tensor_parallel 3: each rank needs a KV head of its own, and the model has 2"),
        (["2", "--draft-tensor-parallel", "-1"], "draft_tensor_parallel must be at least 1"),
    ],
)
def test_a_degree_that_cannot_be_is_one_line(folder: Path, degrees: list[str], says: str) -> None:
    done = said("--model", str(folder), "--tensor-parallel", *degrees)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert says in line


@pytest.mark.slow
def test_the_server_serves_drains_and_ends_its_ranks(folder: Path) -> None:
    command = [sys.executable, "-m", "parlay.engine.server", "--model", str(folder), "--port", "0"]
    placement = ["--draft", str(folder), "--tensor-parallel", "2", "--draft-tensor-parallel", "2"]
    process = subprocess.Popen(
        [*command, *placement], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        ready = process.stdout.readline()
        assert "tiny-model (tensor parallel: target 2, draft 2) on http" in ready
        body = {"model": "tiny-model", "prompt": "x", "max_tokens": 30, "ignore_eos": True}
        status, answer, _ = post(f"{ready.split()[-1]}/v1/completions", body)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 30)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        assert process.stderr.read() == ""
        assert not Path(f"/proc/{children[0]}").exists()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_the_default_model_in_float32_says_what_one_process_says() -> None:
    def texts(team: Team | None) -> list[list[int]]:
        config = EngineConfig(target_blocks=300, draft_blocks=300, max_running=8)
        backend, tokenizer = load_backend(dtype="float32", config=config, team=team)
        engine = Engine(backend, LocalPlanner(AnyPlan((NONE, NGRAM, MODEL), 7)), config)
        prompts = [p.text for p in demo_prompts()[:6]]
        chats = [tokenizer.chat([{"role": "user", "content": text}]) for text in prompts]
        requests = [engine.add(ids, SamplingParams(max_tokens=32)) for ids in chats]
        while engine.has_work:
            engine.step()
        return [r.output for r in requests]

    alone = texts(None)
    with team_of(2) as team:
        assert texts(team) == alone
