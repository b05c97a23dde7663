"""The page of a real sidecar in a real browser, its JSON, and the commands that read it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from tests.watching import TaggedHistory

from parlay.policies.synthetic import LIMITS
from parlay.policies.types import PlanSource
from parlay.protos import codec

START_S = 20.0
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A sidecar that has steered an engine for some steps; yields the page's URL."""
    address = f"unix:{tmp_path_factory.mktemp('page') / 's.sock'}"
    command = [sys.executable, "-m", "parlay.controller", "--listen", address]
    process = subprocess.Popen(
        [*command, "--http", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline(), process.stdout.readline()]
        (url,) = (line.split()[-1] for line in lines if "page on" in line)
        steer(address, 150)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=START_S)
        process.stdout.close()


def steer(address: str, steps: int) -> None:
    """Speak to the sidecar as an engine would, a decision and a report a step."""
    hello, history = codec.Hello("engine-7", LIMITS), TaggedHistory(8)
    with grpc.insecure_channel(address) as channel:
        decide: Callable[..., bytes] = channel.unary_unary("/parlay.v1.PolicyService/Decide")
        report: Callable[..., bytes] = channel.unary_unary("/parlay.v1.PolicyService/Report")
        for _ in range(steps):
            view = history.view()
            plan = codec.decode_decision(
                decide(codec.encode_decide(hello, view), timeout=START_S, wait_for_ready=True)
            )
            outcome = history.step(plan, PlanSource.REMOTE)
            report(codec.encode_report("engine-7", outcome), timeout=START_S)


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=START_S) as answer:
        body: bytes = answer.read()
        return body


def test_figures_are_those_of_the_engine(served: str) -> None:
    time.sleep(0.5)
    view = json.loads(read(f"{served}/overview.json"))
    assert [engine["engine"] for engine in view["engines"]] == ["engine-7"]
    assert {task["task"] for task in view["tasks"]} <= {"chat", "code", "edit", "summarise"}
    assert json.loads(read(f"{served}/health"))["engines"] == 1
    assert b"parlay_steps_total" in read(f"{served}/metrics")


def test_explain_says_why(served: str) -> None:
    view = json.loads(read(f"{served}/overview.json"))
    request = view["decisions"][0]["request_id"]
    for command in (["explain", str(request)], ["top"]):
        done = subprocess.run(
            [sys.executable, "-m", "parlay.policies.cli", *command, "--address", served],
            capture_output=True, text=True, timeout=START_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "engine-7" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "parlay.policies.cli", "explain", "987654321", "--address", served],
        capture_output=True, text=True, timeout=START_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "987654321" in done.stderr


@pytest.mark.skipif(BROWSER is None, reason="needs Debian's chromium")
def test_a_browser_shows_engines_tasks_and_plots(served: str, tmp_path: Path) -> None:
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,1500",
        "--virtual-time-budget=6000", "--dump-dom", served,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    for words in ("engine-7", "summarise", "js-plotly-plot", "tokens"):
        assert words in done.stdout
