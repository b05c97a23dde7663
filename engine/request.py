"""A request: its tokens, what it asked for, and how far its KV caches have come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf, isnan
from operator import index

from parlay.policies.types import K_LIMIT, PROPOSERS, Proposer

ALL_PROPOSERS = (1 << PROPOSERS) - 1


class Phase(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended, in the words of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


def token_ids(prompt: Sequence[int], vocab_tokens: int) -> list[int]:
    """Return a prompt's ids as plain integers; raises ValueError where it is no list of ids."""
    if not len(prompt):
        raise ValueError("the prompt is empty: give at least one token")
    try:
        ids = [index(token) for token in prompt]
    except TypeError:
        raise ValueError("the prompt must be token ids, whole numbers") from None
    if min(ids) < 0 or max(ids) >= vocab_tokens:
        wrong = next(i for i in ids if not 0 <= i < vocab_tokens)
        raise ValueError(
            f"the prompt has token id {wrong}; the model's are 0 to {vocab_tokens - 1}"
        )
    return ids


class SampleMode(Enum):
    """How tokens are drawn and drafts verified; all three keep the output's law (not `lossy`)."""

    GREEDY = "greedy"
    REJECTION = "rejection"
    COUPLED = "coupled"


@dataclass(slots=True, frozen=True)
class TokenLogprob:
    """A token's log-probability in the model's own law, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """How to draw tokens; temperature 0 is greedy, a seed makes it coupled (reproducible).

    top_k 0 and top_p 1 are off; logprobs: how many of the likeliest tokens to tell of beside each
    token's own logprob, None: neither. Raises ValueError for a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("top_k", "seed", "max_tokens", "logprobs"):
            if (value := getattr(self, name)) is not None and type(value) is not int:
                raise ValueError(f"{name} must be a whole number, not {value!r}")
        if not 0.0 <= self.temperature <= 10.0:
            raise ValueError(f"temperature must be between 0 and 10, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be between 0 and 2**63 - 1, not {self.seed}")
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(f"logprobs must be 0 or more, not {self.logprobs}")
        if isinstance(self.stop, str):
            raise ValueError(f"stop must be a tuple of strings, not the string {self.stop!r}")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ValueError("a stop string must be a string, and not empty")

    @property
    def mode(self) -> SampleMode:
        """Return how this request is sampled."""
        if self.temperature == 0.0:
            return SampleMode.GREEDY
        return SampleMode.REJECTION if self.seed is None else SampleMode.COUPLED


@dataclass(slots=True, frozen=True)
class SpeculationParams:
    """What a request allows: proposers (bit mask), tokens a step; its task and latency target.

    lossy_threshold: other than inf it changes the output's law: a draft holds also where the target
    gives it so much probability (`lossy.py`). Raises ValueError for a value out of range.
    """

    proposer_mask: int = ALL_PROPOSERS
    max_k: int = K_LIMIT
    task: str = ""
    tpot_target_ms: float = float("nan")
    lossy_threshold: float = inf

    def __post_init__(self) -> None:
        for name in ("max_k", "proposer_mask"):
            if not isinstance(value := getattr(self, name), int):
                raise ValueError(f"{name} must be a whole number, not {value!r}")
        if not isinstance(self.task, str) or not self.task.isprintable():
            raise ValueError(f"task must be a printable string, not {self.task!r}")
        if not 0 <= self.max_k <= K_LIMIT:
            raise ValueError(f"max_k must be between 0 and {K_LIMIT}, not {self.max_k}")
        if not 0 <= self.proposer_mask <= ALL_PROPOSERS:
            names = ", ".join(p.name.lower() for p in Proposer)
            raise ValueError(
                f"proposer mask {self.proposer_mask} names an unknown proposer; known: {names}"
            )
        if not (isnan(self.tpot_target_ms) or 0.0 < self.tpot_target_ms < inf):
            raise ValueError(
                f"tpot_target_ms must be above 0 and finite, or nan, not {self.tpot_target_ms}"
            )
        if self.lossy and not 0.0 < self.lossy_threshold <= 1.0:
            raise ValueError(
                f"lossy_threshold must be above 0 and at most 1, not {self.lossy_threshold}"
            )

    @property
    def lossy(self) -> bool:
        """Say whether the output may be other than the target's."""
        return self.lossy_threshold != inf

    @property
    def learned_with(self) -> str:
        """Return the tag under which policies learn: of lossy requests more drafts hold."""
        return f"{self.task} (lossy)" if self.lossy else self.task


OnTokens = Callable[["Request", list[int]], None]


@dataclass(slots=True, eq=False)
class Request:
    """One request; the scheduler moves it, `commit` grows it, nobody else writes to it.

    tokens: prompt then output. computed: target KV positions that hold committed tokens;
    draft_computed: the same of the draft model, whose cache begins at position draft_start.
    cached_tokens: prompt tokens whose KV others had left when it first ran. recent_accept:
    discounted mean of emitted tokens a step. Raises ValueError for a seed beside a lossy rule: the
    one promises the text that the other gives away.
    """

    request_id: int
    tokens: list[int]
    prompt_tokens: int
    sampling: SamplingParams = SamplingParams()
    speculation: SpeculationParams = SpeculationParams()
    on_tokens: OnTokens | None = None
    phase: Phase = Phase.WAITING
    finish_reason: FinishReason | None = None
    computed: int = 0
    draft_computed: int = 0
    draft_start: int = 0
    cached_tokens: int = 0
    recent_accept: float = 1.0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.speculation.lossy and self.sampling.seed is not None:
            raise ValueError("lossy_threshold and seed exclude each other: leave one of them out")

    @property
    def output(self) -> list[int]:
        """Return the tokens generated so far."""
        return self.tokens[self.prompt_tokens :]

    @property
    def output_tokens(self) -> int:
        """Return how many tokens were generated so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Return how many tokens may still be generated."""
        return self.sampling.max_tokens - self.output_tokens

    @property
    def pending(self) -> int:
        """Return how many tokens the target has not computed yet: 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def finished(self) -> bool:
        """Say whether nothing more will come."""
        return self.phase is Phase.FINISHED
