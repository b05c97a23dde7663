"""Behaviour cloning: begin training as a policy that is already good, by watching it decide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn

from parlay.policies.features import K_OF, PROPOSER_OF, allowed
from parlay.policies.policy import EngineLimits, Policy, Stateless, make_policy
from parlay.policies.types import Array, BatchView, Plan, StepOutcome
from parlay.policies.watched import Watched
from parlay.sim.backend import SimBackend
from parlay.sim.episode import run_episode
from parlay.sim.load import arrivals_of
from parlay.sim.rate import settled
from parlay.sim.scenario import Scenario

TEACHER = "pilot"
_EPOCHS, _ROWS = 30, 512
_RATE = 1e-3


class Recorder(Stateless):
    """Plays a teacher and writes down what it saw, what it might have done and what it did."""

    name = "recorder"

    def __init__(self, teacher: Policy) -> None:
        self.teacher, self.watched = teacher, Watched()
        self.seen: list[Array] = []
        self.may: list[Array] = []
        self.did: list[Array] = []

    def decide(self, view: BatchView) -> Plan:
        """Return the teacher's plan."""
        features, plan = self.watched.features(view), self.teacher.decide(view)
        may = allowed(
            view.match_tokens, view.max_k, view.proposer_mask, np.asarray(view.prefill_tokens > 0)
        )
        action = nearest_actions(plan.proposer, plan.k, may)
        rows = view.prefill_tokens == 0
        for kept, new in ((self.seen, features), (self.may, may), (self.did, action)):
            kept.append(new[rows])
        return plan

    def observe(self, outcome: StepOutcome) -> None:
        """Let both learn."""
        self.teacher.observe(outcome)
        self.watched.observe(outcome)


def nearest_actions(proposer: Array, k: Array, may: Array) -> Array:
    """Return i64 [rows]: of the actions a row may do, the deepest of its proposer within its k."""
    fits = may & (proposer[:, None] == PROPOSER_OF) & (k[:, None] >= K_OF) & (K_OF > 0)
    best: Array = np.where(fits, K_OF, 0).argmax(axis=1)
    return best


def recorded(scenarios: Iterable[Scenario], steps: int, seed: int) -> tuple[Array, Array, Array]:
    """Return features f32, masks bool and the teacher's actions i64 of every row that decoded."""
    recorders: list[Recorder] = []

    def make(limits: EngineLimits, _: SimBackend) -> Policy:
        recorders.append(Recorder(make_policy(TEACHER, {}, limits)))
        return recorders[-1]

    for scenario in scenarios:
        short = settled(scenario).shortened(steps)
        run_episode(short, make, arrivals_of(short), seed)
    features, may, did = (
        np.concatenate([part for r in recorders for part in getattr(r, name)])
        for name in ("seen", "may", "did")
    )
    return features, may, did


def clone(actor: Sequence[nn.Module], seen: Array, may: Array, did: Array, seed: int) -> float:
    """Fit the layers of an actor to a teacher's actions; return the share that it gets right.

    seen f32 [n, features] as the actor takes them.
    """
    network = nn.Sequential(*actor)
    optimizer = torch.optim.Adam(network.parameters(), _RATE)
    x, mask, y = torch.as_tensor(seen), torch.as_tensor(may), torch.as_tensor(did)
    rng = np.random.default_rng(seed)
    for _ in range(_EPOCHS):
        order = torch.as_tensor(rng.permutation(len(y)))
        for rows in order.split(_ROWS):
            logits = network(x[rows]).masked_fill(~mask[rows], -1e8)
            loss = nn.functional.cross_entropy(logits, y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        best = network(x).masked_fill(~mask, -1e8).argmax(dim=1)
    return float((best == y).float().mean())
