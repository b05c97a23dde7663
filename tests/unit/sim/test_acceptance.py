import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import typer
from scipy.special import expit
from typer.testing import CliRunner

from parlay.policies.allocate import fit_plan
from parlay.policies.decision_log import DecisionLog
from parlay.policies.log_schema import rows_of
from parlay.policies.policy import make_policy
from parlay.policies.types import DRAFT_MODEL, MEDUSA, NGRAM, BatchView, Plan, StepOutcome
from parlay.sim import acceptance_fit
from parlay.sim.acceptance_check import goodness
from parlay.sim.acceptance_cli import calibrate_acceptance
from parlay.sim.acceptance_log import DEPTH, assisted_k, read_logs
from parlay.sim.episode import run_episode
from parlay.sim.latent import Latents, TaskLaw
from parlay.sim.laws import Task, read_fitted, tasks, write_fitted
from parlay.sim.load import arrivals_of, luck_of
from parlay.sim.scenario import Scenario, Stage
from parlay.sim.simulate import maker

LAW = TaskLaw(0.0, {MEDUSA: (0.8, 0.6, 0.4, 0.2)}, 0.6, 0.4, 0.5)
MODEL_ID = "vicuna-7b-medusa-float16"
NO_LOG = "no log"


def medusa_log(path: Path, texts: int = 60, tokens: int = 300, law: TaskLaw = LAW) -> None:
    """Write what Medusa's four heads would log of a law's luck."""
    latents = Latents([law], 4, 5)
    lines = []
    for number in range(texts):
        row, at, steps = np.array([latents.admit(number, 0, tokens)]), 1, []
        while at < tokens:
            steps.append(1 + int(latents.held(row, np.array([at]), MEDUSA)[0]))
            at += steps[-1]
        choice = {"decoding_steps": [len(steps)], "accept_lengths": steps}
        lines.append(json.dumps({"category": "a", "model_id": MODEL_ID, "choices": [choice]}))
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "medusa.jsonl"
    medusa_log(path)
    return path


def test_the_law_behind_a_log_is_found(log: Path) -> None:
    found = acceptance_fit.law_of(acceptance_fit.fit(read_logs([log]).observed()["a"]), 0.0)
    assert found.accept[MEDUSA] == pytest.approx(LAW.accept[MEDUSA], abs=0.06)
    assert found.shift_sd == pytest.approx(LAW.shift_sd, abs=0.2)
    assert found.phase_shift == pytest.approx(LAW.phase_shift, abs=0.2)
    assert found.cold_factor == pytest.approx(LAW.cold_factor, abs=0.25)


def test_slopes_are_those_of_the_likelihood(log: Path) -> None:
    drafts = acceptance_fit.Drafts(read_logs([log]).observed()["a"])
    odds = np.linspace(1.2, -0.8, DEPTH)[None]
    model = acceptance_fit.Model(drafts.proposers, odds, 0.5, 0.3, 0.8)
    _, by_odds, rest = acceptance_fit.likelihood(model, drafts)
    small = 1e-4

    def slope(one: acceptance_fit.Model, other: acceptance_fit.Model) -> float:
        of = (acceptance_fit.likelihood(m, drafts)[0] for m in (one, other))
        return (next(of) - next(of)) / (2 * small)

    for name, value in zip(("shift_sd", "phase_shift", "cold_factor"), rest, strict=True):
        at = getattr(model, name)
        up, down = (dataclasses.replace(model, **{name: at + s}) for s in (small, -small))
        assert slope(up, down) == pytest.approx(value, rel=1e-3, abs=1e-2)
    for place in range(4):
        step = small * (np.arange(DEPTH) == place)
        up, down = (dataclasses.replace(model, odds=odds + s) for s in (step, -step))
        assert slope(up, down) == pytest.approx(by_odds[0, place], rel=1e-3, abs=1e-2)


def test_goodness_tells_a_fit_from_a_misfit(log: Path) -> None:
    observed = read_logs([log]).observed()["a"]
    model = acceptance_fit.fit(observed)
    good = goodness(model, observed)[0]
    assert np.nanmax(np.abs(good.z)) < 3.5
    assert good.runs.sum() == pytest.approx(good.runs_foretold.sum()) == len(observed)
    assert good.runs_foretold[:5] == pytest.approx(good.runs[:5], rel=0.12)
    assert good.spread.inside
    alike = dataclasses.replace(model, odds=model.odds + 0.5, shift_sd=0.01)
    bad = goodness(alike, observed)[0]
    assert np.nanmax(np.abs(bad.z)) > 5
    assert not bad.spread.inside
    assert bad.spread.observed > bad.spread.most


def test_foretold_is_the_law_where_texts_are_alike(tmp_path: Path) -> None:
    path = tmp_path / "alike.jsonl"
    medusa_log(path, 20, 100, TaskLaw(0.0, {MEDUSA: (0.7, 0.5)}, 0.01, 0.0, 1.0))
    observed = read_logs([path]).observed()["a"]
    odds = np.array([[0.8, *[-0.2] * (DEPTH - 1)]])
    model = acceptance_fit.Model((MEDUSA,), odds, 1e-3, 0.0, 1.0)
    good = goodness(model, observed)[0]
    assert good.foretold[:4] == pytest.approx(expit(odds[0, :4]), abs=1e-3)
    assert np.isnan(good.foretold[4:]).all()


def test_assisted_generations_k_follows_from_what_was_emitted() -> None:
    assert assisted_k(np.array([6, 8, 1, 1, 3])).tolist() == [5, 7, 9, 8, 7]
    assert assisted_k(np.ones(7, int)).tolist() == [5, 4, 3, 2, 1, 1, 1]


def question(**changed: object) -> str:
    choice = {"decoding_steps": [2, 1], "accept_lengths": [3, 1, 2], **changed}
    return json.dumps({"category": "a", "model_id": MODEL_ID, "choices": [choice]})


def test_each_turn_is_a_text_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(question().encode() + b"\n\n" + b"\0" * 20)
    reading = read_logs([path])
    observed = reading.observed()["a"]
    assert observed.first.tolist() == [0, 2]
    assert observed.at.tolist() == [1, 4, 1]
    assert observed.held.tolist() == [2, 0, 1]
    assert observed.offered.tolist() == [4, 4, 4]
    assert observed.output_tokens.tolist() == [4, 2]
    assert reading.notes == [f"{path}:3: nothing but zeros, passed over"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Expecting"),
        ("[]", "list indices"),
        ('{"model_id": "eagle"}', "'choices' is missing"),
        (question(accept_lengths=[3, 0, 2]), "whole numbers from 1"),
        (question(accept_lengths=[3, 1]), "say 3 steps, accept_lengths has 2"),
        (question(accept_lengths=[9, 1, 2]), "step 0 accepts 8 of a draft of 4"),
        (question().replace("medusa", "vanilla"), "names no drafter"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(question() + "\n" + line + "\n")
    with pytest.raises(ValueError, match=said) as refused:
        read_logs([path])
    assert str(refused.value).startswith(f"{path}:2: ")
    assert "\n" not in str(refused.value)


class Logging:
    """A policy whose steps go into a decision log."""

    def __init__(self, name: str, log: DecisionLog) -> None:
        self.policy = make_policy(name, {"proposer": "medusa", "k": "3"})
        self.log, self.drafted = log, 0

    def decide(self, view: BatchView) -> Plan:
        self.view, self.made = view, self.policy.decide(view)
        return self.made

    def observe(self, outcome: StepOutcome) -> None:
        self.policy.observe(outcome)
        fit = fit_plan(self.made, self.view)
        self.log.append(rows_of(self.view, fit, self.made, outcome))
        self.drafted += int((outcome.verified_k > 0).sum())


def test_a_decision_log_is_read(tmp_path: Path) -> None:
    scenario = Scenario("s", "t", "h200_8b", (Stage({"chat": 1.0}, 8),), 150, 0)
    with DecisionLog(tmp_path) as log:
        policy = Logging("fixed", log)
        run_episode(scenario, lambda *_: policy, arrivals_of(scenario), 1)  # type: ignore[arg-type]
    observed = read_logs([tmp_path]).observed()["chat"]
    mine = observed.proposer == MEDUSA
    assert mine.sum() == policy.drafted > 500
    # What the simulator's law says of chat: .80 of first tokens, shifts apart.
    warm = mine & (observed.at >= 2)
    assert (observed.held[warm] > 0).mean() == pytest.approx(0.79, abs=0.06)
    assert observed.matched / observed.looked == pytest.approx(0.2, abs=0.06)
    assert (observed.prompt_tokens > 0).all()
    assert (observed.proposer[~mine] == NGRAM).all()


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(calibrate_acceptance)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, str(result.exception) if result.exception else result.output


def test_the_command_writes_model_figures_and_plots(log: Path, tmp_path: Path) -> None:
    out, figures, plots = tmp_path / "a.json", tmp_path / "fit.json", tmp_path / "plots"
    code, said = run(*(str(log), "--out", str(out), "--json", str(figures), "--report", str(plots)))
    assert code == 0, said
    fitted = read_fitted(str(out))["a"]
    assert fitted.law.accept[MEDUSA][0] == pytest.approx(0.8, abs=0.06)
    assert fitted.output[0] == pytest.approx(300, rel=0.02)
    assert fitted.prompt == tasks()["chat"].prompt
    check = json.loads(figures.read_text())["a"]["proposers"]["medusa"]
    assert [p["place"] for p in check["places"]] == [1, 2, 3, 4]
    assert (plots / "acceptance-a.svg").read_text().startswith("<svg")


def test_the_command_refuses_in_one_line_and_writes_nothing(log: Path, tmp_path: Path) -> None:
    code, said = run(str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "a.json"))
    assert code
    assert NO_LOG in said
    code, said = run(str(log), "--out", str(tmp_path / "a.jsonl"))
    assert code
    assert "a.json" in said
    short = tmp_path / "short.jsonl"
    short.write_text(question() + "\n")
    code, said = run(str(short), "--out", str(tmp_path / "a.json"))
    assert code
    assert "too few to fit" in said
    assert [p.name for p in tmp_path.iterdir()] == ["short.jsonl"]


def test_fitted_tasks_replace_a_scenarios(tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    law = TaskLaw(0.0, {DRAFT_MODEL: (0.9,)}, 0.3, 0.2, 1.0)
    write_fitted(path, {"mine": Task(law, (50.0, 0.3), (40.0, 0.3), 1.0)}, ["a log"])
    usual = Scenario("s", "t", "h200_8b", (Stage({"chat": 1.0}, 8),), 60, 20)
    scenario = usual.fitted(str(path))
    assert scenario.tasks == ("mine",)
    luck, index, mask = luck_of(scenario, 8, 1)
    assert (index, mask) == ({"mine": 0}, 1 | 1 << DRAFT_MODEL)
    assert isinstance(luck, Latents)
    assert luck.laws == [law]
    speeds = [
        run_episode(scenario, maker(name), arrivals_of(scenario), 1).goodput
        for name in ("none", "fixed:proposer=draft_model/k=6", "hazard_oracle", "clairvoyant")
    ]
    assert speeds == sorted(speeds)
    assert speeds[1] > 1.5 * speeds[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "kind"),
        ("[1", "Expecting"),
        ('{"kind": "parlay.acceptance/1", "tasks": {}}', "no tasks"),
        ('{"kind": "parlay.acceptance/1", "tasks": {"a": {"match_rate": 2}}}', "match_rate"),
        ('{"kind": "parlay.acceptance/1", "tasks": {"a": {"match_rate": 0}}}', "is missing"),
    ],
)
def test_what_is_no_fitted_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "fit.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as refused:
        read_fitted(str(path))
    assert "\n" not in str(refused.value)
