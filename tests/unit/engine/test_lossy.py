"""The lossy rule: only where asked for, a likely draft holds though the target draws another."""

from __future__ import annotations

import dataclasses
from math import exp, inf, log, nextafter

import numpy as np
import pytest
import torch
from tests.tiny import CONFIG, AnyPlan, tiny_backend
from torch import Tensor

from parlay.engine.planner import LocalPlanner
from parlay.engine.request import Request, SamplingParams, SpeculationParams
from parlay.engine.sampling import probabilities
from parlay.engine.step import Engine
from parlay.engine.tree import trees_of
from parlay.engine.tree_verify import Walked, accept_trees
from parlay.engine.verify import DraftLaw, accept, places_of
from parlay.policies.types import BatchView, Plan, Proposer

LAW = (0.5, 0.25, 0.125, 0.125)
"""What the target says in every place."""
GREEDY, DRAWN = SamplingParams(), SamplingParams(temperature=1.0)
PROMPT = [1, 2, 3, 2]


def logits(places: int) -> Tensor:
    return torch.tensor([[log(p) for p in LAW]] * places, dtype=torch.float64)


QUARTER = float(probabilities(logits(1), [DRAWN])[0, 1])
"""What rounding has left of a quarter."""


def request(sampling: SamplingParams, least: float, number: int = 1) -> Request:
    return Request(number, [0, 1], 2, sampling, SpeculationParams(lossy_threshold=least))


def chain(
    sampling: SamplingParams, least: float, draft: list[int], rows: int = 1, law: bool = False
) -> tuple[list[int], list[list[int]]]:
    """Verify the draft in so many requests; return how much holds in each and their tokens.

    law: the draft was drawn from a law that is sure of it, token by token.
    """
    k = np.full(rows, len(draft), np.int32)
    places = places_of(np.arange(rows), np.tile(np.asarray(draft, np.int64), (rows, 1)), k)
    requests = [request(sampling, least, i) for i in range(rows)]
    sure = torch.eye(len(LAW), dtype=torch.float64)
    drawn = DraftLaw(
        {i: i for i in range(rows)}, [sure[[t] * rows] for t in draft], torch.arange(len(LAW))
    )
    found = accept(logits(rows * (len(draft) + 1)), requests, places, drawn if law else None, 7)
    return found[0].tolist(), found[1].tolist()


def tree(sampling: SamplingParams, least: float, rows: int = 1) -> Walked:
    """Walk a root with children 2 and 1, 1 with a child 3, in so many requests."""
    tokens, parents = [2, 1, 3], [-1, -1, 1]
    trees = trees_of([tokens] * rows, [parents] * rows)
    requests = [request(sampling, least, i) for i in range(rows)]
    return accept_trees(logits(4 * rows), requests, np.arange(rows), trees, None, 7)


@pytest.mark.parametrize(
    ("least", "held"), [(inf, 1), (1.0, 1), (nextafter(QUARTER, 1), 1), (QUARTER, 2), (0.12, 3)]
)
def test_a_greedy_draft_holds_from_the_threshold_on(least: float, held: int) -> None:
    accepted, tokens = chain(GREEDY, least, [0, 1, 3])
    assert accepted == [held]
    assert tokens[0] == [0, 1, 3][:held] + [0] + [-1] * (3 - held)


@pytest.mark.parametrize("law", [False, True], ids=["a point mass", "of a drafter's law"])
def test_a_drawn_draft_always_holds_from_the_threshold_on(law: bool) -> None:
    rows = 2000
    accepted, _ = chain(DRAWN, QUARTER, [1], rows, law)
    assert accepted == [1] * rows
    for least in (inf, nextafter(QUARTER, 1)):
        accepted, tokens = chain(DRAWN, least, [1], rows, law)
        assert 0.21 < np.mean(accepted) < 0.29
        assert all(run[0] != 1 for n, run in zip(accepted, tokens, strict=True) if not n)


def test_what_a_filter_excludes_never_holds() -> None:
    cut = SamplingParams(temperature=1.0, top_k=1)
    assert chain(cut, 0.01, [0, 1])[0] == [1]
    # By the law that is drawn from: at a high temperature 3 is likelier than it was.
    hot = SamplingParams(temperature=10.0)
    assert chain(hot, 0.2, [3], rows=9)[0] == [1] * 9
    assert sum(chain(DRAWN, 0.2, [3], rows=99)[0]) < 40


@pytest.mark.parametrize(
    ("least", "path"), [(inf, []), (nextafter(QUARTER, 1), []), (QUARTER, [1]), (0.12, [1, 2])]
)
def test_in_a_tree_the_likeliest_child_is_followed(least: float, path: list[int]) -> None:
    walked = tree(GREEDY, least)
    assert walked.accepted.tolist() == [len(path)]
    assert walked.path[0, : len(path)].tolist() == path
    assert walked.tokens[0, : len(path) + 1].tolist() == [[2, 1, 3][n] for n in path] + [0]


def test_in_a_tree_that_is_drawn_from_the_draw_comes_first() -> None:
    rows = 600
    strict, lossy = tree(DRAWN, inf, rows), tree(DRAWN, QUARTER, rows)
    followed = strict.accepted > 0
    assert 0.3 < followed.mean() < 0.46  # 2 and 1 have 3/8 of the law
    assert np.array_equal(lossy.path[followed], strict.path[followed])
    assert np.all(lossy.accepted[~followed] > 0)
    assert np.all(lossy.path[~followed, 0] == 1)


@pytest.mark.parametrize("least", [0.3, 0.2, 0.01])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, SamplingParams(0.7, top_k=3)])
def test_a_chain_beside_a_tree_gets_what_it_gets_alone(
    sampling: SamplingParams, least: float
) -> None:
    rng = np.random.default_rng(5)
    k = rng.integers(0, 4, 24).astype(np.int32)
    drafts = np.where(np.arange(3) < k[:, None], rng.integers(0, 4, (24, 3)), -1)
    said = torch.from_numpy(rng.normal(size=(int((k + 1).sum()) + 4, 4)))
    requests = [request(sampling, least, i) for i in range(24)]
    alone, tokens = accept(said[:-4], requests, places_of(np.arange(24), drafts, k), None, 7)
    trees = trees_of(
        [*(row[:n] for row, n in zip(drafts, k, strict=True)), [0, 1, 2]],
        [*(range(-1, n - 1) for n in k.tolist()), [-1, -1, 1]],
    )
    beside = accept_trees(
        said, [*requests, request(GREEDY, inf, 99)], np.arange(25), trees, None, 7
    )
    assert beside.accepted[:-1].tolist() == alone.tolist()
    for i, held in enumerate(alone):
        assert beside.tokens[i, : held + 1].tolist() == tokens[i, : held + 1].tolist()


class Priced(AnyPlan):
    """Any plan, at prices at which every branch pays."""

    def decide(self, view: BatchView) -> Plan:
        plan = super().decide(view)
        plan.survival = np.full((len(view), 4, self.k_max), 0.9, np.float32)
        plan.token_value_ms, plan.marginal_token_price_ms = 10.0, 0.0
        return plan


def run(*asks: tuple[SamplingParams, float], tree_width: int = 1) -> list[Request]:
    """Decode requests beside each other, under random plans of chains or trees."""
    config = dataclasses.replace(CONFIG, tree_width=tree_width)
    plans = Priced((Proposer.NGRAM, Proposer.DRAFT_MODEL), 4, fixed_k=True)
    engine = Engine(tiny_backend(6, config=config), LocalPlanner(plans), config)
    requests = [
        engine.add(PROMPT, sampling, SpeculationParams(lossy_threshold=least))
        for sampling, least in asks
    ]
    while engine.has_work:
        engine.step()
    return requests


def params(temperature: float, seed: int | None = None) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=60, logprobs=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_low_threshold_takes_every_draft_and_others_are_left_alone(temperature: float) -> None:
    asks = (params(0.0), inf), (params(1.0, seed=3), inf)
    greedy, seeded, lossy = run(*asks, (params(temperature), 1e-9))
    assert 0 < lossy.accepted == lossy.drafted
    assert [r.output for r in run(*asks)] == [greedy.output, seeded.output]
    assert greedy.accepted < greedy.drafted


def test_it_is_off_by_default() -> None:
    assert not SpeculationParams().lossy
    assert not Request(1, [1], 1).speculation.lossy


@pytest.mark.parametrize("width", [1, 3], ids=["chains", "trees"])
def test_what_the_target_would_not_have_said_was_likely_and_logprobs_say_how_likely(
    width: int,
) -> None:
    strict, lossy = run((params(0.0), inf), (params(0.0), 0.05), tree_width=width)
    assert strict.output == run((params(0.0), inf))[0].output
    assert lossy.output != strict.output
    assert all(lp.token == lp.top[0][0] for lp in strict.logprobs)
    unlikely = [lp for lp in lossy.logprobs if lp.token != lp.top[0][0]]
    assert unlikely
    assert all(exp(lp.logprob) >= 0.05 - 1e-6 for lp in unlikely)


def test_policies_learn_of_it_apart() -> None:
    seen: list[list[int]] = []

    class Watched(AnyPlan):
        def decide(self, view):  # type: ignore[no-untyped-def]
            seen.append(view.task.tolist())
            return AnyPlan.decide(self, view)

    engine = Engine(tiny_backend(), LocalPlanner(Watched((Proposer.NGRAM,), 2)), CONFIG)
    for least in (inf, 0.5, 0.2):
        engine.add(PROMPT, GREEDY, SpeculationParams(task="code", lossy_threshold=least))
    engine.step()
    ((strict, half, fifth),) = seen
    assert strict != half == fifth


@pytest.mark.parametrize("least", [0.0, -0.1, 1.1, float("nan"), -inf])
def test_a_threshold_is_a_probability_above_0(least: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        SpeculationParams(lossy_threshold=least)


def test_a_seed_and_a_threshold_exclude_each_other() -> None:
    engine = Engine(tiny_backend(), LocalPlanner(AnyPlan((Proposer.NGRAM,), 4)), CONFIG)
    with pytest.raises(ValueError, match="lossy_threshold and seed exclude each other"):
        engine.add(PROMPT, SamplingParams(seed=1), SpeculationParams(lossy_threshold=0.3))
    assert not engine.has_work
