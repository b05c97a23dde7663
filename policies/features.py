"""What a learned policy sees of a request, and its actions: one place for training and serving.

The features are estimates rather than raw counts: how many tokens each action should get accepted
(hazards by batch, task and request, as in `acceptance.py` but without a Python object a request)
and what a token costs, in tokens that the same time would emit elsewhere. So one network serves
machines of any speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parlay.policies.acceptance import (
    CHANNELS,
    FIRST_TOKENS,
    FIRST_WEIGHT,
    HAZARD_FLOOR,
    NEIGHBOUR_REACH,
    NEIGHBOUR_ROWS,
    PRIOR_HAZARD,
    PRIOR_ROWS,
    REQUEST_DECAY,
    TASK_HALF_LIFE_ROWS,
    TASK_STRENGTH,
    channel_of,
)
from parlay.policies.allocate import HAZARD_CEILING
from parlay.policies.cost import behind
from parlay.policies.strength import REQUEST_STRENGTH
from parlay.policies.types import (
    DRAFT_MODEL,
    MEDUSA,
    NGRAM,
    NONE,
    PROPOSERS,
    Array,
    match_bucket,
)

SCHEMA = 1
"""Changes with any feature or action; a network of another schema is refused."""
DEPTH = 8
_BY_PASSES, _BY_HEADS = (1, 2, 3, 5, 8), (1, 2, 3, 4)
ACTIONS = (
    (NONE, 0),
    *((NGRAM, k) for k in _BY_PASSES),
    *((DRAFT_MODEL, k) for k in _BY_PASSES),
    *((MEDUSA, k) for k in _BY_HEADS),
)
PROPOSER_OF = np.array([p for p, _ in ACTIONS], np.uint8)
K_OF = np.array([k for _, k in ACTIONS], np.int64)
ACTION_NAMES = ("none", *(f"{('', 'ngram', 'draft', 'medusa')[p]}:{k}" for p, k in ACTIONS[1:]))
WIDTHS = (1, 2, 4, 8)
"""Tokens a row at which the price of a verified token is looked at."""
_OF_BATCH = (
    "log_batch", "log_kv_tokens", "prefill_share", "bucket_slack", "tokens_a_row",
    "price_1_2", "price_2_4", "price_4_8", "price_pass", "price_pass_alone", "price_medusa",
    "price_ngram", "price_catch_up", "last_ngram", "last_draft", "last_medusa", "last_depth",
    "ms_to_plain",
)  # fmt: skip
_OF_ROW = (
    "match_bucket", "recent_accept", "log_output", "first_tokens", "log_draft_kv_lag",
    "temperature", "tpot_to_target", "known_ngram", "known_draft", "known_medusa",
)  # fmt: skip
FEATURES = (*_OF_BATCH, *_OF_ROW, *(f"accepts_{name}" for name in ACTION_NAMES[1:]))
LAST = np.array([i for i, name in enumerate(FEATURES) if name.startswith("last_")])
"""What tells of the step before."""

_BATCH_HALF_LIFE = 1200.0
"""In drafts that were scored."""
_SPEED_DECAY = 0.98
_PRIOR_HAZARD = PRIOR_HAZARD.astype(np.float32)
_lag = np.arange(DEPTH) - np.arange(DEPTH)[:, None]
_NEIGHBOURS = np.where(_lag >= 0, NEIGHBOUR_REACH ** np.maximum(_lag, 0), 0.0).astype(np.float32)


@dataclass(slots=True)
class Rows:
    """The requests of one or more batches: row and task in the tracker's tables, and the batch.

    The rest is as in BatchView; each array [n].
    """

    row: Array
    batch: Array
    task: Array
    match_tokens: Array
    output_tokens: Array
    recent_accept: Array
    draft_kv_lag: Array
    temperature: Array
    tpot_target_ms: Array


@dataclass(slots=True)
class Prices:
    """What steps of each batch take, in ms, each array [batches].

    decoding: rows that may draft; verify_ms [len(WIDTHS), batches]: of that many tokens a row;
    pass_ms: one pass of the draft model for all of them; medusa_ms, ngram_ms: drafting for all;
    catch_up_ms: one token of KV. prefill_share: of the step's tokens; slack: rows to the next edge,
    a share of the rows.
    """

    decoding: Array
    kv_tokens: Array
    verify_ms: Array
    pass_ms: Array
    medusa_ms: Array
    ngram_ms: Array
    catch_up_ms: Array
    prefill_share: Array
    slack: Array


@dataclass(slots=True)
class Shown:
    """Drafts that were scored, by verification or as shadows; each array [n], as in Drafts."""

    row: Array
    batch: Array
    task: Array
    proposer: Array
    match_tokens: Array
    accepted: Array
    seen: Array
    output_tokens: Array


class Tracker:
    """Estimates of hazards and speed, for some batches at once.

    Rejections over expected ones, discounted: by batch, channel (match bucket, draft model, Medusa)
    and place; by task; by request. speed f32 [3, batches]: tokens, net ms (prompts left out) and
    row-steps; last f32 [batches, 4]: shares of rows by proposer and depth of the step before.
    """

    def __init__(self, batches: int, rows: int, tasks: int) -> None:
        self.counts = np.zeros((2, batches, CHANNELS, DEPTH), np.float32)
        self.task = np.zeros((2, tasks, PROPOSERS), np.float32)
        self.request = np.zeros((2, rows, PROPOSERS), np.float32)
        self.speed = np.zeros((3, batches))
        self.last = np.zeros((batches, 4), np.float32)
        self.hazard = np.zeros((batches, CHANNELS, DEPTH), np.float32)
        self._refit()

    def begin(self, rows: Array) -> None:
        """Forget what was known of the requests in `rows`."""
        self.request[:, rows] = 0.0

    def begin_batches(self, batches: Array, tasks: Array) -> None:
        """Forget all that was known of some batches and their tasks."""
        self.counts[:, batches] = 0.0
        self.task[:, tasks] = 0.0
        self.speed[:, batches] = 0.0
        self.last[batches] = 0.0
        self._refit()

    def grow(self, rows: int) -> None:
        """Make room for so many more requests."""
        more = np.zeros((2, rows, PROPOSERS), np.float32)
        self.request = np.concatenate([self.request, more], axis=1)

    def ran(self, tokens: Array, net_ms: Array, rows: Array, last: Array) -> None:
        """Note one step of every batch: emitted tokens, its time without prompts, rows, `last`."""
        self.speed *= _SPEED_DECAY
        self.speed += (tokens, net_ms, rows)
        self.last[:] = last

    def learn(self, present: Array, shown: Shown) -> None:
        """Learn from a step in which the requests in rows `present` ran, and what it showed."""
        self.request[:, present] *= REQUEST_DECAY
        if not len(shown.row):
            return
        who, place = shown.proposer.astype(np.intp), np.arange(DEPTH)
        self._age(shown)
        channel = channel_of(who, shown.match_tokens)
        at_risk = place < np.minimum(shown.accepted + 1, shown.seen)[:, None]
        hazard = np.where(at_risk, self.hazard[shown.batch, channel], np.float32(0.0))
        weight = np.where(shown.output_tokens < FIRST_TOKENS, FIRST_WEIGHT, 1.0)
        weight = weight.astype(np.float32)
        failed = ((shown.accepted < shown.seen) & (shown.accepted < DEPTH)) * weight
        task_frailty = self._task_frailty()[shown.task, who]
        frailty = self._frailty(shown.row, who, task_frailty)
        cell = (shown.batch * CHANNELS + channel) * DEPTH
        shape = self.counts.shape[1:]
        fell = cell + np.minimum(shown.accepted, DEPTH - 1)
        self.counts[0] += np.bincount(fell, failed, self.counts[0].size).reshape(shape)
        exposure = at_risk * (frailty * weight)[:, None]
        self.counts[1] += np.bincount(
            (cell[:, None] + place).ravel(), exposure.ravel(), self.counts[1].size
        ).reshape(shape)
        expected = hazard.sum(axis=1) * weight
        _add(self.request, 0, shown.row, who, failed)
        _add(self.request, 1, shown.row, who, expected)
        _add(self.task, 0, shown.task, who, failed)
        _add(self.task, 1, shown.task, who, expected * np.sqrt(frailty / task_frailty))
        self._refit()

    def columns(self, rows: Rows, prices: Prices) -> Array:
        """Return f32 [n, len(FEATURES)], raw."""
        out = np.empty((len(rows.row), len(FEATURES)), np.float32)
        of_batch, ms_a_token = self._of_batch(prices)
        out[:, : len(_OF_BATCH)] = of_batch[rows.batch]
        at, n = len(_OF_BATCH), len(_OF_ROW)
        out[:, at : at + n] = self._of_row(rows, ms_a_token).T
        self._accepts(rows, out[:, at + n :])
        return out

    def _of_batch(self, prices: Prices) -> tuple[Array, Array]:
        """Return the features [batches, n] of batches, and the ms that a row waits for a token."""
        tokens, net_ms, row_steps = self.speed
        rows = np.maximum(prices.decoding, 1.0)
        plain = np.maximum(prices.verify_ms[0], 1e-9)
        cold = net_ms <= 0.0
        rate = np.where(cold, rows / plain, tokens / np.where(cold, 1.0, net_ms))
        a_row = np.where(cold, 1.0, tokens / np.where(cold, 1.0, np.maximum(row_steps, 1.0)))
        slopes = np.diff(prices.verify_ms, axis=0) / np.diff(WIDTHS)[:, None]
        value = rate / rows
        columns = (
            np.log2(rows) / 8.0, np.log2(1.0 + prices.kv_tokens / 1024.0) / 8.0,
            prices.prefill_share, prices.slack, a_row / 4.0,
            *(value * slopes), value * prices.pass_ms,
            np.log2(1.0 + rate * prices.pass_ms) / 4.0, value * prices.medusa_ms,
            value * prices.ngram_ms, rate * prices.catch_up_ms, *self.last.T,
            np.log2(np.maximum(rows / plain / rate, 1e-3)),
        )  # fmt: skip
        return np.stack(columns, axis=1).astype(np.float32), rows / rate

    def _of_row(self, rows: Rows, ms_a_token: Array) -> Array:
        target = np.where(rows.tpot_target_ms > 0.0, rows.tpot_target_ms, np.inf)
        known = np.log1p(self.request[1, rows.row]).T
        return np.stack(
            (
                match_bucket(rows.match_tokens) / 7.0,
                np.minimum(rows.recent_accept, 9.0) / 4.0,
                np.log2(1.0 + rows.output_tokens) / 8.0,
                rows.output_tokens < FIRST_TOKENS,
                np.log2(1.0 + behind(rows.draft_kv_lag)) / 8.0,
                np.minimum(rows.temperature, 2.0),
                np.minimum(ms_a_token[rows.batch] / target, 4.0),
                known[NGRAM],
                known[DRAFT_MODEL],
                known[MEDUSA],
            )
        )

    def _accepts(self, rows: Rows, out: Array) -> None:
        """Fill f32 [n, actions - 1] with the tokens that each action should get accepted."""
        task_frailty = self._task_frailty()[rows.task]
        at = 0
        for who, ks in ((NGRAM, _BY_PASSES), (DRAFT_MODEL, _BY_PASSES), (MEDUSA, _BY_HEADS)):
            frailty = self._frailty(rows.row, who, task_frailty[:, who])
            hazard = self.hazard[rows.batch, channel_of(np.asarray(who), rows.match_tokens)]
            total, survival = np.zeros(len(out), np.float32), np.ones(len(out), np.float32)
            if who == NGRAM:
                survival[rows.match_tokens <= 0] = 0.0
            # A place at a time: accumulating along short rows is several times slower.
            for place in range(ks[-1]):
                survival *= 1.0 - np.minimum(hazard[:, place] * frailty, HAZARD_CEILING)
                total += survival
                if place + 1 in ks:
                    out[:, at] = total
                    at += 1

    def _age(self, shown: Shown) -> None:
        drafts = np.bincount(shown.batch, minlength=self.counts.shape[1])
        self.counts *= (0.5 ** (drafts / _BATCH_HALF_LIFE)).astype(np.float32)[:, None, None]
        drafts = np.bincount(shown.task, minlength=self.task.shape[1])
        self.task *= (0.5 ** (drafts / TASK_HALF_LIFE_ROWS)).astype(np.float32)[:, None]

    def _task_frailty(self) -> Array:
        frailty: Array = (TASK_STRENGTH + self.task[0]) / (TASK_STRENGTH + self.task[1])
        return frailty

    def _frailty(self, row: Array, who: Array | int, task_frailty: Array) -> Array:
        rejected, expected = self.request[:, row, who]
        frailty: Array = (REQUEST_STRENGTH * task_frailty + rejected) / (
            REQUEST_STRENGTH + expected
        )
        return frailty

    def _refit(self) -> None:
        """Shrink each place to the shallower ones near it, and those to the prior."""
        rejected, exposed = self.counts
        near = (PRIOR_ROWS * _PRIOR_HAZARD[:, None] + rejected @ _NEIGHBOURS) / (
            PRIOR_ROWS + exposed @ _NEIGHBOURS
        )
        hazard = (NEIGHBOUR_ROWS * near + rejected) / (NEIGHBOUR_ROWS + exposed)
        self.hazard = np.clip(hazard, HAZARD_FLOOR, HAZARD_CEILING).astype(np.float32)

    def state(self) -> dict[str, Array]:
        """Return everything that later features depend on."""
        return {n: getattr(self, n).copy() for n in ("counts", "task", "request", "speed", "last")}

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where a shape does not fit."""
        for name, own in self.state().items():
            if name not in state or np.shape(state[name])[-1:] != own.shape[-1:]:
                raise ValueError(f"the features' state lacks '{name}' or has another shape")
            setattr(self, name, np.array(state[name], own.dtype))
        self._refit()


def allowed(match_tokens: Array, max_k: Array, proposer_mask: Array, prefill: Array) -> Array:
    """Return bool [n, actions]: what each row may do; not drafting, always."""
    deep = np.where(prefill, 0, max_k)[:, None] >= K_OF
    deep &= ((proposer_mask[:, None] >> PROPOSER_OF) & 1).astype(bool)
    deep &= (match_tokens > 0)[:, None] | (PROPOSER_OF != NGRAM)
    deep[:, 0] = True
    return deep


def _add(table: Array, part: int, row: Array, who: Array, what: Array) -> None:
    """Add to table[part] at (row, who), where pairs may repeat."""
    total = np.bincount(row * PROPOSERS + who, what, table[part].size)
    table[part] += total.reshape(table[part].shape)
