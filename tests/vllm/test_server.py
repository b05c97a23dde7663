"""vLLM's own server, steered: as a user starts it, asked by OpenAI's client."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

START_S = 240.0


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


@pytest.fixture(scope="module")
def server(
    checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    from tests.tiny_vllm import server_arguments

    port, log = _free_port(), tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port)]
    command += server_arguments(checkpoints, "draft_model")
    command += ["--scheduler-cls", "parlay.engine.plugins.vllm.make_scheduler"]
    url = f"http://127.0.0.1:{port}"
    environ = {**os.environ, "PARLAY_POLICY": "fixed", "PARLAY_SET": "proposer=draft_model k=3"}
    environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ)
        try:
            end_s = time.monotonic() + START_S
            while time.monotonic() < end_s and process.poll() is None:
                try:
                    _get(f"{url}/health")
                    break
                except OSError:
                    time.sleep(0.5)
            else:
                pytest.fail("the server did not start:\n" + log.read_text()[-3000:])
            yield url, log
        finally:
            process.terminate()
            process.wait(60)


def _drafted(url: str) -> int:
    found = re.findall(
        r"^vllm:spec_decode_num_draft_tokens_total\{.*\} ([\d.]+)", _get(f"{url}/metrics"), re.M
    )
    return int(sum(float(value) for value in found))


def test_hints_come_through_openais_client(server: tuple[str, Path]) -> None:
    import openai

    url, log = server
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    texts = []
    for speculate in ("true", "false"):
        before = _drafted(url)
        done = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "one two three one two three"}],
            temperature=0.0,
            max_completion_tokens=40,
            extra_body={
                "ignore_eos": True,
                "vllm_xargs": {"parlay_speculate": speculate, "parlay_task": "count"},
            },
        )
        assert done.usage is not None
        assert done.usage.completion_tokens == 40
        texts.append(done.choices[0].message.content)
        assert (_drafted(url) > before) is (speculate == "true")
    assert texts[0] == texts[1]
    assert "parlay steers this engine: draft_model or our n-gram" in log.read_text()
