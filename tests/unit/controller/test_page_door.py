"""Who may read the page: requests of every kind, asked of the application without a socket."""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path

import pytest
from tests.watching import Clock, ask, run_steps

from parlay.controller.host import Host
from parlay.controller.metrics import Metrics
from parlay.controller.observatory import Observatory
from parlay.controller.page_door import check_page, token_of
from parlay.controller.tokens import Tokens
from parlay.controller.web import Page

TOKEN, OTHER = "reader-0123456789abcdef", "x" * 32
PATHS = ("/", "/live.json", "/overview.json", "/explain/1.json", "/explain/1", "/metrics")


def basic(pair: str) -> str:
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    file = tmp_path / "readers"
    file.write_text(f"prometheus {TOKEN}\n")
    file.chmod(0o600)
    return Tokens(file)


@pytest.fixture
def page(tokens: Tokens) -> Page:
    host = Host("pilot", watch=Observatory(Clock()))
    assert host.watch is not None
    run_steps(host, "engine-0", 3)
    return Page(host.watch, Metrics(host.watch, lambda: host.policy), tokens)


def test_nothing_is_shown_without_the_token(page: Page, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    app = page.served()
    wrong = ("", f"Bearer {OTHER}", f"bearer{TOKEN}", TOKEN, basic(OTHER), basic(f"{TOKEN}:"))
    broken = ("Basic !!!", "Basic gICA", "Bearer " + "y" * 10_000, "Bearer \xff")
    for path in (*PATHS, "/assets/page.js", "/nothing"):
        for shown in ((), *((one,) for one in (*wrong, *broken))):
            status, headers, body = ask(app, path, *shown)
            assert status == 401
            assert headers["www-authenticate"].startswith("Basic realm=")
            assert "engine-0" not in body
    assert "a token is needed" in json.loads(ask(app, "/live.json")[2])["error"]
    assert page.metrics.refused["page"]() == 8 * 11 + 1
    assert 1 <= caplog.text.count("page refused peer=203.0.113.9") < 10
    assert OTHER not in caplog.text


def test_a_token_opens_as_a_bearers_and_as_a_password(page: Page) -> None:
    app = page.served()
    for shown in (
        f"Bearer {TOKEN}",
        f"bearer  {TOKEN}",
        basic(f"anna:{TOKEN}"),
        basic(f":{TOKEN}"),
    ):
        for path in ("/", "/live.json", "/overview.json", "/metrics", "/assets/page.css"):
            assert ask(app, path, shown)[0] == 200


def test_probes_learn_that_it_lives_and_no_more(page: Page) -> None:
    app = page.served()
    status, _, body = ask(app, "/health")
    assert (status, json.loads(body)) == (200, {"status": "ok"})
    page.observatory.fold()
    known = json.loads(ask(app, "/health", f"Bearer {TOKEN}")[2])
    assert known == {"status": "ok", "policy": "pilot", "listen": "", "engines": 1}


def test_a_token_is_good_for_as_long_as_it_is_in_the_file(page: Page, tokens: Tokens) -> None:
    app = page.served()
    assert ask(app, "/", f"Bearer {TOKEN}")[0] == 200
    tokens.path.write_text(f"{OTHER}\n")
    tokens.refresh(at_once=True)
    assert ask(app, "/", f"Bearer {TOKEN}")[0] == 401
    assert ask(app, "/", f"Bearer {OTHER}")[0] == 200


def test_only_this_host_may_read_a_page_that_asks_nothing(tokens: Tokens) -> None:
    for address in ("127.0.0.1:9090", "localhost:0", "[::1]:1"):
        check_page(address, None)
    for address in ("0.0.0.0:9090", "[::]:9090", "10.0.0.1:9090", "parlay.example:80"):
        check_page(address, tokens)
        with pytest.raises(ValueError, match="asks for no password, so give it a port of 127"):
            check_page(address, None)


def test_a_password_may_hold_a_colon() -> None:
    assert token_of(basic("anna:a:b")) == "a:b"
