from __future__ import annotations

import pytest

from parlay.engine.planner import LocalPlanner
from parlay.engine.plugins.settings import make_planner, read_settings, sparing_planner
from parlay.engine.sparing import SparingPlanner
from parlay.policies.policy import EngineLimits

LIMITS = EngineLimits()


def test_the_environment_names_policy_values_and_sidecar() -> None:
    environ = {
        "PARLAY_POLICY": "fixed",
        "PARLAY_SET": "proposer=ngram  k=5",
        "PARLAY_SIDECAR": "unix:/run/x.sock",
        "PARLAY_ENGINE_ID": "mine",
    }
    settings = read_settings(environ=environ)
    assert settings.policy == "fixed"
    assert settings.values == {"proposer": "ngram", "k": "5"}
    assert settings.sidecar == "unix:/run/x.sock"
    assert settings.engine_id == "mine"


def test_arguments_win_and_leave_another_policys_values_aside() -> None:
    environ = {"PARLAY_POLICY": "fixed", "PARLAY_SET": "k=5", "PARLAY_SIDECAR": "unix:/a"}
    settings = read_settings("goodput", sidecar="unix:/b", environ=environ)
    assert (settings.policy, settings.values, settings.sidecar) == ("goodput", {}, "unix:/b")
    assert read_settings(values={"k": 2}, environ=environ).values == {"k": 2}


def test_nothing_said_is_a_policy_in_this_process() -> None:
    planner = make_planner(read_settings(environ={}), "x", LIMITS)
    assert isinstance(planner, LocalPlanner)
    sparing = sparing_planner(read_settings(environ={}), "x", LIMITS)
    assert isinstance(sparing, SparingPlanner)
    assert (sparing.share, sparing.most_steps) == (0.01, 8)
    assert planner.policy.name == "pilot"


@pytest.mark.parametrize("text", ["k", "=3", "k=1 deep"])
def test_pairs_must_be_pairs(text: str) -> None:
    with pytest.raises(ValueError, match=r"PARLAY_SET.*key=value"):
        read_settings(environ={"PARLAY_SET": text})


def test_what_makes_no_sense_is_said_at_the_start() -> None:
    for settings in (
        read_settings("nobody", environ={}),
        read_settings("fixed", {"depth": "3"}, environ={}),
        read_settings("fixed", sidecar="nowhere", environ={}),
    ):
        with pytest.raises(ValueError, match=r"unknown policy|no setting|nowhere"):
            make_planner(settings, "x", LIMITS)
