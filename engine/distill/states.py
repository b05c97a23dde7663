"""The target's hidden states that a draft reads beside its tokens, as in EAGLE (arXiv 2401.15077).

The state of layer L is the residual stream after L blocks, RMS-normed without a weight; that of the
last layer is what the target's head reads. At place i a draft reads token i and the states of place
i - 1, from which the target chose token i; where those are not known it reads zeros.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor
from torch.nn import functional as F

from parlay.engine.distill.llama import Target, rotary
from parlay.engine.model_config import ModelConfig
from parlay.engine.models import STATE_EPS

MORE_KNOWN = 3.0
LONGEST_UNKNOWN = 3


def state_layers(target: ModelConfig) -> tuple[int, ...]:
    """Return the layers whose states a new draft reads, ascending: an early one and the last."""
    early = max(1, target.layers * 4 // 15)
    return (early, target.layers) if early < target.layers else (target.layers,)


def early_state(x: Tensor) -> Tensor:
    """Return the state [..., hidden] of a residual stream behind any block but the last."""
    return F.rms_norm(x, x.shape[-1:], eps=STATE_EPS)


@torch.no_grad()
def target_states(target: Target, ids: list[int], layers: tuple[int, ...]) -> Tensor:
    """Return the states [places, layers, hidden] of every place of a text."""
    x = target.embedding[torch.tensor(ids)][None]
    cos, sin = rotary(target.body.config, len(ids), x.dtype)
    found = x.new_zeros(len(ids), len(layers), x.shape[-1])
    for depth, block in enumerate(target.body.blocks()[: max(layers, default=0)], 1):
        x = block(x, cos, sin)
        if depth in layers:
            last = depth == target.body.config.layers
            found[:, layers.index(depth)] = (target.body.norm(x) if last else early_state(x))[0]
    return found


def state_inputs(states: Tensor, tokens: int) -> Tensor:
    """Return [tokens, layers * hidden]: what a draft reads beside the last `tokens` of a text.

    states [places, layers, hidden]: those of the places before the text's last one, up to it;
    older ones than the tokens need are left out, and zeros stand for those that are missing.
    """
    fed = states.flatten(1)[-tokens:]
    return F.pad(fed, (0, 0, tokens - len(fed), 0))


def known_places(count: int, rng: random.Random) -> Tensor:
    """Return bool [count]: places of an answer that are read with states, in random runs.

    In serving the last 0 to k places have none. Runs without of 1 to LONGEST_UNKNOWN places behind
    runs with of 1 + about MORE_KNOWN teach all those depths in every text.
    """
    known = [False] * rng.randint(0, LONGEST_UNKNOWN)
    while len(known) < count:
        known += [True] * (1 + int(rng.expovariate(1 / MORE_KNOWN)))
        known += [False] * rng.randint(1, LONGEST_UNKNOWN)
    return torch.tensor(known[:count], dtype=torch.bool)
