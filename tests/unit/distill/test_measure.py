from __future__ import annotations

import torch
from tests.unit.distill.tiny_target import tiny_target

from parlay.engine.distill.measure import Drafter, accepted, by_task

DEPTH = 4


def drafter() -> Drafter:
    model = tiny_target(torch.float32, seed=1)
    ids = torch.arange(2, 48)
    return Drafter(model.body, model.head[ids], ids, model.embedding)


def next_token(d: Drafter, ids: list[int]) -> int:
    hidden = d.body(d.embedding[torch.tensor([ids])])[0, -1]
    return int(d.ids[(hidden @ d.head.T).argmax()])


def text_of(d: Drafter, seed: int) -> tuple[list[int], int]:
    """A text that the drafter often guesses: its own, with random tokens now and then."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 48, (5,), generator=rng).tolist()
    for _ in range(20):
        odd = int(torch.randint(0, 100, (), generator=rng)) < 25
        ids.append(int(torch.randint(2, 48, (), generator=rng)) if odd else next_token(d, ids))
    return ids, 5


def brute_force(d: Drafter, ids: list[int], prompt: int) -> list[int]:
    counts = []
    for place in range(prompt, len(ids) - DEPTH + 1):
        guesses: list[int] = []
        for _ in range(DEPTH):
            guesses.append(next_token(d, ids[:place] + guesses))
        right = [g == t for g, t in zip(guesses, ids[place:], strict=False)]
        counts.append(right.index(False) if False in right else DEPTH)
    return counts


def test_equals_drafting_place_by_place() -> None:
    d = drafter()
    spread = set()
    for seed in range(4):
        ids, prompt = text_of(d, seed)
        wanted = brute_force(d, ids, prompt)
        assert accepted(d, ids, prompt, DEPTH).tolist() == wanted
        spread |= set(wanted)
    assert spread == set(range(DEPTH + 1))


def test_means_by_task_and_texts_that_are_too_short() -> None:
    d = drafter()
    texts = [text_of(d, seed) for seed in (0, 1)]
    done: list[None] = []
    means = by_task(
        d,
        [("a", *texts[0]), ("a", *texts[1]), ("b", [2, 3, 4, 5], 3)],
        lambda: done.append(None),
    )
    counts = [c for ids, prompt in texts for c in brute_force(d, ids, prompt)]
    assert len(done) == 3
    assert means.keys() == {"a"}
    assert means["a"] == [
        round(sum(min(c, k) for c in counts) / len(counts), 3) for k in range(1, DEPTH + 1)
    ]
