"""Block accounting of a paged KV cache: who owns which block, never what is in it. Free of torch.

A request's table lists the blocks that hold its positions 0, 1, 2, ... in order. Draft tokens take
blocks before they are known to be good; `truncate` gives back what a rejection leaves unused. Full
blocks of committed tokens may be shared (`settle`, `adopt`), and are kept when their last owner is
gone until others need them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from parlay.engine.prefix_cache import PrefixCache


class BlockCache:
    """A pool of `total` blocks of `block_tokens` positions, and a table of them per request."""

    def __init__(self, total: int, block_tokens: int) -> None:
        if total < 1 or block_tokens < 1:
            raise ValueError(
                f"a cache needs at least one block of one token, not {total} of {block_tokens}"
            )
        self.total = total
        self.block_tokens = block_tokens
        self.tables: dict[int, list[int]] = {}
        self.prefixes = PrefixCache(block_tokens)
        # A heap: low blocks first, so that those of a request lie side by side and few are touched;
        # gathering scattered ones takes 1.7 times as long on a CPU.
        self._free = list(range(total))

    @property
    def free(self) -> int:
        """Return how many blocks no table holds: those that only a prefix may need are free."""
        return len(self._free) + self.prefixes.idle

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold `tokens` positions."""
        return -(-tokens // self.block_tokens)

    def capacity(self, request_id: int) -> int:
        """Return how many positions fit a request without another block."""
        return len(self.tables.get(request_id, ())) * self.block_tokens

    def room(self, request_id: int) -> int:
        """Return how many positions a request could have if it took every free block."""
        return self.capacity(request_id) + self.free * self.block_tokens

    def held_by(self, request_id: int) -> float:
        """Return a request's blocks, one that n tables hold as 1/n: all requests' add up to what
        is not free.
        """  # noqa: D205
        refs = self.prefixes.refs
        return sum(1 / refs.get(block, 1) for block in self.tables.get(request_id, ()))

    def reserve(self, request_id: int, tokens: int) -> bool:
        """Make a table hold `tokens` positions; False, changing nothing, where blocks are short."""
        table = self.tables.get(request_id, [])
        need = self.blocks_for(tokens) - len(table)
        if need <= 0:
            return True
        if (short := need - len(self._free)) > 0:
            if short > self.prefixes.idle:
                return False
            for _ in range(short):
                heapq.heappush(self._free, self.prefixes.evict())
        self.tables[request_id] = table
        table.extend(heapq.heappop(self._free) for _ in range(need))
        return True

    def adopt(self, request_id: int, known: list[int]) -> int:
        """Begin a table with known blocks that hold its first tokens; return how many tokens."""
        assert request_id not in self.tables, "a table begins with what it shares"
        for block in known:
            self.prefixes.hold(block)
        if known:
            self.tables[request_id] = known
        return len(known) * self.block_tokens

    def settle(self, request_id: int, tokens: Sequence[int], computed: int) -> None:
        """Give back the blocks beyond a request's first `computed` tokens, which are all committed,
        and let others find those that they fill.
        """  # noqa: D205
        table, size = self.tables[request_id], self.block_tokens
        full = computed // size
        if full and table[full - 1] not in self.prefixes.refs:
            for block in self.prefixes.learn(table, tokens, full):
                heapq.heappush(self._free, block)
        if len(table) * size >= computed + size:
            self.truncate(request_id, computed)

    def truncate(self, request_id: int, tokens: int) -> None:
        """Give back the blocks beyond `tokens` positions."""
        table = self.tables.get(request_id)
        keep = -(-tokens // self.block_tokens)
        if table is None or len(table) <= keep:
            return
        prefixes = self.prefixes
        while len(table) > keep:
            block = table.pop()
            if block in prefixes.refs:
                prefixes.drop(block)
            else:
                heapq.heappush(self._free, block)
        if not table:
            del self.tables[request_id]

    def release(self, request_id: int) -> None:
        """Give back every block of a request."""
        self.truncate(request_id, 0)

    def forget(self) -> None:
        """Make known blocks that nobody holds unknown: what they held is gone."""
        while self.prefixes.idle:
            heapq.heappush(self._free, self.prefixes.evict())

    def check(self) -> None:
        """Assert that each block is free, idle, or held by one table, or by several if known."""
        tables = list(self.tables.values())
        self.prefixes.check(tables)
        known = self.prefixes.refs
        own = [block for table in tables for block in table if block not in known]
        everything = sorted([*own, *known, *self._free])
        assert everything == list(range(self.total)), "blocks leaked or shared"
