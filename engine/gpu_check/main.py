"""Run the check: correctness first, then shape by shape, within the time; each part is saved."""

from __future__ import annotations

import platform
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from parlay.engine.gpu_check.attention_check import check_attention
from parlay.engine.gpu_check.budget import Budget, shares
from parlay.engine.gpu_check.floor import Rates, measure_rates
from parlay.engine.gpu_check.profile import KIND
from parlay.engine.gpu_check.report import print_section, verdict
from parlay.engine.gpu_check.shape_check import FULL, TINY, Room, ShapeCheck
from parlay.engine.gpu_check.shapes import SHAPES
from parlay.engine.gpu_check.token_check import check_tokens
from parlay.policies.files import write_json

CASES = {"cuda": 200, "cpu": 24}
"""Random shapes of attention, where time allows."""
_TOKENS_OF = {"cuda": (24, 24), "cpu": (6, 12)}
"""Requests of the whole tiny models, and output tokens of each."""
_CORRECTNESS_WEIGHTS = [12.0, 22.0]
_SECTION_WEIGHTS = [4.0, 18.0, 7.0, 8.0, 48.0]
"""Seconds of a full run, about: what a part leaves over goes to those behind it."""


@dataclass(slots=True)
class Check:
    """A run: where it runs, until when, and the document that grows section by section."""

    device: torch.device
    budget: Budget
    json_file: Path
    console: Console
    document: dict[str, Any] = field(default_factory=dict)

    def section(
        self, name: str, budget: Budget, work: Callable[[Budget], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Do a part of the check, print and save it; None where it failed or did not fit."""
        clock = self.budget.clock
        begin_s = clock()
        found: dict[str, Any]
        done = False
        try:
            found, done = work(budget), True
        except Room as error:
            found = {"skipped": str(error)}
        except Exception as error:
            # Whatever one part does, the others are worth having.
            said = " ".join(f"{type(error).__name__}: {error}".split())
            found = {"failed": said, "traceback": traceback.format_exc()}
        found["seconds"] = clock() - begin_s
        self.document["sections"][name] = found
        write_json(self.json_file, self.document)
        print_section(name, found, self.console)
        return found if done else None


def run_check(
    names: Sequence[str], device: torch.device, minutes: float, json_file: Path, console: Console
) -> dict[str, Any]:
    """Measure shapes on a device; return the document, which is in `json_file` as well.

    Its `passed` is False where outputs are wrong or a part broke down; bars that are missed do not
    change it.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    check = Check(device, Budget.of(60.0 * minutes), json_file, console)
    check.document = {
        "kind": KIND,
        **_about(device, dtype, minutes),
        "sections": {},
        "profiles": {},
    }
    weights = [*_CORRECTNESS_WEIGHTS, *(_SECTION_WEIGHTS * len(names))]
    parts = iter(shares(weights))
    cases, (requests, tokens) = CASES[device.type], _TOKENS_OF[device.type]
    check.section(
        "attention", check.budget.share(next(parts)), lambda b: check_attention(device, b, cases)
    )
    check.section(
        "tokens",
        check.budget.share(next(parts)),
        lambda b: check_tokens(device, b, requests, tokens),
    )
    rates = measure_rates(device, dtype)
    check.document["rates"] = {"bytes_per_s": rates.bytes_per_s, "flops": rates.flops}
    for name in names:
        _shape(check, name, dtype, rates, [next(parts) for _ in _SECTION_WEIGHTS])
    check.document["passed"], check.document["verdict"] = verdict(check.document["sections"])
    write_json(json_file, check.document)
    return check.document


def _shape(
    check: Check, name: str, dtype: torch.dtype, rates: Rates, parts: Sequence[float]
) -> None:
    """Measure one shape; its profile is in the document as soon as it is whole."""
    plan = TINY if name == "tiny" else FULL
    one = ShapeCheck(SHAPES[name], plan, dtype, check.device, rates)
    loaded = check.section(f"{name} load", check.budget.share(parts[0]), lambda _: one.load())
    if loaded is None:
        return
    works = {
        "verify": one.verify,
        "drafting": one.drafting,
        "graphs": one.graphs,
        "engine": one.engine,
    }
    for (kind, work), part in zip(works.items(), parts[1:], strict=True):
        check.section(f"{name} {kind}", check.budget.share(part), work)
        document = check.document
        source = f"parlay gpu-check: {name} of random weights, {dtype} on {document['device']}"
        profile = one.profile(source)
        if profile is not None:
            document["profiles"][name] = profile
            write_json(check.json_file, document)


def _about(device: torch.device, dtype: torch.dtype, minutes: float) -> dict[str, Any]:
    """Return on what the figures are from."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "device": name,
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "minutes": minutes,
    }


def device_named(name: str) -> torch.device:
    """Return the device of that name; raises ValueError where there is none."""
    if name not in ("cpu", "cuda"):
        raise ValueError(f"no device '{name}'; choose cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no GPU here; --device cpu runs the check at tiny sizes")
    return torch.device(name)
