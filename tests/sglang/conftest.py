"""Tests against SGLang's own controller, out of a wheel that is not installed (SGLANG.md)."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

HERE = Path(__file__).parent
WHEEL = os.environ.get("SGLANG_WHEEL", "")
_PACKAGES = ("sglang", "sglang.srt", "sglang.srt.speculative")
_UNSET = SimpleNamespace(get=lambda: None)
# What these modules import of SGLang's that needs a GPU or much else.
_STUBS: dict[str, dict[str, Any]] = {
    "sglang.srt.arg_groups": {},
    "sglang.srt.arg_groups.overrides": {"resolved_view": None, "resolving_view": None},
    "sglang.srt.environ": {"envs": SimpleNamespace(SGLANG_PLUGINS=_UNSET, SGLANG_PLATFORM=_UNSET)},
    "sglang.srt.runtime_context": {"attn_dp_enabled_of": None},
    "sglang.srt.speculative.spec_info": {"SpeculativeAlgorithm": None},
    "sglang.srt.utils": {"log_info_on_rank0": lambda logger, line: logger.info(line)},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="no wheel: SGLANG_WHEEL=/path/to/sglang.whl")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            if not Path(WHEEL).is_file():
                item.add_marker(skip)


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return what makes SGLang's controller with the policy that its plugins have put there."""
    monkeypatch.setenv("PARLAY", "1")
    before = dict(sys.modules)
    for name in _PACKAGES:
        # A package without its own first lines, which import all of SGLang.
        package = ModuleType(name)
        package.__path__ = [f"{WHEEL}/{name.replace('.', '/')}"]
        sys.modules[name] = package
    for name, names in _STUBS.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(names)
    plugins: Any = importlib.import_module("sglang.srt.plugins")
    ours = EntryPoint("parlay", "parlay.engine.plugins.sglang:register", "sglang.srt.plugins")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [ours])
    plugins.load_plugins()
    params: Any = importlib.import_module("sglang.srt.speculative.adaptive_spec_params")
    states: Any = importlib.import_module("sglang.srt.speculative.adaptive_runtime_state")

    def make(worker: Any, config: str | None = None) -> Any:
        policy = params.AdaptiveSpeculativeParams(worker.speculative_num_steps, config)
        return states.AdaptiveController(worker, policy)

    yield make
    for name in [n for n in sys.modules if n.partition(".")[0] == "sglang"]:
        del sys.modules[name]
    sys.modules.update({n: m for n, m in before.items() if n.partition(".")[0] == "sglang"})
