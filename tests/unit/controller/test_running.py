"""What a reload changes in a sidecar that runs, and what it leaves alone."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from parlay.controller.access import Door
from parlay.controller.config import Config
from parlay.controller.log import StepLog
from parlay.controller.running import Running

MUTUAL = Config(
    admin="127.0.0.1:1",
    tls_cert=Path("/cert"),
    tls_key=Path("/key"),
    client_ca=Path("/ca"),
    admin_client_ca=Path("/other"),
)


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    before = logging.getLogger("parlay").level
    yield
    logging.getLogger("parlay").setLevel(before)


def test_a_reload_applies_what_may_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    new = dataclasses.replace(
        MUTUAL,
        log_level="debug",
        log_sample=0.25,
        tenant="other",
        client_names=("a",),
        admin_names=("b", "c"),
    )
    with StepLog(tmp_path, "none") as steps:
        running = Running(MUTUAL, lambda: new, Door(), Door(), steps)
        running.reload()
        assert steps._log.settings.sample_rate == 0.25
    assert (running.door.names, running.admin_door.names) == (
        frozenset("a"),
        frozenset("bc"),
    )
    assert logging.getLogger("parlay").level == logging.DEBUG
    assert running.config == dataclasses.replace(new, tenant="default")
    assert "key=tenant reason='needs a restart'" in caplog.text


def test_what_cannot_be_read_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> Config:
        raise ValueError("parlay.toml: unknown key 'x'")

    running = Running(MUTUAL, fails, Door(), Door())
    running.reload()
    assert running.config is MUTUAL
    assert "config not reloaded" in caplog.text
    assert "unknown key 'x'" in caplog.text
