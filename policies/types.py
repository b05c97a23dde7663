"""What engine and policy say to each other: structs of numpy arrays, one row a request.

BatchView goes to the policy before a step, Plan comes back, StepOutcome tells what the step did.
Rows are matched by request_id, never by index: requests may join or leave between the two.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

K_LIMIT = 64
"""No request drafts more tokens than this in one step, whatever it is asked."""
MATCH_EDGES = (1, 2, 3, 4, 6, 9, 16)
"""Lower edges of the match-length buckets 1..7; bucket 0 means no match."""
NO_BUDGET = -1


class Proposer(IntEnum):
    """Who guesses the next tokens; also the column of every per-proposer array."""

    NONE = 0
    NGRAM = 1
    DRAFT_MODEL = 2
    MEDUSA = 3


PROPOSERS = len(Proposer)
NONE, NGRAM, DRAFT_MODEL, MEDUSA = (int(p) for p in Proposer)
"""Plain numbers for hot paths, where an enum's attribute costs a microsecond."""


class Truncated(IntEnum):
    """What cut a request's accepted run short."""

    NONE = 0
    EOS = 1
    STOP = 2
    LENGTH = 3


class PlanSource(IntEnum):
    """Where the plan that a row followed came from."""

    DEFAULT = 0
    LOCAL = 1
    REMOTE = 2


class Reason(IntEnum):
    """Why a row got its decision, for `explain`."""

    UNSPECIFIED = 0
    FIXED = 1
    BEST_GOODPUT = 2
    NO_GAIN = 3
    NO_MATCH = 4
    GATE = 5
    EXPLORE = 6
    WARM_UP = 7
    NOT_ALLOWED = 8
    HEURISTIC = 9


class StopKind(IntEnum):
    """When a proposer stops before its k tokens."""

    NONE = 0
    SURVIVAL = 1
    ENTROPY = 2
    PROBABILITY = 3


ENTROPY_SCALE = 0.15
"""The c of an entropy rule's sqrt(c H), SVIP's bound on acceptance (Zhang et al. 2024)."""


class ShadowKind(IntEnum):
    """How a shadow proposal was scored: exact matches, or overlap sum min(p, q)."""

    MATCH = 0
    OVERLAP = 1


def task_id(tag: str) -> int:
    """Hash a task tag into 32 bits; the empty tag is 0, unknown."""
    return zlib.crc32(tag.encode()) if tag else 0


def match_bucket(match_tokens: Array) -> Array:
    """Return the bucket [0, len(MATCH_EDGES)] of each match length."""
    return np.searchsorted(_EDGES, match_tokens, side="right")


_EDGES = np.asarray(MATCH_EDGES)


@dataclass(slots=True)
class BatchView:
    """The batch as the policy may see it before step `step_id`; the engine fills every field.

    Per row [rows]: request_id u64; task u32, 0 unknown; context_tokens, output_tokens i32, tokens
    so far; prefill_tokens i32, prompt tokens computed in this step (such a row cannot draft);
    temperature f32, 0 greedy; max_k i32, what request, length and cache still allow; proposer_mask
    u8, bit p set where proposer p is allowed and there; tpot_target_ms f32, nan none; recent_accept
    f32, discounted mean of emitted tokens a step; match_tokens i32, the n-gram's longest suffix
    match now; draft_kv_lag i32, tokens the draft model must catch up; seeded bool. Batch-wide:
    requests running and waiting, KV blocks free and in all, KV tokens held, and bucket_edges i32,
    the padded token counts a step can have (empty: any).
    """

    request_id: Array
    task: Array
    context_tokens: Array
    output_tokens: Array
    prefill_tokens: Array
    temperature: Array
    max_k: Array
    proposer_mask: Array
    tpot_target_ms: Array
    recent_accept: Array
    match_tokens: Array
    draft_kv_lag: Array
    seeded: Array
    step_id: int = 0
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    kv_tokens: int = 0
    bucket_edges: Array = field(default_factory=lambda: np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self.request_id)

    def allows(self, proposer: int) -> Array:
        """Return bool [rows]: may this row draft with `proposer` in this step."""
        return ((self.proposer_mask >> proposer) & 1).astype(bool) & (self.max_k > 0)


@dataclass(slots=True, frozen=True)
class StopRule:
    """When drafting stops early; the threshold's unit is the kind's own."""

    kind: StopKind = StopKind.NONE
    threshold: float = 0.0


@dataclass(slots=True)
class TaskDefaults:
    """What requests get that the plan has no row for: by task; task 0 serves every other task."""

    task: Array
    proposer: Array
    k: Array


@dataclass(slots=True)
class Plan:
    """What to do in the next step; the policy fills every field, `fit_plan` applies it.

    Per row [rows]: request_id u64; proposer u8; k i16; shadow bool, run the draft model only to
    observe; propensity f32, the probability with which this (proposer, k) was chosen; reason u8.
    survival f32 [rows, PROPOSERS, K]: P(first j drafts all accepted), or None where the policy has
    no estimates (then proposer and k are applied as they stand). match_hazard f32 [len(MATCH_EDGES)
    + 1, K] and match_frailty f32 [rows]: the n-gram's hazard by match bucket and each row's
    multiplier on it, so that a plan made one step ago follows the match length of now; both or
    neither. token_value_ms: what one emitted token is worth in step time (1 / goodput);
    marginal_token_price_ms: what one more verified token costs; draft_token_price_ms f32
    [PROPOSERS]: what drafting one costs. A token is worth drafting while survival * token_value_ms
    >= its two prices; nan: no prices. budget_tokens: drafted tokens the batch may verify, fixed
    before drafting (k in all may be more: what it is spent on is chosen once they are drafted);
    NO_BUDGET: no limit. calibration f32 [PROPOSERS, 2], or [PROPOSERS, 2, K], a line a place: slope
    and offset from a drafter's confidence (log-odds) to acceptance.
    """

    request_id: Array
    proposer: Array
    k: Array
    shadow: Array
    propensity: Array
    reason: Array
    survival: Array | None = None
    match_hazard: Array | None = None
    match_frailty: Array | None = None
    defaults: TaskDefaults | None = None
    token_value_ms: float = float("nan")
    marginal_token_price_ms: float = float("nan")
    draft_token_price_ms: Array = field(default_factory=lambda: np.zeros(PROPOSERS, np.float32))
    budget_tokens: int = NO_BUDGET
    stop_rule: StopRule = StopRule()
    calibration: Array | None = None
    step_id: int = 0
    state_version: int = 0
    policy_version: str = ""
    expires_after_steps: int = 8

    def __len__(self) -> int:
        return len(self.request_id)


@dataclass(slots=True)
class Fitted:
    """A plan fitted to the batch that is there, by row of the view: proposer u8, k, verify_k i32.

    follows bool: the row was in the plan (else it got a default). shadow bool, propensity f32 and
    reason u8 are carried over from the plan's row. survival f32 [rows, K]: the plan's, of each
    row's own proposer at the match length of now; None where it has none.
    """

    proposer: Array
    k: Array
    verify_k: Array
    follows: Array
    shadow: Array
    propensity: Array
    reason: Array
    survival: Array | None = None


@dataclass(slots=True)
class ShadowRows:
    """Proposals that were scored against what was committed without being verified.

    Per row: request_id u64; proposer u8; offered_k i16, tokens proposed; matched f32, how many held
    (a sum of overlaps where kind is OVERLAP); observed i16, positions that could be seen;
    match_tokens i32, the n-gram's match length when it proposed; kind u8.
    """

    request_id: Array
    proposer: Array
    offered_k: Array
    matched: Array
    observed: Array
    match_tokens: Array
    kind: Array

    def __len__(self) -> int:
        return len(self.request_id)


@dataclass(slots=True)
class StepOutcome:
    """What step `step_id` did; the engine fills every field.

    Per row [rows]: request_id u64; task u32; proposer u8; requested_k, drafted_k, verified_k,
    accepted (before EOS, stop or length cropped it) i16; emitted i16, tokens committed (0 while the
    prompt is being computed; where an engine verifies trees the other counts are those of the chain
    that was planned, and emitted may be more than accepted + 1); match_tokens i32, the match length
    the draft was made with; truncated_by u8; plan_source u8; plan_step_id u64, the step whose view
    the plan was computed from; confidences f32 [rows, K], the drafter's largest probability at each
    place before a token was drawn there (also the place at which it stopped), nan none. Batch-wide:
    padded_tokens, rows of the verify pass; prefill_tokens among them; kv_tokens read; draft_ms f32
    [PROPOSERS]; draft_depth, passes of the draft model; verify_ms; step_ms, from the end of the
    step before (or from the start, after idleness) to the end of this.
    """

    request_id: Array
    task: Array
    proposer: Array
    requested_k: Array
    drafted_k: Array
    verified_k: Array
    accepted: Array
    emitted: Array
    match_tokens: Array
    truncated_by: Array
    plan_source: Array
    plan_step_id: Array
    confidences: Array
    shadow: ShadowRows
    step_id: int = 0
    padded_tokens: int = 0
    prefill_tokens: int = 0
    kv_tokens: int = 0
    draft_ms: Array = field(default_factory=lambda: np.zeros(PROPOSERS, np.float32))
    draft_depth: int = 0
    verify_ms: float = 0.0
    step_ms: float = 0.0

    def __len__(self) -> int:
        return len(self.request_id)


def no_shadows() -> ShadowRows:
    """Return a ShadowRows without rows."""
    return ShadowRows(
        request_id=np.zeros(0, np.uint64),
        proposer=np.zeros(0, np.uint8),
        offered_k=np.zeros(0, np.int16),
        matched=np.zeros(0, np.float32),
        observed=np.zeros(0, np.int16),
        match_tokens=np.zeros(0, np.int32),
        kind=np.zeros(0, np.uint8),
    )
