"""Side branches: what a tree gets, that every output stays what it was, and what policies hear."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tests.tiny import CONFIG, AnyPlan, fewer, tiny_backend
from tests.tiny_heads import headed_backend
from tests.unit.engine.test_law import DRAWS, LENGTH, VOCAB, counted, exact_joint, p_value
from tests.unit.engine.test_tree_kernels import model_of

from parlay.engine import branches
from parlay.engine.backend import Drafts
from parlay.engine.branches import Branch, least_worth, match_branches, trees_of_drafts
from parlay.engine.kernels import build
from parlay.engine.planner import LocalPlanner
from parlay.engine.proposers.ngram import Candidates
from parlay.engine.request import SamplingParams
from parlay.engine.scheduler import EngineConfig
from parlay.engine.step import Engine
from parlay.engine.torch_backend import TorchBackend
from parlay.policies.policy import make_policy
from parlay.policies.types import (
    NO_BUDGET,
    Array,
    BatchView,
    Fitted,
    Plan,
    Proposer,
    StepOutcome,
)

NONE, NGRAM, DRAFT, MEDUSA = Proposer
WIDE = dataclasses.replace(CONFIG, tree_width=3)


class Priced(AnyPlan):
    """Any plan, with survivals and prices at which branches pay."""

    def decide(self, view: BatchView) -> Plan:
        plan = super().decide(view)
        depth = np.cumprod(np.full(self.k_max, 0.7, np.float32))
        plan.survival = np.broadcast_to(depth, (len(view), 4, self.k_max)).copy()
        plan.token_value_ms, plan.marginal_token_price_ms = 10.0, 0.02
        return plan


class Heard(LocalPlanner):
    """Keeps what the policy was told."""

    def __init__(self, policy: AnyPlan) -> None:
        super().__init__(policy)
        self.outcomes: list[StepOutcome] = []

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)
        super().observe(outcome)


def priced(
    k: int, survival: list[float], budget: int = NO_BUDGET, price_ms: float = 1.0
) -> tuple[Plan, Fitted]:
    view = np.zeros(1, np.uint64)
    plan = Plan(
        request_id=view,
        proposer=np.full(1, NGRAM, np.uint8),
        k=np.full(1, k, np.int16),
        shadow=np.zeros(1, bool),
        propensity=np.ones(1, np.float32),
        reason=np.zeros(1, np.uint8),
        token_value_ms=10.0,
        marginal_token_price_ms=price_ms,
        budget_tokens=budget,
    )
    fit = Fitted(
        plan.proposer, np.full(1, k), np.full(1, k), np.ones(1, bool), plan.shadow,
        plan.propensity, plan.reason, np.asarray([survival], np.float32),
    )  # fmt: skip
    return plan, fit


def drafted(chain: list[int], beside: list[Branch], confidence: float = np.nan) -> Drafts:
    drafts = Drafts(
        np.full(1, len(chain), np.int32),
        np.asarray([chain], np.int64),
        np.full((1, len(chain)), confidence, np.float32),
        np.full(1, -1, np.int32),
    )
    drafts.branches = {0: beside}
    return drafts


def shape(drafts: Drafts, plan: Plan, fit: Fitted, room: int = 64) -> tuple[list[int], list[int]]:
    trees = trees_of_drafts(drafts, fit, plan, np.asarray([room]))
    return ([], []) if trees is None else (trees.tokens.tolist(), trees.parent.tolist())


def test_a_branch_is_added_while_it_is_worth_more_than_it_costs() -> None:
    plan, fit = priced(2, [0.5, 0.4])
    # 0.5 * 0.6 = .3 and then * 0.8 = .24; at place 1: 0.5 * 0.2 * 0.9 = .09, below the .1 it costs.
    drafts = drafted([7, 8], [Branch(0, [5, 6], 0.6), Branch(1, [9], 0.9)])
    assert shape(drafts, plan, fit) == ([7, 8, 5, 6], [-1, 0, -1, 2])
    assert shape(drafted([7, 8], drafts.branches[0], 0.5), plan, fit) == (
        [7, 8, 5, 9, 6], [-1, 0, -1, 0, 2],
    ), "confidences say .3, .225 and .15"  # fmt: skip
    assert shape(drafts, *priced(2, [0.5, 0.4], price_ms=2.45)) == ([7, 8, 5], [-1, 0, -1])
    assert shape(drafts, *priced(2, [0.5, 0.4], price_ms=2.55)) == ([], []), "a tree costs .5 ms"
    assert shape(drafts, *priced(2, [0.5, 0.4], price_ms=4.0)) == ([], [])


def test_room_budget_and_the_chain_bound_a_tree() -> None:
    drafts = drafted([7, 8], [Branch(0, [5, 6], 0.6), Branch(0, [7, 1], 0.3), Branch(2, [4], 1.0)])
    plan, fit = priced(2, [0.5, 0.4])
    assert shape(drafts, plan, fit) == ([7, 8, 5, 6], [-1, 0, -1, 2]), "its own token, its end"
    assert shape(drafts, plan, fit, room=3) == ([7, 8, 5], [-1, 0, -1])
    assert shape(drafts, plan, fit, room=1) == ([], [])
    assert shape(drafts, *priced(2, [0.5, 0.4], budget=3)) == ([7, 8, 5], [-1, 0, -1])
    assert shape(drafts, *priced(2, [0.5, 0.4], budget=1)) == ([], [])
    fit.verify_k = np.ones(1, np.int32)
    assert shape(drafts, plan, fit) == ([7, 5, 6], [-1, -1, 1]), "of the chain what is verified"


@pytest.mark.parametrize(("value", "price"), [(np.nan, 1.0), (10.0, np.nan), (0.0, 1.0)])
def test_without_prices_drafts_are_chains(value: float, price: float) -> None:
    plan, fit = priced(2, [0.5, 0.4])
    plan.token_value_ms, plan.marginal_token_price_ms = value, price
    assert least_worth(plan) == np.inf
    assert shape(drafted([7, 8], [Branch(0, [5], 1.0)]), plan, fit) == ([], [])


def test_other_matches_share_what_the_chain_leaves() -> None:
    found = Candidates(
        np.asarray([[7, 1], [8, 2], [9, -1]]), np.asarray([5, 5, 2], np.int32),
        np.asarray([4, 4, 9], np.int32), np.asarray([2, 2, 3], np.int32),
    )  # fmt: skip
    others = match_branches(found, 7)
    assert [(b.place, b.tokens) for b in others] == [(0, [8, 2]), (0, [9])]
    # Of five parts the chain has two, its like two, and what was never seen one, of which 3 in 10.
    assert [b.share for b in others] == pytest.approx([2 / 3, 0.2 * 0.3 / 0.6])


def run(
    backend: TorchBackend, config: EngineConfig, policy: AnyPlan, temperature: float, rows: int = 12
) -> tuple[list[list[int]], list[StepOutcome]]:
    """Decode `rows` requests, half of which arrive later; return outputs and outcomes."""
    planner = Heard(policy)
    engine = Engine(backend, planner, config)
    params = [
        SamplingParams(
            temperature, top_p=0.95, seed=s if temperature else None, max_tokens=fewer(40, 3)
        )
        for s in range(rows)
    ]
    prompts = [[1 + s % 9, 2, 3, 1 + s % 9, 2] * (1 + s // 3) for s in range(rows)]
    requests = [engine.add(p, s) for p, s in zip(prompts[::2], params[::2], strict=True)]
    for _ in range(6):
        engine.step()
    requests += [engine.add(p, s) for p, s in zip(prompts[1::2], params[1::2], strict=True)]
    while engine.has_work:
        engine.step()
        engine.scheduler.target.check()
        engine.scheduler.draft.check()
    assert engine.scheduler.target.free == config.target_blocks, "a block leaked"
    assert engine.scheduler.draft.free == config.draft_blocks, "a block leaked"
    order = sorted(requests, key=lambda r: (r.sampling.seed or 0, r.request_id))
    return [r.output for r in order], planner.outcomes


BACKENDS: dict[str, tuple[Callable[..., TorchBackend], tuple[Proposer, ...]]] = {
    "ngram": (tiny_backend, (NGRAM,)),
    "draft": (tiny_backend, (DRAFT,)),
    "draft with states": (partial(tiny_backend, state_layers=(1, 2)), (DRAFT,)),
    "medusa": (headed_backend, (MEDUSA,)),
    "mix": (headed_backend, (NONE, NGRAM, DRAFT, MEDUSA)),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "coupled"])
def test_trees_never_change_what_greedy_and_coupled_requests_get(
    name: str, temperature: float
) -> None:
    make_backend, mix = BACKENDS[name]
    plain, _ = run(make_backend(20, 1), CONFIG, AnyPlan((NONE,), 0), temperature)
    assert len({tuple(o) for o in plain}) > 6
    tight = dataclasses.replace(WIDE, max_running=8, target_blocks=90, draft_blocks=60)
    for config in (WIDE, tight):
        outputs, outcomes = run(make_backend(20, 1, config), config, Priced(mix, 5), temperature)
        assert outputs == plain
        beyond = sum(int((o.emitted > o.accepted + 1).sum()) for o in outcomes)
        assert beyond >= fewer(4, 4) or (name.startswith("draft") and temperature), (
            "no branch was followed"
        )
        assert all((o.accepted <= o.verified_k).all() for o in outcomes)


@pytest.mark.skipif(build.load() is None, reason="needs AVX512_BF16 and a C compiler")
def test_trees_change_nothing_in_the_bfloat16_kernels() -> None:
    torch.set_num_threads(1)
    config = dataclasses.replace(WIDE, block_tokens=16, target_blocks=64)
    model = model_of("share 3")

    def backend(config: EngineConfig) -> TorchBackend:
        return TorchBackend(model, None, config)

    plain, _ = run(backend(config), config, AnyPlan((NONE,), 0), 0.0)
    outputs, outcomes = run(backend(config), config, Priced((NGRAM,), 5), 0.0)
    assert outputs == plain
    assert sum(int((o.emitted > o.accepted + 1).sum()) for o in outcomes) >= fewer(4, 4)


def test_the_adaptive_policy_adds_branches_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(branches, "TREE_MS", 0.0)  # the tiny model's steps take as long
    backend = headed_backend(20, 1)
    plain, _ = run(backend, CONFIG, AnyPlan((NONE,), 0), 0.0)
    policy = make_policy("goodput", limits=backend.limits())
    outputs, outcomes = run(headed_backend(20, 1, WIDE), WIDE, policy, 0.0)  # type: ignore[arg-type]
    assert outputs == plain
    nodes = sum(o.padded_tokens - o.prefill_tokens for o in outcomes)
    rows = sum(int((o.emitted > 0).sum() + o.verified_k.sum()) for o in outcomes)
    assert nodes > rows, "no branch was ever worth its price"


@pytest.mark.parametrize("mix", [(NGRAM,), (MEDUSA,), (NONE, NGRAM, DRAFT, MEDUSA)])
def test_rejection_sampling_over_trees_has_the_exact_joint_law(mix: tuple[Proposer, ...]) -> None:
    params = SamplingParams(1.0, max_tokens=LENGTH)
    counts = counted(headed_backend(VOCAB, 11, WIDE), [params] * DRAWS, Priced(mix, 3))
    assert p_value(counts, exact_joint(params)) > 1e-3


def chain_holds(config: EngineConfig, params: SamplingParams) -> tuple[Array, float]:
    """Return how often 0, 1, .. tokens of a chain of three held, and tokens emitted a step."""
    planner = Heard(Priced((MEDUSA,), 3, fixed_k=True))
    engine = Engine(headed_backend(VOCAB, 3, config), planner, config)
    for s in range(fewer(400, 5)):
        seed = None if params.seed is None else s
        engine.add([1 + s % 3, 2, s % 5], dataclasses.replace(params, seed=seed))
    counts, emitted = np.zeros(4), []
    while engine.has_work:
        engine.step()
        heard = planner.outcomes[-1]
        counts += np.bincount(heard.accepted[heard.verified_k == 3], minlength=4)
        emitted += heard.emitted[heard.verified_k == 3].tolist()
    return counts, float(np.mean(emitted))


@pytest.mark.parametrize("seed", [None, 0], ids=["rejection", "coupled"])
def test_what_a_policy_hears_of_chains_is_what_it_hears_without_trees(seed: int | None) -> None:
    params = SamplingParams(1.0, seed=seed, max_tokens=6)
    plain, few = chain_holds(CONFIG, params)
    wide, more = chain_holds(WIDE, params)
    assert more > few + 0.1
    expected = plain / plain.sum() * wide.sum()
    # Both are samples: a loose bound for a bias that any extra acceptance would make large.
    assert chisquare(wide, expected).pvalue > 1e-6


def test_logprobs_follow_the_path() -> None:
    def scores(config: EngineConfig, policy: AnyPlan) -> tuple[list[float], int]:
        planner = Heard(policy)
        engine = Engine(headed_backend(20, 1, config), planner, config)
        params = SamplingParams(0.8, seed=1, logprobs=2, max_tokens=30)
        requests = [engine.add([1 + s, 2, 3, 1 + s, 2], params) for s in range(8)]
        while engine.has_work:
            engine.step()
        followed = sum(int((o.emitted > o.accepted + 1).sum()) for o in planner.outcomes)
        return [t.logprob for r in requests for t in r.logprobs], followed

    plain, _ = scores(CONFIG, AnyPlan((NONE,), 0))
    found, followed = scores(WIDE, Priced((NGRAM, MEDUSA), 4, fixed_k=True))
    assert followed > 5
    assert found == pytest.approx(plain, abs=1e-4)


def test_a_tree_needs_a_width() -> None:
    with pytest.raises(ValueError, match="tree_width"):
        EngineConfig(tree_width=0)


def test_requests_that_share_a_beginning_keep_their_texts() -> None:
    prompt = [1, 2, 3, 4, 1, 2, 3, 4, 5, 1, 2, 3]
    torch.manual_seed(0)

    def outputs(config: EngineConfig, policy: AnyPlan) -> list[list[int]]:
        engine = Engine(headed_backend(20, 1, config), LocalPlanner(policy), config)
        texts = []
        for tail in ([1], [2], [1, 2], [1]):
            request = engine.add(prompt + tail, SamplingParams(max_tokens=24))
            while engine.has_work:
                engine.step()
            texts.append(request.output)
            if texts[1:]:
                assert request.cached_tokens > 0, "nothing was found again"
        again = engine.add(prompt + [1] + texts[0], SamplingParams(max_tokens=24))
        while engine.has_work:
            engine.step()
        assert again.cached_tokens > len(prompt), "what drafts wrote was never found again"
        return [*texts, again.output]

    plain = outputs(CONFIG, AnyPlan((NONE,), 0))
    assert outputs(WIDE, Priced((NGRAM, DRAFT, MEDUSA), 5)) == plain
