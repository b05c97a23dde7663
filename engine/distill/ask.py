"""Prompts that the target asks itself: what it writes where the user's turn would stand.

An instruction-tuned model, given its chat template up to there, writes what it was tuned to answer
(Xu et al. 2024, "Magpie"): more varied than any list of ours, and nobody's data set.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from parlay.engine.distill.generate import Decoder, Job, generate
from parlay.engine.tokenizer import Tokenizer

TASK = "chat"
ASK_TOKENS = 96
SHORTEST = 5
_MARK = "QUESTION"


def around_question(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids of a one-turn chat before and behind the user's text.

    Raises ValueError where the template changes what the user wrote.
    """
    ids = tokenizer.chat([{"role": "user", "content": _MARK}])
    mark = tokenizer.encode(_MARK)
    places = [i for i in range(len(ids)) if ids[i : i + len(mark)] == mark]
    if len(places) != 1:
        raise ValueError("this chat template leaves no place where the model could ask itself")
    return ids[: places[0]], ids[places[0] + len(mark) :]


def asked(
    path: Path,
    decoder: Callable[[], Decoder],
    tokenizer: Tokenizer,
    count: int,
    seed: int,
    done: Callable[[int], None],
) -> list[list[int]]:
    """Return the ids of up to `count` different prompts, from a file if it is there.

    Fewer: draws that did not end in ASK_TOKENS, or that came before, are left out. decoder is made
    only where there is something to ask; done is told how many draws ended. Raises ValueError where
    the file is damaged.
    """
    if path.exists():
        done(count)
        return _read(path)
    head, tail = around_question(tokenizer)
    found: dict[tuple[int, ...], None] = {}

    def finish(job: Job) -> None:
        done(1)
        if job.out[-1] in ending and len(job.out) > SHORTEST:
            found.setdefault(tuple(job.out[:-1]))

    if count:
        asking = decoder()
        ending = asking.config.eos_ids
        generate(asking, _draws(head, count, seed), ASK_TOKENS, finish)
    prompts = [[*head, *question, *tail] for question in sorted(found)]
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(p) + "\n" for p in prompts), encoding="utf-8")
    part.rename(path)
    return prompts


def _draws(head: list[int], count: int, seed: int) -> Iterable[Job]:
    return (Job(TASK, list(head), 1.0, seed * 1_000_003 + n) for n in range(count))


def _read(path: Path) -> list[list[int]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it") from None
