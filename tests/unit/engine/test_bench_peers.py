"""Peers as processes: the protocol, with a module that stands in for vLLM, and what goes wrong."""

from __future__ import annotations

import json
import mmap
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from parlay.engine import cli
from parlay.engine.bench_load import Load
from parlay.engine.bench_memory import peak_mb, reset_peak
from parlay.engine.bench_peer import Peer
from parlay.engine.bench_peers import check_peers, start_peers, taking_part

SETTINGS = {
    "model": "m", "dtype": "bfloat16", "threads": 1, "context_tokens": 64, "max_running": 16,
    "kv_bytes": 1 << 20,
}  # fmt: skip

FAKE_VLLM = '''
"""Gives two tokens a step and request, the prompt's first token an end of text if it is 99."""
import json, os, sys, types

__version__ = "0.0"
print("vLLM talks on standard output")
MADE = {}

class SamplingParams:
    def __init__(self, **kwargs):
        assert kwargs["temperature"] == 0.0
        self.__dict__.update(kwargs)

sampling_params = types.SimpleNamespace(RequestOutputKind=types.SimpleNamespace(DELTA="delta"))

class Engine:
    def __init__(self):
        self.live, self.most = {}, 0

    def add_request(self, name, prompt, sampling):
        assert sampling.output_kind == "delta"
        if prompt["prompt_token_ids"] == [13]:
            print("out of luck", file=sys.stderr)
            raise RuntimeError("no such luck")
        if prompt["prompt_token_ids"] == [14]:
            print("killed by a signal", file=sys.stderr)
            os._exit(3)
        self.live[name] = sampling.max_tokens
        self.most = max(self.most, len(self.live))
        assert self.most <= 2

    def step(self):
        outs = []
        for name in list(self.live):
            new = min(2, self.live[name])
            self.live[name] -= new
            finished = self.live[name] == 0
            if finished:
                del self.live[name]
            out = types.SimpleNamespace(token_ids=[7] * new)
            outs.append(types.SimpleNamespace(request_id=name, outputs=[out], finished=finished))
        return outs

class LLM:
    def __init__(self, **kwargs):
        with open(os.environ["FAKE_LOG"], "a") as log:
            names = ("PARLAY", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "LD_PRELOAD")
            keep = {k: os.environ.get(k) for k in names}
            log.write(json.dumps({**kwargs, **keep}) + "\\n")
        self.llm_engine = Engine()
'''


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python that finds a `vllm` as above."""
    (tmp_path / "vllm.py").write_text(FAKE_VLLM, encoding="utf-8")
    for folder in ("bin", "lib"):
        (tmp_path / folder).mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()  # the loader says so, and goes on
    file = tmp_path / "bin" / "python"
    file.write_text(
        f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n', encoding="utf-8"
    )
    file.chmod(0o755)
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("PARLAY", "1")
    return file


def test_vllm_is_started_once_a_mode_and_asked_often(python: Path, tmp_path: Path) -> None:
    check_peers(["vllm"], python)
    with ExitStack() as stack:
        entrants, about = start_peers(stack, ["vllm"], python, SETTINGS, [99])
        assert [(e.engine, e.mode) for e in entrants] == [("vllm", "none"), ("vllm", "ngram")]
        assert about == {"vllm": {"version": "0.0"}}
        for entrant in (*entrants, *entrants):
            assert list(entrant.settings) == [1, 4, 16]
            answer = entrant.decode(Load(2, [[1], [2], [3]], [5, 2, 1], ["chat"] * 3))
            assert [t.tokens for t in answer.timings] == [5, 2, 1]
            for t in answer.timings:
                assert 0 < t.ttft_s <= t.total_s <= answer.seconds
            assert answer.peak_memory_mb is None or 1 < answer.peak_memory_mb < 1000
    made = [json.loads(line) for line in (tmp_path / "log").read_text("utf-8").splitlines()]
    made.sort(key=lambda m: m["speculative_config"] is not None)
    assert len(made) == 2
    assert made[0]["speculative_config"] is None
    assert made[1]["speculative_config"]["method"] == "ngram"
    for one in made:
        assert (one["PARLAY"], one["OMP_NUM_THREADS"]) == ("0", "1")
        assert one["NUMBA_NUM_THREADS"] == "1"
        assert (one["dtype"], one["max_num_seqs"], one["model"]) == ("bfloat16", 16, "m")
        assert one["enable_prefix_caching"] is False
        assert one["LD_PRELOAD"] is None or one["LD_PRELOAD"].endswith("lib/libiomp5.so")


@pytest.mark.parametrize(("token", "says"), [(13, "RuntimeError: no such luck"), (14, "signal")])
def test_a_peer_that_fails_says_why_and_what_helps(python: Path, token: int, says: str) -> None:
    with ExitStack() as stack:
        entrants, _ = start_peers(stack, ["vllm"], python, SETTINGS, [])
        with pytest.raises(ValueError, match=rf"^vllm: .*{says}.*; .*--without vllm"):
            entrants[0].decode(Load(1, [[token]], [4], ["chat"]))


def test_an_environment_without_vllm_is_an_error(python: Path, tmp_path: Path) -> None:
    (tmp_path / "vllm.py").unlink()
    with (
        ExitStack() as stack,
        pytest.raises(ValueError, match=r"No module named 'vllm'; `make venv-vllm`"),
    ):
        start_peers(stack, ["vllm"], python, SETTINGS, [])


def test_what_is_missing_is_an_error_that_names_the_cure(python: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no Python at .*nowhere; `make venv-vllm`"):
        check_peers(["vllm"], tmp_path / "nowhere")
    check_peers(["hf"], tmp_path / "nowhere")
    if sys.platform == "linux" and os.uname().machine == "x86_64":
        (tmp_path / "lib" / "libiomp5.so").unlink()
        with pytest.raises(ValueError, match="pip install intel-openmp"):
            check_peers(["vllm"], python)


def test_peers_can_be_left_out() -> None:
    assert taking_part([]) == ["hf", "hf_assisted", "hf_prompt_lookup", "vllm"]
    assert taking_part(["vllm", "hf"]) == ["hf_assisted", "hf_prompt_lookup"]
    with pytest.raises(ValueError, match="--without vllms: no such peer; choose among hf, "):
        taking_part(["vllms"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--vllm-python", "/nowhere/python"], "make venv-vllm"),
        (["--without", "parlay"], "no such peer"),
    ],
)
def test_the_command_says_so_in_one_line(words: list[str], says: str) -> None:
    app = typer.Typer()
    app.command()(cli.bench_engine)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert done.stderr.startswith("parlay bench engine: ")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_silent_peer_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parlay.engine.bench_peer.START_S", 0.05)
    monkeypatch.setattr("parlay.engine.bench_peer._END_S", 0.05)
    code = "import time; time.sleep(60)"
    peer = Peer("x", "wake it", [sys.executable, "-c", code], os.environ, {})
    try:
        with pytest.raises(ValueError, match=r"^x: it said nothing for 0 s.*; wake it$"):
            peer.wait_ready()
    finally:
        peer.close()


def hold(mb: int) -> None:
    """Have so many MB resident for a moment, whatever the allocator keeps."""
    with mmap.mmap(-1, mb * 1_000_000) as block:
        for place in range(0, len(block), mmap.PAGESIZE):
            block[place] = 1


def test_the_peak_is_of_what_came_since_it_was_reset() -> None:
    pid = os.getpid()
    hold(160)
    if not reset_peak(pid):
        pytest.skip("this system keeps the peak of a process's whole life")
    before = peak_mb(pid)
    hold(80)
    after = peak_mb(pid)
    assert before is not None
    assert after is not None
    assert 70 < after - before < 90
    assert reset_peak(pid)
    assert (peak_mb(pid) or 0) < after - 40


def test_where_the_peak_cannot_be_reset_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"VmRSS:": 100.0, "VmHWM:": 180.0}
    monkeypatch.setattr("parlay.engine.bench_memory._status_mb", lambda _, name: figures[name])
    assert not reset_peak(2**31 - 1)


def test_nobody_counts_a_process_that_is_not_there() -> None:
    assert not reset_peak(2**31 - 1)
    assert peak_mb(2**31 - 1) is None
