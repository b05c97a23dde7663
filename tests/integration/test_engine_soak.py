"""A thousand random requests through HTTP: none lost, none hung, no block leaked, memory flat."""

from __future__ import annotations

import json
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.serving import MODEL, SMALL, WAIT_S, get, post

ROOT = Path(__file__).parents[2]
REQUESTS, CLIENTS, PARTS = 1000, 12, 4
GROWTH = {"blocks": 2500, "malloc_bytes": 1 << 17, "resident_bytes": 1 << 19}
"""What the last half, 500 requests, may still take: five small objects a request, or 250 bytes."""


class OwnProcess:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.url = self._line()

    def held(self) -> dict[str, int]:
        """Return what it holds; see `tests.serving.held`."""
        self._process.send_signal(signal.SIGUSR1)
        found: dict[str, int] = json.loads(self._line())
        return found

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def own_process(kind: str) -> Iterator[OwnProcess]:
    """Serve in a process of its own."""
    command = [sys.executable, "-m", "tests.serving", kind]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        try:
            yield OwnProcess(process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
            process.wait()


def random_body(rng: random.Random) -> dict[str, Any]:
    prompt = "".join(rng.choices("abé日🎲 ", k=rng.randint(1, 16)))
    chat = rng.random() < 0.5
    seed = rng.choice([None, rng.randrange(1 << 40)])
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": rng.randint(1, 60),
        "temperature": rng.choice([0, 0.7, 1]),
        "top_p": rng.choice([None, 0.9]),
        "stream": rng.random() < 0.5,
        "stop": rng.choice([None, ",", ["^", "never"], "\ufffd,"]),
        "seed": seed,
        "logprobs": rng.choice([None, True if chat else 3]),
        "ignore_eos": rng.random() < 0.8,
        "speculation": rng.choice(
            [None, {"enabled": False}, {"max_k": rng.randint(0, 8)}, {"proposers": ["ngram"]},
             {"task": rng.choice(["code", f"task {rng.random()}"]), "tpot_target_ms": 20},
             None if seed else {"lossy_threshold": rng.random() or 1}]
        ),
    }  # fmt: skip
    return body | (
        {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    )


def ask(url: str, seed: int) -> str:
    """Send one random request; return what became of it."""
    rng = random.Random(seed)
    body = random_body(rng)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    kind = rng.random()
    if kind < 0.2:
        return leave(url, path, body, rng)
    if kind < 0.23:
        status, said, _ = post(url + path, body | {"n": 2})
        assert (status, said["error"]["param"]) == (400, "n")
        return "refused"
    if body["stream"]:
        reason, tokens = streamed(url + path, body)
    else:
        status, said, _ = post(url + path, body)
        assert status == 200, said
        reason, tokens = said["choices"][0]["finish_reason"], said["usage"]["completion_tokens"]
    assert 1 <= tokens <= body["max_tokens"]
    assert reason == "stop" or tokens == body["max_tokens"]
    return str(reason)


def leave(url: str, path: str, body: dict[str, Any], rng: random.Random) -> str:
    """Send a request and go away, after some bytes of the answer or none."""
    place = urlsplit(url)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    with socket.create_connection((place.hostname or "", place.port or 0), WAIT_S) as sock:
        sock.sendall((head + data)[: rng.choice([None, None, len(head) + 5])])
        if rng.random() < 0.5:
            time.sleep(rng.random() * 0.3)
        if body["stream"] and rng.random() < 0.3:
            sock.settimeout(0.1)
            with suppress(TimeoutError):
                sock.recv(rng.randint(1, 400))
    return "left"


def streamed(url: str, body: dict[str, Any]) -> tuple[str, int]:
    """Return why a stream ended and its tokens; it must end well."""
    data = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        events = [line[6:] for line in answer.read().decode().split("\n\n") if line]
    assert events[-1] == "[DONE]"
    last, used = json.loads(events[-3]), json.loads(events[-2])
    return last["choices"][0]["finish_reason"], used["usage"]["completion_tokens"]


def metric(text: str, name: str) -> float:
    return sum(float(v) for v in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.M))


def idle(url: str) -> str:
    """Wait until nothing runs or waits; return the metrics."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        said, text = json.loads(get(f"{url}/health")), get(f"{url}/metrics").decode()
        if said["running"] == said["waiting"] == 0:
            return text
        assert time.monotonic() < deadline_s, "a request hangs"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc what is allocated")
@pytest.mark.parametrize("kind", ["virtual", "any", "goodput"])
def test_a_thousand_random_requests(kind: str) -> None:
    became: Counter[str] = Counter()
    held: list[dict[str, int]] = []
    with own_process(kind) as server:
        url = server.url
        probe = {"model": MODEL, "prompt": "é", "temperature": 0, "max_tokens": 60}
        _, alone, _ = post(f"{url}/v1/completions", probe)
        with ThreadPoolExecutor(CLIENTS) as pool:
            for part in range(PARTS):
                begin, end = (REQUESTS * p // PARTS for p in (part, part + 1))
                became.update(pool.map(lambda seed: ask(url, seed), range(begin, end)))
                text = idle(url)
                held.append(server.held())
                assert metric(text, "parlay_engine_free_blocks") == SMALL.target_blocks
                assert held[-1].pop("draft_blocks") == 0
                _, after, _ = post(f"{url}/v1/completions", probe)
                if kind != "virtual":  # whose text is a function of the request's number
                    assert after["choices"] == alone["choices"]
        text = idle(url)
    print(kind, dict(became), *held, sep="\n")
    print("\n".join(line for line in text.splitlines() if re.match("parlay.*_total", line)))
    assert sum(became.values()) == REQUESTS
    assert became["left"] > 100
    assert min(became["stop"], became["length"], became["refused"]) > 10
    ended = metric(text, "parlay_engine_requests_total")
    assert ended >= became["stop"] + became["length"] + PARTS + 1
    assert metric(text, "parlay_engine_preemptions_total") > 0
    assert metric(text, "parlay_engine_accepted_tokens_total") > 0
    assert metric(text, "parlay_engine_lossy_requests_total") > 0
    for what, most in GROWTH.items():
        assert held[-1][what] - held[PARTS // 2 - 1][what] < most, what
