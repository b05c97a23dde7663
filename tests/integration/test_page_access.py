"""A page that other hosts can reach: its token and its certificate, for browser and commands."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.certificates import authority, signed
from tests.integration.test_security import token_file, until
from tests.integration.test_web import browse, browse_live, needs_browser, steer
from tests.sidecars import Sidecar, running

from parlay.controller import doctor
from parlay.controller.fetch import fetch
from parlay.controller.tls import PageTls
from parlay.policies.doctor import Asked, Verdict

START_S = 20.0
TOKEN, NEW_TOKEN = "reader-0123456789abcdef", "reader-fedcba9876543210"


@pytest.fixture
def readers(tmp_path: Path) -> Path:
    """The file of who may read."""
    return token_file(tmp_path, "readers", f"anna {TOKEN}")


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[Sidecar]:
    """Run a sidecar with a page that other hosts reach, at the address that this one knows."""
    with running(f"unix:{folder}/s.sock", "--http", "0.0.0.0:0", *options) as sidecar:
        sidecar.page = sidecar.page.replace("0.0.0.0", "127.0.0.1")
        yield sidecar


def status(url: str, token: str = "") -> int:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    asked = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=START_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


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
    tmp_path: Path, readers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "parlay.toml"
    with serving(tmp_path, "--http-tokens", str(readers)) as served:
        url = served.page
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
        token_file(tmp_path, "readers", f"anna {NEW_TOKEN}")
        served.send(signal.SIGHUP)
        until(lambda: status(url, NEW_TOKEN) == 200)
        assert fetch(url, "/overview.json")["engines"]
        assert status(url, TOKEN) == 401
    said = "".join(served.errors)
    assert "tokens travel as plain text" in said
    assert TOKEN not in said
    assert NEW_TOKEN not in said


def test_a_token_is_not_sent_to_another_host_as_plain_text(
    readers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARLAY_HTTP_TOKEN_FILE", str(readers))
    with pytest.raises(ValueError, match="would travel as plain text"):
        fetch("http://10.0.0.1:9090", "/overview.json")


def test_the_page_is_served_with_the_sidecars_certificate(
    tmp_path: Path, readers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = authority(tmp_path)
    cert, key = signed(tmp_path, ca, "server")
    monkeypatch.setenv("PARLAY_HTTP_TOKEN_FILE", str(readers))
    options = ("--http-tokens", str(readers), "--tls-cert", str(cert))
    with serving(tmp_path, *options, "--tls-key", str(key)) as served:
        url = served.page
        assert url.startswith("https://127.0.0.1:")
        with pytest.raises(OSError, match="no sidecar answers"):
            fetch(url, "/overview.json")
        monkeypatch.setenv("PARLAY_HTTP_CA_FILE", str(ca))
        assert fetch(url, "/overview.json")["engines"] == []
        assert fetch(url, "/health", any_name=True)["status"] == "ok"
        with pytest.raises(OSError, match="no sidecar answers"):
            fetch(url.replace("https", "http"), "/health")
    assert "plain text" not in "".join(served.errors)


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
def test_a_browser_is_let_in_with_the_password_alone(tmp_path: Path, readers: Path) -> None:
    with serving(tmp_path, "--http-tokens", str(readers)) as served:
        url = served.page
        steer(f"unix:{tmp_path}/s.sock", 40)
        shut = browse(url, tmp_path / "a", "--dump-dom")
        assert "engine-7" not in shut
        assert 'data-state="live"' not in shut
        page = browse_live(url.replace("//", f"//anna:{TOKEN}@"), tmp_path / "b")
        assert "engine-7" in page
        assert page.count('class="js-line"') >= 6
        shown = json.dumps(page)
        assert TOKEN not in shown
