"""A page that other hosts can reach: its token and its certificate, for browser and commands."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.certificates import authority, signed
from tests.integration.test_web import browse, needs_browser, steer

from parlay.controller import doctor
from parlay.controller.fetch import fetch
from parlay.controller.tls import PageTls
from parlay.policies.doctor import Asked, Verdict

START_S = 20.0
TOKEN, NEW_TOKEN = "reader-0123456789abcdef", "reader-fedcba9876543210"


@dataclass
class Served:
    """A sidecar's page, at this host's address; said: what its process wrote to stderr."""

    url: str
    process: subprocess.Popen[str]
    said: str = ""


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[Served]:
    """Run a sidecar with a page that other hosts reach; `said` is whole after the block."""
    command = [sys.executable, "-m", "parlay.controller", "--listen", f"unix:{folder}/s.sock"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, "--http", "0.0.0.0:0", *options], stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline(), process.stdout.readline()]
            (url,) = (line.split()[-1] for line in lines if "page on" in line)
            served = Served(url.replace("0.0.0.0", "127.0.0.1"), process)
            yield served
        finally:
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=START_S)
        served.said = errors


def token_file(folder: Path, token: str, name: str = "readers") -> Path:
    file = folder / name
    file.write_text(f"anna {token}\n")
    file.chmod(0o600)
    return file


def status(url: str, token: str = "", trusted: ssl.SSLContext | None = None) -> int:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=START_S, context=trusted
        ) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def run(*command: str, environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, **(environ or {})},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_without_a_token_other_hosts_may_not_reach_it(tmp_path: Path) -> None:
    listen = ("--listen", f"unix:{tmp_path}/s.sock")
    code, said = run("parlay.controller", *listen, "--http", "0.0.0.0:0")
    assert (code, said.count("\n")) == (1, 1)
    assert said.startswith("parlay serve: the page cannot listen on 0.0.0.0:0: it asks for no")
    assert not (tmp_path / "s.sock").exists()


def test_commands_and_probes_show_a_token_and_follow_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = token_file(tmp_path, TOKEN)
    config = tmp_path / "parlay.toml"
    with serving(tmp_path, "--http-tokens", str(readers)) as served:
        url = served.url
        steer(f"unix:{tmp_path}/s.sock", 3)
        assert [status(f"{url}{path}") for path in ("/", "/metrics", "/health")] == [401, 401, 200]
        assert [status(f"{url}{path}", TOKEN) for path in ("/", "/metrics")] == [200, 200]
        with pytest.raises(ValueError, match=r"a token is needed.*PARLAY_HTTP_TOKEN_FILE"):
            fetch(url, "/overview.json")
        code, said = run("parlay.policies.cli", "top", "--address", url)
        assert (code, said.count("\n")) == (1, 1)
        environ = {"PARLAY_HTTP_TOKEN_FILE": str(readers)}
        code, said = run("parlay.policies.cli", "top", "--address", url, environ=environ)
        assert (code, "engine-7" in said) == (0, True), said
        config.write_text(
            f'listen = "unix:{tmp_path}/s.sock"\nhttp = "0.0.0.0:{url.rpartition(":")[2]}"\n'
            f'http_tokens = "{readers}"\n'
        )
        for shown, words in (("", "for whoever shows a token"), (str(readers), ": ok, engines ")):
            monkeypatch.setenv("PARLAY_HTTP_TOKEN_FILE", shown)
            found = {one.what: one for one in doctor.checks(Asked(config))}["http"]
            assert (found.verdict, words in found.text) == (Verdict.OK, True), found
        token_file(tmp_path, NEW_TOKEN)
        served.process.send_signal(signal.SIGHUP)
        until(lambda: status(url, NEW_TOKEN) == 200)
        assert fetch(url, "/overview.json")["engines"]
        assert status(url, TOKEN) == 401
    assert "tokens travel as plain text" in served.said
    assert TOKEN not in served.said
    assert NEW_TOKEN not in served.said


def test_a_token_is_not_sent_to_another_host_as_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARLAY_HTTP_TOKEN_FILE", str(token_file(tmp_path, TOKEN)))
    with pytest.raises(ValueError, match="would travel as plain text"):
        fetch("http://10.0.0.1:9090", "/overview.json")


def test_the_page_is_served_with_the_sidecars_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = authority(tmp_path)
    cert, key = signed(tmp_path, ca, "server")
    monkeypatch.setenv("PARLAY_HTTP_TOKEN_FILE", str(token_file(tmp_path, TOKEN)))
    options = ("--http-tokens", str(tmp_path / "readers"), "--tls-cert", str(cert))
    with serving(tmp_path, *options, "--tls-key", str(key)) as served:
        url = served.url
        assert url.startswith("https://127.0.0.1:")
        with pytest.raises(OSError, match="no sidecar answers"):
            fetch(url, "/overview.json")
        monkeypatch.setenv("PARLAY_HTTP_CA_FILE", str(ca))
        assert fetch(url, "/overview.json")["engines"] == []
        assert fetch(url, "/health", any_name=True)["status"] == "ok"
        with pytest.raises(OSError, match="no sidecar answers"):
            fetch(url.replace("https", "http"), "/health")
    assert "plain text" not in served.said


def test_a_replaced_certificate_is_shown_to_new_connections(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    cert, key = signed(tmp_path, ca, "server")
    page = PageTls(cert, key)
    before = shown_by(page.context, ca)
    page.refresh()
    assert shown_by(page.context, ca) == before
    other_cert, other_key = signed(tmp_path, ca, "replica")
    key.write_bytes(other_key.read_bytes())
    page.refresh()
    assert shown_by(page.context, ca) == before
    cert.write_bytes(other_cert.read_bytes())
    page.refresh()
    assert shown_by(page.context, ca) != before


def shown_by(server: ssl.SSLContext, ca: Path) -> bytes:
    """Shake hands in memory; return the certificate that was shown."""
    client = ssl.create_default_context(cafile=ca)
    client.check_hostname = False
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True))
    for end in (*ends, ends[0]):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    found = ends[0].getpeercert(binary_form=True)
    assert found is not None
    return found


@needs_browser
@pytest.mark.slow
def test_a_browser_is_let_in_with_the_password_alone(tmp_path: Path) -> None:
    readers = token_file(tmp_path, TOKEN)
    with serving(tmp_path, "--http-tokens", str(readers)) as served:
        url = served.url
        steer(f"unix:{tmp_path}/s.sock", 40)
        shut = browse(url, tmp_path / "a", "--dump-dom")
        assert "engine-7" not in shut
        assert 'data-state="live"' not in shut
        page = browse(url.replace("//", f"//anna:{TOKEN}@"), tmp_path / "b", "--dump-dom")
        assert 'data-state="live"' in page
        assert "engine-7" in page
        assert page.count('class="js-line"') >= 6
        shown = json.dumps(page)
        assert TOKEN not in shown
