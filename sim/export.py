"""What training hands over: the actor as arrays, and how it does in the engine's loop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3 import DQN
from stable_baselines3.common.base_class import BaseAlgorithm
from torch import nn

from parlay.policies.lstm import Lstm
from parlay.policies.network import Network
from parlay.policies.policy import make_policy
from parlay.policies.types import Array
from parlay.sim.env import Scaler
from parlay.sim.episode import run_episode
from parlay.sim.load import arrivals_of
from parlay.sim.rate import settled
from parlay.sim.scenario import Scenario

COMPARED = ("none", "goodput", "pilot", "learned")
"""What a trained network is scored beside."""
_SCORE_STEPS, _SCORE_SEED = 1000, 7_000_003


def actor_of(model: BaseAlgorithm) -> list[nn.Module]:
    """Return the layers up to logits, or to the values of actions; without an LSTM before them."""
    policy: Any = model.policy
    if isinstance(model, DQN):
        return list(policy.q_net.q_net)
    return [*policy.mlp_extractor.policy_net, policy.action_net]


def network_of(model: BaseAlgorithm, scaler: Scaler, card: Mapping[str, Any]) -> Network:
    """Return the actor as numpy arrays."""
    layers = actor_of(model)
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    return Network(
        [_numbers(layer.weight) for layer in linear],
        [_numbers(layer.bias) for layer in linear],
        np.asarray(scaler.centre, np.float32),
        np.asarray(scaler.scale, np.float32),
        "relu" if any(isinstance(layer, nn.ReLU) for layer in layers) else "tanh",
        card,
        _lstm_of(model),
    )


def _lstm_of(model: BaseAlgorithm) -> Lstm | None:
    if not isinstance(model, RecurrentPPO):
        return None
    lstm: Any = model.policy.lstm_actor
    bias = _numbers(lstm.bias_ih_l0) + _numbers(lstm.bias_hh_l0)
    return Lstm(_numbers(lstm.weight_ih_l0), _numbers(lstm.weight_hh_l0), bias)


def _numbers(tensor: torch.Tensor) -> Array:
    found: Array = tensor.detach().numpy().copy()
    return found


def scores(scenario: Scenario, path: Path) -> dict[str, float]:
    """Return goodput in the engine's loop, on a seed that nobody trains on, by policy."""
    short = settled(scenario).shortened(min(_SCORE_STEPS, scenario.steps))
    settings = {"learned": {"path": str(path)}}

    def of(name: str) -> float:
        episode = run_episode(
            short,
            lambda limits, _: make_policy(name, settings.get(name), limits),
            arrivals_of(short),
            _SCORE_SEED,
        )
        return round(episode.goodput, 1)

    return {name: of(name) for name in COMPARED}
