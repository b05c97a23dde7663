"""The text to distil on: the target's own answers, many at a time.

Dense key and value slots and one pass a token for all of them: no paging, nothing speculative.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from parlay.engine.attention.sdpa import attend_by_gemm
from parlay.engine.distill.examples import Example, read_shards, write_shard
from parlay.engine.distill.llama import require_llama, rotary, rotate
from parlay.engine.distill.states import early_state
from parlay.engine.linear import Linear, can_pack, make_linear
from parlay.engine.model_config import ModelConfig
from parlay.engine.scheduler import DRAFT_WINDOW_TOKENS

PROMPT_STATES = DRAFT_WINDOW_TOKENS + 1  # a window's first token reads the state before it
SLOTS = 128
SHARD_EXAMPLES = 64
TOP_K = 50
CPU = torch.device("cpu")

_Layer = tuple[Tensor, Linear, Linear, Tensor, Linear, Linear]


@dataclass
class Job:
    """One prompt to answer; seed keys the draws of a temperature above 0.

    out and states are filled: the answer, and the target's states bf16 [places, layers, hidden] in
    pieces: the prompt's last PROMPT_STATES, then one for each token of the answer but the last.
    From a place's last state the head makes the distribution of the token behind it.
    """

    task: str
    prompt: list[int]
    temperature: float
    seed: int
    out: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)

    def draw(self, logits: Tensor) -> int:
        """Choose the next token from f32 [vocab]; the draw depends on seed and position alone."""
        if self.temperature == 0.0:
            return int(logits.argmax())
        values, ids = logits.topk(min(TOP_K, len(logits)))
        source = torch.Generator().manual_seed(self.seed * 65_537 + len(self.out))
        chosen = torch.multinomial((values / self.temperature).softmax(-1), 1, generator=source)
        return int(ids[chosen])


class Decoder:
    """A target with prepacked weights and room for SLOTS sequences of `longest` tokens.

    state_layers: whose states it tells, ascending and ending in the last; empty: the last alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        longest: int,
        state_layers: tuple[int, ...] = (),
    ) -> None:
        require_llama(config)
        self.config = config
        self.state_layers = state_layers or (config.layers,)
        assert list(self.state_layers) == sorted(set(self.state_layers))
        assert self.state_layers[-1] == config.layers
        self.embedding = weights["model.embed_tokens.weight"].bfloat16()
        self.norm = weights["model.norm.weight"].bfloat16()
        self.head = _packed(weights.get("lm_head.weight", self.embedding))
        self.layers = [_layer(weights, i) for i in range(config.layers)]
        shape = (config.layers, 2, SLOTS, config.kv_heads, longest, config.head_dim)
        self.cache = torch.zeros(shape, dtype=torch.bfloat16)
        self.cos, self.sin = rotary(config, longest, torch.bfloat16)

    def prefill(self, slot: int, ids: list[int]) -> Tensor:
        """Fill a slot with a prompt; return its states [tokens, layers, hidden]."""
        length = len(ids)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache[layer, 0, slot, :, :length] = k.transpose(0, 1)
            self.cache[layer, 1, slot, :, :length] = v.transpose(0, 1)
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1)

        return self._forward(torch.tensor(ids), torch.arange(length), attend)

    def step(self, ids: Tensor, at: Tensor) -> Tensor:
        """Feed each slot its token at its place, i64 [SLOTS]; return [SLOTS, layers, hidden]."""
        c, slots = self.config, torch.arange(len(ids))
        longest = self.cache.shape[4]
        seen = torch.arange(longest) <= at[:, None]
        mask = torch.where(seen, 0.0, -torch.inf).bfloat16()[:, None, None]
        mask = mask.expand(-1, c.kv_heads, c.heads // c.kv_heads, -1).flatten(0, 1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.cache[layer]
            keys[slots, :, at], values[slots, :, at] = k, v
            q = q.reshape(len(mask), -1, c.head_dim)
            # Over whole slots: a batched GEMM of keys that do not lie side by side takes thrice
            # as long, and so does SDPA.
            return attend_by_gemm(q, keys.flatten(0, 1), values.flatten(0, 1), mask)

        return self._forward(ids, at, attend)

    def logits(self, states: Tensor) -> Tensor:
        """Return f32 [n, vocab] of states [n, layers, hidden]."""
        return self.head(states[:, -1]).float()

    def _forward(
        self, ids: Tensor, at: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        c, states = self.config, []
        x = self.embedding[ids]
        cos, sin = self.cos[at][:, None], self.sin[at][:, None]
        for i, (norm, qkv, out, norm2, gate_up, down) in enumerate(self.layers):
            y = qkv(_rms(x, norm, c.norm_eps)).view(len(x), -1, c.head_dim)
            q, k, v = y.split([c.heads, c.kv_heads, c.kv_heads], 1)
            mixed = attend(i, rotate(q, cos, sin), rotate(k, cos, sin), v)
            x = x + out(mixed.reshape(len(x), -1))
            gate, up = gate_up(_rms(x, norm2, c.norm_eps)).chunk(2, -1)
            x = x + down(F.silu(gate) * up)
            if i + 1 in self.state_layers[:-1]:
                states.append(early_state(x))
        return torch.stack([*states, _rms(x, self.norm, c.norm_eps)], 1)


def _layer(weights: Mapping[str, Tensor], i: int) -> _Layer:
    def get(name: str) -> Tensor:
        return weights[f"model.layers.{i}.{name}.weight"].bfloat16()

    return (
        get("input_layernorm"),
        _packed(*(get(f"self_attn.{n}_proj") for n in "qkv")),
        _packed(get("self_attn.o_proj")),
        get("post_attention_layernorm"),
        _packed(get("mlp.gate_proj"), get("mlp.up_proj")),
        _packed(get("mlp.down_proj")),
    )


def _packed(*weights: Tensor) -> Linear:
    return make_linear(torch.cat(weights).bfloat16(), can_pack(torch.bfloat16, CPU))


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


@torch.no_grad()
def generate(
    decoder: Decoder, jobs: Iterable[Job], new_tokens: int, finish: Callable[[Job], None]
) -> None:
    """Answer every job with at most new_tokens tokens, end token included; finish gets each one.

    Prompts must leave new_tokens places free in the decoder's slots.
    """
    waiting = iter(jobs)
    slots: list[Job | None] = [None] * SLOTS
    ids, at = torch.zeros(SLOTS, dtype=torch.long), torch.zeros(SLOTS, dtype=torch.long)

    def push(slot: int, states: Tensor, logits: Tensor) -> None:
        job = slots[slot]
        assert job is not None
        token = job.draw(logits)
        job.out.append(token)
        job.states.append(states[-PROMPT_STATES:].clone())
        ids[slot] = token
        if token in decoder.config.eos_ids or len(job.out) >= new_tokens:
            finish(job)
            slots[slot], at[slot] = None, 0

    while True:
        for slot in range(SLOTS):
            while slots[slot] is None and (job := next(waiting, None)) is not None:
                slots[slot], at[slot] = job, len(job.prompt)
                states = decoder.prefill(slot, job.prompt)
                push(slot, states, decoder.logits(states[-1:])[0])
        busy = [slot for slot, job in enumerate(slots) if job is not None]
        if not busy:
            return
        states = decoder.step(ids, at)
        logits = decoder.logits(states)
        for slot in busy:
            at[slot] += 1
            push(slot, states[slot : slot + 1], logits[slot])


def answer(
    decoder: Callable[[], Decoder],
    jobs: list[Job],
    new_tokens: int,
    folder: Path,
    done: Callable[[int], None],
) -> None:
    """Answer jobs into a folder of shards, leaving out prompts that it has already.

    decoder is made only if there is something to do; done is told how many jobs ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    have = {tuple(e.ids[: e.prompt]) for e in read_shards(folder)}
    left = [job for job in jobs if tuple(job.prompt) not in have]
    done(len(jobs) - len(left))
    if not left:
        return
    ended: list[Example] = []
    first = len(list(folder.glob("*.safetensors")))
    numbers = itertools.count(first)

    def flush() -> None:
        if ended:
            write_shard(folder / f"{next(numbers):05d}.safetensors", ended)
            ended.clear()

    def finish(job: Job) -> None:
        ids = [*job.prompt, *job.out]
        ended.append(Example(job.task, ids, len(job.prompt), torch.cat(job.states)))
        done(1)
        if len(ended) == SHARD_EXAMPLES:
            flush()

    generate(decoder(), left, new_tokens, finish)
    flush()
