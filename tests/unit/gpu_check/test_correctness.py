"""The checks of correctness pass on what is right, and fail on what is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from parlay.engine import torch_backend
from parlay.engine.attention.paged import PagedKV
from parlay.engine.attention.sdpa import SdpaAttention
from parlay.engine.gpu_check import attention_check, token_check
from parlay.engine.gpu_check.attention_case import appended, attended, random_case
from parlay.engine.gpu_check.attention_check import BOUNDS, LEAST_CASES, check_attention
from parlay.engine.gpu_check.budget import Budget, shares
from parlay.engine.gpu_check.tiny_models import CPU, MODES, PLAIN, decode, prompts, tiny_backend
from parlay.engine.gpu_check.token_check import agreement, exact_row
from parlay.engine.spans import Spans

NO_TIME = Budget.of(0.0)


def test_every_backend_here_agrees_with_the_reference() -> None:
    found = check_attention(CPU, NO_TIME, 100)
    assert found["passed"]
    assert {row["dtype"] for row in found["rows"]} == {"float32", "bfloat16"}
    assert all(row["cases"] == LEAST_CASES for row in found["rows"]), "the least, out of time"


def test_cases_have_trees_windows_long_rows_and_shared_heads() -> None:
    cases = [random_case(np.random.default_rng(i), torch.float32) for i in range(40)]
    assert any(c.spans.trees is not None for c in cases)
    assert any(c.window is not None for c in cases)
    assert any(max(c.spans.lengths) > 40 for c in cases)
    assert any(max(c.spans.starts) > 500 for c in cases)
    assert {c.heads // c.kv_heads for c in cases} >= {1, 2, 4, 7}


def test_the_reference_sees_what_spans_say() -> None:
    case = random_case(np.random.default_rng(3), torch.float32)
    case.spans = Spans([case.spans.tables[0]], [0], [1])
    case.q, case.kv, case.window = case.q[:1], case.kv[:1], None
    value = case.kv[0, case.kv_heads :]
    share = case.heads // case.kv_heads
    assert torch.equal(attended(case)[0], value.repeat_interleave(share, 0)), "its own value alone"
    assert torch.equal(appended(case)[:, case.slots[0]], case.kv[0])


class Unmasked(SdpaAttention):
    """Sees the whole of every tree."""

    def plan(self, spans, window=None):  # type: ignore[no-untyped-def]
        return super().plan(Spans(spans.tables, spans.starts, spans.lengths), window)


class Endless(SdpaAttention):
    """Knows no window."""

    def plan(self, spans, window=None):  # type: ignore[no-untyped-def]
        return super().plan(spans, None)


class Forgetful(SdpaAttention):
    """Moves nothing."""

    def move(self, from_slots: Tensor, to_slots: Tensor) -> None:
        pass


class Rough(SdpaAttention):
    """Rounds its output once too coarsely."""

    def __call__(self, layer, q, kv, plan):  # type: ignore[no-untyped-def]
        return super().__call__(layer, q, kv, plan).to(torch.float8_e4m3fn).to(q.dtype)


class Lost(SdpaAttention):
    """Yields what is no number."""

    def __call__(self, layer, q, kv, plan):  # type: ignore[no-untyped-def]
        return super().__call__(layer, q, kv, plan) * float("nan")


@pytest.mark.parametrize("wrong", [Unmasked, Endless, Forgetful, Rough, Lost])
def test_an_attention_that_is_wrong_is_found(
    wrong: Callable[[PagedKV, int], SdpaAttention], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_check, "backends", lambda _: {"wrong": wrong})
    found = check_attention(CPU, Budget.of(60.0), 8)
    assert not found["passed"]
    assert [row["passed"] for row in found["rows"]] == [False, False]
    assert BOUNDS[torch.float32] < BOUNDS[torch.bfloat16]


def test_drafts_hold_in_every_mode_and_say_what_plain_decoding_says() -> None:
    asked = prompts(4)
    backends = {width: tiny_backend(torch.float32, CPU, width) for width in (1, 3)}
    truth = decode(backends[1], PLAIN[0], asked, 12)
    for mode in MODES:
        backend = backends[mode.tree_width]
        accepted: list[int] = []
        land = backend.verify

        def watched(batch, drafts, verify_k, land=land, accepted=accepted):  # type: ignore[no-untyped-def]
            verified = land(batch, drafts, verify_k)
            accepted.append(int(verified.accepted.sum()))
            return verified

        backend.verify = watched  # type: ignore[method-assign]
        assert decode(backend, mode, asked, 12) == truth, mode.name
        backend.verify = land  # type: ignore[method-assign]
        assert sum(accepted) > 0, f"nothing that {mode.name} drafts ever holds"


def test_wrong_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    few = tuple(m for m in MODES if m.name in ("draft", "trees-1"))
    monkeypatch.setattr(token_check, "MODES", few)
    monkeypatch.setattr(token_check, "PLAIN", PLAIN[:2])
    assert token_check.check_tokens(CPU, Budget.of(60.0), 3, 8)["passed"]
    none = np.zeros(0, np.int64)
    monkeypatch.setattr(torch_backend, "kept_nodes", lambda *_: (none, none))
    found = token_check.check_tokens(CPU, Budget.of(60.0), 3, 16)
    assert not found["passed"], "an accepted branch was left where it lay"
    wrong = {row["mode"]: row for row in found["float32"]}["trees-1"]
    assert wrong["identical"] < wrong["outputs"]
    assert wrong["first_wrong"] is not None


def test_without_time_every_proposer_and_trees_are_checked_all_the_same() -> None:
    found = token_check.check_tokens(CPU, NO_TIME, 2, 4)
    assert found["passed"]
    assert found["left_out"] == ["draft", "ngram", "medusa", "trees-1"]
    assert {row["mode"] for row in found["float32"]} == token_check.ALWAYS


def test_rows_and_divergences_say_where_an_output_leaves() -> None:
    truth = [[1, 2, 3], [4, 5, 6]]
    row = exact_row("draft", [[1, 2, 3], [4, 9, 6]], truth)
    assert (row["identical"], row["first_wrong"], row["passed"]) == (1, (1, 1), False)
    outputs = {"none-1": truth, "none-6": [[1, 2, 3], [4, 5, 7]], "draft": [[1, 8, 3], [4, 5, 6]]}
    found = agreement(outputs)
    assert found.compared == found.compared_plain == {0: 1, 1: 1}
    ((spec,), (plain,)) = found.divergences, found.plain
    assert (spec.prompt, spec.position, spec.expected, spec.emitted) == (0, 1, 2, 8)
    assert (plain.prompt, plain.position, plain.expected, plain.emitted) == (1, 2, 6, 7)


def test_what_a_part_leaves_over_goes_to_the_rest() -> None:
    now = [0.0]
    budget = Budget.of(100.0, lambda: now[0])
    parts = shares([1.0, 1.0, 2.0])
    assert parts == pytest.approx([1 / 4, 1 / 3, 1.0])
    assert budget.share(parts[0]).left_s == pytest.approx(25.0)
    now[0] = 5.0
    assert budget.share(parts[1]).left_s == pytest.approx(95.0 / 3)
    now[0] = 100.0
    assert budget.over
    assert replace(budget, stop_s=200.0).left_s == 100.0
