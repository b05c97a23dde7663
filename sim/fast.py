"""The closed loop for many batches at once, without an object a request: what training runs on.

Requests accept by the laws of `latent.py` and steps cost what `costs.py` says, but luck is drawn a
block a step from one counter-based stream, not kept for each request: what lies beyond a rejection
is never seen, so that coins drawn anew there have the same law. A phase may turn once within a
draft, not twice. Blocks of the KV cache are plenty and plans are never late: the engine's loop has
those. Prompts share the token budget in order of arrival, as in the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from parlay.engine.commit import RECENT_DECAY
from parlay.policies.cost import behind
from parlay.policies.features import DEPTH, Shown, Tracker, allowed
from parlay.policies.types import DRAFT_MODEL, MEDUSA, NGRAM, PROPOSERS, Array
from parlay.sim.episode import TOKEN_BUDGET
from parlay.sim.fast_costs import FastCosts
from parlay.sim.kinds import POOL, Kind
from parlay.sim.latent import (
    COLD_FACTOR,
    COLD_TOKENS,
    CONFIDENCE_NOISE,
    COPULA,
    PHASE_TOKENS,
    match_length,
    place_log_odds,
)
from parlay.sim.laws import tasks

_EVERY_PROPOSER = np.uint8((1 << PROPOSERS) - 1)
_F32 = np.float32
_USUAL_WEIGHT = 0.1
_LEADING = np.array([f"{byte:08b}0".index("0") for byte in range(256)])
"""How many bits of a byte are set before the first that is not: DEPTH places are a byte."""


@dataclass(slots=True)
class Stepped:
    """What a step did: emitted i64 and caused_ms [rows]; by batch tokens, net_ms and step_ms.

    caused_ms: by how much longer the step took because the row drafted. net_ms: step_ms but for
    what the prompts in it would have taken without drafts.
    """

    emitted: Array
    caused_ms: Array
    tokens: Array
    net_ms: Array
    step_ms: Array


class FastLoop:
    """Batches side by side, each with its own requests, costs and luck.

    Rows of one batch lie together, `batch` [rows] says whose each is. vary: how much batches differ
    from their kind, in log-odds of acceptance and in the log of costs; a batch begins anew, with
    other luck, after about `life_steps` (0: never).
    """

    def __init__(
        self, kinds: Sequence[Kind], seed: int, vary: float = 0.0, life_steps: int = 0
    ) -> None:
        self.kinds, self.vary, self.life_steps = list(kinds), vary, life_steps
        self.rng = np.random.Generator(np.random.Philox(key=[seed, 1]))
        self.sizes = np.array([kind.concurrency for kind in kinds])
        batches, rows = len(kinds), int(self.sizes.sum())
        self.batch = np.repeat(np.arange(batches), self.sizes)
        self._first = np.cumsum(self.sizes) - self.sizes
        self.every = np.arange(batches)
        self._laws(kinds)
        self._pools(kinds)
        models = list({id(kind.costs): kind.costs for kind in kinds}.values())
        most = int(self.sizes.max())
        self.costs = FastCosts(
            models,
            np.array([next(i for i, m in enumerate(models) if m is k.costs) for k in kinds]),
            TOKEN_BUDGET + most * (DEPTH + 1),
            TOKEN_BUDGET,
        )
        self.tracker = Tracker(batches, rows, batches * self.task_count)
        self.task = np.zeros(rows, np.intp)
        self.prompt, self.length, self.output = (np.zeros(rows, np.int64) for _ in range(3))
        self.pending, self.lag, self._order = (np.zeros(rows, np.int64) for _ in range(3))
        self.match = np.zeros(rows, np.int32)
        self.recent = np.ones(rows)
        self._own, self._high = np.zeros(rows, _F32), np.zeros(rows, bool)
        self._until = np.ones(rows, np.int64)
        self._clock = 0
        self.blind, self.usual = np.zeros(batches), self.sizes.astype(float)
        self.tried = np.zeros((PROPOSERS, batches), bool)
        self._restart(self.every)
        self._schedule()

    def _laws(self, kinds: Sequence[Kind]) -> None:
        """Make the tables of every task that occurs."""
        names = list(dict.fromkeys(name for kind in kinds for name in kind.names))
        laws = [tasks()[name].law for name in names]
        self.task_count = len(names)
        self._odds = place_log_odds(laws, DEPTH).astype(_F32)
        self._match_rate = np.array([law.match_rate for law in laws], _F32)
        self._shift_sd = np.array([law.shift_sd for law in laws], _F32)
        self._phase = np.array([law.phase_shift for law in laws], _F32)
        self._bent = np.zeros((len(kinds), self.task_count, PROPOSERS), _F32)
        self._index = {name: i for i, name in enumerate(names)}

    def _pools(self, kinds: Sequence[Kind]) -> None:
        """Lay the pools of all kinds beside one another: i64 [kinds, 3, POOL]."""
        unique = list({id(kind): kind for kind in kinds}.values())
        place = {id(kind): i for i, kind in enumerate(unique)}
        self._pool_of = np.array([place[id(kind)] for kind in kinds])
        of_name = [np.array([self._index[name] for name in kind.names]) for kind in unique]
        self._pool = np.array(
            [
                (index[kind.task], kind.prompt_tokens, kind.output_tokens)
                for index, kind in zip(of_name, unique, strict=True)
            ]
        )
        self.catches_up = np.array([kind.catches_up for kind in kinds])

    def _restart(self, batches: Array) -> None:
        """Begin some batches anew: other costs and laws, every request somewhere in its output."""
        n, rng = len(batches), self.rng
        scales = self.costs.scales
        for table in (scales.verify, scales.draft, scales.medusa):
            table[batches] = np.exp(self.vary * rng.standard_normal(n))
        self._bent[batches] = self.vary * rng.standard_normal((n, self.task_count, PROPOSERS))
        self.blind[batches] = rng.random(n) if self.vary else 0.0
        self.tried[:, batches] = False
        self.usual[batches] = self.sizes[batches]
        own_tasks = (batches[:, None] * self.task_count + np.arange(self.task_count)).ravel()
        self.tracker.begin_batches(batches, own_tasks)
        rows = np.flatnonzero(np.isin(self.batch, batches))
        self._begin(rows)
        self.output[rows] = 1 + (rng.random(len(rows)) * (self.length[rows] - 1)).astype(np.int64)
        self.pending[rows] = 0
        self._look_up(rows)

    def _begin(self, rows: Array) -> None:
        """Draw new requests into rows."""
        n, rng = len(rows), self.rng
        drawn = self._pool[self._pool_of[self.batch[rows]], :, rng.integers(0, POOL, n)]
        self.task[rows], self.prompt[rows], self.length[rows] = drawn.T
        self.output[rows] = 0
        self.pending[rows] = self.lag[rows] = self.prompt[rows]
        self.match[rows], self.recent[rows] = 0, 1.0
        self._own[rows] = self._shift_sd[self.task[rows]] * rng.standard_normal(n, _F32)
        self._high[rows] = rng.random(n) < 0.5
        self._until[rows] = rng.geometric(1.0 / PHASE_TOKENS, n)
        self._order[rows] = self._clock
        self.tracker.begin(rows)

    def _schedule(self) -> None:
        """Share the token budget: one token for each row that decodes, then prompts by age."""
        self.decodes = self.pending == 0
        self.chunk = self.decodes.astype(np.int64)
        self.decoding = np.add.reduceat(self.chunk, self._first)
        rows = np.flatnonzero(~self.decodes)
        if len(rows):
            rows = rows[np.lexsort((rows, self._order[rows], self.batch[rows]))]
            batch, need = self.batch[rows], self.pending[rows]
            before = np.cumsum(need) - need
            first = np.searchsorted(batch, batch)
            room = (TOKEN_BUDGET - self.decoding)[batch] - (before - before[first])
            self.chunk[rows] = np.clip(room, 0, need)
        self.emits = self.decodes | (self.chunk == self.pending)
        self.max_k = np.where(self.decodes, np.minimum(self.length - self.output - 1, DEPTH), 0)
        computed = np.where(self.decodes, self.prompt + self.output - 1, self.prompt - self.pending)
        self.computed = np.where(self.chunk > 0, computed, 0)
        self.kv_tokens = np.add.reduceat(self.computed, self._first)
        self.fed = np.add.reduceat(self.chunk, self._first)

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
        coins = self.rng.random((len(k), DEPTH), _F32)
        drafts = np.flatnonzero(k)
        accepted = np.zeros(len(k), np.int64)
        accepted[drafts] = np.minimum(self._held(drafts, who[drafts], coins[drafts]), k[drafts])
        emitted = np.where(self.emits, accepted + 1, 0)
        done = self._price(who, k, emitted)
        self._learn(who, k, accepted, emitted, coins)
        decoding = np.add.reduceat(self.emits.astype(np.int64), self._first)
        shares = np.stack(
            [self._count(who == p) / np.maximum(decoding, 1) for p in (1, 2, 3)]
            + [np.maximum.reduceat(np.where(who == DRAFT_MODEL, k, 0), self._first) / DEPTH],
            axis=1,
        )
        self.tracker.ran(done.tokens, done.net_ms, decoding, shares)
        self._advance(who, k, emitted)
        return done

    def _count(self, which: Array) -> Array:
        return np.add.reduceat(which.astype(np.int64), self._first)

    def _shift(self, rows: Array) -> Array:
        """Return f32 [n, DEPTH]: each request's shift at the places of a draft that begins now."""
        high = self._high[rows, None] ^ (np.arange(DEPTH) >= self._until[rows, None])
        phase = self._phase[self.task[rows], None]
        return self._own[rows, None] + np.where(high, phase, -phase)

    def _held(self, rows: Array, who: Array, coins: Array) -> Array:
        """Return how many of DEPTH tokens drafted now would hold: uniform coins f32 [n, DEPTH]."""
        task = self.task[rows]
        odds = self._odds[task, who] + self._shift(rows)
        odds += self._bent[self.batch[rows], task, who][:, None]
        cold = self.output[rows, None] + np.arange(DEPTH) < COLD_TOKENS
        right = coins * (1.0 + np.exp(-odds)) < np.where(cold, _F32(COLD_FACTOR), _F32(1.0))
        return _LEADING[np.packbits(right, axis=1)[:, 0]]

    def _price(self, who: Array, k: Array, emitted: Array) -> Stepped:
        """Return what the step took, and what each row's draft added to it."""
        costs, batch, every = self.costs, self.batch, self.every
        tokens = self.fed + np.add.reduceat(k, self._first)
        requests = np.add.reduceat(self.emits.astype(np.int64), self._first)
        attention = costs.attention(every, requests, self.kv_tokens)
        verify = costs.verify_ms(every, tokens, attention)
        without = costs.verify_ms(batch, tokens[batch] - k, attention)
        caused = verify[batch] - without
        heads, lookups = self._count(who == MEDUSA), self._count(who == NGRAM)
        of_passes, of_row = self._draft_ms(who, k)
        caused += of_row
        draft = of_passes.copy()
        for rows, price, p in (
            (heads, costs.medusa_ms, MEDUSA),
            (lookups, costs.ngram_ms, NGRAM),
        ):
            took = price(every, rows)
            draft += took
            caused += np.where(who == p, (took - price(every, np.maximum(rows - 1, 0)))[batch], 0.0)
        self.tried[[NGRAM, DRAFT_MODEL, MEDUSA]] |= (lookups > 0, of_passes > 0, heads > 0)
        step_ms = verify + draft + costs.overhead_ms
        prompts = self.fed - self.decoding
        self.usual += _USUAL_WEIGHT * (tokens - prompts - self.usual)
        with_prompts = costs.verify_ms(every, self.fed, attention)
        plain = costs.verify_ms(every, self.decoding, attention)
        net_ms = step_ms - np.where(prompts > 0, with_prompts - plain, 0.0)
        emitted_by_batch = np.add.reduceat(emitted, self._first)
        return Stepped(emitted, caused, emitted_by_batch, net_ms, step_ms)

    def _draft_ms(self, who: Array, k: Array) -> tuple[Array, Array]:
        """Return what the draft model takes, by batch, and what each row adds to it."""
        mine = np.flatnonzero(who == DRAFT_MODEL)
        batches, of_row = len(self.kinds), np.zeros(len(k))
        if not len(mine):
            return np.zeros(batches), of_row
        batch, deep, kv = self.batch[mine], k[mine], self.computed[mine]
        size = batches * (DEPTH + 1)
        depth = np.bincount(batch * (DEPTH + 1) + deep, minlength=size).reshape(batches, -1)
        rows = depth[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
        owing = np.where(self.catches_up[batch], behind(self.lag[mine]), 0)
        kv_sum, owed = (np.bincount(batch, x, batches) for x in (kv, owing))
        owed = owed.astype(np.int64)
        took = self._passes_ms(self.every, rows, kv_sum, owed)
        fewer = rows[batch] - (np.arange(DEPTH) < deep[:, None])
        without = self._passes_ms(batch, fewer, kv_sum[batch] - kv, owed[batch] - owing)
        of_row[mine] = took[batch] - without
        return took, of_row

    def _passes_ms(self, batch: Array, rows: Array, kv_tokens: Array, owed: Array) -> Array:
        """Return the time [n] of passes over rows [n, DEPTH]; the first reads what is owed."""
        kv_of_row = (kv_tokens / np.maximum(rows[:, 0], 1))[:, None]
        behind = np.where(np.arange(DEPTH) == 0, owed[:, None], 0)
        took: Array = self.costs.draft_pass_ms(batch[:, None], rows, kv_of_row, behind).sum(axis=1)
        return took

    def _learn(self, who: Array, k: Array, accepted: Array, emitted: Array, coins: Array) -> None:
        """Tell the tracker of drafts, and of the n-gram's guesses where others drafted.

        A guess is scored on the tokens of this step alone, where the engine waits for its end.
        """
        own = np.flatnonzero(k)
        told = np.flatnonzero(self.decodes & (self.match > 0) & (who != NGRAM))
        # The n-gram's coins hang together with those of who drafted, by a Gaussian copula.
        single = self.rng.standard_normal((len(told), DEPTH), _F32)
        shared = ndtri(np.clip(coins[told], _F32(1e-6), _F32(1.0 - 1e-6)))
        mixed = ndtr(_F32(COPULA) * shared + _F32(np.sqrt(1.0 - COPULA**2)) * single)
        held = self._held(told, np.full(len(told), NGRAM), mixed)
        seen = emitted[told]
        rows = np.concatenate([own, told])
        shown = Shown(
            row=rows,
            batch=self.batch[rows],
            task=self.batch[rows] * self.task_count + self.task[rows],
            proposer=np.concatenate([who[own], np.full(len(told), NGRAM)]),
            match_tokens=self.match[rows],
            accepted=np.concatenate([accepted[own], np.minimum(held, seen)]),
            seen=np.concatenate([k[own], np.minimum(np.minimum(held, seen) + 1, seen)]),
            output_tokens=self.output[rows],
        )
        self.tracker.learn(np.flatnonzero(self.chunk > 0), shown)

    def _advance(self, who: Array, k: Array, emitted: Array) -> None:
        """Move every request on; what has ended makes room for the next."""
        self._clock += 1
        self.pending -= np.where(self.decodes, 0, self.chunk)
        self.recent += np.where(self.emits, (1.0 - RECENT_DECAY) * (emitted - self.recent), 0.0)
        # The draft model has read all but the last token, or but two where all its guesses held.
        read = np.where(emitted > k, 2, 1)
        self.lag = np.where((who == DRAFT_MODEL) & (k > 0), read, self.lag + emitted)
        self.output += emitted
        self._until -= emitted
        turned = np.flatnonzero(self._until <= 0)
        while len(turned):
            self._high[turned] ^= True
            self._until[turned] += self.rng.geometric(1.0 / PHASE_TOKENS, len(turned))
            turned = turned[self._until[turned] <= 0]
        ended = np.flatnonzero(self.output >= self.length)
        if len(ended):
            self._begin(ended)
        self._look_up(np.arange(len(self.batch)))
        if self.life_steps:
            over = self.rng.random(len(self.kinds)) < 1.0 / self.life_steps
            if over.any():
                self._restart(np.flatnonzero(over))
        self._schedule()

    def _look_up(self, rows: Array) -> None:
        """Draw the n-gram's match lengths at the positions of now."""
        n, task = len(rows), self.task[rows]
        found = (self.rng.random(n, _F32) < self._match_rate[task]) & (self.pending[rows] == 0)
        self.match[rows] = 0
        rows, task = rows[found], task[found]
        phase = self._phase[task]
        odds = self._odds[task, NGRAM, 0] + self._bent[self.batch[rows], task, NGRAM]
        odds += self._own[rows] + np.where(self._high[rows], phase, -phase)
        noise = CONFIDENCE_NOISE * self.rng.standard_normal(len(rows), _F32)
        self.match[rows] = match_length(odds + noise)

    def plain_ms(self) -> Array:
        """Return what a step of every batch would take if all rows decoded and none drafted."""
        attention = self.costs.attention(self.every, self.sizes, self.kv_tokens)
        took: Array = self.costs.verify_ms(self.every, self.sizes, attention)
        took += self.costs.overhead_ms
        return took
