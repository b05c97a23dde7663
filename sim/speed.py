"""How fast a policy was, at the same work: what makes figures of a changing load comparable.

Episodes are so many steps long, whatever they emit. Where the load changes, tokens over time would
then favour whoever spends its time where many requests run and crawls where few do: a static could
beat an oracle. So each stage counts as much as no speculation emits in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parlay.policies.types import Array
from parlay.sim.scenario import Scenario
from parlay.sim.tally import BUCKETS, Episode

_BLOCKS, _RESAMPLES = 20, 1000


def stages_of(scenario: Scenario, steps: int) -> Array:
    """Return the stage that each bucket of `steps` measured steps lies in, i64 [BUCKETS]."""
    number = {id(stage): i for i, stage in enumerate(scenario.stages)}
    middle = ((np.arange(BUCKETS) + 0.5) * steps / BUCKETS).astype(int)
    return np.array([number[id(scenario.stage_at(scenario.warm_up_steps + m))] for m in middle])


class Speed:
    """Tokens per second of work like that of `none` in each stage.

    none: episodes without speculation, of the seeds that are judged. stage i64 [BUCKETS]: see
    `stages_of`; one stage makes it tokens over time.
    """

    def __init__(self, stage: Array, none: Sequence[Episode]) -> None:
        self._in = stage[:, None] == np.unique(stage)
        tokens, _ = self._sums(none, BUCKETS)
        self._work = tokens.sum(axis=0)

    def __call__(self, own: Sequence[Episode]) -> float:
        """Return the goodput of episodes, of all seeds together."""
        tokens, time_s = self._sums(own, BUCKETS)
        return float(self._rate(tokens.sum(axis=0), time_s.sum(axis=0)))

    def interval(self, own: Sequence[Episode], other: Sequence[Episode]) -> tuple[float, float]:
        """Return the 95% interval of a ratio of goodputs, by a paired block bootstrap.

        Blocks of consecutive steps of one seed are drawn together for both, since requests of one
        step share its time and neighbouring steps share their requests.
        """
        (a, a_s), (b, b_s) = self._sums(own, _BLOCKS), self._sums(other, _BLOCKS)
        drawn = np.random.default_rng(0).integers(0, len(a), (_RESAMPLES, len(a)))
        ratio = self._rate(a[drawn].sum(1), a_s[drawn].sum(1))
        ratio /= self._rate(b[drawn].sum(1), b_s[drawn].sum(1))
        low, high = np.nanpercentile(ratio, [2.5, 97.5])
        return float(low), float(high)

    def _rate(self, tokens: Array, time_s: Array) -> Array:
        """Return goodput [...] of tokens and time [..., stages]; nan where a stage is missing."""
        pace = np.divide(time_s, tokens, out=np.full(tokens.shape, np.nan), where=tokens > 0)
        rate: Array = self._work.sum() / (self._work * pace).sum(axis=-1)
        return rate

    def _sums(self, episodes: Sequence[Episode], blocks: int) -> tuple[Array, Array]:
        """Return tokens and time [seeds * blocks, stages], in blocks of consecutive buckets."""
        found = [
            np.concatenate([
                (getattr(e, name)[:, None] * self._in).reshape(blocks, -1, self._in.shape[1]).sum(1)
                for e in episodes
            ])
            for name in ("bucket_tokens", "bucket_s")
        ]  # fmt: skip
        return found[0], found[1]
