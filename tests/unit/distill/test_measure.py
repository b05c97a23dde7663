from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.unit.distill.tiny_target import tiny_target
from torch import Tensor

from parlay.engine.distill.examples import Example
from parlay.engine.distill.measure import Drafter, accepted, by_task

DEPTH = 4
TOKENS = 25
PROMPT = 5


def drafter(reads_states: bool) -> Drafter:
    model = tiny_target(torch.float32, seed=1)
    ids = torch.arange(2, 48)
    proj = torch.randn(32, 6, generator=torch.Generator().manual_seed(2)) * 0.3
    return Drafter(
        model.body, model.head[ids], ids, model.embedding, proj if reads_states else None
    )


def next_token(d: Drafter, ids: list[int], states: Tensor, guesses: int) -> int:
    """Guess behind ids, the last `guesses` of which were not verified; states [places, 2, 3]."""
    x = d.embedding[torch.tensor(ids)]
    if d.state_proj is not None:
        for place in range(1, len(ids) - guesses):
            x[place] += d.state_proj @ states[place - 1].flatten()
    hidden = d.body(x[None])[0, -1]
    return int(d.ids[(hidden @ d.head.T).argmax()])


def text_of(d: Drafter, seed: int) -> Example:
    """A text that the drafter often guesses: its own, with random tokens now and then."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 48, (PROMPT,), generator=rng).tolist()
    states = torch.randn(TOKENS - 1, 2, 3, generator=rng)
    while len(ids) < TOKENS:
        draw = int(torch.randint(0, 100, (), generator=rng))
        guesses = int(torch.randint(0, DEPTH, (), generator=rng))
        odd = int(torch.randint(2, 48, (), generator=rng))
        ids.append(odd if draw < 25 else next_token(d, ids, states, guesses))
    return Example("a", ids, PROMPT, states)


def brute_force(d: Drafter, text: Example) -> list[int]:
    counts = []
    for place in range(text.prompt, len(text.ids) - DEPTH + 1):
        guesses: list[int] = []
        for _ in range(DEPTH):
            known = text.ids[:place] + guesses
            guesses.append(next_token(d, known, text.states, len(guesses)))
        right = [g == t for g, t in zip(guesses, text.ids[place:], strict=False)]
        counts.append(right.index(False) if False in right else DEPTH)
    return counts


def measured(d: Drafter, text: Example) -> list[int]:
    return accepted(d, text.ids, text.prompt, DEPTH, text.states).tolist()


@pytest.mark.parametrize("reads_states", [False, True])
def test_equals_drafting_place_by_place(reads_states: bool) -> None:
    d = drafter(reads_states)
    spread, shifted = set(), []
    for seed in range(6):
        text = text_of(d, seed)
        wanted = brute_force(d, text)
        assert measured(d, text) == wanted
        spread |= set(wanted)
        shifted.append(dataclasses.replace(text, states=text.states.roll(1, 0)))
    assert spread == set(range(DEPTH + 1))
    moved = [measured(d, text) != brute_force(d, text_of(d, n)) for n, text in enumerate(shifted)]
    assert any(moved) == reads_states


def test_means_by_task_and_texts_that_are_too_short() -> None:
    d = drafter(reads_states=True)
    texts = [text_of(d, seed) for seed in (0, 1)]
    done: list[None] = []
    short = Example("b", [2, 3, 4, 5], 3, torch.zeros(3, 2, 3))
    means = by_task(d, [*texts, short], lambda: done.append(None))
    counts = [c for text in texts for c in brute_force(d, text)]
    assert len(done) == 3
    assert means.keys() == {"a"}
    assert means["a"] == [
        round(sum(min(c, k) for c in counts) / len(counts), 3) for k in range(1, DEPTH + 1)
    ]
