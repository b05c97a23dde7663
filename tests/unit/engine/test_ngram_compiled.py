"""The n-gram index in C is the one in Python, token for token."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.engine.kernels import build
from parlay.engine.kernels.ngram import CompiledIndex, Indexes, new_index
from parlay.engine.proposers.ngram_index import NgramIndex

pytestmark = pytest.mark.skipif(build.load_ngram() is None, reason="needs a C compiler")
TEXT = st.lists(st.integers(0, 4), max_size=60)


@given(st.lists(TEXT, min_size=1, max_size=4), st.integers(1, 9))
def test_it_finds_and_proposes_the_same_after_every_token(texts: list[list[int]], k: int) -> None:
    ours, theirs = [CompiledIndex() for _ in texts], [NgramIndex() for _ in texts]
    together = Indexes(ours)
    for at in range(max(map(len, texts))):
        more = [text[at : at + 1] for text in texts]
        match = together.extend(more)
        for index, tokens in zip(theirs, more, strict=True):
            index.extend(tokens)
        assert match == [i.match_tokens for i in ours] == [i.match_tokens for i in theirs]
        assert [i.propose(k) for i in ours] == [i.propose(k) for i in theirs]


@pytest.mark.parametrize("words", [3, 300, 50_000])
def test_it_is_the_same_in_a_long_text(words: int) -> None:
    draw = random.Random(words)
    page = [draw.randrange(words) for _ in range(400)]
    text = [t if draw.random() > 0.05 else draw.randrange(words) for t in page * 20]
    ours, theirs = CompiledIndex(), NgramIndex()
    for start in range(0, len(text), 7):
        ours.extend(text[start : start + 7])
        theirs.extend(text[start : start + 7])
        assert ours.match_tokens == theirs.match_tokens
        assert ours.propose(8) == theirs.propose(8)


def test_a_prompt_is_read_many_times_sooner_than_in_python() -> None:
    draw = random.Random(1)
    text = [draw.randrange(2000) for _ in range(20_000)]
    took = []
    for index in (CompiledIndex(), NgramIndex()):
        start_s = time.perf_counter()
        index.extend(text)
        took.append(time.perf_counter() - start_s)
    assert took[0] < 0.5 * took[1]


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(build.OFF, "off")
    build.load_ngram.cache_clear()
    yield
    build.load_ngram.cache_clear()


@pytest.mark.usefixtures("_no_compiler")
def test_without_a_compiler_it_is_in_python() -> None:
    indexes = [new_index(), new_index()]
    assert all(isinstance(index, NgramIndex) for index in indexes)
    assert Indexes(indexes).extend([[1, 2, 1, 2, 1], []]) == [3, 0]
    with pytest.raises(RuntimeError, match="cannot be compiled"):
        CompiledIndex()
