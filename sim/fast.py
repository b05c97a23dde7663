"""The engine's loop for many batches at once, without an object a request.

Scheduling, prices and what requests go through are the engine's; who asks and what would be
accepted is the luck's: drawn in blocks (`block_luck.py`), for training, or keyed by request, when
an episode is the engine's own to the last token (`keyed.py`). Blocks of the KV cache are plenty
here: the engine's loop has scarce ones. Prompts share the token budget in order of arrival, as in
the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from parlay.engine.commit import RECENT_DECAY
from parlay.policies.features import DEPTH, Shown, Tracker, allowed
from parlay.policies.types import DRAFT_MODEL, NGRAM, PROPOSERS, Array
from parlay.sim.block_luck import BlockLuck
from parlay.sim.episode import TOKEN_BUDGET
from parlay.sim.fast_costs import FastCosts
from parlay.sim.fast_price import Drafted, Stepped, priced
from parlay.sim.kinds import Kind

_EVERY_PROPOSER = np.uint8((1 << PROPOSERS) - 1)


class LoopLuck(Protocol):
    """Who asks next in the loop, and what would be accepted of a draft that begins now.

    names: the tags of tasks, in the order of their numbers.
    """

    names: tuple[str, ...]

    def restart(self, loop: FastLoop, batches: Array, rows: Array) -> None:
        """Begin batches, whose rows are `rows`, anew."""
        ...

    def begin(self, loop: FastLoop, rows: Array) -> Array:
        """Fill task, prompt, length and cached of free rows; return those that got a request."""
        ...

    def flip(self, loop: FastLoop) -> None:
        """Draw a step's coins, if they are drawn by step."""
        ...

    def held(self, loop: FastLoop, rows: Array, who: Array) -> Array:
        """Return how many of DEPTH tokens drafted now by proposers `who` would hold."""
        ...

    def guessed(self, loop: FastLoop, rows: Array) -> Array:
        """Return how many of the n-gram's guesses would hold in rows where others draft."""
        ...

    def move(self, loop: FastLoop, emitted: Array) -> None:
        """Let what changes along an output go on by `emitted` tokens."""
        ...

    def match(self, loop: FastLoop, decodes: Array) -> Array:
        """Return the n-gram's match lengths i32 [rows] of now, 0 where a row does not decode."""
        ...


class FastLoop:
    """Batches side by side, each with its own requests, costs and luck.

    Rows of one batch lie together, `batch` [rows] says whose each is; a row whose length is 0 is
    free, and `began` those whose request is new since the step before. vary: how much batches
    differ from their kind, in log-odds of acceptance and in the log of costs; a batch begins anew,
    with other luck, after about `life_steps` (0: never). luck: drawn in blocks if none is given.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        seed: int,
        vary: float = 0.0,
        life_steps: int = 0,
        luck: LoopLuck | None = None,
    ) -> None:
        self.kinds, self.vary, self.life_steps = list(kinds), vary, life_steps
        self.rng = np.random.Generator(np.random.Philox(key=[seed, 1]))
        self.sizes = np.array([kind.concurrency for kind in kinds])
        batches, rows = len(kinds), int(self.sizes.sum())
        self.batch = np.repeat(np.arange(batches), self.sizes)
        self._first = np.cumsum(self.sizes) - self.sizes
        self.every = np.arange(batches)
        self.luck: LoopLuck = luck or BlockLuck(kinds, rows, vary)
        self.task_count = len(self.luck.names)
        self.catches_up = np.array([kind.catches_up for kind in kinds])
        self._priced(kinds)
        self.tracker = Tracker(batches, rows, batches * self.task_count)
        self.task = np.zeros(rows, np.intp)
        self.prompt, self.length, self.output = (np.zeros(rows, np.int64) for _ in range(3))
        self.pending, self.lag, self.cached = (np.zeros(rows, np.int64) for _ in range(3))
        self._order = np.zeros(rows, np.int64)
        self.match = np.zeros(rows, np.int32)
        self.began = np.zeros(rows, bool)
        self.recent = np.ones(rows)
        self._clock = 0
        self.blind, self.usual = np.zeros(batches), self.sizes.astype(float)
        self.tried = np.zeros((PROPOSERS, batches), bool)
        self._restart(self.every)
        self.schedule()

    def _priced(self, kinds: Sequence[Kind]) -> None:
        models = list({id(kind.costs): kind.costs for kind in kinds}.values())
        self.costs = FastCosts(
            models,
            np.array([next(i for i, m in enumerate(models) if m is k.costs) for k in kinds]),
            TOKEN_BUDGET + int(self.sizes.max()) * (DEPTH + 1),
            TOKEN_BUDGET,
        )

    def _restart(self, batches: Array) -> None:
        """Begin some batches anew: other costs and laws, other requests."""
        n, rng = len(batches), self.rng
        scales = self.costs.scales
        for table in (scales.verify, scales.draft, scales.medusa):
            table[batches] = np.exp(self.vary * rng.standard_normal(n))
        self.blind[batches] = rng.random(n) if self.vary else 0.0
        self.tried[:, batches] = False
        self.usual[batches] = self.sizes[batches]
        own_tasks = (batches[:, None] * self.task_count + np.arange(self.task_count)).ravel()
        self.tracker.begin_batches(batches, own_tasks)
        self.luck.restart(self, batches, np.flatnonzero(np.isin(self.batch, batches)))

    def begin(self, rows: Array) -> None:
        """Let the next requests into free rows; what of their prompts is cached is not computed."""
        self.length[rows] = self.output[rows] = self.pending[rows] = 0
        rows = self.luck.begin(self, rows)
        self.pending[rows] = self.prompt[rows] - self.cached[rows]
        self.lag[rows] = self.prompt[rows]
        self.recent[rows], self.began[rows] = 1.0, True
        self._order[rows] = self._clock
        self.tracker.begin(rows)

    def schedule(self) -> None:
        """Look matches up and share the token budget: decoding rows first, then prompts by age.

        A prompt of which one token is left is a row that decodes, as in the scheduler.
        """
        self.decodes = (self.pending <= 1) & (self.length > 0)
        self.match = self.luck.match(self, self.decodes)
        self.chunk = self.decodes.astype(np.int64)
        self.decoding = self.sums(self.chunk)
        self._share(np.flatnonzero(self.pending > 1))
        self.emits = (self.chunk > 0) & (self.chunk >= self.pending)
        self.max_k = np.where(self.decodes, np.minimum(self.length - self.output - 1, DEPTH), 0)
        computed = np.where(self.decodes, self.prompt + self.output - 1, self.prompt - self.pending)
        self.computed = np.where(self.chunk > 0, computed, 0)
        self.kv_tokens = self.sums(self.computed)
        self.fed = self.sums(self.chunk)

    def _share(self, rows: Array) -> None:
        """Give prompts what decoding rows leave of the budget."""
        if not len(rows):
            return
        rows = rows[np.lexsort((rows, self._order[rows], self.batch[rows]))]
        batch, need = self.batch[rows], self.pending[rows]
        before = np.cumsum(need) - need
        first = np.searchsorted(batch, batch)
        room = (TOKEN_BUDGET - self.decoding)[batch] - (before - before[first])
        self.chunk[rows] = np.clip(room, 0, need)

    def allowed(self) -> Array:
        """Return bool [rows, actions]: what each row may do in the next step."""
        return allowed(
            self.match, self.max_k, np.full(len(self.batch), _EVERY_PROPOSER), ~self.decodes
        )

    def step(self, proposer: Array, k: Array) -> Stepped:
        """Run a step in which rows draft k i64 tokens with proposer, cut to what may be."""
        k = np.minimum(k, self.max_k)
        k = np.where((proposer == 0) | ((proposer == NGRAM) & (self.match <= 0)), 0, k)
        who = np.where(k > 0, proposer, 0).astype(np.intp)
        self.luck.flip(self)
        done = self.run(who, Drafted(k, k, k))
        self._learn(who, k, done)
        self.advance(who, k, done)
        self.turn()
        return done

    def run(self, who: Array, drafted: Drafted) -> Stepped:
        """Return what a step accepts and takes; `who` [rows] is NONE where nothing was asked."""
        drafts = np.flatnonzero(drafted.verified)
        accepted = np.zeros(len(who), np.int64)
        held = self.luck.held(self, drafts, who[drafts])
        accepted[drafts] = np.minimum(held, drafted.verified[drafts])
        return priced(self, who, drafted, accepted)

    def sums(self, values: Array) -> Array:
        """Return the sum of values [rows], numbers or bool, over each batch."""
        found: Array = np.add.reduceat(np.asarray(values, np.int64), self._first)
        return found

    def _learn(self, who: Array, k: Array, done: Stepped) -> None:
        """Tell the tracker of drafts, and of the n-gram's guesses where others drafted.

        A guess is scored on the tokens of this step alone, where the engine waits for its end.
        """
        own = np.flatnonzero(k)
        told = np.flatnonzero(self.decodes & (self.match > 0) & (who != NGRAM))
        held, seen = self.luck.guessed(self, told), done.emitted[told]
        rows = np.concatenate([own, told])
        shown = Shown(
            row=rows,
            batch=self.batch[rows],
            task=self.batch[rows] * self.task_count + self.task[rows],
            proposer=np.concatenate([who[own], np.full(len(told), NGRAM)]),
            match_tokens=self.match[rows],
            accepted=np.concatenate([done.accepted[own], np.minimum(held, seen)]),
            seen=np.concatenate([k[own], np.minimum(np.minimum(held, seen) + 1, seen)]),
            output_tokens=self.output[rows],
        )
        self.tracker.learn(np.flatnonzero(self.chunk > 0), shown)
        decoding = self.sums(self.emits)
        shares = np.stack(
            [self.sums(who == p) / np.maximum(decoding, 1) for p in (1, 2, 3)]
            + [np.maximum.reduceat(np.where(who == DRAFT_MODEL, k, 0), self._first) / DEPTH],
            axis=1,
        )
        self.tracker.ran(done.tokens, done.net_ms, decoding, shares)

    def advance(self, who: Array, kept: Array, done: Stepped) -> None:
        """Move every request on by what it emitted."""
        emitted = done.emitted
        self._clock += 1
        self.pending = np.maximum(self.pending - self.chunk, 0)
        self.recent += np.where(self.emits, (1.0 - RECENT_DECAY) * (emitted - self.recent), 0.0)
        # The draft model has read its own guesses but the last, as far as they held.
        read = np.minimum(done.accepted, np.maximum(kept - 1, 0))
        self.lag = np.where(who == DRAFT_MODEL, emitted - read, self.lag + emitted)
        self.output += emitted
        self.luck.move(self, emitted)

    def turn(self) -> None:
        """Let the next requests into the rows of those that have ended, and schedule."""
        self.began[:] = False
        free = np.flatnonzero(self.output >= self.length)
        if len(free):
            self.begin(free)
        if self.life_steps:
            over = self.rng.random(len(self.kinds)) < 1.0 / self.life_steps
            if over.any():
                self._restart(np.flatnonzero(over))
        self.schedule()

    def plain_ms(self) -> Array:
        """Return what a step of every batch would take if all rows decoded and none drafted."""
        attention = self.costs.attention(self.every, self.sizes, self.kv_tokens)
        took: Array = self.costs.verify_ms(self.every, self.sizes, attention)
        took += self.costs.overhead_ms
        return took
