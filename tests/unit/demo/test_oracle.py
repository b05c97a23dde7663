from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.tiny import CONFIG, tiny_llama

from parlay.engine.demo.logits import TorchOracle
from parlay.engine.planner import LocalPlanner
from parlay.engine.request import SamplingParams
from parlay.engine.step import Engine
from parlay.engine.torch_backend import TorchBackend
from parlay.policies.policy import make_policy

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 1], [3], [9, 9, 2, 4]]


def greedy() -> dict[int, list[int]]:
    backend = TorchBackend(tiny_llama(40, 2, 3), None, CONFIG)
    engine = Engine(backend, LocalPlanner(make_policy("none")), CONFIG)
    requests = [engine.add(p, SamplingParams(max_tokens=12)) for p in PROMPTS]
    while engine.has_work:
        engine.step()
    return {i: r.output for i, r in enumerate(requests)}


def test_float32_top_is_what_greedy_decoding_took() -> None:
    exact = tiny_llama(40, 2, 3)
    oracle = TorchOracle(exact, exact, PROMPTS)
    for prompt, output in greedy().items():
        top, gap = oracle.top_two(prompt, output)
        assert top[:, 0].tolist() == output
        assert (gap >= 0).all()
        assert (top[:, 1] != top[:, 0]).all()
        tokens = [(3, output[3]), (5, int(top[5, 1]))]
        assert oracle.behind(prompt, output[:6], tokens) == pytest.approx([0.0, gap[5]], abs=1e-4)


def test_noise_is_none_in_float32_and_some_in_bf16() -> None:
    exact, outputs = tiny_llama(40, 2, 3), greedy()
    assert TorchOracle(exact, exact, PROMPTS).noise(outputs, 0.999) == pytest.approx(0, abs=1e-4)
    rough = tiny_llama(40, 2, 3, torch.bfloat16)
    noise = TorchOracle(rough, exact, PROMPTS).noise(outputs, 0.999)
    gaps = np.concatenate(
        [TorchOracle(exact, exact, PROMPTS).top_two(*o)[1] for o in outputs.items()]
    )
    assert 1e-3 < noise < gaps.max()
