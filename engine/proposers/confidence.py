"""How sure a drafter is at a place, and whether that is enough to draft on."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from parlay.policies.calibration import calibrated
from parlay.policies.types import ENTROPY_SCALE, Array, Plan, Proposer, StopKind, StopRule


def likeliest(p: Tensor) -> tuple[Array, Array]:
    """Return the first of the largest entries of each row of p f32 [rows, n]: index and value."""
    if p.device.type == "cpu":
        # A sixth of the time of torch's max along a row.
        law = p.numpy()
        best = law.argmax(-1)
        return best, law[np.arange(len(best)), best]
    peak, index = p.max(-1)
    return index.cpu().numpy(), peak.cpu().numpy()


def choice_and_peak(logits: Tensor) -> tuple[Tensor, ...]:
    """Return `likeliest` of the laws of logits [rows, n], where they lie."""
    peak, index = torch.softmax(logits.float(), -1).max(-1)
    return index, peak


def estimate(plan: Plan | None, proposer: Proposer, place: int, peak: Array) -> Array:
    """Return P(accepted), as a plan has it, at a place whose likeliest token has chance `peak`."""
    if plan is None or plan.calibration is None:
        return peak
    lines = plan.calibration[proposer].reshape(2, -1)
    # A line a place, the last of which goes for all that follow.
    slope, offset = lines[:, min(place, lines.shape[1] - 1)]
    return calibrated(peak, float(slope), float(offset))


def entropy_of(logits: Tensor) -> Tensor:
    """Return the entropy f32 [rows], in nats, of each row's law."""
    each: Tensor = torch.special.entr(torch.softmax(logits.float(), -1))
    return each.sum(-1)


def keeps_drafting(stop: StopRule, reach: Array, logits: Tensor, place: int) -> Array:
    """Return bool [rows]: whether to draft this place, judged before its token is drawn."""
    needs = place > 0 and stop.kind is StopKind.ENTROPY
    return keeps(stop, reach, entropy_of(logits).cpu().numpy() if needs else reach, place)


def keeps(stop: StopRule, reach: Array, entropy: Array, place: int) -> Array:
    """Return `keeps_drafting` of rows whose entropies [rows] are known, where the rule asks."""
    keep: Array = np.ones(len(reach), bool)
    if stop.kind is StopKind.SURVIVAL:
        keep = np.greater_equal(reach, stop.threshold)
    elif place > 0 and stop.kind is StopKind.ENTROPY:
        keep = np.less_equal(np.sqrt(ENTROPY_SCALE * entropy), stop.threshold)
    return keep
