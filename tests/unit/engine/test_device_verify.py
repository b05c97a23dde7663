"""Acceptance as on a GPU: the very tokens of the CPU's, and no look at the device but one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parlay.engine.device_trees import walk_trees
from parlay.engine.device_verify import accept_chains
from parlay.engine.judge import judge, judge_on_device
from parlay.engine.request import Request, SampleMode, SamplingParams, SpeculationParams
from parlay.engine.sampling import (
    Purpose,
    draw_key,
    draw_keys,
    exponentials,
    mix64,
    mix64s,
    noise,
    uniform,
    uniforms,
)
from parlay.engine.transfer import Upload, _words, from_words, packed, send_into, unpacked
from parlay.engine.tree import Trees, trees_of
from parlay.engine.tree_verify import accept_trees
from parlay.engine.verify import DraftLaw, Places, accept, places_of
from parlay.policies.types import Array

U64 = st.integers(0, 2**64 - 1)
CUT = SamplingParams(0.7, top_k=3, top_p=0.9, logprobs=1)
MODES = [
    SamplingParams(), SamplingParams(0.9, seed=4), SamplingParams(1.0), CUT,
    SamplingParams(0.8, top_p=0.8, seed=3), SamplingParams(logprobs=3),
]  # fmt: skip
SEEDED = (1, 4)


@dataclass
class Step:
    """A step's rows of every mode, with chains or trees; those with a law have chains."""

    requests: list[Request]
    emitting: Array
    places: Places
    trees: Trees
    logits: Tensor
    law: DraftLaw


def some_tree(rng: np.random.Generator, nodes: int, vocab: int) -> tuple[list[int], list[int]]:
    tokens, parents = list[int](), list[int]()
    for _ in range(nodes):
        family = int(rng.integers(-1, len(tokens))), int(rng.integers(vocab))
        if family not in set(zip(parents, tokens, strict=True)):
            parents.append(family[0])
            tokens.append(family[1])
    return tokens, parents


def some_step(seed: int, bent: bool) -> Step:
    rng = np.random.default_rng(seed)
    rows, vocab, most = int(rng.integers(1, 16)), int(rng.choice([5, 128])), int(rng.integers(6))
    mode = rng.integers(0, len(MODES), rows)
    lossy = (rng.random(rows) < 0.3) & ~np.isin(mode, SEEDED)
    requests = [
        Request(
            i, [0, 1, 2], 2, MODES[m], SpeculationParams(lossy_threshold=0.2 if cut else np.inf)
        )
        for i, (m, cut) in enumerate(zip(mode.tolist(), lossy.tolist(), strict=True))
    ]
    sampled = [i for i in range(rows) if mode[i] in (2, 3) and rng.random() < 0.5]
    chain = [rng.integers(0, vocab - 1, int(n)).tolist() for n in rng.integers(0, most + 1, rows)]
    shapes = [(c, list(range(-1, len(c) - 1))) for c in chain]
    if bent:
        shapes = [
            shape if i in sampled else some_tree(rng, 8, vocab) for i, shape in enumerate(shapes)
        ]
    trees = trees_of([s[0] for s in shapes], [s[1] for s in shapes])
    emitting = np.flatnonzero(np.append(True, rng.random(rows - 1) < 0.9))
    places = places_of(emitting, trees.padded_tokens(), trees.counts.astype(np.int32))
    logits = torch.from_numpy(2 * rng.normal(size=(int(places.starts[-1]), vocab)))
    depth = max((len(chain[i]) for i in sampled), default=0)
    laws = [rng.normal(size=(len(sampled), vocab - 1)) for _ in range(depth)]
    of_law = [torch.softmax(torch.from_numpy(2 * law), -1) for law in laws]
    watched = {int(r): torch.full((vocab - 1,), 1 / (vocab - 1)).double() for r in emitting[:2]
               if requests[r].sampling.temperature}  # fmt: skip
    law = DraftLaw({r: n for n, r in enumerate(sampled)}, of_law, torch.arange(vocab - 1), watched)
    kind = torch.bfloat16 if seed % 2 else torch.float32
    return Step(requests, emitting, places, trees, logits.to(kind), law)


@pytest.mark.parametrize("stacked", [False, True])
def test_chains_get_the_tokens_of_the_cpu(stacked: bool) -> None:
    for seed in range(120):
        s = some_step(seed, bent=False)
        accepted, tokens = accept(s.logits, s.requests, s.places, s.law, 7)
        if stacked and isinstance(s.law.law, list) and s.law.law:
            s.law.law = torch.stack(s.law.law)
        choice = s.logits.float().argmax(-1) if stacked else None
        held, found = accept_chains(s.logits, s.requests, s.places, s.law, 7, choice)
        assert held.tolist() == accepted.tolist(), seed
        assert found.tolist() == tokens.tolist(), seed


def test_chains_that_no_host_has_read_get_the_same_tokens() -> None:
    """The lossy and the sampled among them too: the host has a 0 for every draft."""
    kinds = set[tuple[SampleMode, bool]]()
    for seed in range(120):
        s = some_step(seed, bent=False)
        expected = accept_chains(s.logits, s.requests, s.places, s.law, 7)
        blind = np.where(s.places.drafts >= 0, 0, -1)
        read = np.concatenate(
            [
                [0, *s.places.drafts[row, :k]]
                for row, k in zip(s.places.rows, s.places.k, strict=True)
            ]
        )
        fed = torch.from_numpy(read.astype(np.int64))
        places = dataclasses.replace(s.places, drafts=blind, fed=fed)
        found = accept_chains(s.logits, s.requests, places, s.law, 7)
        assert [a.tolist() for a in found] == [a.tolist() for a in expected], seed
        of = [s.requests[row] for row in s.places.rows[expected[0].numpy() > 0].tolist()]
        kinds |= {(r.sampling.mode, r.speculation.lossy) for r in of}
    assert len(kinds) == 5  # coupled is never lossy


def test_trees_get_the_walks_of_the_cpu() -> None:
    for seed in range(120):
        s = some_step(seed, bent=True)
        walked = accept_trees(s.logits, s.requests, s.emitting, s.trees, s.law, 7)
        held, tokens, path = walk_trees(s.logits, s.requests, s.emitting, s.trees, s.law, 7)
        assert held.tolist() == walked.accepted.tolist(), seed
        assert tokens.tolist() == walked.tokens.tolist(), seed
        assert path.tolist() == walked.path.tolist(), seed


@pytest.mark.parametrize("bent", [False, True], ids=["chains", "trees"])
def test_the_verdict_is_the_same_with_its_logprobs_and_overlaps(bent: bool) -> None:
    told = overlapping = 0
    for seed in range(40):
        s = some_step(seed, bent)
        args = s.logits, s.requests, s.places, s.trees if bent else None, s.law, 7
        ours, theirs = judge_on_device(*args)(), judge(*args)()
        assert ours.accepted.tolist() == theirs.accepted.tolist()
        assert ours.logprobs == theirs.logprobs
        assert ours.overlaps == pytest.approx(theirs.overlaps, abs=1e-12)
        told, overlapping = told + len(ours.logprobs), overlapping + len(ours.overlaps)
    assert min(told, overlapping) > 10


@pytest.mark.parametrize("bent", [False, True], ids=["chains", "trees"])
def test_a_verdict_is_begun_without_a_look_at_any_value(
    bent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tensors on `meta` have no values: whoever asks for one gets an error.
    kept: list[list[Tensor]] = []
    monkeypatch.setattr("parlay.engine.judge.Reading", kept.append)
    for seed in range(4):
        s = some_step(seed, bent)
        assert isinstance(s.law.law, list)
        s.law.law = [q.to("meta") for q in s.law.law]
        s.law.watched = {row: q.to("meta") for row, q in s.law.watched.items()}
        s.law.ids = s.law.ids.to("meta")
        trees = s.trees if bent else None
        judge_on_device(s.logits.to("meta"), s.requests, s.places, trees, s.law, 7)
        assert kept[-1][0].shape == (len(s.emitting),)
    assert len(kept) == 4


class Watch(TorchDispatchMode):
    """Counts operations, and keeps those for which a GPU's host would wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.waits = 0, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count += 1
        masks = (
            [i for i in args[1] if i is not None and i.dtype is torch.bool]
            if (name in ("index", "index_put", "index_put_"))
            else []
        )
        # A `where` moves a 0-d operand, which lies on the host, to the device.
        bare = name == "where" and any(isinstance(a, Tensor) and a.dim() == 0 for a in args)
        if masks or bare or name in WAITING:
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


WAITING = (
    "_local_scalar_dense", "item", "nonzero", "masked_select", "unique_dim", "_unique2", "equal",
    "is_nonzero", "repeat_interleave", "bincount",
)  # fmt: skip


@pytest.mark.parametrize("bent", [False, True], ids=["chains", "trees"])
def test_what_is_enqueued_for_a_verdict_does_not_grow_with_the_rows(bent: bool) -> None:
    def watched(step: Step) -> Watch:
        args = step.logits, step.requests, step.places, step.trees if bent else None, step.law, 7
        # How a CPU seeks the largest is another matter.
        choice = step.logits.float().argmax(-1)
        watch = Watch()
        with watch:
            judge_on_device(*args, choice)
        return watch

    steps = [s for seed in range(12) if len((s := some_step(seed, bent)).requests) > 3]
    seen = [watched(s) for s in steps]
    assert [name for w in seen for name in w.waits] == []
    # All that differs is which modes and how deep trees are there.
    one = some_step(0, bent)
    assert watched(one).count == watched(repeated(one, 5)).count


def repeated(step: Step, times: int) -> Step:
    """Return a step with all its rows so many times."""
    rows, n = len(step.requests), times
    requests = [dataclasses.replace(r, request_id=i) for i, r in enumerate(step.requests * n)]
    trees = trees_of(
        [t.tolist() for t in np.split(step.trees.tokens, step.trees.starts[1:-1])] * n,
        [t.tolist() for t in np.split(step.trees.parent, step.trees.starts[1:-1])] * n,
    )
    emitting = np.concatenate([step.emitting + rows * i for i in range(n)])
    places = places_of(emitting, trees.padded_tokens(), trees.counts.astype(np.int32))
    law = dataclasses.replace(
        step.law,
        row={r + rows * i: n for i in range(times) for r, n in step.law.row.items()},
        watched={r + rows * i: q for i in range(times) for r, q in step.law.watched.items()},
    )
    return Step(requests, emitting, places, trees, step.logits.repeat(n, 1), law)


@given(st.lists(U64, min_size=1, max_size=9), st.integers(0, 2**40), st.sampled_from(Purpose))
def test_keys_are_the_same_by_the_batch(keys: list[int], position: int, purpose: Purpose) -> None:
    batch = np.asarray(keys, np.uint64)
    assert mix64s(batch).tolist() == [mix64(k) for k in keys]
    assert uniforms(batch).tolist() == [uniform(k) for k in keys]
    drawn = draw_keys(batch, np.asarray(position), purpose)
    assert drawn.tolist() == [draw_key(k, position, purpose) for k in keys]
    ids = torch.arange(5)
    signed = torch.from_numpy(batch.view(np.int64))
    assert torch.equal(noise(signed, ids), exponentials(keys, ids))


def test_one_buffer_carries_every_array_to_a_device_and_back() -> None:
    arrays: list[Array] = [
        np.arange(3, dtype=np.int32), np.zeros((0, 4)), np.asarray([[True], [False]]),
        np.asarray([2.5]), np.arange(6, dtype=np.int64).reshape(2, 3),
    ]  # fmt: skip
    tensors = [torch.from_numpy(a) for a in arrays]
    for array, found in zip(arrays, unpacked(packed(tensors, pin=False), tensors), strict=True):
        assert found.dtype is torch.from_numpy(array).dtype
        assert np.array_equal(found.numpy(), array)
    words = torch.cat([_words(t) for t in tensors]).numpy()
    floats = [t.dtype.is_floating_point for t in tensors]
    for array, back in zip(
        arrays, from_words(words, [t.shape for t in tensors], floats), strict=True
    ):
        assert np.array_equal(back, array)
    load = Upload(torch.device("meta"))
    sent = [load.add(a) for a in arrays]
    load.send()
    assert all(s.tensor.device.type == "meta" for s in sent)
    assert [s.tensor.shape for s in sent] == [t.shape for t in tensors]
    into = torch.zeros(3, dtype=torch.int64)
    send_into(into, np.arange(3))
    assert into.tolist() == [0, 1, 2]
