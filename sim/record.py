"""Record a counterfactual trace of a real model: every proposer scored at every position.

The engine itself answers prompts greedily: other kernels round otherwise, and half of the default
model's answers then part from what the engine says. The n-gram and the draft model guess before
each token of the answers, as the engine would have them guess there, and are compared with what
came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from parlay.engine.distill.llama import body_of, target_of
from parlay.engine.distill.measure import Drafter, accepted_and_sure
from parlay.engine.distill.prompts import Prompt
from parlay.engine.distill.states import target_states
from parlay.engine.draft_format import load_draft
from parlay.engine.planner import LocalPlanner
from parlay.engine.proposers.ngram import NgramIndex
from parlay.engine.request import Request, SamplingParams
from parlay.engine.scheduler import DRAFT_WINDOW_TOKENS
from parlay.engine.step import Engine
from parlay.engine.tokenizer import Tokenizer
from parlay.engine.torch_backend import TorchBackend
from parlay.engine.weights import load_checkpoint
from parlay.policies.policy import make_policy
from parlay.policies.types import DRAFT_MODEL, NGRAM, Array
from parlay.sim.counterfactual import TracedRequest

NGRAM_TOKENS, DRAFT_TOKENS = 20, 8
LONGEST_PROMPT = 400


def record(
    backend: TorchBackend,
    tokenizer: Tokenizer,
    folder: Path,
    draft: Path | None,
    prompts: Iterable[Prompt],
    new_tokens: int,
    answered: Callable[[], None],
) -> Iterator[TracedRequest]:
    """Yield a traced request for each prompt that fits; answered is told of each answer.

    backend: of the checkpoint in folder, with any draft; draft: the file of the one to score, or
    None. Raises ValueError as loading them does.
    """
    asked = [(p.task, tokenizer.chat([{"role": "user", "content": p.text}])) for p in prompts]
    asked = [(task, ids) for task, ids in asked if len(ids) <= LONGEST_PROMPT]
    answers = greedy(backend, [ids for _, ids in asked], tokenizer.eos_ids, new_tokens, answered)
    config, weights = load_checkpoint(folder)
    target = target_of(config, weights, torch.bfloat16)
    drafter = None if draft is None else _drafter(draft, target.embedding)
    layers = () if drafter is None else drafter.body.config.state_layers
    for number, ((task, ids), out) in enumerate(zip(asked, answers, strict=True)):
        states = target_states(target, [*ids, *out[:-1]], layers)
        yield traced(f"{task}-{number}", task, ids, out, drafter, states)


def greedy(
    backend: TorchBackend,
    prompts: Sequence[Sequence[int]],
    eos_ids: Sequence[int],
    new_tokens: int,
    answered: Callable[[], None],
) -> list[list[int]]:
    """Return what the engine answers, without speculation, in at most new_tokens tokens each."""
    policy = make_policy("none", {}, backend.limits())
    engine = Engine(backend, LocalPlanner(policy), backend.config, eos_ids=eos_ids)

    def heard(request: Request, _: Sequence[int]) -> None:
        if request.finished:
            answered()

    sampling = SamplingParams(max_tokens=new_tokens)
    requests = [engine.add(ids, sampling, on_tokens=heard) for ids in prompts]
    while engine.has_work:
        engine.step()
    return [list(r.tokens[r.prompt_tokens :]) for r in requests]


def traced(
    name: str,
    task: str,
    prompt: list[int],
    out: list[int],
    drafter: Drafter | None,
    states: Tensor,
) -> TracedRequest:
    """Return what the proposers would have done before each token of an answer.

    states [tokens - 1, layers, hidden]: the target's, of the layers that the drafter reads.
    """
    drafted, held, match = ngram_counts(prompt, out)
    offered, accepted, confidence = {NGRAM: drafted}, {NGRAM: held}, {}
    k_max = {NGRAM: NGRAM_TOKENS}
    if drafter is not None:
        k_max[DRAFT_MODEL] = DRAFT_TOKENS
        run, sure = _draft_counts(drafter, prompt, out, states)
        offered[DRAFT_MODEL] = np.full(len(out), DRAFT_TOKENS, np.int32)
        accepted[DRAFT_MODEL], confidence[DRAFT_MODEL] = run, sure
    return TracedRequest(name, task, len(prompt), k_max, offered, accepted, match, confidence)


def ngram_counts(prompt: list[int], out: list[int]) -> tuple[Array, Array, Array]:
    """Return i32 [outputs]: the n-gram's drafted and accepted tokens, and its match length."""
    index = NgramIndex()
    index.extend(prompt)
    drafted, held, match = (np.zeros(len(out), np.int32) for _ in range(3))
    for place, token in enumerate(out):
        guess = index.propose(NGRAM_TOKENS)
        came = out[place : place + len(guess)]
        wrong = (i for i, (a, b) in enumerate(zip(guess, came, strict=False)) if a != b)
        drafted[place], held[place] = len(guess), next(wrong, len(came))
        match[place] = index.match_tokens
        index.extend([token])
    return drafted, held, match


def _draft_counts(
    drafter: Drafter, prompt: list[int], out: list[int], states: Tensor
) -> tuple[Array, Array]:
    """Return accepted i32 [outputs] and confidence f32 [outputs, DRAFT_TOKENS] of the draft."""
    seen = prompt[-DRAFT_WINDOW_TOKENS:]
    # Behind the answer's end stand tokens that nothing guesses, so that its last places draft too.
    ids = [*seen, *out, *[-1] * DRAFT_TOKENS]
    states = F.pad(states, (0, 0, 0, 0, 0, DRAFT_TOKENS))
    run, sure = accepted_and_sure(drafter, ids, len(seen), DRAFT_TOKENS, states)
    return run[: len(out)].numpy().astype(np.int32), sure[: len(out)].numpy()


def _drafter(path: Path, embedding: Tensor) -> Drafter:
    sizes, own, ids = load_draft(path, embedding)
    body = body_of(sizes, own, torch.bfloat16)
    proj = own.get("state_proj.weight")
    return Drafter(body, own["lm_head.weight"], ids, F.pad(embedding, (0, 0, 0, 1)), proj)
