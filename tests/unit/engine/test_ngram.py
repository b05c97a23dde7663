"""The n-gram's automaton against a search of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parlay.engine.proposers.ngram import NgramIndex, NgramProposer
from parlay.engine.request import Request


def longest_suffix_seen_before(text: list[int]) -> int:
    """Return the length of the longest suffix that also ends somewhere earlier."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[len(text) - length :]
        ends = range(length, len(text))
        if any(text[end - length : end] == suffix for end in ends):
            return length
    return 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6))
def test_match_is_the_longest_suffix_and_the_guess_followed_it(text: list[int], k: int) -> None:
    index = NgramIndex()
    for end in range(1, len(text) + 1):
        index.extend([text[end - 1]])
        match, guess = index.match_tokens, index.propose(k)
        assert match == longest_suffix_seen_before(text[:end])
        assert len(guess) == (k if match else 0)
        if match:
            # The guess continues an earlier place of the suffix; past the end it repeats itself.
            extended = text[:end] + guess
            suffix = text[end - match : end]
            assert any(
                text[at - match : at] == suffix and extended[at : at + k] == guess
                for at in range(match, end)
            )


def test_appending_bit_by_bit_is_the_same_as_at_once() -> None:
    text = [1, 2, 1, 2, 3, 1, 2, 1, 2, 3, 1, 2]
    whole, parts = NgramIndex(), NgramIndex()
    whole.extend(text)
    for token in text:
        parts.extend([token])
    assert (whole.match_tokens, whole.propose(5)) == (parts.match_tokens, parts.propose(5))
    assert whole.propose(3) == [1, 2, 3]


def test_a_request_is_indexed_up_to_its_newest_token_and_forgotten() -> None:
    proposer = NgramProposer()
    request = Request(1, [5, 6, 7, 5, 6], 5, computed=4)
    lookup = proposer.lookup([request], 4)
    assert lookup.match_tokens.tolist() == [2]
    assert lookup.tokens.tolist() == [[7, 5, 6, 7]]
    request.tokens.append(9)
    request.computed = 5
    assert proposer.lookup([request], 4).match_tokens.tolist() == [0]
    proposer.forget(request)
    assert not proposer._indexes


def test_a_prompt_that_is_still_computed_offers_nothing() -> None:
    lookup = NgramProposer().lookup([Request(1, [5, 6, 5, 6], 4)], 3)
    assert lookup.match_tokens.tolist() == [0]
    assert lookup.tokens.tolist() == [[-1, -1, -1]]


def test_requests_of_two_engines_with_the_same_id_do_not_share_an_index() -> None:
    proposer = NgramProposer()
    proposer.lookup([Request(1, [5, 6, 7, 5, 6], 5, computed=4)], 4)
    lookup = proposer.lookup([Request(1, [8, 9, 8], 3, computed=2)], 2)
    assert lookup.match_tokens.tolist() == [1]
    assert lookup.tokens.tolist() == [[9, 8]]
