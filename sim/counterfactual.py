"""Counterfactual traces: what every proposer would have done at every position of real texts.

A file holds a request a line, as JSON: id, task, prompt_tokens, k_max, accepted and drafted by
proposer (a number for each output position: how many tokens it could draft, and how many of them
would be accepted), match_tokens, and optionally confidence by proposer (a list for each position).
Any policy can replay it exactly, at any batch.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from parlay.policies.files import fault_of, write_whole
from parlay.policies.types import NGRAM, PROPOSERS, Array, Proposer

SHIPPED_TRACE = Path(__file__).parent / "data" / "smollm_trace.jsonl.gz"
"""The default model's answers to 320 prompts of five tasks, drawn from what the draft trains on but
with another seed: `parlay calibrate trace --prompts 320 --tokens 96 --out F` and `gzip -9n F`."""
_NAMES = {p.name.lower(): int(p) for p in Proposer if p is not Proposer.NONE}
_MOST = 4096


@dataclass(slots=True, frozen=True)
class TracedRequest:
    """One request: by proposer i32 [outputs] what could be drafted and would hold; match_tokens
    i32 [outputs]; confidence by proposer f32 [outputs, K], nan none.
    """  # noqa: D205

    name: str
    task: str
    prompt_tokens: int
    k_max: Mapping[int, int]
    drafted: Mapping[int, Array]
    accepted: Mapping[int, Array]
    match_tokens: Array
    confidence: Mapping[int, Array] = field(default_factory=dict)

    @property
    def output_tokens(self) -> int:
        """Return how many tokens were emitted."""
        return len(self.match_tokens)


def write_traces(path: Path, requests: Iterable[TracedRequest]) -> int:
    """Write requests to a file, whole or not at all; return how many there were."""

    def fill(file: IO[str]) -> int:
        lines = (json.dumps(_as_json(r), separators=(",", ":")) + "\n" for r in requests)
        return sum(1 for line in lines if file.write(line))

    count: int = write_whole(path, fill)
    return count


def read_traces(path: Path) -> Iterator[TracedRequest]:
    """Yield a file's requests, gzipped where its name ends in .gz.

    Raises ValueError "PATH:LINE: what is wrong" in one line.
    """
    if not path.is_file():
        raise ValueError(f"no counterfactual trace {path}: make one with `parlay calibrate trace`")
    found = 0
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            yield _parsed(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            said = fault_of(error)
            raise ValueError(f"{path}:{number}: {said}; record the trace again") from None
        found += 1
    if not found:
        raise ValueError(f"{path}: the trace is empty; record it again")


def _lines(path: Path) -> Iterator[str]:
    zipped = path.suffix == ".gz"
    with gzip.open(path, "rt", encoding="utf-8") if zipped else path.open(encoding="utf-8") as file:
        try:
            yield from file
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: cannot be read ({error}); copy it again") from None


class TraceLuck:
    """What would be accepted, as recorded; request i replays line (i + first) modulo their number.

    It answers what `Latents` answers, but for what only a law knows.
    """

    def __init__(self, requests: list[TracedRequest], depth: int, first: int = 0) -> None:
        self.requests, self.depth, self.first = requests, depth, first
        longest = max(r.output_tokens for r in requests) + depth
        self.match = np.zeros((len(requests), longest), np.int32)
        self._held = np.zeros((len(requests), PROPOSERS, longest), np.int32)
        self._offered = np.zeros_like(self._held)
        self._confidence = np.full((len(requests), PROPOSERS, longest, depth), np.nan, np.float32)
        for row, request in enumerate(requests):
            outputs = request.output_tokens
            self.match[row, :outputs] = request.match_tokens
            for proposer, drafted in request.drafted.items():
                self._offered[row, proposer, :outputs] = drafted
                self._held[row, proposer, :outputs] = request.accepted[proposer]
            for proposer, shown in request.confidence.items():
                width = min(depth, shown.shape[1])
                self._confidence[row, proposer, :outputs, :width] = shown[:, :width]
        # A match that leads nowhere is none to an engine that drafts.
        self.match[self._offered[:, NGRAM] == 0] = 0

    @property
    def proposer_mask(self) -> int:
        """Return the proposers that were recorded, as bits, and no speculation."""
        there = {p for request in self.requests for p in request.drafted}
        return 1 | sum(1 << proposer for proposer in there)

    def admit(self, request: int, task: int, tokens: int) -> int:
        """Return the line that request number `request` replays."""
        return (request - 1 + self.first) % len(self.requests)

    def release(self, row: int) -> None:
        """Nothing is held."""

    def offered(self, rows: Array, output_tokens: Array, proposer: Array | int) -> Array:
        """Return i32 [n]: how many tokens could be drafted now."""
        found: Array = np.minimum(self._offered[rows, proposer, output_tokens], self.depth)
        return found

    def held(self, rows: Array, output_tokens: Array, proposer: Array | int) -> Array:
        """Return i32 [n]: how many of them would hold."""
        found: Array = np.minimum(self._held[rows, proposer, output_tokens], self.depth)
        return found

    def confidence(self, rows: Array, output_tokens: Array, proposer: Array) -> Array:
        """Return f32 [n, depth]: the drafter's confidences, nan where none were recorded."""
        shown: Array = self._confidence[rows, proposer, output_tokens]
        return shown


def _as_json(request: TracedRequest) -> dict[str, Any]:
    def named(of: Mapping[int, Any]) -> dict[str, Any]:
        return {Proposer(p).name.lower(): v for p, v in of.items()}

    shown = {
        p: [[round(float(c), 3) for c in place if c == c] for place in of]
        for p, of in request.confidence.items()
    }
    return {
        "id": request.name,
        "task": request.task,
        "prompt_tokens": request.prompt_tokens,
        "k_max": named(request.k_max),
        "accepted": named({p: v.tolist() for p, v in request.accepted.items()}),
        "drafted": named({p: v.tolist() for p, v in request.drafted.items()}),
        "match_tokens": request.match_tokens.tolist(),
        **({"confidence": named(shown)} if shown else {}),
    }


def _parsed(raw: Mapping[str, Any]) -> TracedRequest:
    match = _counts("match_tokens", raw["match_tokens"], None)
    outputs = len(match)
    if not outputs:
        raise ValueError("it has no output positions")
    accepted, drafted = raw["accepted"], raw["drafted"]
    unknown = (set(accepted) | set(drafted)) - set(_NAMES)
    if unknown or set(accepted) != set(drafted):
        raise ValueError(f"accepted and drafted need the same proposers of {', '.join(_NAMES)}")
    held = {_NAMES[n]: _counts(f"accepted.{n}", v, outputs) for n, v in accepted.items()}
    offered = {_NAMES[n]: _counts(f"drafted.{n}", v, outputs) for n, v in drafted.items()}
    for proposer, counts in held.items():
        if (counts > offered[proposer]).any():
            raise ValueError(f"{Proposer(proposer).name.lower()} accepts more than it drafted")
    prompt = int(raw["prompt_tokens"])
    if prompt < 1:
        raise ValueError("prompt_tokens must be at least 1")
    return TracedRequest(
        str(raw["id"]),
        str(raw["task"]),
        prompt,
        {_NAMES[name]: int(k) for name, k in raw["k_max"].items()},
        offered,
        held,
        match,
        {_NAMES[n]: _ragged(n, v, outputs) for n, v in raw.get("confidence", {}).items()},
    )


def _counts(name: str, values: Any, length: int | None) -> Array:
    found = np.asarray(values)
    if found.ndim != 1 or (length is not None and len(found) != length):
        raise ValueError(f"{name} needs a number for each of the {length or ''} output positions")
    if found.size and (found.dtype.kind not in "iu" or found.min() < 0 or found.max() > _MOST):
        raise ValueError(f"{name} needs whole numbers from 0 to {_MOST}")
    return found.astype(np.int32)


def _ragged(name: str, rows: Any, length: int) -> Array:
    if len(rows) != length:
        raise ValueError(f"confidence.{name} needs a list for each of the {length} positions")
    out = np.full((length, max((len(row) for row in rows), default=0)), np.nan, np.float32)
    for place, row in enumerate(rows):
        out[place, : len(row)] = row
    if ((out < 0.0) | (out > 1.0)).any():
        raise ValueError(f"confidence.{name} needs probabilities between 0 and 1")
    return out
