"""`parlay engine` as a process: serves, drains on SIGTERM, says what is wrong in one line."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.serving import WAIT_S, get, post, tiny_checkpoint

COMMAND = [sys.executable, "-m", "parlay.engine.server"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny-model")


@contextlib.contextmanager
def running(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            yield line.split()[-1], process
        finally:
            process.kill()
            process.wait()


def test_its_steps_can_be_watched(folder: Path, tmp_path: Path) -> None:
    watch = f"unix:{tmp_path}/stats.sock"
    with running("--model", str(folder), "--draft", "none", "--stats", watch) as (url, _):
        body = {"model": "tiny-model", "prompt": "x", "max_tokens": 9, "ignore_eos": True}
        post(f"{url}/v1/completions", body)
        ask = [sys.executable, "-m", "parlay.policies.cli", "stats", watch, "--request", "1"]
        done = subprocess.run([*ask, "--json"], capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["output_tokens"] == 9


def test_a_folder_is_served_under_its_name_and_sigterm_drains(folder: Path) -> None:
    options = ["--draft", str(folder), "--policy", "fixed", "--set", "k=3", "--context", "100"]
    with running("--model", str(folder), *options) as (url, process):
        (card,) = json.loads(get(f"{url}/v1/models"))["data"]
        assert (card["id"], card["max_model_len"]) == ("tiny-model", 100)
        body = {"model": "tiny-model", "prompt": "x", "max_tokens": 99, "ignore_eos": True}
        answers: list[Any] = []
        asking = threading.Thread(
            target=lambda: answers.append(post(f"{url}/v1/completions", body))
        )
        asking.start()
        while not answers and json.loads(get(f"{url}/health"))["running"] == 0:
            pass
        process.send_signal(signal.SIGTERM)
        asking.join()
        ((status, said, _),) = answers
        assert (status, said["usage"]["completion_tokens"]) == (200, 99)
        assert said["usage"]["speculation"]["accepted"] > 0
        assert process.wait(WAIT_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_silent_sidecar_leaves_the_policy_in_charge(folder: Path, tmp_path: Path) -> None:
    with running("--model", str(folder), "--sidecar", f"unix:{tmp_path}/none.sock") as (url, _):
        body = {"model": "tiny-model", "prompt": "x", "max_tokens": 20, "ignore_eos": True}
        assert post(f"{url}/v1/completions", body)[0] == 200
        metrics = get(f"{url}/metrics").decode()
        assert 'parlay_engine_plan_rows_total{source="local"} 20.0' in metrics


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--policy", "nope"], "unknown policy 'nope'"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--port", "70000"], "--port must be between 0 and 65535"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["--max-running", "0"], "max_running must be at least 1"),
        (["--context", "4000"], "context is 128 tokens, not 4000"),
        (["--sidecar", "x:1", "--policy", "goodput"], "leave out --policy"),
        (["--sidecar", "nonsense"], "nonsense"),
        (["--set", "k"], "write it as key=value"),
        (["--corpus", "/no/such/file"], "--corpus /no/such/file cannot be read: No such file"),
    ],
)
def test_what_is_wrong_is_one_line(folder: Path, options: list[str], says: str) -> None:
    model = [] if "--model" in options else ["--model", str(folder)]
    port = [] if "--port" in options else ["--port", "0"]
    one_line(subprocess.run([*COMMAND, *model, *port, *options], **KEPT), says)


def test_a_port_in_use_is_one_line(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([*COMMAND, "--model", str(folder), "--port", port], **KEPT)
    one_line(done, f"cannot listen on 127.0.0.1:{port}: Address already in use")


KEPT: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, "check": False}


def one_line(done: subprocess.CompletedProcess[str], says: str) -> None:
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("parlay engine: ")
    assert says in line
