"""A pass of the kernels beside Python: the same bits as one that is waited for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.engine.test_kernels import TABLES, VOCAB, config_of, weights_of

from parlay.engine.kernels import build
from parlay.engine.kernels.native import NativeLlama
from parlay.engine.runner import Runner, flat
from parlay.engine.spans import Spans

pytestmark = pytest.mark.skipif(build.load() is None, reason="needs AVX512_BF16 and a C compiler")


def runner() -> Runner:
    config = config_of("share 3")
    weights = weights_of(config)
    model = NativeLlama(config, weights, weights["model.embed_tokens.weight"])
    return Runner(model, 64, 16, taps=(1, 3))


@torch.inference_mode()
@pytest.mark.parametrize("places", [[0, 1, 2, 3, 4, 5, 6], [2, 5, 6], []])
def test_a_launched_pass_gives_the_same_bits(places: list[int]) -> None:
    ids = torch.randint(VOCAB, (7,), generator=torch.Generator().manual_seed(1)).tolist()
    fed, spans = [ids[:4], ids[4:]], Spans(TABLES[:2], [0, 0], [4, 3])
    where = np.asarray(places, np.int64)
    beside, waited = runner(), runner()
    ours = beside.land(beside.launch(flat(fed), spans, where, beside=True))
    theirs = waited.land(waited.launch(flat(fed), spans, where, beside=False))
    assert ours.busy_ms > 0.0
    assert torch.equal(ours.hidden, theirs.hidden)
    assert torch.equal(ours.logits, theirs.logits) or not places
    assert len(ours.logits) == len(places)
    known = [4, 3]
    later = Spans(TABLES[:2], [4, 3], [1, 1])
    for r in (beside, waited):
        r.read([[1], [2]], later)
    states = [r.states_before(later, known) for r in (beside, waited)]
    assert torch.equal(states[0], states[1])


@torch.inference_mode()
def test_what_is_dropped_is_waited_for() -> None:
    r = runner()
    ids = [[n % VOCAB for n in range(200)]]
    for _ in range(20):
        r.launch(flat(ids), Spans([list(range(30))], [0], [200]), np.arange(200), beside=True)
    hidden = r.read([[5]], Spans([[40]], [0], [1]))
    assert torch.equal(hidden, runner().read([[5]], Spans([[40]], [0], [1])))
