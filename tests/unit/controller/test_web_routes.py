"""What each address of the page answers, asked of the application without a socket."""

from __future__ import annotations

import json
import socket

import pytest
from tests import watching
from tests.watching import Clock, run_steps

from parlay.controller.host import Host
from parlay.controller.listener import bind
from parlay.controller.metrics import Metrics
from parlay.controller.observatory import Observatory
from parlay.controller.web import FRESH_S, Page

NASTY = "<script>alert('x')</script>"


@pytest.fixture(scope="module")
def page() -> Page:
    clock = Clock()
    host = Host("pilot", watch=Observatory(clock))
    assert host.watch is not None
    run_steps(host, "engine-0", 30, clock=clock)
    run_steps(host, NASTY, 3, clock=clock)
    return Page(host.watch, Metrics(host.watch, lambda: host.policy))


def ask(page: Page, path: str, query: str = "") -> tuple[int, dict[str, str], str]:
    return watching.ask(page.app(), path, query=query)


def test_the_page_loads_only_what_the_sidecar_serves(page: Page) -> None:
    status, headers, body = ask(page, "/")
    assert status == 200
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert "http://" not in body
    assert "https://" not in body
    for name in ("plotly.min.js", "page.js", "page.css"):
        assert f"/assets/{name}" in body
        status, headers, content = ask(page, f"/assets/{name}")
        assert status == 200
        assert len(content) > 500
        assert "javascript" in headers["content-type"] or "css" in headers["content-type"]


@pytest.mark.parametrize("name", ["page.html", "web.py", "..%2fweb.py", "nothing"])
def test_other_files_are_not_served(page: Page, name: str) -> None:
    assert ask(page, f"/assets/{name}")[0] == 404


def test_pieces_and_plots_fit_the_elements_of_the_page(page: Page) -> None:
    body = ask(page, "/")[2]
    live = json.loads(ask(page, "/live.json")[2])
    for name in (*live["html"], *live["figures"]):
        assert f'id="{name}"' in body
    assert "engine-0" in live["html"]["tables"]


def test_names_that_engines_give_themselves_are_no_markup(page: Page) -> None:
    live = json.loads(ask(page, "/live.json")[2])
    assert "alert(" in live["html"]["tables"]
    assert "<script" not in live["html"]["tables"]
    request = json.loads(ask(page, "/overview.json")[2])["decisions"][-1]["request_id"]
    status, _, body = ask(page, f"/explain/{request}", "engine=%3Cscript%3Ealert('x')%3C/script%3E")
    assert status == 200
    assert "<script" not in body


def test_an_explanation_is_a_page_and_json(page: Page) -> None:
    asked = json.loads(ask(page, "/overview.json", "engine=engine-0")[2])["decisions"][0]
    path = f"/explain/{asked['request_id']}"
    found = json.loads(ask(page, f"{path}.json", "engine=engine-0")[2])
    assert found["k"] == asked["k"]
    status, headers, body = ask(page, path, "engine=engine-0")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    assert "The plan was to" in body


def test_what_is_not_known_is_a_404_that_says_so(page: Page) -> None:
    status, _, body = ask(page, "/explain/99999999.json")
    assert status == 404
    assert "request 99999999" in json.loads(body)["error"]
    status, headers, body = ask(page, "/explain/99999999")
    assert status == 404
    assert headers["content-type"].startswith("text/html")
    assert "request 99999999" in body
    for path in ("/live.json", "/overview.json"):
        status, _, body = ask(page, path, "engine=nobody")
        assert status == 404
        assert "nobody" in json.loads(body)["error"]


def test_a_second_reader_gets_what_the_first_one_had(page: Page) -> None:
    page._made.clear()
    first = ask(page, "/live.json")[2]
    made_s = page._made[None][0]
    assert ask(page, "/live.json")[2] == first
    assert page._made[None][0] == made_s
    page._made[None] = (made_s - FRESH_S, b"old")
    assert ask(page, "/live.json")[2] != "old"


@pytest.mark.parametrize("address", ["9090", "host", ":80", "127.0.0.1:http", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="write it as host:port"):
        bind(address, "--http")


def test_a_port_that_is_taken_is_said_to_be() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="cannot listen on 127"):
            bind(f"127.0.0.1:{taken.getsockname()[1]}", "--http")
