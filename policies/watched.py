"""What a served policy sees: features of a view, from the outcomes of the steps before it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from parlay.policies.cost import StepTime, behind, padded
from parlay.policies.evidence import drafts_of
from parlay.policies.features import DEPTH, WIDTHS, Prices, Rows, Shown, Tracker
from parlay.policies.types import (
    DRAFT_MODEL,
    MEDUSA,
    NGRAM,
    PROPOSERS,
    Array,
    BatchView,
    StepOutcome,
)

_TASKS = 64
"""Tasks are told apart by their hash; two that fall together share what is known of them."""
_FORGET_STEPS = 512
_SWEEP_STEPS = 64
_LONG_PROMPT_TOKENS = 64
UNSEEN_SHARE = np.array([0.0, 0.01, 0.0, 0.05])
"""What drafting is thought to take before it was seen, of a plain step."""
_DRAFTING_WEIGHT = 0.05


class Watched:
    """One engine as a learned policy sees it: tables of `features.py`, step times as they come.

    rows intp [rows]: each request of the last view in the tables; fresh: those of new requests.
    """

    def __init__(self) -> None:
        self.tracker = Tracker(1, 0, _TASKS)
        self.step_time = StepTime()
        self.requests = Requests()
        self.drafting_ms = np.full(PROPOSERS, np.nan)
        self.rows = self.fresh = np.zeros(0, np.intp)
        self._lag: tuple[Array, Array] = (np.zeros(0, np.uint64), np.zeros(0, np.int32))

    def features(self, view: BatchView) -> Array:
        """Return f32 [rows, features], raw."""
        self._lag = (view.request_id, view.draft_kv_lag)
        rows, fresh = self.requests.rows_of(view.request_id, view.output_tokens)
        self.rows, self.fresh = rows, fresh
        if (more := self.requests.size - self.tracker.request.shape[1]) > 0:
            self.tracker.grow(more)
        self.tracker.begin(fresh)
        n = len(view)
        seen = Rows(
            row=rows,
            batch=np.zeros(n, np.intp),
            task=(view.task % _TASKS).astype(np.intp),
            match_tokens=view.match_tokens,
            output_tokens=view.output_tokens,
            recent_accept=view.recent_accept,
            draft_kv_lag=view.draft_kv_lag,
            temperature=view.temperature,
            tpot_target_ms=view.tpot_target_ms,
        )
        return self.tracker.columns(seen, self._prices(view))

    def _prices(self, view: BatchView) -> Prices:
        """Return the features' prices as far as steps have taught them."""
        decoding = max(int((view.prefill_tokens == 0).sum()), 1)
        prompts = int(view.prefill_tokens.sum())
        fed = np.array([decoding + prompts])
        tokens = padded(decoding * np.array(WIDTHS), view.bucket_edges)
        verify_ms = self.step_time.verify_ms(tokens, float(view.kv_tokens))
        a_pass, token_ms, catch_up_ms = self.step_time.draft_ms()
        guess = UNSEEN_SHARE * verify_ms[0]
        drafting = np.where(np.isnan(self.drafting_ms), guess, self.drafting_ms)
        return Prices(
            decoding=np.array([decoding]),
            kv_tokens=np.array([view.kv_tokens]),
            verify_ms=verify_ms[:, None],
            pass_ms=np.array([a_pass + decoding * token_ms[DRAFT_MODEL]]),
            medusa_ms=drafting[[MEDUSA]],
            ngram_ms=drafting[[NGRAM]],
            catch_up_ms=np.array([catch_up_ms]) if (view.draft_kv_lag > 1).any() else np.zeros(1),
            prefill_share=prompts / fed,
            slack=np.minimum((padded(fed, view.bucket_edges) - fed) / decoding, 4.0),
        )

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from one finished step."""
        ids, lag = self._lag
        modelled = outcome.request_id[outcome.proposer == DRAFT_MODEL]
        self.step_time.observe(outcome, float(behind(lag[np.isin(ids, modelled)]).sum()))
        rows = self.requests.known(outcome.request_id)
        there, output = rows >= 0, self.requests.output
        drafts = drafts_of(outcome, rows, self.requests.known(outcome.shadow.request_id), None)
        task = np.zeros(self.requests.size, np.intp)
        task[rows[there]] = outcome.task[there] % _TASKS
        shown = Shown(
            row=drafts.row,
            batch=np.zeros(len(drafts.row), np.intp),
            task=task[drafts.row],
            proposer=drafts.proposer,
            match_tokens=drafts.match_tokens,
            accepted=drafts.accepted,
            seen=np.minimum(drafts.seen, DEPTH),
            output_tokens=output[drafts.row],
        )
        self.tracker.learn(rows[there], shown)
        output[rows[there]] += outcome.emitted[there]
        self._clock(outcome)

    def _clock(self, outcome: StepOutcome) -> None:
        """Learn how fast the batch is, prompts left out, and what Medusa and the n-gram take."""
        net_ms = outcome.step_ms
        if not (0.0 < net_ms < np.inf and len(outcome)):
            return
        for proposer in (NGRAM, MEDUSA):
            if (outcome.proposer == proposer).any():
                told, known = float(outcome.draft_ms[proposer]), self.drafting_ms[proposer]
                weight = 1.0 if np.isnan(known) else _DRAFTING_WEIGHT
                self.drafting_ms[proposer] = np.nan_to_num(known) * (1.0 - weight) + weight * told
        if outcome.prefill_tokens > _LONG_PROMPT_TOKENS:
            if not self.step_time.started:
                return
            left = np.array([max(outcome.padded_tokens - outcome.prefill_tokens, 1)])
            verify_ms = float(self.step_time.verify_ms(left, float(outcome.kv_tokens))[0])
            net_ms = min(net_ms, verify_ms + float(outcome.draft_ms.sum()))
        ran = outcome.emitted > 0
        deep = outcome.drafted_k[outcome.proposer == DRAFT_MODEL].max(initial=0)
        count = np.bincount(outcome.proposer[ran], minlength=PROPOSERS)[1:PROPOSERS]
        last = np.append(count / max(int(ran.sum()), 1), deep / DEPTH)
        tokens = np.array([float(outcome.emitted.sum())])
        self.tracker.ran(tokens, np.array([net_ms]), np.array([float(ran.sum())]), last[None])

    def state(self) -> dict[str, Array]:
        """Return everything that later features depend on."""
        parts = {
            "tracker": self.tracker.state(),
            "cost": self.step_time.state(),
            "requests": self.requests.state(),
        }
        flat = {f"{part}.{key}": value for part, of in parts.items() for key, value in of.items()}
        flat["drafting_ms"] = self.drafting_ms.copy()
        flat["lag.request_id"], flat["lag.tokens"] = self._lag
        return flat

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        if missing := set(self.state()) - set(state):
            raise ValueError(f"learned: the state lacks {', '.join(sorted(missing)[:3])}")
        for part, load in (
            ("tracker.", self.tracker.load),
            ("cost.", self.step_time.load),
            ("requests.", self.requests.load),
        ):
            load({k.removeprefix(part): v for k, v in state.items() if k.startswith(part)})
        self.drafting_ms = np.array(state["drafting_ms"])
        self._lag = (state["lag.request_id"].copy(), state["lag.tokens"].copy())


class Requests:
    """Which row of the tables each request has, and its output tokens by row."""

    def __init__(self) -> None:
        self.output = np.zeros(0, np.int64)
        self._row: dict[int, int] = {}
        self._free: list[int] = []
        self._seen = np.zeros(0, np.int64)
        self._steps = 0

    @property
    def size(self) -> int:
        """Return how many rows there are."""
        return len(self.output)

    def rows_of(self, request_id: Array, output_tokens: Array) -> tuple[Array, Array]:
        """Return each request's row, and those of requests that are new.

        Less output than before is another request: an engine that restarts counts ids from 1 again.
        """
        self._steps += 1
        if self._steps % _SWEEP_STEPS == 0:
            self._forget()
        rows = self.known(request_id)
        back = (rows >= 0) & (output_tokens < self.output[rows] if self.size else False)
        new = np.flatnonzero((rows < 0) | back)
        for place in new.tolist():
            if rows[place] < 0:
                rows[place] = self._add(int(request_id[place]))
        self.output[rows] = output_tokens
        self._seen[rows] = self._steps
        return rows, rows[new]

    def known(self, request_id: Array) -> Array:
        """Return each request's row, -1 where it is not known."""
        return np.array([self._row.get(i, -1) for i in request_id.tolist()], np.intp)

    def _add(self, request_id: int) -> int:
        if not self._free:
            more = max(64, self.size)
            self._free.extend(range(self.size + more - 1, self.size - 1, -1))
            self.output = np.concatenate([self.output, np.zeros(more, np.int64)])
            self._seen = np.concatenate([self._seen, np.zeros(more, np.int64)])
        row = self._row[request_id] = self._free.pop()
        return row

    def _forget(self) -> None:
        gone = [i for i, row in self._row.items() if self._steps - self._seen[row] > _FORGET_STEPS]
        for request_id in gone:
            self._free.append(self._row.pop(request_id))

    def state(self) -> dict[str, Array]:
        """Return every request with its row."""
        return {
            "request_id": np.fromiter(self._row, np.uint64, len(self._row)),
            "row": np.fromiter(self._row.values(), np.int64, len(self._row)),
            "output": self.output.copy(),
            "seen": self._seen.copy(),
            "steps": np.asarray(self._steps),
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        ids, rows, size = state["request_id"].tolist(), state["row"].tolist(), len(state["output"])
        if len(ids) != len(rows) or len(set(rows)) != len(rows) or max(rows, default=-1) >= size:
            raise ValueError("learned: the state's requests do not fit its rows")
        self._row = dict(zip(ids, rows, strict=True))
        self._free = sorted(set(range(size)) - set(rows), reverse=True)
        self.output, self._seen = state["output"].copy(), state["seen"].copy()
        self._steps = int(state["steps"])
