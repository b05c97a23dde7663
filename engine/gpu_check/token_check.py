"""Whole tiny models on a device against a CPU: float32 token for token, bfloat16 by soundness.

`interfaces.md` pins both: float32's greedy outputs are identical whatever the speculation; a
bfloat16 output may leave the plain one only at a near-tie (`demo/soundness.py`), and no more often
than plain decoding at other row counts does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parlay.engine.demo.logits import TorchOracle
from parlay.engine.demo.soundness import Agreement, Divergence, first_difference, judge
from parlay.engine.gpu_check.budget import Budget
from parlay.engine.gpu_check.tiny_models import (
    CPU,
    MODES,
    PLAIN,
    Mode,
    decode,
    prompts,
    tiny_backend,
    tiny_llama,
)

ALWAYS = {*(mode.name for mode in PLAIN), "all", "trees"}
"""What is decoded however late it is: of these there is something to judge."""

Outputs = Mapping[str, Sequence[list[int]]]
"""By mode, what was said to each prompt."""


def check_tokens(
    device: torch.device, budget: Budget, requests: int = 24, tokens: int = 24
) -> dict[str, Any]:
    """Decode in every mode, in float32 and in bfloat16; return who agreed with whom."""
    asked = prompts(requests)
    truth = decode(tiny_backend(torch.float32, CPU), PLAIN[0], asked, tokens)
    exact = decoded(torch.float32, device, (*PLAIN, *MODES), asked, tokens, budget)
    rows = [exact_row(mode, outputs, truth) for mode, outputs in exact.items()]
    rough = decoded(torch.bfloat16, device, (*PLAIN, *MODES), asked, tokens, budget)
    oracle = TorchOracle(
        tiny_llama(3, torch.bfloat16, device), tiny_llama(3, torch.float32, CPU), asked
    )
    verdict = judge(agreement(rough), oracle)
    passed = all(row["passed"] for row in rows) and bool(verdict["identical"])
    left = [m.name for m in MODES if m.name not in exact or m.name not in rough]
    return {"float32": rows, "bfloat16": verdict, "left_out": left, "passed": passed}


def decoded(
    dtype: torch.dtype,
    device: torch.device,
    modes: Sequence[Mode],
    asked: Sequence[list[int]],
    tokens: int,
    budget: Budget,
) -> dict[str, list[list[int]]]:
    """Return what each mode says; those that come too late are left out, but never ALWAYS."""
    found: dict[str, list[list[int]]] = {}
    backends = {
        width: tiny_backend(dtype, device, width) for width in {m.tree_width for m in modes}
    }
    for mode in modes:
        if mode.name in ALWAYS or not budget.over:
            found[mode.name] = decode(backends[mode.tree_width], mode, asked, tokens)
    return found


def exact_row(
    mode: str, outputs: Sequence[list[int]], truth: Sequence[list[int]]
) -> dict[str, Any]:
    """Return how many of a mode's outputs are the truth's, and where the first that is not left."""
    places = [first_difference(right, said) for right, said in zip(truth, outputs, strict=True)]
    wrong = [(prompt, place) for prompt, place in enumerate(places) if place is not None]
    return {
        "mode": mode,
        "outputs": len(outputs),
        "tokens": sum(map(len, outputs)),
        "identical": len(outputs) - len(wrong),
        "first_wrong": wrong[0] if wrong else None,
        "passed": not wrong,
    }


def agreement(outputs: Outputs) -> Agreement:
    """Compare every mode with no speculation at one request at a time; see `soundness.compare`."""
    reference = outputs[PLAIN[0].name]
    found = Agreement(dict(enumerate(reference)))
    plain = {mode.name for mode in PLAIN}
    for mode, said in outputs.items():
        if mode == PLAIN[0].name:
            continue
        compared = found.compared_plain if mode in plain else found.compared
        divergences = found.plain if mode in plain else found.divergences
        for prompt, output in enumerate(said):
            compared[prompt] = compared.get(prompt, 0) + 1
            place = first_difference(reference[prompt], output)
            if place is not None:
                expected = reference[prompt][place]
                divergences.append(Divergence(mode, mode, prompt, place, expected, output[place]))
    return found
