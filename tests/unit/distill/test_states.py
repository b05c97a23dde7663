from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from tests.unit.distill.tiny_target import CONFIG, tiny_target

from parlay.engine.distill.examples import Example, windowed
from parlay.engine.distill.llama import rotary
from parlay.engine.distill.states import known_places, state_inputs, state_layers, target_states

IDS = [5, 9, 40, 3, 17, 22]


@pytest.mark.parametrize(("layers", "read"), [(30, (8, 30)), (3, (1, 3)), (2, (1, 2)), (1, (1,))])
def test_a_new_draft_reads_an_early_layer_and_the_last(layers: int, read: tuple[int, ...]) -> None:
    assert state_layers(dataclasses.replace(CONFIG, layers=layers)) == read


def test_states_are_those_of_the_definition() -> None:
    target = tiny_target(torch.float32)
    target.body.norm.weight.mul_(2)
    x = target.embedding[torch.tensor([IDS])]
    cos, sin = rotary(CONFIG, len(IDS), torch.float32)
    for block in target.body.blocks()[:2]:
        x = block(x, cos, sin)
    early = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    last = target.body(target.embedding[torch.tensor([IDS])])
    wanted = torch.stack([early[0], last[0]], 1)
    torch.testing.assert_close(target_states(target, IDS, (2, 3)), wanted)
    torch.testing.assert_close(target_states(target, IDS, (2,)), wanted[:, :1])
    assert target_states(target, IDS, ()).shape == (len(IDS), 0, 32)


def test_place_i_reads_the_states_of_place_i_minus_1() -> None:
    states = torch.arange(1, 13).view(3, 2, 2)  # of places 0, 1 and 2 of four
    assert state_inputs(states, 4).tolist() == [
        [0, 0, 0, 0], [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12],
    ]  # fmt: skip
    assert state_inputs(states, 3).tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert state_inputs(states, 2).tolist() == [[5, 6, 7, 8], [9, 10, 11, 12]]


def test_a_window_reads_the_states_of_the_whole_text() -> None:
    target = tiny_target(torch.float32)
    whole = Example("t", IDS, 4, target_states(target, IDS[:-1], (1, 3)))
    cut = windowed(whole, 2)
    assert cut.ids == IDS[2:]
    assert torch.equal(cut.hidden, whole.hidden)
    full = state_inputs(whole.states, len(IDS))
    assert torch.equal(state_inputs(cut.states, len(cut.ids)), full[2:])
    assert full[2].any()


def test_runs_without_states_are_as_long_as_a_draft_goes_deep() -> None:
    rng = random.Random(4)
    runs: dict[bool, list[int]] = {True: [], False: []}
    starts = set()
    for _ in range(400):
        known = known_places(60, rng).tolist()
        assert len(known) == 60
        lengths = [(key, len(list(run))) for key, run in itertools.groupby(known)]
        starts.add(0 if lengths[0][0] else lengths[0][1])
        for key, length in lengths[1:-1]:
            runs[key].append(length)
    assert set(runs[False]) == {1, 2, 3}
    assert starts == {0, 1, 2, 3}
    assert min(runs[True]) == 1
    assert 3 < sum(runs[True]) / len(runs[True]) < 5
    assert known_places(0, rng).shape == (0,)
