from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from parlay.engine import cli
from parlay.engine import generate as module
from parlay.engine.generate import StopText, generate
from parlay.engine.planner import LocalPlanner
from parlay.engine.remote import EngineInfo, RemotePlanner
from parlay.engine.request import SamplingParams
from parlay.engine.scheduler import EngineConfig
from parlay.engine.step import Engine
from parlay.engine.virtual import Hazards, Task, VirtualBackend
from parlay.policies.policy import make_policy
from parlay.policies.types import Proposer

TASK = Task({Proposer.NGRAM: (0.7,)})


class Letters:
    """A tokenizer whose every token is one letter."""

    eos_ids = ()

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.encode("".join(m["content"] for m in messages) + ">")

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


def open_virtual(policy: str = "fixed") -> Engine:
    backend = VirtualBackend(Hazards({"": TASK}))
    planner = LocalPlanner(make_policy(policy, {}, backend.limits()))
    return Engine(backend, planner, EngineConfig(), Letters().decode)


def run(sampling: SamplingParams, write: Callable[[str], Any]) -> module.Generated:
    return generate(open_virtual(), Letters(), [1, 2, 3], sampling, write)  # type: ignore[arg-type]


def test_pieces_are_the_text_and_the_counts_add_up() -> None:
    pieces: list[str] = []
    done = run(SamplingParams(max_tokens=40), pieces.append)
    assert "".join(pieces) == done.text
    assert len(done.text) == done.output_tokens == 40
    assert len(pieces) > 5
    assert done.finish_reason == "length"
    assert done.accepted_tokens + done.steps >= 40
    assert sum(done.steps_by_proposer.values()) == done.steps
    assert done.steps_by_plan_source == {"local": done.steps}
    assert done.tokens_per_s > 0
    assert f"40 tokens in {done.steps} steps" in done.stats()


def test_the_stop_string_is_left_out() -> None:
    whole = run(SamplingParams(max_tokens=40), lambda _: None).text
    stop = whole[17:20]
    pieces: list[str] = []
    done = run(SamplingParams(max_tokens=40, stop=(stop,)), pieces.append)
    assert done.text == "".join(pieces) == whole[: whole.index(stop)]
    assert done.finish_reason == "stop"


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_text_is_cut_at_the_first_stop_however_it_comes(
    text: str, stop: list[str], data: st.DataObject
) -> None:
    out: list[str] = []
    cut = StopText(stop, out.append)
    rest = text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        cut.push(rest[:size])
        rest = rest[size:]
    cut.flush()
    # What completes a stop string first ends the text, as it does in the engine.
    ends = [(text.index(s) + len(s), text.index(s)) for s in stop if s in text]
    upto = min((at for end, at in ends if end == min(ends)[0]), default=len(text))
    assert "".join(out) == text[:upto]


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    @contextmanager
    def opened(
        model: object, policy: str, settings: dict[str, str], sidecar: str | None, *_: object
    ) -> Any:
        make_policy(policy, settings)
        engine = open_virtual(policy)
        if sidecar is not None:
            info = EngineInfo("test", engine.limits)
            engine.planner = RemotePlanner(sidecar, info, engine.planner)
        with closing(engine.planner):
            yield engine, Letters()

    monkeypatch.setattr(module, "open_engine", opened)
    app = typer.Typer()
    app.command()(cli.generate)
    return app


def test_command_streams_text_and_says_what_speculation_did(app: typer.Typer) -> None:
    done = CliRunner().invoke(app, ["hello", "--max-tokens", "12", "--stats"])
    assert done.exit_code == 0, done.output
    assert len(done.stdout.strip()) == 12
    assert "12 tokens in" in done.stderr


def test_a_sidecar_that_says_nothing_is_named(app: typer.Typer, tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/nobody.sock"
    done = CliRunner().invoke(app, ["hello", "--max-tokens", "3", "--sidecar", target])
    assert done.exit_code == 0, done.output
    assert len(done.stdout.strip()) == 3
    assert done.stderr.startswith(f"parlay generate: no plan from {target}")
    assert len(done.stderr.splitlines()) == 1


def test_command_prints_json(app: typer.Typer) -> None:
    done = CliRunner().invoke(app, ["-", "--raw", "--json", "--max-tokens", "3"], input="four")
    report = json.loads(done.stdout)
    assert (report["prompt_tokens"], report["output_tokens"]) == (4, 3)
    assert len(report["text"]) == 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["x", "--policy", "wish"], "unknown policy 'wish'"),
        (["x", "--set", "k"], "write it as key=value"),
        (["x", "--policy", "fixed", "--set", "proposer=oracle"], "oracle"),
        (["x", "--policy", "fixed", "--set", "k=many"], "k=many"),
        (["x", "--policy", "none", "--sidecar", "unix:/tmp/x"], "leave out --policy"),
        (["x", "--set", "k=2", "--sidecar", "unix:/tmp/x"], "leave out --policy"),
        (["x", "--temperature", "-1"], "temperature"),
        (["x", "--max-tokens", "0"], "max_tokens"),
        (["", "--raw"], "empty"),
        ([""], "empty"),
        (["\udcff\udcfe"], "no UTF-8 text"),
        (["x" * 9000, "--raw"], "9000 tokens"),
    ],
)
def test_bad_input_gets_one_line(app: typer.Typer, words: list[str], says: str) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert done.stderr.startswith("parlay generate: ")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", [cli.demo, cli.bench_engine])
def test_figures_that_cannot_be_written_are_refused_before_the_work(
    command: Callable[..., None], tmp_path: Path
) -> None:
    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, ["--json", str(tmp_path / "none" / "x.json")])
    assert done.exit_code == 1
    assert "cannot write" in done.stderr
    assert "a folder that can be written" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_prompt_from_an_input_that_is_closed_is_refused(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(SystemExit) as ended:
        app(["-"])
    assert ended.value.code == 1
    assert "standard input is closed" in capsys.readouterr().err


def test_a_refusal_leaves_no_file(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(cli.demo)
    done = CliRunner().invoke(app, ["--json", str(tmp_path / "x.png")])
    assert done.exit_code == 1
    assert "let FILE end in .json" in done.stderr
    assert not list(tmp_path.iterdir())
