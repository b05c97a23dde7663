"""Environments to train in: a batch as one gymnasium environment, or each request slot as one row.

Reward. Goodput is a ratio of long-run means, tokens over time, and no mean of per-step ratios: that
would count a quick step as much as a slow one and favour plans that are quick when little is
emitted. So the reward is linear, as for the average reward of a semi-Markov process (Dinkelbach
1967; Schwartz 1993): emitted - goodput * ms, with the running goodput of the policy itself. Over a
batch its mean is 0 for the policy whose goodput it is, and above 0 for just those that have more.

Credit. A row pays for the time that its own draft added to the step, and for an equal part of what
the step would have taken without it. The second does not depend on what the row did, so that a row
gains by an action exactly what the batch gains (a difference reward: Wolpert and Tumer 2001); with
equal parts of the whole time it would pay a batch-th of what its draft costs, and all would draft
too much. What rows pay need not add up to the step.

Time in which prompts are computed is left out of time and goodput: a token brings the next prompt
nearer by as much whoever guessed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from parlay.policies.features import ACTION_NAMES, FEATURES, K_OF, LAST, PROPOSER_OF
from parlay.policies.types import Array
from parlay.sim.fast import FastLoop
from parlay.sim.fast_price import Stepped
from parlay.sim.fast_seen import features_of
from parlay.sim.kinds import Kind

_BOUND = 8.0
_RATE_DECAY = 0.995
_HIDDEN_SHARE = 0.1
"""Of the steps in which a batch sees nothing of what it drafted last. A pass that nobody else asks
for pays for no row: seen at a fresh start alone, that would keep a large batch from ever drafting.
Hidden from all rows at once, it is a place where all of them learn to begin together."""
_F32 = np.float32


class Reward:
    """Turns steps into rewards; keeps each batch's running goodput.

    tpot_target_ms: where it is given, a row also loses the time by which it fell further behind
    that many ms a token, in tokens; summed over a request that is how late it was at the last.
    """

    def __init__(self, loop: FastLoop, tpot_target_ms: float = float("nan")) -> None:
        self.loop, self.target_ms = loop, tpot_target_ms
        self._tokens = loop.sizes / (1.0 - _RATE_DECAY)
        self._ms = loop.plain_ms() / (1.0 - _RATE_DECAY)
        self._late_ms = np.zeros(len(loop.batch))

    @property
    def goodput(self) -> Array:
        """Return the running goodput of each batch, tokens a ms, at first without speculation."""
        rate: Array = self._tokens / self._ms
        return rate

    def of(self, done: Stepped) -> tuple[Array, Array]:
        """Return the rewards of a step: of rows f32 [rows], and of each whole batch f64."""
        batch, rate = self.loop.batch, self.goodput
        rest_ms = (done.net_ms[batch] - done.caused_ms) / self.loop.sizes[batch]
        rows = done.emitted - rate[batch] * (done.caused_ms + rest_ms)
        batches = done.tokens - rate * done.net_ms
        self._tokens = _RATE_DECAY * self._tokens + done.tokens
        self._ms = _RATE_DECAY * self._ms + done.net_ms
        if self.target_ms > 0.0:
            behind = self._fell_behind(done)
            rows -= behind
            batches -= np.bincount(batch, behind, len(rate))
        return rows.astype(_F32), batches

    def _fell_behind(self, done: Stepped) -> Array:
        before = np.maximum(self._late_ms, 0.0)
        first = self.loop.output <= done.emitted  # The clock starts with the first token.
        self._late_ms += done.step_ms[self.loop.batch] - self.target_ms * done.emitted
        self._late_ms[first] = 0.0
        change = np.maximum(self._late_ms, 0.0) - np.where(first, 0.0, before)
        return np.where(first, 0.0, change) / self.target_ms


class Scaler:
    """Centres and scales features; fitted once, then frozen and written beside the weights."""

    def __init__(self, centre: Array | None = None, scale: Array | None = None) -> None:
        n = len(FEATURES)
        self.centre = np.zeros(n, _F32) if centre is None else centre
        self.scale = np.ones(n, _F32) if scale is None else scale

    def __call__(self, raw: Array) -> Array:
        """Return features in [-8, 8]."""
        out = raw - self.centre
        out *= self.scale
        return np.clip(out, -_BOUND, _BOUND, out=out)


def fitted_scaler(loop: FastLoop, steps: int, seed: int) -> Scaler:
    """Return the scaler of features met under random actions; `loop` moves on by that many steps.

    What hardly varies is not blown up: it may vary elsewhere.
    """
    rng = np.random.default_rng(seed)
    seen = []
    for _ in range(steps):
        may = loop.allowed()
        action = (rng.random(may.shape, _F32) * may).argmax(axis=1)
        loop.step(PROPOSER_OF[action], K_OF[action])
        seen.append(features_of(loop))
    every = np.concatenate(seen)
    return Scaler(every.mean(axis=0), (1.0 / np.maximum(every.std(axis=0), 0.1)).astype(_F32))


class SlotVecEnv(VecEnv):
    """Every request slot of every batch is one environment: its own action, a shared step.

    A slot lives on with its next request, so no episode ever ends, but with `ends` each request is
    an episode: for learners that remember it. An action that a row may not do does nothing.
    `env_method("action_masks")` and `action_masks()` give bool masks.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        seed: int,
        vary: float = 0.0,
        life_steps: int = 0,
        tpot_target_ms: float = float("nan"),
        scaler: Scaler | None = None,
        ends: bool = False,
    ) -> None:
        self.ends = ends
        self.loop = FastLoop(kinds, seed, vary, life_steps)
        self.reward = Reward(self.loop, tpot_target_ms)
        self.scaler, self.target_ms = scaler or Scaler(), tpot_target_ms
        rows = len(self.loop.batch)
        self._rng = np.random.Generator(np.random.Philox(key=[seed, 2]))
        self._infos: list[dict[str, Any]] = [{}] * rows
        self._never = np.zeros(rows, bool)
        self._mask = self.loop.allowed()
        self._action = np.zeros(rows, np.int64)
        self.render_mode = None
        box = spaces.Box(-_BOUND, _BOUND, (len(FEATURES),), _F32)
        super().__init__(rows, box, spaces.Discrete(len(ACTION_NAMES)))

    def reset(self) -> Array:
        """Return the observations; the loop goes on as it stood."""
        return self._seen()

    def step_async(self, actions: Array) -> None:
        """Take the actions i64 [rows]."""
        self._action = np.asarray(actions, np.int64)

    def step_wait(self) -> tuple[Array, Array, Array, list[dict[str, Any]]]:
        """Run the step."""
        action = np.where(self._mask[np.arange(self.num_envs), self._action], self._action, 0)
        done = self.loop.step(PROPOSER_OF[action], K_OF[action])
        reward, _ = self.reward.of(done)
        self._mask = self.loop.allowed()
        done_with = self.loop.began if self.ends else self._never
        return self._seen(), reward, done_with.copy(), self._infos

    def _seen(self) -> Array:
        raw = features_of(self.loop, self.target_ms)
        hidden = self._rng.random(len(self.loop.kinds)) < _HIDDEN_SHARE
        raw[np.ix_(hidden[self.loop.batch], LAST)] = 0.0
        return self.scaler(raw)

    def action_masks(self) -> Array:
        """Return bool [rows, actions]: what each row may do now."""
        return self._mask

    def has_attr(self, attr_name: str) -> bool:
        """Say whether rows have an attribute, as the masks of sb3-contrib ask."""
        return hasattr(self, attr_name)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method that returns an array by row, and return its rows."""
        found = getattr(self, method_name)(*method_args, **method_kwargs)
        return [found[i] for i in self._get_indices(indices)]

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute, the same for every row."""
        return [getattr(self, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute for all rows."""
        del indices
        setattr(self, attr_name, value)

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        """Say that no row is wrapped."""
        del wrapper_class
        return [False for _ in self._get_indices(indices)]

    def close(self) -> None:
        """Nothing to let go of."""


class BatchEnv(gymnasium.Env[Array, Array]):
    """One batch: an action a slot (MultiDiscrete), every slot's features, its own reward.

    An episode is cut after `episode_steps`; info holds goodput, tokens a second so far.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self, kind: Kind, episode_steps: int = 1000, tpot_target_ms: float = float("nan")
    ) -> None:
        if episode_steps < 1:
            raise ValueError(f"episode_steps must be 1 or more, not {episode_steps}")
        self.kind, self.episode_steps, self.target_ms = kind, episode_steps, tpot_target_ms
        slots = kind.concurrency
        size = (slots * len(FEATURES),)
        self.observation_space = spaces.Box(-_BOUND, _BOUND, size, _F32)
        self.action_space = spaces.MultiDiscrete([len(ACTION_NAMES)] * slots)
        self.scaler = Scaler()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin with other requests; the same seed, the same ones."""
        super().reset(seed=seed)
        self.loop = FastLoop([self.kind], int(self.np_random.integers(2**31)))
        self.reward = Reward(self.loop, self.target_ms)
        self._steps, self._tokens, self._ms = 0, 0.0, 0.0
        return self._seen(), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Run one step of the batch."""
        may = self.loop.allowed()
        chosen = np.where(may[np.arange(len(may)), action], action, 0)
        done = self.loop.step(PROPOSER_OF[chosen], K_OF[chosen])
        self._steps += 1
        self._tokens += float(done.tokens[0])
        self._ms += float(done.step_ms[0])
        reward = float(self.reward.of(done)[1][0])
        info = {"goodput": 1e3 * self._tokens / self._ms}
        return self._seen(), reward, False, self._steps >= self.episode_steps, info

    def action_masks(self) -> Array:
        """Return bool [slots * actions], as MaskablePPO wants them."""
        return self.loop.allowed().ravel()

    def _seen(self) -> Array:
        return self.scaler(features_of(self.loop, self.target_ms)).ravel()
