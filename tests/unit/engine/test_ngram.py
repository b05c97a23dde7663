"""The n-gram proposer: what it indexes, keeps, forgets and shares."""

from __future__ import annotations

import weakref

import pytest

from parlay.engine.backend import Lookup
from parlay.engine.planner import LocalPlanner
from parlay.engine.proposers.ngram import NgramProposer
from parlay.engine.request import Phase, Request, SamplingParams, SpeculationParams
from parlay.engine.scheduler import EngineConfig
from parlay.engine.step import Engine
from parlay.engine.virtual import Hazards, StepCost, Task, VirtualBackend
from parlay.policies.policy import make_policy
from parlay.policies.types import Proposer


def decoding(tokens: list[int], request_id: int = 1, prompt_tokens: int = 1) -> Request:
    return Request(request_id, tokens, prompt_tokens, computed=len(tokens) - 1)


def finish(proposer: NgramProposer, tokens: list[int], prompt_tokens: int = 1) -> None:
    request = decoding(tokens, prompt_tokens=prompt_tokens)
    proposer.lookup([request], 1)
    request.phase = Phase.FINISHED
    proposer.forget(request)


def test_a_request_is_indexed_up_to_its_newest_token() -> None:
    proposer, request = NgramProposer(), decoding([5, 6, 7, 5, 6])
    lookup = proposer.lookup([request], 4)
    assert lookup.match_tokens.tolist() == [2]
    assert lookup.tokens.tolist() == [[7, 5, 6, 7]]
    assert (lookup.match_count.tolist(), lookup.guess_count.tolist()) == ([1], [1])
    request.tokens.append(9)
    request.computed = 5
    assert proposer.lookup([request], 4).match_tokens.tolist() == [0]


def test_forget_frees_the_index() -> None:
    proposer, request = NgramProposer(), decoding([5, 6, 7, 5, 6])
    proposer.lookup([request], 4)
    index = weakref.ref(proposer._indexes[request])
    proposer.forget(request)
    assert index() is None
    proposer.forget(request)


def test_a_prompt_that_is_still_computed_offers_nothing_but_is_indexed_as_it_goes() -> None:
    proposer, request = NgramProposer(), Request(1, [5, 6, 5, 6], 4)
    lookup = proposer.lookup([request], 3)
    assert lookup.match_tokens.tolist() == [0]
    assert lookup.tokens.tolist() == [[-1, -1, -1]]
    request.computed = 2
    assert proposer.lookup([request], 3).match_tokens.tolist() == [0]
    assert proposer._indexes[request].tokens.tolist() == [5, 6]
    request.computed = 3
    assert proposer.lookup([request], 3).match_tokens.tolist() == [2]


def test_requests_of_two_engines_with_the_same_id_do_not_share_an_index() -> None:
    proposer = NgramProposer()
    proposer.lookup([decoding([5, 6, 7, 5, 6])], 4)
    lookup = proposer.lookup([decoding([8, 9, 8])], 2)
    assert lookup.match_tokens.tolist() == [1]
    assert lookup.tokens.tolist() == [[9, 8]]


def test_tokens_cannot_be_taken_back() -> None:
    proposer, request = NgramProposer(), decoding([5, 6, 7, 5, 6])
    proposer.lookup([request], 4)
    del request.tokens[-2:]
    request.computed = 2
    with pytest.raises(AssertionError, match="taken back"):
        proposer.lookup([request], 4)


class Indexing(VirtualBackend):
    """Keeps an index beside the made-up acceptance, and holds it against what was committed."""

    ngram = NgramProposer()

    def lookup(self, requests: list[Request], depth: int) -> Lookup:
        self.ngram.lookup(requests, depth)
        for request in requests:
            end = len(request.tokens) if request.pending == 1 else request.computed
            assert self.ngram._indexes[request].tokens.tolist() == request.tokens[:end]
        return super().lookup(requests, depth)

    def forget(self, request: Request) -> None:
        self.ngram.forget(request)


def test_rejected_drafts_are_never_in_the_index() -> None:
    task = Task({Proposer.NGRAM: (0.5,)})
    backend = Indexing(Hazards({"t": task}), StepCost())
    policy = make_policy("fixed", {"proposer": "ngram", "k": 3}, backend.limits())
    engine = Engine(backend, LocalPlanner(policy), EngineConfig(token_budget=16))
    sampling, speculation = SamplingParams(max_tokens=40), SpeculationParams(task="t")
    requests = [engine.add(list(range(n)), sampling, speculation) for n in (3, 40)]
    while engine.has_work:
        engine.step()
    assert all(0 < r.accepted < r.drafted for r in requests)
    assert not backend.ngram._indexes


def test_candidates_are_columns_padded_to_k() -> None:
    proposer, request = NgramProposer(), decoding([1, 7, 1, 7, 1, 8, 1])
    found = proposer.candidates(request, 3, 4)
    assert found.tokens.tolist() == [[7, 1, 8], [8, 1, 8]]
    assert found.match_tokens.tolist() == [1, 1]
    assert found.match_count.tolist() == [3, 3]
    assert found.guess_count.tolist() == [2, 1]
    none = proposer.candidates(decoding([1, 2]), 3, 4)
    assert none.tokens.shape == (0, 3)
    assert none.match_tokens.shape == (0,)


def test_without_a_corpus_nothing_is_shared() -> None:
    proposer = NgramProposer()
    finish(proposer, [9, 1, 2, 3, 4, 5, 6])
    assert proposer.lookup([decoding([8, 1, 2, 3, 4])], 2).match_tokens.tolist() == [0]


def test_outputs_of_finished_requests_are_guessed_from_to_their_ends() -> None:
    proposer = NgramProposer(corpus_tokens=100)
    finish(proposer, [9, 1, 2, 3, 4, 5, 6], prompt_tokens=1)
    lookup = proposer.lookup([decoding([8, 1, 2, 3, 4])], 4)
    assert lookup.tokens.tolist() == [[5, 6, -1, -1]]
    assert lookup.match_tokens.tolist() == [2]  # four shared tokens are worth two
    assert (lookup.match_count.tolist(), lookup.guess_count.tolist()) == ([1], [1])
    # The prompt is not shared.
    assert proposer.lookup([decoding([8, 9])], 4).match_tokens.tolist() == [0]


def test_a_preempted_request_is_not_shared_and_a_finished_one_once() -> None:
    proposer = NgramProposer(corpus_tokens=100)
    assert proposer.corpus is not None
    request = decoding([9, 1, 2, 3])
    proposer.lookup([request], 1)
    proposer.forget(request)
    assert sum(len(part.tokens) for part in proposer.corpus.parts) == 0
    proposer.lookup([request], 1)
    request.phase = Phase.FINISHED
    proposer.forget(request)
    proposer.forget(request)
    assert sum(len(part.tokens) for part in proposer.corpus.parts) == 4


def test_a_match_in_the_own_text_goes_before_one_that_is_worth_no_more() -> None:
    proposer = NgramProposer(corpus_tokens=100)
    finish(proposer, [9, 1, 2, 3, 4, 5, 6])
    own, longer = [4, 7, 2, 3, 4], [4, 7, 1, 2, 3, 4]
    assert proposer.lookup([decoding(own)], 1).tokens.tolist() == [[7]]
    assert proposer.lookup([decoding(longer)], 1).tokens.tolist() == [[5]]
    found = proposer.candidates(decoding(longer), 2, 3)
    assert found.tokens.tolist() == [[5, 6], [7, 1]]
    assert found.match_tokens.tolist() == [2, 1]
