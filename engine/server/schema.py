"""Request bodies of /v1/completions and /v1/chat/completions, checked field by field.

What would change the output and is not supported is refused, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan
from typing import Any

from parlay.engine.request import ALL_PROPOSERS, SamplingParams, SpeculationParams
from parlay.engine.server.errors import ApiError, invalid
from parlay.engine.server.fields import Fields
from parlay.policies.types import K_LIMIT, PROPOSERS, Proposer

COMPLETION_TOKENS = 16
"""What /v1/completions generates where no max_tokens is given (OpenAI API reference)."""
MAX_STOPS, MAX_STOP_CHARS, MAX_TOP_LOGPROBS, MAX_TASK_CHARS = 16, 256, 20, 64
MAX_TEMPERATURE, MAX_SEED, MAX_TOP_K = 2.0, 2**63 - 1, 2**31 - 1
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
_NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
_NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (False, True),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
_LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")


@dataclass(slots=True, frozen=True)
class Ask:
    """A checked body. prompt: text or token ids, or messages ({"role", "content"}) of a chat.

    max_tokens None: as many as the context holds. top_logprobs None: no logprobs.
    """

    model: str
    prompt: str | list[int] | list[dict[str, str]]
    max_tokens: int | None
    sampling: dict[str, Any]
    speculation: SpeculationParams
    top_logprobs: int | None = None
    stream: bool = False
    include_usage: bool = False

    def sampling_params(self, max_tokens: int) -> SamplingParams:
        """Return how to draw the tokens."""
        return SamplingParams(**self.sampling, max_tokens=max_tokens, logprobs=self.top_logprobs)


def completion_ask(body: dict[str, Any], proposer_mask: int) -> Ask:
    """Check a body of /v1/completions; proposer_mask: what the engine has. Raises ApiError."""
    fields = Fields(body)
    prompt = _prompt(fields)
    max_tokens = fields.integer("max_tokens", 1, MAX_SEED) or COMPLETION_TOKENS
    top = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    return _ask(fields, _NEUTRAL_COMPLETION, proposer_mask, prompt, max_tokens, top)


def chat_ask(body: dict[str, Any], proposer_mask: int) -> Ask:
    """Check a body of /v1/chat/completions; proposer_mask: what the engine has. Raises ApiError."""
    fields = Fields(body)
    messages = _messages(fields)
    old = fields.integer("max_tokens", 1, MAX_SEED)
    new = fields.integer("max_completion_tokens", 1, MAX_SEED)
    if old and new and old != new:
        raise invalid("max_tokens and max_completion_tokens differ: give one", "max_tokens")
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    top = (top or 0) if wanted else None
    return _ask(fields, _NEUTRAL_CHAT, proposer_mask, messages, new or old, top)


def _ask(
    fields: Fields,
    neutral: dict[str, tuple[Any, ...]],
    proposer_mask: int,
    prompt: str | list[int] | list[dict[str, str]],
    max_tokens: int | None,
    top_logprobs: int | None,
) -> Ask:
    """Take the fields that both bodies have."""
    model = fields.text("model")
    if model is None:
        raise invalid("model is missing: GET /v1/models names it", "model")
    sampling = _sampling(fields)
    speculation = _speculation(fields.object("speculation"), proposer_mask)
    if speculation.lossy and sampling["seed"] is not None:
        path = "speculation.lossy_threshold"
        raise invalid(f"{path} and seed exclude each other: a seed promises the model's text", path)
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options.given and not stream:
        raise invalid("stream_options needs stream: true", "stream_options")
    include_usage = options.flag("include_usage")
    options.only("include_obfuscation", (False,))
    options.done()
    for name, values in (_NEUTRAL | neutral).items():
        fields.only(name, values)
    fields.ignore(*_LABELS)
    fields.done()
    return Ask(
        model, prompt, max_tokens, sampling, speculation, top_logprobs, stream, include_usage
    )


def _sampling(fields: Fields) -> dict[str, Any]:
    """Take what SamplingParams knows but for its length; OpenAI's defaults where it has any."""
    temperature = fields.number("temperature", 0.0, MAX_TEMPERATURE)
    top_p = fields.number("top_p", 0.0, 1.0)
    if top_p == 0.0:
        raise fields.wrong("top_p", "above 0 and at most 1")
    return {
        "temperature": 1.0 if temperature is None else temperature,
        "top_p": 1.0 if top_p is None else top_p,
        "top_k": fields.integer("top_k", 0, MAX_TOP_K) or 0,
        "seed": fields.integer("seed", 0, MAX_SEED),
        "stop": _stop(fields),
        "ignore_eos": fields.flag("ignore_eos"),
    }


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in stops)
    ):
        raise fields.wrong("stop", f"up to {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _speculation(fields: Fields, there: int) -> SpeculationParams:
    """Take {"enabled", "max_k", "proposers", "tpot_target_ms", "task", "lossy_threshold"}."""
    enabled = fields.flag("enabled", True)
    max_k = fields.integer("max_k", 0, K_LIMIT)
    mask = _proposers(fields, there)
    target_ms = fields.number("tpot_target_ms", 0.0, inf)
    if target_ms == 0.0:
        raise fields.wrong("tpot_target_ms", "above 0")
    task = fields.text("task") or ""
    if len(task) > MAX_TASK_CHARS:
        raise fields.wrong("task", f"at most {MAX_TASK_CHARS} characters")
    most = (K_LIMIT if max_k is None else max_k) if enabled else 0
    least = _lossy_threshold(fields, bool(most))
    fields.done()
    return SpeculationParams(
        proposer_mask=mask,
        max_k=most,
        task=task,
        tpot_target_ms=nan if target_ms is None else target_ms,
        lossy_threshold=inf if least is None else least,
    )


def _lossy_threshold(fields: Fields, speculates: bool) -> float | None:
    least = fields.number("lossy_threshold", 0.0, 1.0)
    if least == 0.0:
        raise fields.wrong("lossy_threshold", "above 0 and at most 1")
    if least is not None and not speculates:
        path = fields.path("lossy_threshold")
        raise invalid(f"{path} is about drafts, but speculation is off: leave one out", path)
    return least


def _proposers(fields: Fields, there: int) -> int:
    """Take the names of proposers; `there` is the mask of those that the engine has."""
    names = fields.take("proposers")
    if names is None:
        return ALL_PROPOSERS
    known = {Proposer(p).name.lower(): p for p in range(1, PROPOSERS) if there >> p & 1}
    if not isinstance(names, list) or not all(isinstance(n, str) and n in known for n in names):
        raise fields.wrong("proposers", f"a list of what this engine has ({', '.join(known)})")
    return 1 << Proposer.NONE | sum(1 << known[name] for name in set(names))


def _prompt(fields: Fields) -> str | list[int]:
    """Take a text or token ids; a list of one of them is the same."""
    value = fields.take("prompt")
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise invalid("only one prompt a request is supported", "prompt", "unsupported_field")
        value = value[0]
    ids = isinstance(value, list) and all(type(t) is int and t >= 0 for t in value)
    if not (isinstance(value, str) or ids) or not value:
        raise fields.wrong("prompt", "a text or token ids, not empty")
    found: str | list[int] = value
    return found


def _messages(fields: Fields) -> list[dict[str, str]]:
    value = fields.take("messages")
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
        raise fields.wrong("messages", "a list of messages, not empty")
    return [_message(Fields(m, f"messages[{i}]")) for i, m in enumerate(value)]


def _message(fields: Fields) -> dict[str, str]:
    role = fields.text("role")
    if role not in ROLES:
        raise fields.wrong("role", f"one of {', '.join(ROLES)}")
    content = fields.take("content")
    if isinstance(content, list):
        parts = [_part(fields, n, part) for n, part in enumerate(content)]
        content = "".join(parts)
    if not isinstance(content, str):
        raise fields.wrong("content", "a text, or a list of parts of type text")
    fields.done()
    return {"role": ROLES[role], "content": content}


def _part(fields: Fields, n: int, part: Any) -> str:
    path = fields.path(f"content[{n}]")
    if not isinstance(part, dict) or part.get("type") != "text":
        raise invalid(f"{path} is no part of type text: only text is supported", path)
    inner = Fields(part, path)
    inner.take("type")
    text = inner.text("text")
    inner.done()
    if text is None:
        raise invalid(f"{path}.text is missing", f"{path}.text")
    return text


def check_model(ask: Ask, served: str) -> None:
    """Raise ApiError (404) where another model is asked for."""
    if ask.model != served:
        raise ApiError(
            404, f"there is no model '{ask.model[:80]}' here, only '{served}'", "model",
            "model_not_found",
        )  # fmt: skip
