"""Texts that every request may be guessed from: some given, others bounded in tokens.

Of those that come with time the oldest half goes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parlay.engine.proposers.ngram_index import Continuation, NgramIndex

LONGEST_MATCH, WORTH = 16, 3
"""Longest suffix that is looked for, and how many of its tokens foretell as much as one of a match
in the request's own text.

On Spec-Bench's prompts with answers of Vicuna-7B, code editing, HumanEval and GSM8K, a shared match
of 1-3, 4-6 and 7-9 tokens was right about its next token as often as an own one of 1, 2 and 3
(.24, .39, .61 against .27, .47, .56).
"""
LONGEST_WORTH = -(-LONGEST_MATCH // WORTH)
"""Own matches as long as this need not ask."""
_END = -1
_NOWHERE = (0, 0)


class SharedCorpus:
    """Texts given at the start, which stay, and two automata of at most most_tokens / 2 tokens.

    Texts that are added go to the newer one. When it is full the older one is dropped, and an empty
    one begins. most_tokens 0: nothing is added. Raises ValueError for 1 to 3.
    """

    def __init__(self, most_tokens: int, texts: Iterable[Sequence[int]] = ()) -> None:
        if most_tokens in (1, 2, 3) or most_tokens < 0:
            raise ValueError(f"a shared corpus needs room for 4 tokens or more, not {most_tokens}")
        self._half = most_tokens // 2
        self._newer, self._older, self._given = (NgramIndex() for _ in range(3))
        for text in texts:
            self._given.extend(text)
            self._given.extend([_END])

    def add(self, text: Sequence[int]) -> None:
        """Take a text in, of one that is too long its end."""
        if not self._half:
            return
        kept = text[max(len(text) - self._half + 1, 0) :]
        if len(self._newer.tokens) + len(kept) + 1 > self._half:
            self._newer, self._older = NgramIndex(), self._newer
        self._newer.extend(kept)
        self._newer.extend([_END])

    @property
    def parts(self) -> tuple[NgramIndex, NgramIndex, NgramIndex]:
        """Return the automata, the newest texts' first."""
        return self._newer, self._older, self._given


class CorpusReader:
    """Where a growing text stands in a corpus, so that each of its tokens is looked up once."""

    def __init__(self, corpus: SharedCorpus) -> None:
        self._corpus, self._read_tokens = corpus, 0
        self._at: dict[NgramIndex, tuple[int, int]] = {}

    def read(self, text: Sequence[int]) -> None:
        """Go on to the end of the text, which has grown since."""
        begin, at = self._read_tokens, self._at
        if begin < len(text) - LONGEST_MATCH:
            begin, at = len(text) - LONGEST_MATCH, {}
        unread, self._read_tokens = text[begin:], len(text)
        self._at = {
            part: part.follow(*at.get(part, _NOWHERE), unread, LONGEST_MATCH)
            for part in self._corpus.parts
        }

    def continuations(self, k: int, width: int, beyond: int = 0) -> list[Continuation]:
        """Return up to width ways to go on, each to its own text's end, in the order of `merged`.

        Their match_tokens is what the match is worth: a third of its length, rounded up. beyond:
        none that is worth no more than this.
        """
        least = beyond * WORTH
        matches = sorted((m for m in self._at.items() if m[1][1] > least), key=_longest_first)
        found = list[Continuation]()
        for part, (state, length) in matches:
            here = part.continuations_of(state, length, k, width, above=least)
            found = merged(found, here, width) if found else here
            if len(found) == width:
                # What matches as long may be more frequent.
                least = max(least, found[-1].match_tokens - 1)
        return [_of_one_text(one) for one in found]


def _longest_first(match: tuple[NgramIndex, tuple[int, int]]) -> int:
    return -match[1][1]


def merged(first: list[Continuation], second: list[Continuation], width: int) -> list[Continuation]:
    """Return the best of both, longest match first, then most frequent, one a first token."""
    out: list[Continuation] = []
    seen = set[int]()
    for one in sorted([*first, *second], key=lambda c: (-c.match_tokens, -c.guess_count)):
        if one.tokens[0] not in seen and len(out) < width:
            seen.add(one.tokens[0])
            out.append(one)
    return out


def _of_one_text(found: Continuation) -> Continuation:
    """Cut where the next text begins, and say what the match is worth."""
    tokens = found.tokens
    if _END in tokens:
        tokens = tokens[: tokens.index(_END)]
    return found._replace(match_tokens=-(-found.match_tokens // WORTH), tokens=tokens)
