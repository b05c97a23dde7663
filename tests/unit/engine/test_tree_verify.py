"""Walks over draft trees: the target's exact joint law, what greedy would say, chains as before."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from parlay.engine import tree_verify
from parlay.engine.request import Request, SamplingParams
from parlay.engine.sampling import Purpose, draw_key, probabilities, race, request_key
from parlay.engine.tree import Trees, trees_of
from parlay.engine.tree_verify import Walked, accept_trees
from parlay.engine.verify import DraftLaw, accept, places_of
from parlay.policies.types import Array

VOCAB, DEPTH = 4, 3
PLAIN, CUT = SamplingParams(1.0), SamplingParams(0.7, top_k=3, top_p=0.9)
Tree = tuple[list[int], list[int]]
TREES: dict[str, Tree] = {
    "chain": ([2, 1, 0], [-1, 0, 1]),
    "fan": ([3, 0, 1, 2], [-1, -1, -1, -1]),
    "two by two": ([1, 2, 0, 1, 3, 0], [-1, -1, 0, 0, 1, 1]),
    "ragged": ([0, 2, 2, 3, 1, 1, 0], [-1, 0, -1, 1, 0, 2, 4]),
    "whole vocabulary": ([0, 1, 2, 3, 0, 1, 2, 3], [-1, -1, -1, -1, 2, 2, 2, 2]),
    "empty": ([], []),
}


def target(prefix: tuple[int, ...]) -> Tensor:
    """Return the logits after a text: any function of it will do."""
    seed = int(sum((t + 1) * 7**i for i, t in enumerate(prefix)))
    return 1.5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def law_after(prefix: tuple[int, ...], params: SamplingParams) -> Array:
    law: Array = probabilities(target(prefix)[None], [params])[0].numpy()
    return law


def prefixes(tree: Tree) -> list[tuple[int, ...]]:
    """Return the text before each place of a tree: the root's, then through each node."""
    texts: list[tuple[int, ...]] = [()]
    for token, parent in zip(*tree, strict=True):
        texts.append((*texts[parent + 1], token))
    return texts


def logits_of(tree: Tree) -> Tensor:
    return torch.stack([target(t) for t in prefixes(tree)])


def request_of(number: int, params: SamplingParams) -> Request:
    return Request(number, [0, 1], 2, params)


def exact_joint(params: SamplingParams) -> dict[tuple[int, ...], float]:
    texts = itertools.product(range(VOCAB), repeat=DEPTH + 1)
    return {t: rest_of((), t, params) for t in texts}


def rest_of(known: tuple[int, ...], text: tuple[int, ...], params: SamplingParams) -> float:
    """Return P(text | it begins with `known`)."""
    return float(
        np.prod([law_after(text[:i], params)[text[i]] for i in range(len(known), len(text))])
    )


def walks(
    tree: Tree, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[float, tuple[int, ...], Array]]:
    """Yield (probability, accepted tokens, law of the last token) of every branch of the walk.

    The walk's uniform numbers are scripted, one from the middle of each interval in which the walk
    goes one way, and the law that it hands to the race is kept, so nothing is left to chance.
    """
    script: list[float] = []
    asked: list[None] = []
    handed: list[Array] = []

    def scripted(key: int) -> float:
        asked.append(None)
        return script[len(asked) - 1] if len(asked) <= len(script) else 1.0 - 1e-12

    def recorded(law: Tensor, keys: list[int], ids: Tensor) -> Tensor:
        handed.append((law / law.sum(-1, keepdim=True)).numpy()[0])
        return law.argmax(-1)

    monkeypatch.setattr(tree_verify, "uniform", scripted)
    monkeypatch.setattr(tree_verify, "race", recorded)
    # `accept` would take chains; here the tree's own walk is on trial.
    monkeypatch.setattr(Trees, "straight", lambda self: np.zeros(len(self), bool))
    logits, texts = logits_of(tree), prefixes(tree)
    trees = trees_of([tree[0]], [tree[1]])

    def branch(node: int, draws: list[float], weight: float) -> Iterator[Any]:
        law = law_after(texts[node + 1], params)
        low = 0.0
        for child in [i for i, p in enumerate(tree[1]) if p == node]:
            width = float(law[tree[0][child]])
            if width > 0.0:
                middle = low + width / 2
                yield from branch(child, [*draws, middle], weight * width)
            low += width
        if low < 1.0 - 1e-12:
            script[:] = [*draws, (low + 1.0) / 2]
            asked.clear()
            handed.clear()
            request = request_of(0, params)
            found = accept_trees(logits.clone(), [request], np.arange(1), trees, None, 0)
            held = tuple(found.tokens[0, : found.accepted[0]].tolist())
            assert held == texts[node + 1], "the walk went where its draws did not send it"
            yield weight * (1.0 - low), held, handed[-1]

    yield from branch(-1, [], 1.0)


@pytest.mark.parametrize("params", [PLAIN, CUT], ids=["plain", "top-k-top-p"])
@pytest.mark.parametrize("name", TREES)
def test_the_walk_has_the_targets_joint_law_branch_by_branch(
    name: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_law(TREES[name], params, monkeypatch)


def check_law(tree: Tree, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    got = dict.fromkeys(itertools.product(range(VOCAB), repeat=DEPTH + 1), 0.0)
    for weight, held, last in walks(tree, params, monkeypatch):
        for text in got:
            if text[: len(held)] == held:
                known = text[: len(held) + 1]
                got[text] += weight * float(last[known[-1]]) * rest_of(known, text, params)
    expected = exact_joint(params)
    assert sum(expected.values()) == pytest.approx(1.0)
    for text, p in expected.items():
        assert got[text] == pytest.approx(p, abs=1e-12), text


@st.composite
def some_tree(draw: st.DrawFn) -> Tree:
    """Draw a tree of at most DEPTH levels with siblings that differ."""
    tokens: list[int] = []
    parents: list[int] = []
    depth: list[int] = []
    taken: set[tuple[int, int]] = set()
    for _ in range(draw(st.integers(0, 8))):
        parent = draw(st.sampled_from([-1, *(i for i, d in enumerate(depth) if d + 1 < DEPTH)]))
        token = draw(st.integers(0, VOCAB - 1))
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depth.append(0 if parent < 0 else depth[parent] + 1)
    return tokens, parents


@settings(max_examples=8, deadline=None)
@given(some_tree(), st.sampled_from([PLAIN, CUT]))
def test_random_trees_keep_the_joint_law(tree: Tree, params: SamplingParams) -> None:
    with pytest.MonkeyPatch.context() as patch:
        check_law(tree, params, patch)


def walked(tree: Tree, requests: list[Request]) -> Walked:
    n = len(requests)
    logits = logits_of(tree).repeat(n, 1)
    trees = trees_of([tree[0]] * n, [tree[1]] * n)
    return accept_trees(logits, requests, np.arange(n), trees, None, 9)


@pytest.mark.parametrize("seeded", [False, True], ids=["rejection", "coupled"])
@pytest.mark.parametrize("name", ["two by two", "ragged"])
def test_what_is_really_drawn_fits_the_joint_law(name: str, seeded: bool) -> None:
    draws, params = 4000, [SamplingParams(1.0, seed=i if seeded else None) for i in range(4000)]
    found = walked(TREES[name], [request_of(i, p) for i, p in enumerate(params)])
    counts: dict[tuple[int, ...], int] = {}
    for accepted, tokens in zip(found.accepted, found.tokens.tolist(), strict=True):
        text = tuple(tokens[: accepted + 1])
        counts[text] = counts.get(text, 0) + 1
    # Every text that a walk can end with: a path of the tree, then a token that is no child there.
    family = {(*prefix,) for prefix in prefixes(TREES[name])}
    ends = [(*p, t) for p in family for t in range(VOCAB) if (*p, t) not in family]
    expected = np.asarray([rest_of((), e, PLAIN) * draws for e in ends])
    assert expected.sum() == pytest.approx(draws)
    observed = np.asarray([counts.get(e, 0) for e in ends])
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    assert chisquare(observed[keep], expected[keep]).pvalue > 1e-3


@pytest.mark.parametrize("seed", [None, 5], ids=["greedy", "coupled"])
@given(tree=some_tree())
@settings(max_examples=30, deadline=None)
def test_greedy_and_coupled_walks_say_what_the_target_would(seed: int | None, tree: Tree) -> None:
    params = SamplingParams() if seed is None else SamplingParams(0.8, seed=seed)
    text: tuple[int, ...] = ()
    request = request_of(1, params)
    key = request_key(request, 9)
    for place in range(DEPTH + 1):
        logits = target(text)[None]
        if seed is None:
            token = int(logits.argmax())
        else:
            keys = [draw_key(key, place, Purpose.COUPLED)]
            token = int(race(probabilities(logits, [params]), keys, torch.arange(VOCAB)))
        text = (*text, token)
    found = walked(tree, [request])
    accepted = int(found.accepted[0])
    assert tuple(found.tokens[0, : accepted + 1].tolist()) == text[: accepted + 1]
    paths = prefixes(tree)[1:]
    assert text[: accepted + 1] not in paths, "a child that was right was not followed"
    on_path = [paths.index(text[: i + 1]) for i in range(accepted)]
    assert found.path[0, :accepted].tolist() == on_path
    assert np.all(found.path[0, accepted:] == -1)
    assert np.all(found.tokens[0, accepted + 1 :] == -1)


def mixed_batch(rng: np.random.Generator, rows: int, vocab: int) -> SimpleNamespace:
    """Return rows of every mode with chains of any length, and the law of those that have one."""
    k = rng.integers(0, 5, rows).astype(np.int32)
    drafts = np.where(np.arange(4) < k[:, None], rng.integers(0, vocab, (rows, 4)), -1)
    logits = torch.from_numpy(rng.normal(size=(int((k + 1).sum()), vocab)) * 1.5).float()
    modes = [SamplingParams(), SamplingParams(0.9, seed=4), SamplingParams(1.0), CUT]
    requests = [request_of(i, modes[i % 4]) for i in range(rows)]
    sampled = [i for i in range(rows) if i % 8 == 2]
    law = [torch.softmax(torch.from_numpy(rng.normal(size=(len(sampled), vocab))), -1)] * 4
    private = DraftLaw({r: n for n, r in enumerate(sampled)}, law, torch.arange(vocab))
    return SimpleNamespace(k=k, drafts=drafts, logits=logits, requests=requests, law=private)


@pytest.mark.parametrize("bent", [False, True], ids=["chains alone", "beside a tree"])
def test_chains_get_the_very_tokens_of_accept(bent: bool) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        b = mixed_batch(rng, 16, 6)
        emitting = np.asarray([r for r in range(16) if r % 5])
        keep = np.repeat(np.isin(np.arange(16), emitting), b.k + 1)
        logits = b.logits[torch.from_numpy(keep)]
        places = places_of(emitting, b.drafts, b.k)
        accepted, tokens = accept(logits, b.requests, places, b.law, 7)
        chains = [row[:n] for row, n in zip(b.drafts, b.k, strict=True)]
        trees = trees_of(chains, [range(-1, n - 1) for n in b.k.tolist()])
        requests, rows = b.requests, emitting
        if bent:
            tree = trees_of([[0, 1, 2]], [[-1, -1, 1]])
            rows, requests = np.append(rows, 16), [*requests, request_of(16, PLAIN)]
            logits = torch.cat((logits, torch.zeros(4, 6)))
            trees = trees_of(
                [*np.split(trees.tokens, trees.starts[1:-1]), tree.tokens],
                [*np.split(trees.parent, trees.starts[1:-1]), tree.parent],
            )
        found = accept_trees(logits, requests, rows, trees, b.law, 7)
        assert found.accepted[: len(emitting)].tolist() == accepted.tolist()
        for row, held in enumerate(accepted):
            assert found.tokens[row, : held + 1].tolist() == tokens[row, : held + 1].tolist()
            assert found.path[row, :held].tolist() == list(range(held))
            assert np.all(found.tokens[row, held + 1 :] == -1)
            assert np.all(found.path[row, held:] == -1)


def test_a_sampled_tree_is_refused() -> None:
    law = DraftLaw({0: 0}, [torch.full((1, VOCAB), 0.25)] * 2, torch.arange(VOCAB))
    tree = TREES["two by two"]
    trees = trees_of([tree[0]], [tree[1]])
    with pytest.raises(AssertionError, match="chain"):
        accept_trees(logits_of(tree), [request_of(0, PLAIN)], np.arange(1), trees, law, 0)
