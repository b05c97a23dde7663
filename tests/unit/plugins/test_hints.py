from __future__ import annotations

from math import isnan

import pytest

from parlay.engine.plugins.hints import speculation_of
from parlay.engine.request import ALL_PROPOSERS, SpeculationParams
from parlay.policies.types import DRAFT_MODEL, K_LIMIT, NGRAM


def test_no_hints_allow_everything() -> None:
    for hints in (None, {}, {"vendor_flag": 3}):
        found = speculation_of(hints, "parlay_")
        assert (found.proposer_mask, found.max_k, found.task) == (ALL_PROPOSERS, K_LIMIT, "")
        assert isnan(found.tpot_target_ms)


def test_hints_come_as_values_or_as_text() -> None:
    values = {"max_k": 3, "proposers": ["ngram"], "task": "code", "tpot_target_ms": 40}
    text = {"p_max_k": "3", "p_proposers": "ngram", "p_task": "code", "p_tpot_target_ms": "40"}
    wanted = SpeculationParams(1 << NGRAM, 3, "code", 40.0)
    assert speculation_of(values) == speculation_of(text, "p_") == wanted
    both = speculation_of({"proposers": "ngram, draft_model"}).proposer_mask
    assert both == 1 << NGRAM | 1 << DRAFT_MODEL


@pytest.mark.parametrize("off", [False, "false", 0, "off"])
def test_a_request_may_opt_out(off: object) -> None:
    assert speculation_of({"speculate": off, "max_k": 5}).max_k == 0


@pytest.mark.parametrize(
    "hints",
    [
        {"max_k": "many"},
        {"max_k": 2.5},
        {"max_k": -1},
        {"max_k": None},
        {"max_k": float("inf")},
        {"proposers": "oracle"},
        {"proposers": ["none"]},
        {"tpot_target_ms": 0},
        {"tpot_target_ms": []},
        {"speculate": "maybe"},
        {"depth": 3},
    ],
)
def test_nonsense_is_refused(hints: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"hint|proposer|max_k|tpot"):
        speculation_of(hints)
