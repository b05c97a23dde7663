"""The n-gram's automaton against a search of the whole text, and its work and size."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.engine.proposers.ngram_index import MOST_COUNTED, Continuation, NgramIndex

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def ends_before(text: list[int], length: int) -> list[int]:
    """Return where, before the end, the text's last `length` tokens ended too."""
    suffix = text[len(text) - length :]
    return [end for end in range(length, len(text)) if text[end - length : end] == suffix]


def longest_suffix_seen_before(text: list[int]) -> int:
    return next((n for n in range(len(text) - 1, 0, -1) if ends_before(text, n)), 0)


def followers(text: list[int]) -> list[tuple[int, int, int, int]]:
    """Return (token, match length, times the suffix was seen, times the token followed it)."""
    found: dict[int, tuple[int, int, int, int]] = {}
    for length in range(len(text) - 1, 0, -1):
        after = [text[end] for end in ends_before(text, length)]
        for token in after:
            found.setdefault(token, (token, length, len(after), after.count(token)))
    return list(found.values())


@given(TEXT, st.integers(1, 6))
def test_match_is_the_longest_suffix_and_the_guess_followed_it(text: list[int], k: int) -> None:
    index = NgramIndex()
    for end in range(1, len(text) + 1):
        index.extend([text[end - 1]])
        match, guess = index.match_tokens, index.propose(k)
        assert match == longest_suffix_seen_before(text[:end])
        assert len(guess) == (k if match else 0)
        if match:
            # The guess continues an earlier place of the suffix; past the end it repeats itself.
            ends, extended = ends_before(text[:end], match), text[:end] + guess
            assert any(extended[at : at + k] == guess for at in ends)
            assert index.match_count == len(ends)
            assert index.guess_count() == sum(text[at] == guess[0] for at in ends)
        else:
            assert (index.match_count, index.guess_count()) == (0, 0)


@given(TEXT, st.integers(1, 6), st.integers(0, 5))
def test_continuations_are_what_followed_by_match_length_then_count(
    text: list[int], k: int, width: int
) -> None:
    index = NgramIndex()
    index.extend(text)
    found, expected = index.continuations(k, width), followers(text)
    rows = [(c.tokens[0], c.match_tokens, c.match_count, c.guess_count) for c in found]
    assert len(rows) == min(width, len(expected))
    assert set(rows) <= set(expected)
    order = sorted((-length, -count) for _, length, _, count in expected)
    assert [(-row[1], -row[3]) for row in rows] == order[: len(rows)]
    for one in found:
        extended = text + one.tokens
        ends = ends_before(text, one.match_tokens)
        assert any(extended[at : at + k] == one.tokens for at in ends)


@given(st.lists(TEXT, min_size=1, max_size=4), TEXT)
def test_the_longest_suffix_of_another_text_is_found(
    texts: list[list[int]], tail: list[int]
) -> None:
    index, held = NgramIndex(), list[int]()
    for text in texts:
        index.extend([*text, -1])
        held += [*text, -1]
    state, length = index.follow(0, 0, tail, len(tail))
    fits = [
        n
        for n in range(len(tail) + 1)
        if any(held[i : i + n] == tail[len(tail) - n :] for i in range(len(held) - n + 1))
    ]
    assert length == max(fits)
    assert (state > 0) == (length > 0)
    for one in index.continuations_of(state, length, 3, 4):
        assert one.tokens[0] >= 0
        suffix = tail[len(tail) - one.match_tokens :]
        places = [i for i in range(len(held)) if held[i : i + len(suffix)] == suffix]
        assert any((held + held)[i + len(suffix) :][:1] == one.tokens[:1] for i in places)
        assert one.match_count == len(places)


def test_a_match_that_was_found_before_the_index_grew_sees_what_came() -> None:
    index = NgramIndex()
    index.extend([1, 2, 3, 4, -1])
    at = index.follow(0, 0, [9, 2, 3], 16)
    index.extend([5, 2, 3, 6, -1])
    state, length = index.follow(*at, [], 16)
    assert (state, length) == index.follow(0, 0, [9, 2, 3], 16)
    found = index.continuations_of(state, length, 1, 3)
    assert [(c.tokens, c.match_tokens, c.match_count) for c in found] == [([6], 2, 2), ([4], 2, 2)]
    assert index.follow(*at, [6], 16) == index.follow(0, 0, [9, 2, 3, 6], 16)
    assert index.follow(*at, [6], 2) == index.follow(0, 0, [3, 6], 16)


def test_appending_bit_by_bit_is_the_same_as_at_once() -> None:
    text = [1, 2, 1, 2, 3, 1, 2, 1, 2, 3, 1, 2]
    whole, parts = NgramIndex(), NgramIndex()
    whole.extend(text)
    for token in text:
        parts.extend([token])
    assert (whole.match_tokens, whole.propose(5)) == (parts.match_tokens, parts.propose(5))
    assert whole.propose(3) == [1, 2, 3]


def test_the_more_frequent_continuation_is_first_where_the_guess_is_the_latest() -> None:
    index = NgramIndex()
    index.extend([1, 7, 1, 7, 9, 1, 8, 3, 1])
    assert index.propose(1) == [8]
    assert [c.tokens for c in index.continuations(1, 2)] == [[7], [8]]
    assert [(c.match_count, c.guess_count) for c in index.continuations(1, 2)] == [(3, 2), (3, 1)]


def test_counts_stop_at_their_limit_and_never_say_more_than_all() -> None:
    index = NgramIndex()
    index.extend([7, 8] * 300 + [9, 7])
    assert index.match_count == index.guess_count() == MOST_COUNTED
    first, *_ = index.continuations(4, 2)
    assert (first.tokens[0], first.match_tokens) == (8, 1)
    assert first.guess_count == first.match_count == MOST_COUNTED


def test_of_very_many_next_tokens_the_ones_that_were_new_last_are_ranked() -> None:
    index = NgramIndex()
    index.extend([t for new in range(1, 2000) for t in (0, new)] + [0, 1999, 0])
    found: list[Continuation] = []
    assert lines_run(lambda: found.extend(index.continuations(1, 4))) < 800
    assert [one.tokens for one in found] == [[1999], [1998], [1997], [1996]]


def text_of(kind: str, tokens: int) -> list[int]:
    draw = random.Random(4)
    if kind == "loop":
        return [1] * tokens
    if kind == "repeats":
        paragraph = [draw.randrange(300) for _ in range(100)]
        return [
            t if draw.random() > 0.02 else draw.randrange(300)
            for t in (paragraph * (tokens // 100 + 1))[:tokens]
        ]
    return [draw.randrange(4 if kind == "few" else 30_000) for _ in range(tokens)]


def lines_run(work: Callable[[], object]) -> int:
    """Return how many lines of Python `work` runs: time without a clock."""
    count = 0

    def tracer(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("kind", ["loop", "repeats", "few", "many"])
def test_an_append_costs_the_same_in_a_longer_text(kind: str) -> None:
    index, text, runs = NgramIndex(), text_of(kind, 32_768), list[int]()
    for start, end in ((8_000, 8_500), (32_268, 32_768)):
        index.extend(text[len(index.tokens) : start])
        runs.append(lines_run(partial(index.extend, text[start:end])))
    assert runs[1] < 1.5 * runs[0]


@pytest.mark.parametrize("kind", ["loop", "repeats", "few", "many"])
def test_a_proposal_at_32k_tokens_costs_what_one_at_1k_does(kind: str) -> None:
    index, text = NgramIndex(), text_of(kind, 32_768)
    index.extend(text[:1024])
    short = lines_run(lambda: index.propose(8))
    index.extend(text[1024:])
    assert lines_run(lambda: index.propose(8)) <= short + 40
    assert lines_run(lambda: index.continuations(8, 4)) < 800
    assert lines_run(lambda: index.follow(0, 0, text[-16:], 16)) < 400


@pytest.mark.parametrize("kind", ["loop", "repeats", "few", "many"])
def test_there_are_at_most_two_states_and_three_transitions_a_token(kind: str) -> None:
    index = NgramIndex()
    index.extend(text_of(kind, 5000))
    states: Sequence[int] = index._only_state
    branches = index._many.values()
    assert len(states) <= 2 * 5000
    assert sum(s > 0 for s in states) + sum(map(len, branches)) <= 3 * 5000
