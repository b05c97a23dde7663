"""The Triton kernels, in the interpreter, against SDPA over random passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.triton_cases import Case, by_slot, random_case, random_spans, unused_slots

from parlay.engine.attention import triton as module
from parlay.engine.attention.triton import TritonPass
from parlay.engine.spans import Spans

CASES, MORE = range(24), range(24, 220)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split short texts too; those long enough for real splits take the interpreter minutes."""
    monkeypatch.setattr(module, "SPLIT_TOKENS", 8)
    monkeypatch.setattr(module, "MOST_SPLITS", 4)


def padded(case: Case, rng: np.random.Generator) -> TritonPass:
    """Return a pass that has room for more of everything, and nonsense where the step ends."""
    spans, (tokens, rows, blocks) = case.spans, rng.integers(0, 6, 3)
    width = max(map(len, spans.tables)) + int(blocks)
    made = case.ours.static(sum(spans.lengths) + int(tokens), len(spans.lengths) + int(rows), width)
    # What an earlier step left.
    made.packed.fill_(1 << 40)
    case.ours.fill(made, spans, case.window)
    for row, table in enumerate(spans.tables):
        made.table[row, len(table) :] = 1 << 30
    made.table[len(spans.tables) :] = 1 << 30
    return made


def check(seed: int, dtype: torch.dtype, tolerance: float) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng, dtype)
    exact = rng.random() < 0.5
    plan = case.ours.plan(case.spans, case.window) if exact else padded(case, rng)
    expected, got = case.expected(), case.got(plan)
    tokens = len(expected)
    torch.testing.assert_close(got[:tokens], expected, atol=tolerance, rtol=tolerance)
    assert not got[tokens:].any()
    spans, cache = case.spans, case.ours.cache
    np.testing.assert_array_equal(plan.positions[:tokens].cpu(), spans.positions())
    ours, theirs = by_slot(cache).cpu().float(), by_slot(case.theirs.cache).clone()
    unused = unused_slots(spans, cache.blocks, cache.block_tokens)
    assert ours[:, :, unused].isnan().all(), "something was written where no token lies"
    theirs[:, :, unused] = torch.nan
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("seed", CASES)
def test_attention_is_that_of_sdpa(seed: int) -> None:
    check(seed, torch.float32, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MORE)
def test_attention_is_that_of_sdpa_over_more_shapes(seed: int) -> None:
    check(seed, torch.float32, 1e-5)


@pytest.mark.parametrize("seed", range(1000, 1006))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_half_precision(seed: int, dtype: torch.dtype) -> None:
    check(seed, dtype, 1e-2 if dtype is torch.bfloat16 else 2e-3)


def test_the_random_passes_reach_what_they_are_to_test() -> None:
    cases = [(np.random.default_rng(seed), seed) for seed in (*CASES, *MORE)]
    made = [random_case(rng) for rng, _ in cases]
    plans = [case.ours.plan(case.spans, case.window) for case in made]
    assert {1, 4} <= {p.shape.splits for p in plans}
    assert {16, 32, 64} <= {p.shape.queries for p in plans}
    assert sum(case.window is not None for case in made) > 60
    assert sum(case.spans.trees is not None for case in made) > 100
    assert any(max(case.spans.trees.counts) > 50 for case in made if case.spans.trees)
    assert any((p.mask < 0).any() for p in plans), "no tree has a 64th node"


def test_a_pass_serves_one_step_after_another() -> None:
    rng = np.random.default_rng(5)
    case = random_case(rng)
    plan = case.ours.static(200, 6, 250)
    for _ in range(3):
        spans, _ = random_spans(rng, case.ours.cache.block_tokens)
        fitting = case.ours.plan(spans, case.window)
        case.ours.fill(plan, spans, case.window)
        tokens, rows = sum(spans.lengths), len(spans.lengths)
        for name in ("positions", "slots", "mask", "base", "low"):
            filled = getattr(plan, name)
            assert torch.equal(filled[:tokens], getattr(fitting, name)), name
            assert (filled[tokens:] == (-1 if name == "slots" else 0)).all(), name
        assert plan.tile_count.sum() == tokens
        for row in range(rows):
            blocks = -(-(spans.starts[row] + spans.lengths[row]) // case.ours.cache.block_tokens)
            assert plan.table[row, :blocks].tolist() == spans.tables[row][:blocks]


def test_a_step_larger_than_its_pass_is_noticed() -> None:
    case = random_case(np.random.default_rng(0))
    spans = Spans([[0], [1]], [0, 0], [1, 1])
    for tokens, rows, told in ((1, 2, "tokens"), (2, 1, "rows")):
        with pytest.raises(AssertionError, match=told):
            case.ours.fill(case.ours.static(tokens, rows, 1), spans)


@pytest.mark.parametrize("seed", range(4))
def test_slots_move_as_the_cache_moves_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng, torch.bfloat16)
    cache, theirs = case.ours.cache, case.theirs.cache
    slots = cache.blocks * cache.block_tokens
    many = int(rng.integers(1, min(slots, 12)))
    source, target = (torch.from_numpy(rng.permutation(slots)[:many]) for _ in range(2))
    # One is in both lists: it must be read before it is overwritten.
    target[0] = source[-1]
    target = target[np.sort(np.unique(target.numpy(), return_index=True)[1])]
    source = source[: len(target)]
    cache.pool.copy_(theirs.pool)
    theirs.move(source, target)
    nowhere = torch.full((2,), -1)
    case.ours.move(torch.cat((source, nowhere)), torch.cat((target, nowhere)))
    assert torch.equal(cache.pool.cpu().float(), theirs.pool)


def test_moving_nothing_moves_nothing() -> None:
    case = random_case(np.random.default_rng(0))
    before = case.ours.cache.pool.clone()
    case.ours.move(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    torch.testing.assert_close(case.ours.cache.pool, before, equal_nan=True, atol=0, rtol=0)


def test_heads_that_are_not_contiguous_are_taken() -> None:
    case = random_case(np.random.default_rng(1))
    plan = case.ours.plan(case.spans, case.window)
    expected = case.got(plan)
    q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(case.ours(0, q, case.kv, plan).cpu(), expected)
