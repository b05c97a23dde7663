"""The lossy rule, for requests that ask for it: a likely draft holds though the target refuses it.

Verification keeps the law of the target (`verify.py`); this rule does not. A draft that would be
refused holds all the same where the target gives it at least the `lossy_threshold` of its request.
Medusa's typical acceptance (2401.10774) is of this kind, its threshold falling with the entropy.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from parlay.engine.request import Request
from parlay.engine.sampling import probabilities
from parlay.policies.types import Array


def law_of(logits: Tensor, request: Request) -> Tensor:
    """Return float64 [rows, vocab]: what the rule takes for the target's probabilities.

    They are those that the request draws from, so that nothing holds which top-k or top-p exclude;
    a greedy request's are those of temperature 1. logits [rows, vocab].
    """
    sampling = request.sampling
    drawn = sampling if sampling.temperature else replace(sampling, temperature=1.0)
    return probabilities(logits, [drawn] * len(logits))


def likely(logits: Tensor, request: Request, draft: Array) -> Array:
    """Return bool [k]: which of the drafts i64 [k] are likely enough, each behind those before it.

    logits [k or more, vocab]: those of the drafts' places come first.
    """
    law = law_of(logits[: len(draft)], request)
    given = law.gather(1, torch.from_numpy(draft).to(law.device)[:, None])[:, 0]
    enough: Array = given.cpu().numpy() >= request.speculation.lossy_threshold
    return enough


def likeliest(law: Tensor, request: Request, tokens: list[int]) -> int:
    """Return which of `tokens` is likeliest by law [vocab]; -1 where none is likely enough."""
    if not tokens or not request.speculation.lossy:
        return -1
    given = law[tokens]
    best = int(given.argmax())
    return best if float(given[best]) >= request.speculation.lossy_threshold else -1
