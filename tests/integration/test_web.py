"""The page of a real sidecar in a real browser, its JSON, and the commands that read it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from tests.sidecars import running
from tests.watching import TaggedHistory

from parlay.policies.synthetic import LIMITS
from parlay.policies.types import PlanSource
from parlay.protos import codec

START_S = 20.0
TRIES = 4
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Debian's chromium")
PLOTS = ["plot-acceptance", "plot-gain", "plot-k", "plot-load", "plot-rate", "plot-shares"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A sidecar that has steered an engine for some steps; yields the page's URL."""
    address = f"unix:{tmp_path_factory.mktemp('page') / 's.sock'}"
    with running(address, "--http", "127.0.0.1:0") as sidecar:
        steer(address, 150)
        yield sidecar.page


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


def browse_live(url: str, profile: Path, *options: str) -> str:
    """Open the page until all of it is drawn: on a busy machine its six seconds may be too few."""
    for _ in range(TRIES):
        page = browse(url, profile, "--dump-dom", *options)
        if 'data-state="live"' in page:
            return page
    raise AssertionError(page)


def browse(url: str, profile: Path, *options: str) -> str:
    """Open a URL in Chromium for six seconds of its own time; return what it prints."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={profile}", "--window-size=1280,1500",
        "--virtual-time-budget=6000", *options, url,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_browser
def test_a_browser_shows_engines_tasks_and_plots(served: str, tmp_path: Path) -> None:
    page = browse_live(served, tmp_path)
    for words in ("engine-7", "summarise", "tokens a second", "Newest decisions"):
        assert words in page
    plots = re.findall(r'<div id="(plot-[a-z]+)" class="js-plotly-plot"', page)
    assert sorted(plots) == PLOTS
    # The bars and the lines themselves, not only their axes.
    assert page.count('class="trace bars"') >= 1
    assert page.count('class="js-line"') >= 6


@needs_browser
def test_a_browser_shows_why(served: str, tmp_path: Path) -> None:
    request = json.loads(read(f"{served}/overview.json"))["decisions"][0]["request_id"]
    page = browse(f"{served}/explain/{request}", tmp_path, "--dump-dom")
    assert "The plan was to draft" in page
    assert "What it could have drafted" in page


@needs_browser
def test_a_browser_says_what_is_wrong(served: str, tmp_path: Path) -> None:
    page = browse(f"{served}/?engine=nobody", tmp_path, "--dump-dom")
    assert 'data-state="away"' in page
    assert "no engine 'nobody' was heard; known: engine-7" in page


@needs_browser
def test_a_screenshot_is_more_than_an_empty_page(served: str, tmp_path: Path) -> None:
    pictures = []
    for name, url in (("page", served), ("none", f"{served}/assets/nothing")):
        browse(url, tmp_path / name, f"--screenshot={tmp_path / name}.png")
        pictures.append((tmp_path / f"{name}.png").read_bytes())
    page, none = pictures
    assert page.startswith(b"\x89PNG")
    assert len(page) > 4 * len(none)
