"""How fast a policy was, at the same work: what makes figures of a changing load comparable.

Episodes are so many steps long, whatever they emit. Where the load changes, tokens over time would
then favour whoever spends its time where many requests run and crawls where few do: a static could
beat an oracle. So each stage counts as much as no speculation emits in it. And who is quick meets
more of the prompts that follow within as many steps, long ones by chance: they count as long as
they take without speculation, for they come with the tokens, whoever guessed those.
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
    """Tokens per second of work like that of `none`: its tokens in each stage, and its prompts.

    none: episodes without speculation, of the seeds that are judged. stage i64 [BUCKETS]: see
    `stages_of`.
    """

    def __init__(self, stage: Array, none: Sequence[Episode]) -> None:
        self._in = stage[:, None] == np.unique(stage)
        self._tokens = self._sums(none, "bucket_tokens", BUCKETS).sum(axis=0)
        self._prompts_s = sum(float(e.bucket_prompts_s.sum()) for e in none)

    def __call__(self, own: Sequence[Episode]) -> float:
        """Return the goodput of episodes, of all seeds together."""
        return float(self._rates(own, np.arange(len(own) * BUCKETS), BUCKETS))

    def interval(self, own: Sequence[Episode], other: Sequence[Episode]) -> tuple[float, float]:
        """Return the 95% interval of a ratio of goodputs, by a paired block bootstrap.

        Blocks of consecutive steps of one seed are drawn together for both, since requests of one
        step share its time and neighbouring steps share their requests.
        """
        blocks = len(own) * _BLOCKS
        drawn = np.random.default_rng(0).integers(0, blocks, (_RESAMPLES, blocks))
        ratio = self._rates(own, drawn, _BLOCKS) / self._rates(other, drawn, _BLOCKS)
        low, high = np.nanpercentile(ratio, [2.5, 97.5])
        return float(low), float(high)

    def _rates(self, episodes: Sequence[Episode], drawn: Array, blocks: int) -> Array:
        """Return goodput [...] of blocks drawn [..., n]; nan where a stage is missing."""
        tokens, time_s, prompts_s = (
            self._sums(episodes, name, blocks)[drawn].sum(axis=-2)
            for name in ("bucket_tokens", "bucket_s", "bucket_prompts_s")
        )
        unknown = np.full(tokens.shape, np.nan)
        pace = np.divide(time_s - prompts_s, tokens, out=unknown, where=tokens > 0)
        took_s = (self._tokens * pace).sum(axis=-1) + self._prompts_s
        rates: Array = self._tokens.sum() / took_s
        return rates

    def _sums(self, episodes: Sequence[Episode], name: str, blocks: int) -> Array:
        """Return a column [seeds * blocks, stages], summed over blocks of consecutive buckets."""
        stages = self._in.shape[1]
        parts = [getattr(e, name)[:, None] * self._in for e in episodes]
        found: Array = np.concatenate([p.reshape(blocks, -1, stages).sum(axis=1) for p in parts])
        return found
