"""What logs say of acceptance: drafts of known length, and how many of their tokens held.

Two kinds of log. Spec-Bench's: a JSON object a line, a question each, whose choices hold
`decoding_steps` (a number a turn), `accept_lengths` (tokens emitted by each step) and the
`model_id`, which names the drafter. And the decision log of this project.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from parlay.policies.decision_log import LogReader
from parlay.policies.files import fault_of
from parlay.policies.log_schema import LoggedStep
from parlay.policies.types import DRAFT_MODEL, MEDUSA, Array, ShadowKind, task_id
from parlay.sim.laws import tasks

DEPTH = 8
"""Tokens of a draft that are looked at, as many as the simulator drafts."""
FIRST_K, LONGER_K, SHORTER_K = 5, 2, 1
"""Hugging Face's assisted generation: its first k, and how k changes after a step."""
_DRAFTERS = (
    ("medusa", MEDUSA, 4),
    ("hydra", MEDUSA, 4),
    ("eagle", DRAFT_MODEL, 5),
    ("sps", DRAFT_MODEL, 0),
)
"""What a model_id holds, the proposer it stands for, and its draft's depth (0: assisted)."""
_SHORTEST = 1
DraftRow = tuple[int, int, int, int]
"""Output position, proposer, offered and held tokens."""


@dataclass(slots=True)
class Observed:
    """One task's drafts, text after text: columns [drafts]; by text its first draft and lengths.

    at: output position; offered and held: tokens of the draft, at most DEPTH. first [texts];
    prompt_tokens and output_tokens [texts], 0 unknown. matched of `looked` positions had a match.
    """

    at: Array
    proposer: Array
    offered: Array
    held: Array
    first: Array
    prompt_tokens: Array
    output_tokens: Array
    matched: int = 0
    looked: int = 0

    def __len__(self) -> int:
        """Return how many drafts there are."""
        return len(self.at)

    @property
    def text(self) -> Array:
        """Return i64 [drafts]: which text each belongs to."""
        sizes = np.diff(np.append(self.first, len(self.at)))
        return np.repeat(np.arange(len(self.first)), sizes)


@dataclass(slots=True)
class Text:
    """One answer as it is read: its drafts in order."""

    drafts: list[DraftRow] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class Reading:
    """What has been read: texts by task, n-gram looks by task as (matched, looked), and notes."""

    texts: dict[str, list[Text]] = field(default_factory=lambda: defaultdict(list))
    looks: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    notes: list[str] = field(default_factory=list)

    def observed(self) -> dict[str, Observed]:
        """Return each task's columns; texts without a draft are left out."""
        found = {}
        for task in sorted(self.texts):
            texts = [text for text in self.texts[task] if text.drafts]
            if texts:
                found[task] = _columns(texts, *self.looks[task])
        return found


def read_logs(paths: Iterable[Path]) -> Reading:
    """Read logs of either kind; a folder or .parquet is a decision log.

    Raises ValueError "PATH:LINE: what is wrong" in one line, and where no draft was logged.
    """
    reading = Reading()
    for path in paths:
        if path.is_dir() or path.suffix == ".parquet":
            _read_decisions(path, reading)
        elif path.is_file():
            _read_questions(path, reading)
        else:
            raise ValueError(f"no log {path}: give a decision log or a Spec-Bench .jsonl")
    if not any(text.drafts for texts in reading.texts.values() for text in texts):
        raise ValueError("the logs hold no drafts: run with a policy that speculates")
    return reading


def assisted_k(emitted: Array) -> Array:
    """Return i64 [steps], the k of assisted generation, which follows from what steps emitted."""
    k, found = FIRST_K, np.zeros(len(emitted), np.int64)
    for step, tokens in enumerate(emitted.tolist()):
        found[step] = k
        k = k + LONGER_K if tokens - 1 >= k else max(k - SHORTER_K, _SHORTEST)
    return found


def _read_questions(path: Path, reading: Reading) -> None:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip(b"\0 \r\n"):
                if b"\0" in line:
                    reading.notes.append(f"{path}:{number}: nothing but zeros, passed over")
                continue
            try:
                task, texts = _question(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
                raise ValueError(
                    f"{path}:{number}: {fault_of(error)}; a row needs model_id and choices with"
                    " decoding_steps and accept_lengths"
                ) from None
            reading.texts[task] += texts


def _question(raw: Mapping[str, Any]) -> tuple[str, list[Text]]:
    """Return a row's task and a text for each of its turns."""
    name = str(raw["model_id"])
    drafter = next(((p, k) for word, p, k in _DRAFTERS if word in name.lower()), None)
    if drafter is None:
        known = ", ".join(word for word, _, _ in _DRAFTERS)
        raise ValueError(f"model_id '{name}' names no drafter of {known}")
    found = []
    for choice in raw["choices"]:
        emitted, turns = _whole(choice, "accept_lengths"), _whole(choice, "decoding_steps")
        if turns.sum() != len(emitted):
            raise ValueError(
                f"decoding_steps say {turns.sum()} steps, accept_lengths has {len(emitted)}"
            )
        ends = np.cumsum(turns)[:-1]
        found += [_turn(part, *drafter) for part in np.split(emitted, ends) if len(part)]
    return str(raw.get("category") or "unknown"), found


def _whole(choice: Mapping[str, Any], name: str) -> Array:
    values = np.asarray(choice[name])
    if values.ndim != 1 or not values.size or values.dtype.kind not in "iu" or values.min() < 1:
        raise ValueError(f"{name} needs whole numbers from 1")
    return values.astype(np.int64)


def _turn(emitted: Array, proposer: int, k: int) -> Text:
    """Return a turn's drafts; its prompt gave the first token, before any was drafted."""
    offered = np.full(len(emitted), k) if k else assisted_k(emitted)
    if (emitted - 1 > offered).any():
        step = int(np.argmax(emitted - 1 > offered))
        raise ValueError(
            f"step {step} accepts {emitted[step] - 1} of a draft of {offered[step]} tokens"
        )
    at = 1 + np.cumsum(emitted) - emitted
    rows = zip(at.tolist(), offered.tolist(), (emitted - 1).tolist(), strict=True)
    return Text([(a, proposer, n, held) for a, n, held in rows], 0, int(emitted.sum()))


def _read_decisions(path: Path, reading: Reading) -> None:
    """Read a decision log: what was verified, and what shadows would have been."""
    tags = {task_id(tag): tag for tag in tasks()} | {0: "unknown"}
    texts: dict[tuple[str, int], Text] = {}
    for step in LogReader(path):
        view, outcome = step.view, step.outcome
        names = [tags.get(t, f"task-{t:08x}") for t in view.task.tolist()]
        decodes = (view.prefill_tokens == 0) & (outcome.emitted > 0)
        for row in np.flatnonzero(decodes).tolist():
            key, task = (step.engine, int(view.request_id[row])), names[row]
            text = texts.get(key)
            if text is None:
                text = texts[key] = Text()
                reading.texts[task].append(text)
            at = int(view.output_tokens[row])
            text.prompt_tokens = int(view.context_tokens[row]) - at
            text.output_tokens = at + int(outcome.emitted[row])
            looks = reading.looks[task]
            looks[0] += int(view.match_tokens[row]) > 0
            looks[1] += 1
            if outcome.verified_k[row]:
                done = int(outcome.verified_k[row]), int(outcome.accepted[row])
                text.drafts.append((at, int(outcome.proposer[row]), *done))
        _shadows(step, texts)


def _shadows(step: LoggedStep, texts: Mapping[tuple[str, int], Text]) -> None:
    """Take shadow drafts as far as they could be seen; an overlap is no draw and is left out."""
    view, shadow = step.view, step.outcome.shadow
    at = dict(zip(view.request_id.tolist(), view.output_tokens.tolist(), strict=True))
    scored = shadow.kind == ShadowKind.MATCH
    columns = (shadow.request_id, shadow.proposer, shadow.matched, shadow.observed)
    for who, proposer, held, observed in zip(*(c[scored].tolist() for c in columns), strict=True):
        matched = int(held)
        text, seen = texts.get((step.engine, who)), min(matched + 1, observed)
        if text is not None and seen:
            text.drafts.append((at[who], proposer, seen, matched))


def _columns(texts: list[Text], matched: int, looked: int) -> Observed:
    sizes = [len(text.drafts) for text in texts]
    at, proposer, offered, held = np.array(_every(texts), np.int64).T
    return Observed(
        at,
        proposer,
        np.minimum(offered, DEPTH),
        np.minimum(held, DEPTH),
        np.cumsum(sizes) - sizes,
        np.array([text.prompt_tokens for text in texts]),
        np.array([text.output_tokens for text in texts]),
        matched,
        looked,
    )


def _every(texts: list[Text]) -> list[DraftRow]:
    return [draft for text in texts for draft in text.drafts]
