"""Which blocks hold which text, so that requests that begin alike share them. Free of torch.

Known are full blocks of committed tokens, whose keys, values and kept states nobody writes again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_NOTHING = -1
"""Stands for the block before the first."""


class PrefixCache:
    """Known blocks, by their tokens and the known block before; the tokens themselves are compared.

    refs: how many tables hold each known block. Who holds one holds the one before it too, and
    gives that back later: of the idle ones, which nobody holds, a block is always idle longer than
    the one before it. So the longest idle goes first, and none outlives what it follows.
    revivals: how often a block came to be known or to be held again.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.refs: dict[int, int] = {}
        self.revivals = 0
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._key: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._block: dict[tuple[int, tuple[int, ...]], int] = {}

    @property
    def idle(self) -> int:
        """Return how many known blocks no table holds."""
        return len(self._idle)

    def find(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return the known blocks that hold the first of `tokens`, in order, up to `most`."""
        found: list[int] = []
        before, size = _NOTHING, self.block_tokens
        for at in range(0, most * size, size):
            block = self._block.get((before, tuple(tokens[at : at + size])))
            if block is None:
                break
            found.append(block)
            before = block
        return found

    def learn(self, table: list[int], tokens: Sequence[int], full: int) -> list[int]:
        """Make the first `full` blocks of a table known; return those that it no longer holds.

        Where the same text is known already the table takes that block instead of its own.
        """
        first, size, spare = full, self.block_tokens, []
        while first and table[first - 1] not in self.refs:
            first -= 1
        for i in range(first, full):
            before = table[i - 1] if i else _NOTHING
            key = (before, tuple(tokens[i * size : (i + 1) * size]))
            block = self._block.setdefault(key, table[i])
            if block == table[i]:
                self._key[block], self.refs[block] = key, 1
                self.revivals += 1
            else:
                self.hold(block)
                spare.append(table[i])
                table[i] = block
        return spare

    def hold(self, block: int) -> None:
        """Count one more table that holds a known block."""
        if not self.refs[block]:
            del self._idle[block]
            self.revivals += 1
        self.refs[block] += 1

    def drop(self, block: int) -> None:
        """Count one table less; held by none the block is idle, and known until it is needed."""
        self.refs[block] -= 1
        if not self.refs[block]:
            self._idle[block] = None

    def evict(self) -> int:
        """Forget the block that has been idle longest, and return it."""
        block, _ = self._idle.popitem(last=False)
        del self.refs[block], self._block[self._key.pop(block)]
        return block

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Assert that counts are those of the tables, and that what a block follows is known."""
        held = dict.fromkeys(self.refs, 0)
        for table in tables:
            known = [block in held for block in table]
            assert known == sorted(known, reverse=True), "known blocks come first in a table"
            for before, block in zip([_NOTHING, *table], table, strict=False):
                if block in held:
                    held[block] += 1
                    assert self._key[block][0] == before, "a table holds another text's block"
        assert held == self.refs, "a block is held more or less often than is counted"
        assert set(self._idle) == {block for block, refs in held.items() if not refs}
        assert {b: k for k, b in self._block.items()} == self._key
        order = {block: at for at, block in enumerate(self._idle)}
        for block, (before, _) in self._key.items():
            assert before == _NOTHING or before in held, "a block outlives what it follows"
            if before in order:
                assert order[block] < order[before], "a block is idle but what it follows is older"
