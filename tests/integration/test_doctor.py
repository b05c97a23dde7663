"""`parlay doctor`: a sound installation, and everything that can be wrong with one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.certificates import authority, ended, signed
from tests.integration.redis_server import BINARY, RedisServer, free_port
from typer.testing import CliRunner

from parlay.controller import doctor
from parlay.engine import doctor as engine_doctor
from parlay.policies import cli
from parlay.policies import doctor as policies_doctor
from parlay.policies.doctor import GROUP, Asked, Finding, Verdict, examine

OK, WARN, FAIL = Verdict.OK, Verdict.WARN, Verdict.FAIL
WAIT_S = 30.0
TOKEN, ADMIN_TOKEN = "engine-0123456789abcdef", "admin-0123456789abcdef"


def config(folder: Path, **values: str) -> Path:
    file = folder / "parlay.toml"
    lines = {"listen": f"unix:{folder}/s.sock", "policy": "none"} | values
    file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items()))
    return file


def tokens(folder: Path, name: str, token: str, mode: int = 0o600) -> str:
    (folder / name).write_text(token)
    (folder / name).chmod(mode)
    return str(folder / name)


@contextmanager
def serving(file: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "parlay.controller", "--config", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "serving on" not in (line := process.stdout.readline()):
            assert line, "the sidecar has ended"
        try:
            yield
        finally:
            process.terminate()
            assert process.wait(WAIT_S) == 0


def look(file: Path | None, **more: Any) -> dict[str, Finding]:
    """Return the last finding of each kind."""
    return {found.what: found for found in doctor.checks(Asked(file, **more))}


def test_a_sound_sidecar_gets_nothing_but_ok(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ca = authority(folder)
    cert, key = signed(folder, ca, "server")
    file = config(
        folder,
        listen=f"127.0.0.1:{free_port()}",
        http=f"127.0.0.1:{free_port()}",
        admin=f"unix:{folder}/admin.sock",
        tls_cert=str(cert),
        tls_key=str(key),
        tokens=tokens(folder, "engines", TOKEN),
        admin_tokens=tokens(folder, "people", ADMIN_TOKEN),
        log=str(folder / "log"),
        state=f"file:{folder}/state",
    )
    with serving(file):
        refused = look(file)
        assert refused["sidecar"].verdict is FAIL
        assert "PARLAY_SIDECAR_CA_FILE" in refused["sidecar"].mend
        assert "UNAUTHENTICATED" in refused["admin"].text
        assert "PARLAY_ADMIN_TOKEN_FILE" in refused["admin"].mend
        monkeypatch.setenv("PARLAY_SIDECAR_CA_FILE", str(ca))
        monkeypatch.setenv("PARLAY_SIDECAR_TOKEN_FILE", str(folder / "engines"))
        monkeypatch.setenv("PARLAY_ADMIN_TOKEN_FILE", str(folder / "people"))
        for _ in range(2):
            found = look(file)
            assert {one.verdict for one in found.values()} == {OK}, found
        whats = ["config", "tokens", "certificate", "log", "state", "sidecar", "admin", "http"]
        assert list(found) == whats
        assert "decides for 4 requests" in found["sidecar"].text
        monkeypatch.setenv("PARLAY_SIDECAR_TOKEN_FILE", str(folder / "people"))
        assert "PERMISSION_DENIED" in look(file)["sidecar"].text
    gone = look(file)
    assert (gone["sidecar"].verdict, gone["http"].verdict) == (FAIL, FAIL)


def test_a_page_of_another_sidecar_is_not_taken_for_ours(folder: Path) -> None:
    http = f"127.0.0.1:{free_port()}"
    ours = config(folder, http=http, listen=f"unix:{folder}/ours.sock")
    told = ours.read_text()
    with serving(config(folder, http=http, listen=f"unix:{folder}/other.sock")):
        ours.write_text(told)
        found = look(ours)
        assert found["http"].verdict is FAIL
        assert f"listens on unix:{folder}/other.sock" in found["http"].text
        theirs = look(ours, sidecar=f"unix:{folder}/other.sock")
        assert (theirs["sidecar"].verdict, theirs["http"].verdict) == (OK, OK)


def test_a_wrong_file_is_the_only_finding(folder: Path) -> None:
    file = config(folder, polcy="none")
    found = look(file)
    assert list(found) == ["config"]
    assert f"{file}: unknown key 'polcy'" in found["config"].text


def test_a_file_that_is_missing_has_an_example(folder: Path) -> None:
    found = look(folder / "missing.toml")
    assert "controller/deploy/parlay.toml is an example" in found["config"].mend


def test_certificates_that_end_are_said_before_and_after(folder: Path) -> None:
    ca = authority(folder)
    cert, key = signed(folder, ca, "server", days=5)
    file = config(folder, listen="127.0.0.1:1", tls_cert=str(cert), tls_key=str(key))
    found = look(file)["certificate"]
    assert (found.verdict, "4 days" in found.text) == (WARN, True)
    cert, key = ended(folder)
    found = look(config(folder, tls_cert=str(cert), tls_key=str(key)))["certificate"]
    assert (found.verdict, "certificate has expired" in found.text) == (FAIL, True)
    found = look(config(folder, tls_cert=str(cert), tls_key=str(ca.with_suffix(".key"))))[
        "certificate"
    ]
    assert (found.verdict, "do not belong together" in found.text) == (FAIL, True)


def test_what_is_readable_by_all_or_not_writable_is_said(folder: Path) -> None:
    (folder / "file").write_text("")
    file = config(
        folder,
        tokens=tokens(folder, "engines", TOKEN, 0o644),
        log=str(folder / "file" / "log"),
        warm_start=str(folder / "none.npz"),
        state="redis://:hunter22@127.0.0.1:1/0",
    )
    file.chmod(0o644)
    kept = list(doctor.checks(Asked(file)))
    found = {one.what: one for one in kept}
    assert "chmod o-r" in found["tokens"].text
    assert {what for what, one in found.items() if one.verdict is FAIL} >= {
        *("tokens", "log", "warm_start", "state", "sidecar")
    }
    assert any("everybody can read it" in one.text for one in kept if one.verdict is WARN)
    assert not any("hunter22" in f"{one}" for one in kept)


@pytest.mark.skipif(BINARY is None, reason="needs redis-server")
def test_a_store_is_written_to_and_read_from(folder: Path) -> None:
    server = RedisServer(folder, "user reader on >pw ~parlay:* +get +hello +select")
    try:
        found = look(config(folder, state=f"redis://127.0.0.1:{server.port}"))["state"]
        assert (found.verdict, "keeps what it is told" in found.text) == (OK, True)
        found = look(config(folder, state=f"redis://reader:pw@127.0.0.1:{server.port}"))["state"]
        assert (found.verdict, "permission" in found.text) == (FAIL, True)
    finally:
        server.process.terminate()
        server.process.wait(WAIT_S)


def test_a_sidecar_that_nobody_spoke_of_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "Config", lambda: type("", (), {"listen": "127.0.0.1:1"}))
    monkeypatch.setenv("PARLAY_LISTEN", "127.0.0.1:1")
    assert look(None)["sidecar"].verdict is WARN
    assert look(None, sidecar="127.0.0.1:1")["sidecar"].verdict is FAIL


# --- The command ---------------------------------------------------------------------------------


def breaks(asked: Asked) -> Iterator[Finding]:
    yield Finding(OK, "first", "fine")
    raise RuntimeError("nobody\nthought of this")


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies_doctor, "checks", breaks)
    found = list(examine(Asked(), [EntryPoint("c", "parlay.policies.doctor:checks", GROUP)]))
    assert [(one.verdict, one.text) for one in found] == [
        (OK, "fine"),
        (FAIL, "RuntimeError: nobody thought of this"),
    ]


def test_a_module_that_is_missing_is_a_finding_and_the_others_go_on() -> None:
    points = [
        EntryPoint("a", "parlay_no_such_module:checks", GROUP),
        EntryPoint("b", "redis.no_such_module:checks", GROUP),
        EntryPoint("c", "parlay.policies.doctor:checks", GROUP),
    ]
    found = list(examine(Asked(), points))
    assert [one.verdict for one in found] == [WARN, WARN, OK, OK]
    assert found[1].mend == "pip install 'parlay[redis]'"
    assert "goodput decides for 4 requests" in found[3].text


def test_the_command_says_all_and_fails_where_something_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = typer.Typer()
    app.command()(cli.doctor)
    monkeypatch.setattr(policies_doctor, "examine", broken_once)
    done = CliRunner().invoke(app, [])
    assert done.exit_code == 1
    assert done.output.splitlines() == [
        "ok   first        fine",
        "fail second       broken",
        "                  -> mend it",
    ]


def broken_once(asked: Asked) -> Iterator[Finding]:
    yield Finding(OK, "first", "fine")
    yield Finding(FAIL, "second", "broken", "mend it")


def test_an_engine_without_its_model_is_said(folder: Path) -> None:
    found = {one.what: one for one in engine_doctor.checks(Asked(model=folder / "none"))}
    assert (found["engine"].verdict, found["model"].verdict) == (OK, FAIL)
    assert "--model" in found["model"].mend


@pytest.mark.slow
def test_an_engine_decodes() -> None:
    found = {one.what: one for one in engine_doctor.checks(Asked())}
    assert found["model"].verdict is OK
    assert "decodes 8 tokens" in found["model"].text
