"""A policy trained in the simulator (`parlay train`): a small network, run with numpy.

Every row's features (`features.py`) go through the network; among what the row may do the action
with the largest logit is taken, or one is drawn, with its true propensity. A recurrent network
remembers each request from step to step, as long as the engine runs it. The policy cannot be made
without a file, so it is in no list of policies that are tried in turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parlay.policies.baselines.rows import rows_plan
from parlay.policies.features import ACTION_NAMES, K_OF, PROPOSER_OF, allowed
from parlay.policies.network import load_network
from parlay.policies.policy import EngineLimits, Entry, Stateless
from parlay.policies.types import Array, BatchView, Plan, Proposer, Reason, StepOutcome
from parlay.policies.watched import Watched


@dataclass(slots=True, frozen=True)
class LearnedSettings:
    """path of the network; sample: draw actions instead of taking the best; seed of the draws."""

    path: str = ""
    sample: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("learned: set path to a network made by parlay train")
        if self.seed < 0:
            raise ValueError(f"learned: seed must be 0 or more, not {self.seed}")


class Learned(Stateless):
    """Runs a network on each row; what the features are made of is learned as the engine runs."""

    name = "learned"

    def __init__(self, settings: LearnedSettings, limits: EngineLimits) -> None:
        del limits
        self.network = load_network(Path(settings.path))
        self.sample, self.seed = settings.sample, settings.seed
        self.watched = Watched()
        self.steps = 0
        size = self.network.lstm.size if self.network.lstm else 0
        self.memory = np.zeros((2, 0, size), np.float32)

    def decide(self, view: BatchView) -> Plan:
        """Return each row's action; deterministic from the settings and the history."""
        logits = self._logits(self.watched.features(view))
        may = allowed(
            view.match_tokens, view.max_k, view.proposer_mask, np.asarray(view.prefill_tokens > 0)
        )
        logits = np.where(may, logits, -np.inf)
        action, propensity = logits.argmax(axis=1), np.ones(len(view), np.float32)
        if self.sample:
            action, propensity = self._draw(logits)
        self.steps += 1
        usual = int(np.bincount(action, minlength=len(ACTION_NAMES)).argmax())
        plan = rows_plan(
            view,
            PROPOSER_OF[action],
            K_OF[action],
            Reason.EXPLORE if self.sample else Reason.BEST_GOODPUT,
            default=(Proposer(int(PROPOSER_OF[usual])), int(K_OF[usual])),
        )
        plan.propensity = propensity
        plan.policy_version = "learned/1"
        return plan

    def _logits(self, features: Array) -> Array:
        """Return f32 [rows, actions]; a network that remembers keeps a state a request."""
        if self.network.lstm is None:
            return self.network.logits(features)
        rows, fresh = self.watched.rows, self.watched.fresh
        if (more := self.watched.requests.size - self.memory.shape[1]) > 0:
            self.memory = np.pad(self.memory, ((0, 0), (0, more), (0, 0)))
        self.memory[:, fresh] = 0.0
        logits, self.memory[:, rows] = self.network.recall(features, self.memory[:, rows])
        return logits

    def _draw(self, logits: Array) -> tuple[Array, Array]:
        """Return actions drawn from the softmax, and the chance that each had."""
        chance = np.exp(logits - logits.max(axis=1, keepdims=True))
        chance /= chance.sum(axis=1, keepdims=True)
        drawn = np.random.default_rng((self.seed, self.steps)).random(len(logits))
        below = np.cumsum(chance, axis=1) / chance.sum(axis=1, keepdims=True)
        action = np.minimum((below <= drawn[:, None]).sum(axis=1), logits.shape[1] - 1)
        return action, chance[np.arange(len(action)), action].astype(np.float32)

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from one finished step."""
        self.watched.observe(outcome)

    def state(self) -> dict[str, Array]:
        """Return everything that later decisions depend on."""
        own = {"steps": np.asarray(self.steps)}
        if self.network.lstm is not None:
            own["memory"] = self.memory.copy()
        return {**self.watched.state(), **own}

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        needed = {"steps", "memory"} if self.network.lstm is not None else {"steps"}
        if missing := needed - set(state):
            raise ValueError(f"learned: the state lacks {sorted(missing)[0]}")
        memory = np.array(state.get("memory", self.memory), np.float32)
        if memory.ndim != 3 or memory.shape[::2] != self.memory.shape[::2]:
            raise ValueError("learned: the state's memory is that of another network")
        self.watched.load(state)
        self.steps, self.memory = int(state["steps"]), memory


ENTRY = Entry("learned", LearnedSettings, Learned)
