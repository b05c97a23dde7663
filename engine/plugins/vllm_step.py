"""What the plugin keeps of vLLM's steps while they are under way, and reads off their ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parlay.engine.plugins.adapter import Decision
from parlay.engine.plugins.vllm_rows import Row
from parlay.policies.types import Array, Truncated


@dataclass(slots=True)
class Drafting:
    """A decision, whom it is for, and what came of it: drafts that the next step verifies.

    place: a request's row in the decision; drafted i32 [rows], what was kept of its drafts.
    draft_ms of vLLM's proposer, lookup_ms of ours.
    """

    decision: Decision
    rows: list[Row]
    place: dict[str, int]
    drafted: Array
    depth: int = 0
    draft_ms: float = 0.0
    lookup_ms: float = 0.0


@dataclass(slots=True)
class Step:
    """A step under way: what vLLM scheduled, the drafts it verifies, those it makes.

    started: whose `in_flight` counts it.
    """

    out: Any
    start_s: float
    verifies: Drafting | None
    makes: Drafting | None = None
    started: list[Row] = field(default_factory=list)


@dataclass(slots=True)
class Seen:
    """A step between vLLM's verdict and its bookkeeping: i32 [rows] as in StepResult."""

    step: Step
    verified: Array
    accepted: Array
    outputs: list[int]


def prompt_tokens(out: Any) -> int:
    """Return how many tokens of a step are of prompts (one of a single token counts as a draft)."""
    drafts = out.scheduled_spec_decode_tokens
    if out.total_num_scheduled_tokens == len(out.num_scheduled_tokens):
        return 0
    extra = ((n, 1 + len(drafts.get(name, ()))) for name, n in out.num_scheduled_tokens.items())
    return sum(n for n, decoding in extra if n > decoding)


def truncated(source: Any) -> int:
    """Say what ended a request, in the words of StepOutcome."""
    if not source.is_finished():
        return 0
    if source.status.name == "FINISHED_LENGTH_CAPPED":
        return int(Truncated.LENGTH)
    if source.status.name != "FINISHED_STOPPED":
        return 0
    return int(Truncated.EOS if source.stop_reason is None else Truncated.STOP)
