"""The n-gram where it matches long, else the draft model: the strongest static there is.

Source: llama.cpp's chain of speculators and flashspec's composite, where a suffix match of 4 to 6
tokens goes to the n-gram with a long draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parlay.policies.baselines.rows import check_k, rows_plan
from parlay.policies.policy import EngineLimits, Stateless, register
from parlay.policies.types import BatchView, Plan, Proposer, Reason


@dataclass(slots=True, frozen=True)
class NgramGateSettings:
    """min_match: shortest suffix match that goes to the n-gram; k_ngram and k_draft, 0 is off."""

    min_match: int = 4
    k_ngram: int = 7
    k_draft: int = 3

    def __post_init__(self) -> None:
        if self.min_match < 1:
            raise ValueError(f"ngram_gate: min_match must be 1 or more, not {self.min_match}")
        check_k("ngram_gate", "k_ngram", self.k_ngram)
        check_k("ngram_gate", "k_draft", self.k_draft)


@register("ngram_gate", NgramGateSettings)
class NgramGate(Stateless):
    """Chooses the proposer per request by the match length of now."""

    name = "ngram_gate"

    def __init__(self, settings: NgramGateSettings, limits: EngineLimits) -> None:
        self.settings = settings
        # Without a draft model the rows that match short go undrafted.
        self.k_draft = settings.k_draft if limits.has(Proposer.DRAFT_MODEL) else 0

    def decide(self, view: BatchView) -> Plan:
        """Return the gate's side for each row."""
        long = view.match_tokens >= self.settings.min_match
        proposer = np.where(long, Proposer.NGRAM, Proposer.DRAFT_MODEL)
        k = np.where(long, self.settings.k_ngram, self.k_draft)
        return rows_plan(
            view, proposer, k, Reason.GATE, default=(Proposer.DRAFT_MODEL, self.k_draft)
        )
