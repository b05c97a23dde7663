"""How many drafted tokens the target would accept, at every position of its own greedy answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from parlay.engine.distill.examples import Example
from parlay.engine.distill.llama import Body, Layer, rotary, rotate
from parlay.engine.distill.states import state_inputs

DEPTH = 4


@dataclass
class Drafter:
    """A draft as served: body, head [rows, hidden], ids i64 [rows], the target's embedding.

    state_proj [hidden, state layers * target's hidden]: where it reads the target's states.
    """

    body: Body
    head: Tensor
    ids: Tensor
    embedding: Tensor
    state_proj: Tensor | None = None

    def read(self, text: Tensor, states: Tensor | None) -> Tensor:
        """Return the body's inputs [length, hidden] for a text whose every token was verified."""
        x = self.embedding[text]
        if self.state_proj is None:
            return x
        assert states is not None, "this draft reads the target's states"
        return x + F.linear(state_inputs(states, len(text)), self.state_proj)

    def guess(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest next token's id (the target's) and probability; x [n, hidden]."""
        peak, best = (self.body.norm(x) @ self.head.T).float().softmax(-1).max(-1)
        return self.ids[best], peak


def accepted(
    drafter: Drafter,
    ids: list[int],
    prompt: int,
    depth: int = DEPTH,
    states: Tensor | None = None,
) -> Tensor:
    """Return i64 [places]: tokens accepted of `depth` drafted, before each output of a text.

    Places with fewer than `depth` outputs left are left out. states: see accepted_and_sure.
    """
    return accepted_and_sure(drafter, ids, prompt, depth, states)[0]


@torch.no_grad()
def accepted_and_sure(
    drafter: Drafter, ids: list[int], prompt: int, depth: int, states: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `accepted` and f32 [places, depth]: the drafter's largest probability at each place.

    Every place drafts for itself: its guesses attend to the true text before it and to one another;
    all places go through at once. states [places, layers, hidden]: the target's up to the last
    token but one, for a draft that reads them; as served, it reads them beside the true text, and
    nothing beside its guesses.
    """
    config = drafter.body.config
    text = torch.tensor(ids)
    places = torch.arange(prompt - 1, max(prompt - 1, len(ids) - depth))
    if not len(places):
        return torch.zeros(0, dtype=torch.long), torch.zeros(0, depth)
    cos, sin = rotary(config, len(ids) + depth, drafter.embedding.dtype)
    x = drafter.read(text, states)
    runs = []
    for layer in drafter.body.blocks():
        run = _Run(layer, places)
        x = run.read(x, cos[: len(ids), None], sin[: len(ids), None])
        runs.append(run)
    guess, peak = drafter.guess(x[places])
    right, sure = [guess == text[places + 1]], [peak]
    for ahead in range(1, depth):
        x, at = drafter.embedding[guess], places + ahead
        for run in runs:
            x = run.extend(x, cos[at, None], sin[at, None])
        guess, peak = drafter.guess(x)
        right.append(guess == text[at + 1])
        sure.append(peak)
    return torch.stack(right, 1).long().cumprod(1).sum(1), torch.stack(sure, 1)


class _Run:
    """One layer over a text, then over guesses that continue it from many places."""

    def __init__(self, layer: Layer, places: Tensor) -> None:
        self.layer, self.places = layer, places
        self.own_keys: list[Tensor] = []
        self.own_values: list[Tensor] = []

    def read(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the states after the layer of the text's x [length, hidden]; keep its keys."""
        q, self.keys, self.values = self._project(x, cos, sin)
        seen = torch.arange(len(x)) <= self.places[:, None]
        self.bias = torch.where(seen, 0.0, -torch.inf)[:, None]
        q, k, v = (t.transpose(0, 1)[None] for t in (q, self.keys, self.values))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._finish(x, mixed[0].transpose(0, 1))

    def extend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the states after the layer of each place's next guess x [places, hidden]."""
        q, k, v = self._project(x, cos, sin)
        self.own_keys.append(k)
        self.own_values.append(v)
        q = q.float() * q.shape[-1] ** -0.5
        keys, values = torch.stack(self.own_keys, 1), torch.stack(self.own_values, 1)
        shared = torch.einsum("phd,thd->pht", q, self.keys.float()) + self.bias
        own = torch.einsum("phd,pghd->phg", q, keys.float())
        p = torch.cat([shared, own], -1).softmax(-1)
        on_text, on_own = p.split([shared.shape[-1], own.shape[-1]], -1)
        mixed = torch.einsum("pht,thd->phd", on_text, self.values.float())
        mixed += torch.einsum("phg,pghd->phd", on_own, values.float())
        return self._finish(x, mixed.to(x.dtype))

    def _project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [n, heads, head_dim], those of a group repeated."""
        a = self.layer.self_attn
        c = a.config
        y = self.layer.input_layernorm(x)
        q, k, v = (p(y).view(len(x), -1, c.head_dim) for p in (a.q_proj, a.k_proj, a.v_proj))
        group = c.heads // c.kv_heads
        k, v = rotate(k, cos, sin).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return rotate(q, cos, sin), k, v

    def _finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.layer.self_attn.o_proj(mixed.flatten(1))
        out: Tensor = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
        return out


def by_task(
    drafter: Drafter, texts: Iterable[Example], done: Callable[[], None]
) -> dict[str, list[float]]:
    """Return for each task the mean accepted tokens at k = 1..DEPTH over all positions.

    done is called after each text.
    """
    counts: dict[str, list[Tensor]] = {}
    for e in texts:
        counts.setdefault(e.task, []).append(accepted(drafter, e.ids, e.prompt, DEPTH, e.states))
        done()
    means: dict[str, list[float]] = {}
    for task, parts in counts.items():
        found = torch.cat(parts).float()
        if len(found):
            means[task] = [round(float(found.clamp_max(k).mean()), 3) for k in range(1, DEPTH + 1)]
    return means
