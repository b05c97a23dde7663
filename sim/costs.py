"""What a step costs in the simulator: named cost models, measured or computed.

Built in: `h200_8b` (Llama-3.1-8B with a 1B draft model on an H200, from measured tables);
`h200_8b_stale` (the same where a step off its graph edge costs 1.15x); `h200_moe` (a mixture of
128 experts, 8 active, by roofline); `cpu_smollm` (this project's default model on a CPU core);
vidur's and splitwise's tables; `roofline:GPU/MODEL[+DRAFT][:tp=N[,draft_tp=M]]` for what has no
table, the target on N GPUs and the draft model on M of them. Any other name is the path of a JSON
profile (`cost_tables.parse_profile` says what it holds), or of what `parlay gpu-check` wrote (its
last shape; FILE.json#1b names another).
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from parlay.sim.cost_tables import StepTime, TableCosts, Work, parse_profile
from parlay.sim.measured import profile_in
from parlay.sim.roofline import GPUS, MODELS, pass_profile, roofline

__all__ = ["BUILT_IN", "CostModel", "StepTime", "TableCosts", "Work", "load_costs"]

_TABLES = (
    "cpu_smollm",
    "h200_8b",
    "splitwise_a100_llama2_70b",
    "splitwise_h100_llama2_70b",
    "vidur_a100_llama2_7b",
    "vidur_a100_llama3_8b",
    "vidur_h100_llama2_7b",
    "vidur_h100_llama2_70b",
)
BUILT_IN = tuple(sorted((*_TABLES, "h200_8b_stale", "h200_moe")))
_OFF_EDGE = 1.15
_ROOFLINE = re.compile(
    r"roofline:([^/:]*)/([^+:]*)(?:\+([^:]*))?(?::tp=([0-9]{1,3})(?:,draft_tp=([0-9]{1,3}))?)?"
)


class CostModel(Protocol):
    """What the simulator asks for the time of a step; bucket_edges () means any token count."""

    @property
    def name(self) -> str:
        """Return what `load_costs` was given."""
        ...

    @property
    def bucket_edges(self) -> tuple[int, ...]:
        """Return the padded token counts a step can have."""
        ...

    def time(self, work: Work) -> StepTime:
        """Return what one step takes; called once a step, so quick."""
        ...


def load_costs(name: str) -> CostModel:
    """Return the cost model of that name.

    Raises ValueError in one line for a name that is not known, a file that is missing or no JSON,
    and a profile that cannot be.
    """
    if name in BUILT_IN:
        return _built_in(name)
    if name.startswith("roofline:"):
        return parse_profile(name, _roofline(name))
    path, _, shape = name.partition("#")
    if not path.endswith(".json"):
        raise ValueError(
            f"no cost model '{name}'; there are {', '.join(BUILT_IN)}, "
            "roofline:GPU/MODEL[+DRAFT][:tp=N[,draft_tp=M]], and the path of a .json profile"
        )
    try:
        profile = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot read the cost profile {path}: {reason}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the cost profile {name} is not JSON: {error}") from error
    return parse_profile(name, profile_in(path, profile, shape))


@cache
def _built_in(name: str) -> TableCosts:
    profile = _table("h200_8b" if name.startswith("h200") else name)
    if name == "h200_8b_stale":
        profile["off_edge_factor"] = _OFF_EDGE
    elif name == "h200_moe":
        # Drafts cost what they cost beside the dense model; no edges, for padding hides experts.
        profile["target"] = pass_profile(GPUS["h200"], MODELS["qwen3-30b-a3b"], 1)
        profile["bucket_edges"] = []
        profile["source"] = "roofline of qwen3-30b-a3b on an h200; drafts as in h200_8b"
    return parse_profile(name, profile)


def _table(name: str) -> dict[str, Any]:
    text = files("parlay.sim").joinpath(f"data/{name}.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def _roofline(name: str) -> dict[str, Any]:
    """Return the profile of `roofline:GPU/MODEL[+DRAFT][:tp=N[,draft_tp=M]]`."""
    found = _ROOFLINE.fullmatch(name)
    if found is None:
        like = "roofline:h100/llama-3.1-8b+llama-3.2-1b:tp=2,draft_tp=1"
        raise ValueError(f"'{name}' must be like {like}")
    gpu, model, draft, tp, draft_tp = found.groups()
    return roofline(gpu, model, draft or "", int(tp or 1), int(draft_tp or 1))
