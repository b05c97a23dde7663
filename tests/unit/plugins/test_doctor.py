"""`parlay doctor --engine`: what a plugin would steer here, and what keeps it from it."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from parlay.engine.plugins import doctor, sglang
from parlay.policies.doctor import GROUP, PLUGINS, Asked, Finding, Verdict, examine

OK, WARN, FAIL = Verdict.OK, Verdict.WARN, Verdict.FAIL


@dataclasses.dataclass
class SchedulerOutput:
    num_spec_tokens_to_schedule: int = 0


class Scheduler:
    def _update_after_schedule(self) -> None: ...
    def update_draft_token_ids(self) -> None: ...
    def update_from_output(self) -> None: ...


def look(engine: str) -> dict[str, Finding]:
    return {found.what: found for found in doctor.checks(Asked(engine=engine))}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *("PARLAY", "PARLAY_POLICY", "PARLAY_SET", "PARLAY_SIDECAR", "PARLAY_VLLM_ROWS"),
        "VLLM_PLUGINS",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A vLLM that knows three methods, on a CPU; parlay is installed beside it."""
    some = Literal["ngram", "suffix", "eagle"]
    fake = SimpleNamespace(
        root=SimpleNamespace(__version__="0.32.0"),
        platform=SimpleNamespace(is_cpu=lambda: True),
    )
    for name, module in {
        "vllm": fake.root,
        "vllm.v1.core.sched.scheduler": SimpleNamespace(Scheduler=Scheduler),
        "vllm.v1.core.sched.output": SimpleNamespace(SchedulerOutput=SchedulerOutput),
        "vllm.platforms": SimpleNamespace(current_platform=fake.platform),
        "vllm.config.speculative": SimpleNamespace(SpeculativeMethod=some),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    there(monkeypatch, "vllm")
    point = EntryPoint("parlay", "parlay.engine.plugins.vllm:register", "vllm.general_plugins")
    monkeypatch.setattr(doctor, "entry_points", lambda group: [point])
    return fake


def there(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in packages or None)


def test_a_vllm_that_would_be_steered(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARLAY", "1")
    found = look("vllm")
    assert [one.verdict for one in found.values()].count(OK) == 5
    assert found["policy"].text == "pilot decides, in the engine's process"
    assert found["plugin"].text == "PARLAY=1: every engine started from here is steered"
    assert found["ngram"].text == (
        "our n-gram, up to 5 tokens, a k for each request, synchronous scheduling"
    )
    assert "arctic-inference==0.1.1" in found["suffix"].mend
    assert "eagle or our n-gram" in found["eagle"].text
    assert found["medusa"].text == "this vLLM does not have it"


def test_on_a_gpu_it_is_another_matter(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.platform.is_cpu = lambda: False
    there(monkeypatch, "vllm", "arctic_inference")
    found = look("vllm")
    assert (
        found["eagle"].text == "eagle, up to 5 tokens, one k for the batch, asynchronous scheduling"
    )
    assert ", synchronous scheduling" in found["ngram"].text
    assert found["suffix"].verdict is OK
    monkeypatch.setenv("PARLAY_VLLM_ROWS", "ragged")
    assert "a k for each request" in look("vllm")["eagle"].text
    monkeypatch.setenv("PARLAY_VLLM_ROWS", "odd")
    assert look("vllm")["rows"].verdict is FAIL


def test_what_keeps_vllm_from_being_steered(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look("vllm")["plugin"]
    assert (found.verdict, "PARLAY=1 is not set" in found.text) == (WARN, True)
    monkeypatch.setattr(doctor, "entry_points", lambda group: [])
    found = look("vllm")["plugin"]
    assert (found.verdict, "--scheduler-cls" in found.mend) == (WARN, True)
    monkeypatch.setenv("VLLM_PLUGINS", "theirs")
    assert "add parlay to it" in look("vllm")["plugin"].mend
    monkeypatch.delattr(Scheduler, "update_from_output")
    assert "has no update_from_output" in look("vllm")["vllm"].text
    assert look("vllm")["vllm"].verdict is FAIL


def test_what_would_decide(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARLAY_SIDECAR", "unix:/run/parlay.sock")
    assert "asks it" in look("vllm")["policy"].mend
    monkeypatch.setenv("PARLAY_POLICY", "wishful")
    assert look("vllm")["policy"].verdict is FAIL


def test_an_engine_that_is_not_here_or_not_ours() -> None:
    assert look("")["engine"].verdict is FAIL
    assert "vllm, huggingface, sglang" in look("trt")["engine"].mend
    assert list(doctor.checks(Asked())) == []


@pytest.mark.parametrize("name", ["huggingface", "hf", "transformers"])
def test_hugging_face(name: str) -> None:
    assert look(name)["huggingface"].verdict is OK


def test_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look("sglang")["sglang"].text == "sglang is not installed here"
    there(monkeypatch, "sglang")
    assert "cannot be had" in look("sglang")["sglang"].text
    path, _, name = sglang.TARGET.rpartition(".")
    theirs = type(name, (), dict.fromkeys(sglang.HOOKS, print))
    monkeypatch.setitem(sys.modules, path, SimpleNamespace(**{name: theirs}))
    assert look("sglang")["sglang"].verdict is OK
    assert look("sglang")["plugin"].verdict is WARN
    del theirs.get_steps_for_batch  # type: ignore[attr-defined]
    assert "has no get_steps_for_batch" in look("sglang")["sglang"].text


def test_the_command_speaks_of_the_engine_alone() -> None:
    points = [
        EntryPoint("policies", "parlay.policies.doctor:checks", GROUP),
        EntryPoint(PLUGINS, "parlay.engine.plugins.doctor:checks", GROUP),
    ]
    alone = list(examine(Asked(engine="huggingface"), points))
    assert [one.what for one in alone] == ["policy", "huggingface"]
    assert "policies" in [one.what for one in examine(Asked(), points)]
