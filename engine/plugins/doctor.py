"""What `parlay doctor --engine NAME` says: what our plugin would steer in an engine, as it is here.

Nothing is started: an engine's own log says at its start what is steered of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any, get_args

from parlay.engine.plugins import sglang, vllm, vllm_ability
from parlay.engine.plugins.hooks import lacking
from parlay.engine.plugins.settings import read_settings
from parlay.policies.doctor import Asked, Finding, Verdict
from parlay.policies.policy import EngineLimits, make_policy

OK, WARN, FAIL = Verdict.OK, Verdict.WARN, Verdict.FAIL
_COMMON = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa")
_K = 5


def checks(asked: Asked) -> Iterator[Finding]:
    """Check one engine's plugin, if one was asked for."""
    if asked.engine is None:
        return
    engine = _ALSO.get(asked.engine, asked.engine)
    if engine not in _ENGINES:
        mend = f"--engine is one of {', '.join(_ENGINES)}; the guide says how to write one"
        yield Finding(FAIL, "engine", f"there is no plugin for {asked.engine!r}", mend)
        return
    package, check = _ENGINES[engine]
    if importlib.util.find_spec(package) is None:
        mend = "run parlay doctor with the Python that the engine runs with"
        yield Finding(FAIL, engine, f"{package} is not installed here", mend)
        return
    yield _decider()
    yield from check()


def _decider() -> Finding:
    """Say what would decide."""
    try:
        settings = read_settings()
        make_policy(settings.policy, settings.values, EngineLimits())
    except (OSError, ValueError) as error:
        return Finding(FAIL, "policy", str(error), "mend PARLAY_POLICY or PARLAY_SET")
    if settings.sidecar is None:
        return Finding(OK, "policy", f"{settings.policy} decides, in the engine's process")
    text = f"the sidecar at {settings.sidecar} decides, {settings.policy} where it is silent"
    return Finding(OK, "policy", text, f"parlay doctor --sidecar {settings.sidecar} asks it")


def _vllm() -> Iterator[Finding]:
    module = importlib.import_module("vllm")
    scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    output = importlib.import_module("vllm.v1.core.sched.output").SchedulerOutput
    lacks = vllm_ability.lacking(scheduler, output)
    version = f"vLLM {module.__version__}"
    if lacks is not None:
        text = f"{version}: its scheduler has no {lacks}, nothing would be steered"
        yield Finding(FAIL, "vllm", text, f"use vLLM {vllm_ability.VERSIONS}")
        return
    yield Finding(OK, "vllm", f"{version}, whose scheduler can be steered")
    yield _found("vllm.general_plugins", f"--scheduler-cls {vllm.FACTORY}")
    listed = os.environ.get("VLLM_PLUGINS")
    if listed is not None and "parlay" not in listed.split(","):
        text = f"VLLM_PLUGINS={listed} keeps vLLM from loading parlay"
        yield Finding(WARN, "plugin", text, "add parlay to it")
    yield from _vllm_methods()


def _vllm_methods() -> Iterator[Finding]:
    """Say what would be steered of each method that this vLLM knows."""
    from parlay.engine.plugins.vllm_scheduler import words_of

    platform = importlib.import_module("vllm.platforms").current_platform
    known = get_args(importlib.import_module("vllm.config.speculative").SpeculativeMethod)
    on_cpu = bool(platform.is_cpu())
    for method in _COMMON:
        if method not in known:
            yield Finding(WARN, method, "this vLLM does not have it")
            continue
        if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
            mend = "install arctic-inference==0.1.1; engine/plugins/VLLM.md says how it builds"
            yield Finding(WARN, method, "vLLM has it with arctic-inference only", mend)
            continue
        try:
            ability = vllm_ability.ability_for(_vllm_as_started(method, not on_cpu), os.environ)
        except ValueError as error:
            yield Finding(FAIL, "rows", str(error), "unset PARLAY_VLLM_ROWS")
            return
        yield Finding(OK, method, words_of(ability))


def _vllm_as_started(method: str, on_gpu: bool) -> Any:
    """Return a scheduler as vLLM would make it with no more said than the method."""
    # With drafts on the host vLLM schedules synchronously, on GPUs too.
    ahead = on_gpu and method not in ("ngram", "suffix", "medusa")
    graphs = SimpleNamespace(decode_mode=lambda: SimpleNamespace(name="FULL"))
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=ahead),
        use_v2_model_runner=ahead,
        vllm_config=SimpleNamespace(
            speculative_config=SimpleNamespace(method=method, num_speculative_tokens=_K),
            compilation_config=SimpleNamespace(cudagraph_mode=graphs),
            model_config=SimpleNamespace(enforce_eager=not on_gpu),
        ),
    )


def _huggingface() -> Iterator[Finding]:
    module = importlib.import_module("transformers")
    version = f"transformers {module.__version__}"
    if int(module.__version__.split(".")[0]) < 5:
        yield Finding(FAIL, "huggingface", f"{version} is too old", "pip install 'transformers>=5'")
        return
    text = f"{version}: nobody, the n-gram or a draft model drafts, once install(model) is called"
    yield Finding(OK, "huggingface", text)


def _sglang() -> Iterator[Finding]:
    path, _, name = sglang.TARGET.rpartition(".")
    try:
        base = getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError, OSError) as error:
        text = f"{sglang.TARGET} cannot be had: {' '.join(str(error).split())}"
        yield Finding(FAIL, "sglang", text, "use SGLang 0.5.23 or newer, where it runs")
        return
    if (lacks := lacking(base, sglang.HOOKS)) is not None:
        text = f"its adaptive policy has no {lacks}, nothing would be steered"
        yield Finding(FAIL, "sglang", text, "use SGLang 0.5.23 or newer")
        return
    text = "with --speculative-adaptive, one number of steps for the batch"
    yield Finding(OK, "sglang", text)
    yield _found("sglang.srt.plugins", None)


def _found(group: str, instead: str | None) -> Finding:
    """Say whether the engine will find us, and whether it may."""
    if not any(point.name == "parlay" for point in entry_points(group=group)):
        text = f"parlay is on the path but not installed: {group} does not have it"
        mend = "pip install parlay here" + (f", or start with {instead}" if instead else "")
        return Finding(WARN, "plugin", text, mend)
    if os.environ.get("PARLAY") != "1":
        text = "installed, but PARLAY=1 is not set here: nothing would be steered"
        mend = "set PARLAY=1 for the engine" + (f", or start with {instead}" if instead else "")
        return Finding(WARN, "plugin", text, mend)
    return Finding(OK, "plugin", "PARLAY=1: every engine started from here is steered")


_ENGINES: dict[str, tuple[str, Callable[[], Iterator[Finding]]]] = {
    "vllm": ("vllm", _vllm),
    "huggingface": ("transformers", _huggingface),
    "sglang": ("sglang", _sglang),
}
_ALSO = {"hf": "huggingface", "transformers": "huggingface"}
