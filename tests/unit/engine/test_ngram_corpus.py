"""The shared corpus against a search of its texts, and its bound."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.engine.test_ngram_index import lines_run

from parlay.engine.proposers.ngram_index import Continuation
from parlay.engine.proposers.shared_corpus import (
    LONGEST_MATCH,
    CorpusReader,
    SharedCorpus,
    merged,
)

TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=25)


def continuations(corpus: SharedCorpus, text: list[int], k: int, width: int) -> list[Continuation]:
    """Return what a text may go on with that is read anew."""
    reader = CorpusReader(corpus)
    reader.read(text)
    return reader.continuations(k, width)


def held_tokens(corpus: SharedCorpus) -> int:
    """Return how many tokens are held; each text takes one more than it has."""
    return sum(len(part.tokens) for part in corpus.parts)


@given(st.lists(TEXT, min_size=1, max_size=4), TEXT, st.booleans())
def test_the_best_is_the_longest_suffix_that_any_text_goes_on_from(
    texts: list[list[int]], tail: list[int], at_the_start: bool
) -> None:
    corpus = SharedCorpus(1000, texts if at_the_start else ())
    for text in () if at_the_start else texts:
        corpus.add(text)

    def after(length: int) -> list[list[int]]:
        suffix = tail[len(tail) - length :]
        places = [(t, i) for t in texts for i in range(len(t) - length)]
        return [t[i + length :] for t, i in places if t[i : i + length] == suffix]

    lengths = range(min(len(tail), LONGEST_MATCH), 0, -1)
    longest = next((n for n in lengths if after(n)), 0)
    found = continuations(corpus, tail, 4, 1)
    assert bool(found) == bool(longest)
    if found:
        (best,) = found
        assert best.match_tokens == -(-longest // 3)
        assert best.tokens in [rest[:4] for rest in after(longest)]
        firsts = [rest[0] for rest in after(longest)]
        assert best.guess_count == max(firsts.count(first) for first in firsts)


@given(st.lists(TEXT, max_size=30), st.integers(4, 60))
def test_it_never_holds_more_than_it_may(texts: list[list[int]], most: int) -> None:
    corpus = SharedCorpus(most)
    for text in texts:
        corpus.add(text)
        assert held_tokens(corpus) <= most
        assert held_tokens(corpus) >= min(len(text) + 1, most // 2)


def test_the_oldest_texts_go_and_the_newest_stay() -> None:
    corpus = SharedCorpus(40)
    for first in range(0, 100, 10):
        corpus.add(list(range(first, first + 9)))
    assert continuations(corpus, [0, 1, 2], 2, 1) == []
    assert continuations(corpus, [90, 91, 92], 2, 1) == [Continuation(1, 1, 1, [93, 94])]
    assert continuations(corpus, [81, 82], 2, 1)[0].tokens == [83, 84]


def test_of_a_text_that_is_too_long_the_end_is_kept() -> None:
    corpus = SharedCorpus(20)
    corpus.add(list(range(100)))
    assert continuations(corpus, [95, 96], 9, 1)[0].tokens == [97, 98, 99]
    assert continuations(corpus, [50, 51], 9, 1) == []


def test_both_halves_are_asked_and_the_longer_match_wins() -> None:
    corpus = SharedCorpus(20)
    corpus.add([1, 2, 3, 4, 5])
    corpus.add([7, 3, 4, 6, 9])
    found = continuations(corpus, [1, 2, 3, 4], 2, 2)
    assert found == [Continuation(2, 1, 1, [5]), Continuation(1, 1, 1, [6, 9])]


@pytest.mark.parametrize(("match", "worth"), [(1, 1), (3, 1), (4, 2), (15, 5), (16, 6), (30, 6)])
def test_a_match_is_worth_a_third_of_its_length(match: int, worth: int) -> None:
    corpus = SharedCorpus(100)
    corpus.add(list(range(40)))
    (found,) = continuations(corpus, [99, *range(30 - match, 30)], 2, 1)
    assert found == Continuation(worth, 1, 1, [30, 31])


def test_merging_keeps_one_of_each_first_token_the_best_first() -> None:
    a = [Continuation(3, 1, 1, [5, 1]), Continuation(1, 4, 3, [6, 1])]
    b = [Continuation(3, 2, 2, [7, 2]), Continuation(2, 2, 2, [5, 2])]
    assert [c.tokens for c in merged(a, b, 9)] == [[7, 2], [5, 1], [6, 1]]
    assert len(merged(a, b, 1)) == 1


@pytest.mark.parametrize("tokens", [-1, 1, 3])
def test_a_corpus_without_room_says_so(tokens: int) -> None:
    with pytest.raises(ValueError, match="room for 4"):
        SharedCorpus(tokens)


def test_texts_that_were_given_stay_and_without_room_nothing_is_added() -> None:
    corpus = SharedCorpus(8, [[7, 8, 9]])
    for i in range(20):
        corpus.add([i, i + 1, i])
    assert continuations(corpus, [7, 8], 4, 1)[0].tokens == [9]
    assert held_tokens(corpus) <= 8 + 4
    only_given = SharedCorpus(0, [[7, 8, 9]])
    only_given.add([1, 2, 1])
    assert held_tokens(only_given) == 4
    assert not continuations(only_given, [1], 4, 1)


def plainly(corpus: SharedCorpus, tail: list[int], width: int) -> list[Continuation]:
    """Return what all three parts offer, without leaving any out that cannot be best."""
    found = list[Continuation]()
    for part in (corpus._newer, corpus._older, corpus._given):
        state, length = part.follow(0, 0, tail[-LONGEST_MATCH:], LONGEST_MATCH)
        if state:
            found = merged(found, part.continuations_of(state, length, 3, width), width)
    return found


@given(
    st.lists(TEXT, max_size=3), st.lists(TEXT, max_size=8), TEXT, st.integers(1, 4),
    st.integers(0, 5),
)  # fmt: skip
def test_parts_that_are_left_out_had_nothing_better(
    given_texts: list[list[int]], texts: list[list[int]], tail: list[int], width: int, beyond: int
) -> None:
    corpus = SharedCorpus(60, given_texts)
    for text in texts:
        corpus.add(text)
    expected = plainly(corpus, tail, width)
    found = continuations(corpus, tail, 3, width)
    assert [(c.match_tokens, c.guess_count) for c in found] == [
        (-(-c.match_tokens // 3), c.guess_count) for c in expected
    ]
    reader = CorpusReader(corpus)
    reader.read(tail)
    better = reader.continuations(3, width, beyond)
    assert better == [c for c in found if c.match_tokens > beyond]


@pytest.mark.parametrize("width", [1, 4])
def test_a_lookup_is_bounded_however_much_is_held(width: int) -> None:
    """In lines of Python run, which stand for time without a clock."""
    draw = random.Random(4)
    corpus = SharedCorpus(120_000, [[draw.randrange(300) for _ in range(3000)]])
    for _ in range(2500):
        corpus.add([draw.randrange(300) for _ in range(40)])
    tails = [[draw.randrange(300) for _ in range(16)] for _ in range(20)]
    runs = [lines_run(partial(continuations, corpus, t, 8, width)) for t in tails]
    assert max(runs) < 1500


def test_a_text_that_goes_on_is_matched_as_one_that_is_read_anew() -> None:
    """Also where the corpus grows and parts are dropped, but for what grew within a match."""
    draw = random.Random(8)
    for grows in (False, True):
        corpus = SharedCorpus(300, [[draw.randrange(3) for _ in range(60)]])
        for _ in range(6):
            corpus.add([draw.randrange(3) for _ in range(40)])
        text, reader, since = [draw.randrange(3) for _ in range(20)], CorpusReader(corpus), 16
        for _ in range(400):
            if grows and draw.random() < 0.02:
                corpus.add([*text[-30:], *(draw.randrange(3) for _ in range(10))])
                since = 0
            new = [draw.randrange(3) for _ in range(draw.randrange(4))]
            text, since = text + new, since + len(new)
            reader.read(text)
            anew, found = continuations(corpus, text, 4, 3), reader.continuations(4, 3)
            if since >= LONGEST_MATCH:
                assert found == anew
            else:
                assert all(
                    a.match_tokens >= b.match_tokens for a, b in zip(anew, found, strict=False)
                )


def test_a_new_token_is_looked_up_alone() -> None:
    draw = random.Random(5)
    corpus = SharedCorpus(100_000, [[draw.randrange(300) for _ in range(3000)]])
    for _ in range(2000):
        corpus.add([draw.randrange(300) for _ in range(40)])
    text, reader = [draw.randrange(300) for _ in range(32_768)], CorpusReader(corpus)
    reader.read(text)
    runs = []
    for _ in range(200):
        text.append(draw.randrange(300))
        runs.append(lines_run(partial(reader.read, text)))
    assert max(runs) < 150
