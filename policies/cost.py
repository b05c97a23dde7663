"""What a step takes, learned where it runs: lines for a start, then what was really seen.

Every line is a ridge regression over the last steps whose prior is a shape without a unit (a step
of many tokens against a step of one); the unit is learned from the first steps. Outliers weigh
little, for a shared machine has spikes. The target's pass has a curve instead (`cost_curve.py`), so
that a knee is seen where there is one; it is made to rise with the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from parlay.policies.cost_curve import EDGES, Curve
from parlay.policies.types import DRAFT_MODEL, MEDUSA, NGRAM, PROPOSERS, Array, StepOutcome

TOKENS_UNIT = 32.0
KV_UNIT = 4096.0
_WINDOW = 96
_REFIT_EACH = 32
_REFIT_EVERY = 4
_NOISE = 0.08
_SPREAD_LEAST = 0.02
_LEAST_SHARE = 0.05
LEAST_MS, MOST_MS = 1e-4, 1e7
"""What lies outside is no time of a step, but a clock gone wrong."""
_PREFILL_MOST = 64
_SHORT = 64
"""Of so few prices, to look whether they rise takes longer than to make them."""

_SURPRISE_PRIOR = 16.0
_SURPRISE_DISCOUNT = 0.98
_SURPRISE_FADE = 0.998
"""A step's share of what is known of the other kind of step fades: a mark-up that keeps a policy
from drafting would keep itself."""
_MOST_SURPRISE = 0.3


_CURRENT_LAG = 2
"""Tokens that the draft model reads in its first pass anyway."""


def behind(draft_kv_lag: Array) -> Array:
    """Return how many tokens the draft model must catch up before it drafts."""
    owed: Array = np.maximum(draft_kv_lag - _CURRENT_LAG, 0)
    return owed


def padded(tokens: Array, bucket_edges: Array) -> Array:
    """Return the tokens that steps of `tokens` really run; beyond the last edge, as they are."""
    if not len(bucket_edges):
        return tokens
    place = np.minimum(np.searchsorted(bucket_edges, tokens), len(bucket_edges) - 1)
    run: Array = np.maximum(tokens, bucket_edges[place])
    return run


class Line:
    """y_ms = weights . x over a window of steps; robust to spikes.

    Ridge regression towards a shape [n], whose unit is the median step and each of whose weights is
    known to a relative sd [n].
    """

    def __init__(self, shape: tuple[float, ...], sd: tuple[float, ...]) -> None:
        self.shape, self.sd = np.asarray(shape), np.asarray(sd)
        self.count = 0
        self._weights = self.shape.copy()
        self._x = np.zeros((_WINDOW, len(shape)))
        self._y = np.zeros(_WINDOW)

    def weights(self, default_scale: float = 1.0) -> Array:
        """Return the weights in ms; before anything was seen, the shape at `default_scale`."""
        return self._weights if self.count else self.shape * default_scale

    def add(self, x: Array, y_ms: float) -> None:
        """Learn from one step, as far as it can be one."""
        if not (LEAST_MS <= y_ms <= MOST_MS and float(x @ self.shape) > 0.0):
            return
        self._x[self.count % _WINDOW], self._y[self.count % _WINDOW] = x, y_ms
        self.count += 1
        if self.count <= _REFIT_EACH or self.count % _REFIT_EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        n = min(self.count, _WINDOW)
        x, usual = self._x[:n], self._x[:n] @ self.shape
        scale = _median(self._y[:n] / usual)
        y, ridge = self._y[:n] / scale, np.diag(1.0 / self.sd**2)
        # From the shape each time: started from the last fit, a bad one would excuse itself.
        weights = self.shape
        for _ in range(3):
            expected = np.maximum(x @ weights, _LEAST_SHARE * usual)
            miss = np.abs(y / expected - 1.0)
            spread = max(1.5 * _median(miss), _SPREAD_LEAST)
            trust = np.minimum(1.0, 2.0 * spread / np.maximum(miss, 1e-9))
            weighted = x * (trust / (_NOISE * expected) ** 2)[:, None]
            solved = np.linalg.solve(weighted.T @ x + ridge, weighted.T @ y + ridge @ self.shape)
            weights = np.maximum(solved, 0.0)
        self._weights = weights * scale

    def state(self) -> Array:
        """Return everything as one vector."""
        return np.concatenate([[float(self.count)], self._weights, self._x.ravel(), self._y])

    def load(self, state: Array) -> None:
        """Take a vector from `state()`; raises ValueError where its length does not fit."""
        n = len(self.shape)
        cuts = np.cumsum([1, n, _WINDOW * n, _WINDOW])
        if np.shape(state) != (cuts[-1],):
            raise ValueError(
                f"a line of {n} weights needs {cuts[-1]} numbers, not {np.shape(state)}"
            )
        count, weights, x, y, _ = np.split(np.asarray(state, float), cuts)
        self.count = int(count[0])
        self._weights, self._x, self._y = weights.copy(), x.reshape(_WINDOW, n).copy(), y.copy()


class StepTime:
    """Step time from tokens verified, KV read, passes and tokens drafted, and KV caught up."""

    def __init__(self) -> None:
        # Against a step of no tokens 32 take another .5x (CPU .7x, GPU .1x).
        self.verify = Line((1.0, 0.5), (0.3, 0.3))
        self.overhead = Line((0.04, 0.02), (0.05, 0.03))
        # Against a verified token: a pass of the draft model, a token in it, a token caught up.
        self.draft = Line((0.06, 0.003, 0.002), (0.06, 0.003, 0.002))
        # A pass of Medusa's heads, once a step however many tokens they draft, and such a token.
        self.heads = Line((0.05, 0.001), (0.05, 0.001))
        self.ngram_token_ms = 0.0
        self.curve = Curve()
        # Without drafts and with them: the sum of steps' surprises, and their number, discounted.
        self._surprise = [[0.0, 0.0], [0.0, 0.0]]

    def observe(self, outcome: StepOutcome, catch_up_tokens: float) -> None:
        """Learn from a step, in which the draft model caught up `catch_up_tokens` of KV."""
        tokens, pads = float(outcome.padded_tokens), _padding(outcome)
        drafted, by_heads = _drafted_by(outcome, DRAFT_MODEL), _drafted_by(outcome, MEDUSA)
        passes = (float(outcome.draft_depth), drafted, catch_up_tokens)
        self._compare(outcome, pads, passes, by_heads)
        if tokens >= 1.0 and outcome.prefill_tokens <= _PREFILL_MOST:
            x = np.array([1.0, tokens / TOKENS_UNIT])
            if LEAST_MS <= outcome.verify_ms <= MOST_MS:
                kv = outcome.kv_tokens / KV_UNIT
                alone_ms = self.curve.add(tokens, kv, pads / TOKENS_UNIT, outcome.verify_ms)
                self.verify.add(x, alone_ms)
            rest = outcome.step_ms - outcome.verify_ms - sum(outcome.draft_ms.tolist())
            self.overhead.add(x, max(rest, 1e-3 * outcome.verify_ms))
        if outcome.draft_depth > 0 and drafted > 0:
            self.draft.add(np.array(passes), float(outcome.draft_ms[DRAFT_MODEL]))
        if by_heads > 0:
            self.heads.add(np.array((1.0, by_heads)), float(outcome.draft_ms[MEDUSA]))
        looked_up = _drafted_by(outcome, NGRAM)
        spent = float(outcome.draft_ms[NGRAM])
        if looked_up > 0 and 0.0 <= spent < np.inf:
            self.ngram_token_ms += 0.05 * (min(spent / looked_up, 1.0) - self.ngram_token_ms)

    def _compare(
        self,
        outcome: StepOutcome,
        pads: float,
        passes: tuple[float, float, float],
        by_heads: float,
    ) -> None:
        """Note by how much a step took longer than these lines say, with drafts and without.

        passes: of the draft model; tokens drafted in them; tokens caught up. by_heads: tokens that
        Medusa drafted.
        """
        if outcome.prefill_tokens or not self.started or not outcome.padded_tokens:
            return
        if not LEAST_MS <= outcome.step_ms <= MOST_MS:
            return
        expected_ms = self.verify_one_ms(float(outcome.padded_tokens), float(outcome.kv_tokens))
        expected_ms += self.pad_ms() * pads
        if outcome.draft_depth > 0:
            each_ms = self.draft.weights(self._scale()).tolist()
            expected_ms += sum(n * ms for n, ms in zip(passes, each_ms, strict=True))
        if by_heads > 0:
            a_pass, a_token = self.heads.weights(self._scale()).tolist()
            expected_ms += a_pass + by_heads * a_token
        surprise = math.log(outcome.step_ms / expected_ms)
        surprise = min(max(surprise, -_MOST_SURPRISE), _MOST_SURPRISE)
        kind = int(np.count_nonzero(outcome.drafted_k) > 0)
        (total, count), other = self._surprise[kind], self._surprise[1 - kind]
        self._surprise[kind] = [
            _SURPRISE_DISCOUNT * total + surprise,
            _SURPRISE_DISCOUNT * count + 1.0,
        ]
        self._surprise[1 - kind] = [_SURPRISE_FADE * part for part in other]

    def markup(self) -> float:
        """Return how many times as long as these lines say a step takes once anything is drafted.

        Against steps without drafts: what the lines miss of both kinds changes no choice.
        """
        plain, drafting = (total / (_SURPRISE_PRIOR + count) for total, count in self._surprise)
        return math.exp(drafting - plain)

    @property
    def started(self) -> bool:
        """Say whether any step has been seen; before that times have no unit."""
        return self.curve.reach[1] > 0.0

    @property
    def taught(self) -> Array:
        """Return the token counts, in steps of a coarse scale, at which steps taught the curve."""
        counts: Array = EDGES[self.curve.seen > 0.0]
        return counts

    def verify_ms(self, tokens: Array, kv_tokens: float) -> Array:
        """Return the time of a step of so many tokens, f64, rising and above 0 as they rise."""
        line = self._alone_ms(tokens)
        line += self.curve.unit_ms * self.curve.kv * kv_tokens / KV_UNIT
        host, host_token = self.overhead.weights(self._scale()).tolist()
        line += host_token / TOKENS_UNIT * tokens + host
        line = np.maximum(line, 1e-6)
        if len(line) < _SHORT or (line[1:] < line[:-1]).any():
            np.maximum.accumulate(line, out=line)
        return line

    def _alone_ms(self, tokens: Array) -> Array:
        """Return what tokens, rising, take without KV: by the curve, beyond all that was seen by
        the line from its ends.
        """  # noqa: D205
        fixed, per_token = self.verify.weights().tolist()
        end, inside = len(tokens), tokens
        if self.started:
            # All that are beyond have the same last one inside.
            low, high = self.curve.reach
            end = min(int(tokens.searchsorted(high, "right")) + 1, end)
            inside = np.minimum(np.maximum(tokens[:end], low), high)
        ms = self.curve.ms(inside)
        anchor = np.maximum(fixed + per_token / TOKENS_UNIT * inside, 1e-9)
        took: Array = fixed + per_token / TOKENS_UNIT * tokens
        for part, last in ((slice(end), slice(None)), (slice(end, None), slice(-1, None))):
            took[part] /= anchor[last]
            took[part] *= ms[last]
        return took

    def verify_one_ms(self, tokens: float, kv_tokens: float) -> float:
        """Return `verify_ms` of one number of tokens, 1 or more, without arrays."""
        fixed, per_token = self.verify.weights().tolist()
        low, high = self.curve.reach
        inside = min(max(tokens, low), high) if self.started else tokens
        line = self.curve.one_ms(inside) * (fixed + per_token / TOKENS_UNIT * tokens)
        line /= max(fixed + per_token / TOKENS_UNIT * inside, 1e-9)
        line += self.curve.unit_ms * self.curve.kv * kv_tokens / KV_UNIT
        host, host_token = self.overhead.weights(self._scale()).tolist()
        return max(float(line + host_token / TOKENS_UNIT * tokens + host), 1e-6)

    def pad_ms(self) -> float:
        """Return what each token takes by which a row is shorter than the longest."""
        return self.curve.unit_ms * self.curve.pad / TOKENS_UNIT

    def draft_ms(self) -> tuple[float, Array, float]:
        """Return what a pass of the draft model, each proposer's token, a caught-up token take."""
        a_pass, a_token, catch_up = self.draft.weights(self._scale()).tolist()
        token_ms = np.zeros(PROPOSERS)
        token_ms[NGRAM] = self.ngram_token_ms
        token_ms[DRAFT_MODEL] = a_token
        token_ms[MEDUSA] = self.heads.weights(self._scale())[1]
        return a_pass, token_ms, catch_up

    def heads_ms(self) -> float:
        """Return what a pass of Medusa's heads takes, whatever it drafts."""
        return float(self.heads.weights(self._scale())[0])

    def _scale(self) -> float:
        return self.curve.unit_ms

    def state(self) -> dict[str, Array]:
        """Return everything that later prices depend on."""
        return {
            "verify": self.verify.state(),
            "overhead": self.overhead.state(),
            "draft": self.draft.state(),
            "heads": self.heads.state(),
            "ngram_token_ms": np.asarray(self.ngram_token_ms),
            "surprise": np.array(self._surprise),
            **self.curve.state(),
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        missing = set(self.state()) - set(state)
        if missing:
            raise ValueError("the cost state is incomplete or of another version")
        for name, line in (
            ("verify", self.verify),
            ("overhead", self.overhead),
            ("draft", self.draft),
            ("heads", self.heads),
        ):
            line.load(state[name])
        self.ngram_token_ms = float(state["ngram_token_ms"])
        self._surprise = np.array(state["surprise"], float).reshape(2, 2).tolist()
        self.curve.load(state)


def _median(values: Array) -> float:
    """Return the median of one or more numbers, without the checks of numpy's."""
    low, high = (len(values) - 1) // 2, len(values) // 2
    parted = np.partition(values, (low, high))
    return 0.5 * (float(parted[low]) + float(parted[high]))


def _padding(outcome: StepOutcome) -> float:
    """Return how many tokens rows of a step without prompts would need to be all of one length."""
    k = outcome.verified_k
    if outcome.prefill_tokens or len(k) < 2:
        return 0.0
    return float(len(k) * int(k.max()) - k.sum())


def _drafted_by(outcome: StepOutcome, proposer: int) -> float:
    """Return how many tokens a proposer drafted in the step."""
    if len(outcome) == 1:
        return float(outcome.drafted_k[0]) if outcome.proposer[0] == proposer else 0.0
    return float(outcome.drafted_k[outcome.proposer == proposer].sum())
