import json
import math
from pathlib import Path

import pytest

from parlay.policies.cli import run as parlay
from parlay.sim.rows import BEST_GATE, BEST_STATIC, as_json
from parlay.sim.scenario import load_scenario
from parlay.sim.simulate import (
    judge,
    maker,
    parse_policy,
    tune,
)

SMALL = """
title = "Two people chat"
costs = "h200_8b"
steps = 20
warm_up_steps = 0
[[stage]]
concurrency = 2
mix = { chat = 1.0 }
"""
COLUMNS = {
    "scenario", "policy", "ratio_to_none", "ratio_to_best_static", "share_of_hazard_oracle",
    "share_of_filtering_oracle", "ci95",
}  # fmt: skip


def test_tuning_finds_the_proposer_that_fits() -> None:
    choices = ["fixed:proposer=ngram/k=3", "fixed:proposer=medusa/k=3"]
    assert tune(load_scenario("chat_low").shortened(40), choices, 1) == choices[1]


def test_a_scenario_is_judged_against_none_statics_and_oracles(small: str) -> None:
    started: list[int] = []
    rows, episodes = judge(load_scenario(small), ["hf_heuristic"], [1], 20, 1, started.append)
    by_name = {row.policy: row for row in rows}
    assert set(by_name) == {
        "none", BEST_STATIC, BEST_GATE, "hf_heuristic", "clairvoyant", "filtering_oracle",
        "hazard_oracle",
    }  # fmt: skip
    assert started == [len(rows)] == [len(episodes)]
    assert by_name["none"].ratio_to_none == 1.0
    assert by_name[BEST_STATIC].what.startswith("fixed:")
    assert by_name["hazard_oracle"].share_of_hazard_oracle == 1.0
    # Of the policies here one alone is a published controller.
    assert by_name["hf_heuristic"].published_ci95 == (1.0, 1.0)
    product = by_name["none"].ratio_to_best_published * by_name["hf_heuristic"].ratio_to_none
    assert math.isclose(product, 1.0)
    for row in rows:
        low, high = row.ci95
        assert low <= row.ratio_to_none <= high
        assert math.isclose(row.goodput, row.ratio_to_none * by_name["none"].goodput)
    written = as_json(rows)["rows"]
    assert isinstance(written, list)
    assert all(set(row) >= COLUMNS for row in written)


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


def test_settings_may_hold_paths() -> None:
    assert parse_policy("learned:path=runs/a.safetensors/seed=3") == (
        "learned", {"path": "runs/a.safetensors", "seed": "3"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nobody", "unknown policy"),
        ("fixed:k", "name:key=value"),
        ("fixed:speed=3", "no setting"),
        ("clairvoyant:k=3", "no settings"),
    ],
)
def test_a_policy_that_cannot_be_made_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        maker(text)


def test_the_command_writes_rows_and_report(tmp_path: Path, small: str) -> None:
    file, folder = tmp_path / "rows.json", tmp_path / "report"
    arguments = ["--scenario", small, "--policy", "hf_heuristic", "--seeds", "1"]
    outputs = ["--json", str(file), "--report", str(folder)]
    assert parlay(["simulate", *arguments, "--workers", "1", *outputs]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {row["policy"] for row in rows} >= {"none", "hf_heuristic", "hazard_oracle"}
    assert (folder / "index.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scenario", "chatty"], "unknown scenario"),
        (["--policy", "nobody"], "unknown policy"),
        (["--costs", "abacus"], "abacus"),
        (["--json", "/nowhere/rows.json"], "cannot write"),
    ],
)
def test_a_wrong_option_is_one_line_and_a_status(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parlay(["simulate", "--steps", "20", *arguments]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_faulty_input_is_one_line_and_leaves_nothing_behind(
    tmp_path: Path, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{0.1 * i},{50 + i},{30}" for i in range(40)]
    rows[24] = "2.4,74,many"
    trace, costs = tmp_path / "t.csv", tmp_path / "costs.json"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    costs.write_text('{"source": "a guess", "bucket_edges": [8, 4]}')
    recorded = tmp_path / "r.jsonl"
    recorded.write_text('{"id": "a", "task": "chat"\n')
    out, page = tmp_path / "out", tmp_path / "page"
    out.mkdir()
    for asked, said in (
        (["--trace", str(trace)], f"{trace}:26: output_tokens must be a whole number"),
        (["--costs", str(costs)], "bucket_edges must ascend"),
        (["--acceptance", str(recorded)], f"{recorded}:1"),
    ):
        argv = ["--scenario", small, "--policy", "none", "--workers", "1", "--steps", "200"]
        argv += ["--json", str(out / "rows.json"), "--report", str(page), *asked]
        assert parlay(["simulate", *argv]) == 1
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
        assert not page.exists()
        assert not list(out.iterdir())
