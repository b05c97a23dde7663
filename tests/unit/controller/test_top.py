"""The terminal's screens: what they say, and that they fit."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType
from tests.watching import TAGS, Clock, run_steps

from parlay.controller import explain, top
from parlay.controller.fetch import fetch
from parlay.controller.host import Host
from parlay.controller.observatory import Observatory, Unknown
from parlay.controller.overview import overview


@pytest.fixture(scope="module")
def seen() -> Observatory:
    clock = Clock()
    observatory = Observatory(clock)
    host = Host("pilot", watch=observatory)
    run_steps(host, "first", 120, clock=clock)
    run_steps(host, "second", 40, clock=clock)
    return observatory


def shown(screen: RenderableType, columns: int) -> str:
    console = Console(file=io.StringIO(), width=columns, legacy_windows=False)
    console.print(screen)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_top_says_who_runs_what_and_why(seen: Observatory, columns: int) -> None:
    text = shown(top.screen(overview(seen) | {"policy": "pilot"}, columns), columns)
    assert max(map(len, text.splitlines())) <= columns
    found = overview(seen)
    for words in ("policy pilot", "2 engines", "tokens/s", "gain", "first", "second", "because"):
        assert words in text
    assert ("step ms" in text) == (columns >= 120)
    assert sum(tag in text for tag in TAGS) >= 2
    assert str(found["decisions"][0]["request_id"]) in text
    assert f"{found['engines'][0]['tokens_per_s']:,.0f}" in text


def test_little_room_cuts_no_column_but_the_last() -> None:
    clock = Clock()
    observatory = Observatory(clock)
    host = Host("pilot", watch=observatory)
    session, _ = run_steps(host, "vllm-worker-7d9c5-alpha", 40, clock=clock)
    run_steps(host, "vllm-worker-7d9c5-omega", 40, clock=clock)
    host.leave(session, session.stream)
    clock.now_s += 3.0
    text = shown(top.screen(overview(observatory) | {"policy": "pilot"}, 80), 80)
    for words in ("vllm-…-alpha", "vllm-…-omega", "ended 3s", "measured  guard", "tokens a row"):
        assert words in text
    lines = text.splitlines()
    because = next(i for i, line in enumerate(lines) if "because" in line)
    at = lines[because].index("because")
    assert all(len(line[at:].strip()) >= 20 for line in lines[because + 1 :] if line.strip())


def test_top_waits_for_engines() -> None:
    text = shown(top.screen(overview(Observatory()) | {"policy": "none"}, 80), 80)
    assert "no engine has said hello yet" in text


def test_bars_reach_the_top_at_the_largest_and_show_gaps() -> None:
    assert top.spark([None, 0.0, 1.0, 2.0]) == "·▁▅█"
    assert top.spark([None, None]) == "··"
    assert top.spark([]) == ""


def test_explain_marks_the_choice_and_the_runner_up(seen: Observatory) -> None:
    texts = []
    for row in overview(seen, "first")["decisions"]:
        found = explain.explained(seen, row["request_id"], "first")
        text = shown(explain.screen(found), 120)
        texts.append(text)
        assert found["said"].startswith("The plan was to draft")
        assert f"request {row['request_id']}" in text
        assert found["k"] == row["k"]
        if found["chosen"] is not None and found["options"]:
            assert text.count("chosen") == 1
            assert len(found["against"]) == len(found["options"])
    assert any("runner-up" in text for text in texts)


def test_explain_takes_the_engine_that_was_heard_last_and_names_others() -> None:
    clock = Clock()
    observatory = Observatory(clock)
    host = Host("goodput", watch=observatory)
    run_steps(host, "old", 5, clock=clock)
    _, steps = run_steps(host, "new", 5, clock=clock)
    request = int(steps[-1][0].request_id[0])
    found = explain.explained(observatory, request)
    assert found["engine"] == "new"
    assert found["steps_ago"] == 0
    assert found["also_on"] == ["old"]
    assert explain.explained(observatory, request, "old")["engine"] == "old"
    with pytest.raises(Unknown, match="known: old, new"):
        explain.explained(observatory, request, "other")
    with pytest.raises(Unknown, match="request 77777777 is in no decision that is kept"):
        explain.explained(observatory, 77777777)


@pytest.mark.parametrize(
    ("address", "text"), [("ftp://x", "write it as"), ("http://", "write it as")]
)
def test_an_address_that_is_none_is_refused(address: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fetch(address, "/overview.json")


def test_a_sidecar_that_is_not_there_is_said_to_be_away() -> None:
    with pytest.raises(OSError, match=r"no sidecar answers at .*parlay serve --http"):
        fetch("127.0.0.1:9", "/overview.json")
