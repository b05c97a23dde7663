"""Acceptance of drafted chains where the logits lie: `verify` as batched tensor operations.

The same law and the same draws, but no value is looked at on the way: what the host knows goes up
in one copy, which place ends a run stays on the device, and one copy brings back what was found. On
a CPU `verify` is quicker, row by row, and the two are held against each other in tests. On a GPU
rounding differs from a CPU's in the last bit of float64: a draw that falls just there may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parlay.engine.request import Request, SampleMode, SamplingParams
from parlay.engine.sampling import (
    Purpose,
    draw_keys,
    first_choices,
    laws,
    race_by,
    request_key,
    shaping,
    uniforms,
)
from parlay.engine.transfer import Sent, Upload
from parlay.engine.tree import places_in_rows
from parlay.engine.verify import DraftLaw, Places
from parlay.policies.types import Array


@dataclass(slots=True)
class Drawn:
    """Places with laws of their own: where i64 [n] in the logits, and what `laws` needs of each."""

    where: Sent
    shape: list[Sent]

    def laws(self, logits: Tensor) -> Tensor:
        """Return float64 [n, vocab]."""
        return laws(logits[self.where.tensor], *(s.tensor for s in self.shape))


@dataclass(slots=True)
class Chains:
    """Rows of a batch and what is drafted in them: rows i64 [n] of those that emit; place i64 [n, K
    + 1], where each of a row's places is, the last one again beyond its k; draft i64 [n, K], -1
    beyond k.
    """  # noqa: D205

    rows: Sent
    place: Sent
    draft: Sent


@dataclass(slots=True)
class Lossy:
    """Greedy rows in which likely drafts hold; their places are those of `drawn`."""

    chains: Chains
    drawn: Drawn
    threshold: Sent


@dataclass(slots=True)
class Rejection:
    """Rows verified by rejection; their places are those of `drawn`.

    uniform f64 [n, K] and residual i64 [n, K + 1], keys: each place's draws. threshold f64 [n, 1].
    sampled i64 [s]: which of the rows drafted by a law, theirs being rows law_row of it.
    """

    chains: Chains
    drawn: Drawn
    uniform: Sent
    residual: Sent
    threshold: Sent
    sampled: Sent
    law_row: Sent


def accept_chains(
    logits: Tensor,
    requests: Sequence[Request],
    places: Places,
    law: DraftLaw | None,
    engine_seed: int,
    choice: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `verify.accept` does, i64 [rows] and i64 [rows, K + 1], on the logits' device.

    choice i64 [places]: the first of the largest logits, where they are known.
    """
    load, vocab = Upload(logits.device), logits.shape[-1]
    of = [requests[row] for row in places.rows.tolist()]
    modes = [r.sampling.mode for r in of]
    rows = np.arange(len(of))
    every = chains_of(load, rows, *grid(places, rows))
    coupled = _coupled(load, of, places, _where(modes, SampleMode.COUPLED), engine_seed, vocab)
    greedy = _where(modes, SampleMode.GREEDY)
    lossy = _lossy(load, of, places, [i for i in greedy if of[i].speculation.lossy], vocab)
    drawn = _where(modes, SampleMode.REJECTION)
    rejection = rejection_of(load, of, places, drawn, law, engine_seed, vocab)
    load.send()

    choice = first_choices(logits) if choice is None else choice
    if coupled is not None:
        raced_at, keys = coupled
        p = raced_at.laws(logits)
        raced = race_by(p, keys.tensor, torch.arange(vocab, device=p.device))
        choice = choice.index_copy(0, raced_at.where.tensor, raced)
    if places.fed is not None:
        _know(places.fed, every, [c.chains for c in (lossy, rejection) if c is not None])
    run, draft = choice[every.place.tensor], every.draft.tensor
    holds = run[:, :-1] == draft
    if lossy is not None:
        of_lossy = lossy.chains.rows.tensor
        holds = holds.index_copy(0, of_lossy, holds[of_lossy] | _likely(logits, lossy))
    held = holds.cumprod(1).sum(1)
    last = run.gather(1, held[:, None])[:, 0]
    if rejection is not None:
        found = reject_chains(logits, rejection, law)
        held, last = (
            a.index_copy(0, rejection.chains.rows.tensor, b)
            for a, b in zip((held, last), found, strict=True)
        )
    return held, tokens_of(draft, held, last)


def tokens_of(draft: Tensor, held: Tensor, last: Tensor) -> Tensor:
    """Return i64 [n, K + 1]: the first held[i] drafts of each row, then last[i], then -1."""
    padded = torch.nn.functional.pad(draft, (0, 1), value=-1)
    place = torch.arange(padded.shape[1], device=draft.device)
    after = last[:, None].masked_fill(place != held[:, None], -1)
    return torch.where(place < held[:, None], padded, after)


def chains_of(load: Upload, rows: Array, place: Array, draft: Array) -> Chains:
    """Send the chains of `rows`, indices of those that emit."""
    return Chains(load.add(rows), load.add(place), load.add(draft))


def grid(places: Places, rows: Array) -> tuple[Array, Array]:
    """Return of `rows`, indices of those that emit, the places and the drafts of `Chains`."""
    k, step = places.k[rows, None], np.arange(int(places.k.max(initial=0)) + 1)
    drafts = places.drafts[places.rows[rows], : len(step) - 1]
    place = places.starts[rows, None] + np.minimum(step, k)
    return place, np.where(step[:-1] < k, drafts, -1)


def _know(fed: Tensor, every: Chains, some: Sequence[Chains]) -> None:
    """Put the drafts that the pass was fed, i64 [places], where the host knew their places only."""
    draft = every.draft.tensor
    every.draft.tensor = torch.where(draft < 0, draft, fed[every.place.tensor[:, 1:]])
    for chains in some:
        chains.draft.tensor = every.draft.tensor[chains.rows.tensor]


def keys_of(requests: Sequence[Request], engine_seed: int) -> Array:
    """Return the requests' keys, u64."""
    return np.asarray([request_key(r, engine_seed) for r in requests], np.uint64)


def drawn_at(load: Upload, where: Array, params: Sequence[SamplingParams], vocab: int) -> Drawn:
    """Lay out places that are drawn by `params`."""
    return Drawn(load.add(where), [load.add(a) for a in shaping(params, vocab)])


def signed(keys: Array) -> Array:
    """Return the bits of u64 keys as i64."""
    return keys.view(np.int64)


def rejection_of(
    load: Upload,
    requests: Sequence[Request],
    places: Places,
    rows: Sequence[int],
    law: DraftLaw | None,
    engine_seed: int,
    vocab: int,
) -> Rejection | None:
    """Lay out the rows to be verified by rejection; requests are those of the rows that emit."""
    if not rows:
        return None
    chosen = np.asarray(rows)
    of, where, _ = _flat(places, chosen)
    mine = [requests[i] for i in rows]
    place, draft = grid(places, chosen)
    # Within the laws that are made of these places alone.
    starts = np.cumsum(places.k[chosen] + 1) - places.k[chosen] - 1
    chains = chains_of(load, chosen, place + (starts - places.starts[chosen])[:, None], draft)
    steps = np.arange(int(places.k.max(initial=0)) + 1)
    position = np.asarray([r.output_tokens for r in mine])[:, None] + steps
    keys = keys_of(mine, engine_seed)[:, None]
    batch_rows = places.rows[chosen].tolist()
    known = {} if law is None else law.row
    sampled = [n for n, row in enumerate(batch_rows) if row in known]
    return Rejection(
        chains,
        drawn_at(load, where, [mine[n].sampling for n in of.tolist()], vocab),
        load.add(uniforms(draw_keys(keys, position[:, :-1], Purpose.ACCEPT))),
        load.add(signed(draw_keys(keys, position, Purpose.RESIDUAL))),
        load.add(np.asarray([[r.speculation.lossy_threshold] for r in mine])),
        load.add(np.asarray(sampled, np.int64)),
        load.add(np.asarray([known[batch_rows[n]] for n in sampled], np.int64)),
    )


def reject_chains(
    logits: Tensor, rejection: Rejection, law: DraftLaw | None
) -> tuple[Tensor, Tensor]:
    """Return how much of each row holds and the token drawn behind it, i64 [n] both."""
    p, place = rejection.drawn.laws(logits), rejection.chains.place.tensor
    draft, k = rejection.chains.draft.tensor, place.shape[1] - 1
    guess = draft.clamp_min(0)
    p_token, q_token = p[place[:, :k], guess], torch.ones_like(rejection.uniform.tensor)
    sampled, q = rejection.sampled.tensor, None
    if law is not None and len(sampled) and len(law.law) and k:
        q = law.whole(p.device)
        of_row = _chances(q[:k, rejection.law_row.tensor], law, guess[sampled], p.shape[-1])
        q_token = q_token.index_copy(0, sampled, of_row)
    holds = rejection.uniform.tensor * q_token < p_token
    holds = (holds | (p_token >= rejection.threshold.tensor)) & (draft >= 0)
    held = holds.cumprod(1).sum(1)

    at = held[:, None]
    final = p[place.gather(1, at)[:, 0]]
    if k:
        refused = guess.gather(1, at.clamp_max(k - 1))
        rest = final.scatter(1, refused, 0.0)
        if law is not None and q is not None:
            place_of = held[sampled].clamp_max(len(q) - 1)
            less = torch.zeros_like(final[sampled]).index_copy(
                1, law.ids.to(p.device), q[place_of, rejection.law_row.tensor]
            )
            rest = rest.index_copy(0, sampled, (final[sampled] - less).clamp_min(0.0))
        # Behind the last draft nothing was refused. And where p == q nothing is left but rounding;
        # then any draw from p is right.
        refusing = (draft.gather(1, at.clamp_max(k - 1)) >= 0) & (at < k)
        final = torch.where(refusing & (rest.sum(1, keepdim=True) > 0.0), rest, final)
    keys = rejection.residual.tensor.gather(1, at)[:, 0]
    return held, race_by(final, keys, torch.arange(p.shape[-1], device=p.device))


def _chances(q: Tensor, law: DraftLaw, guess: Tensor, vocab: int) -> Tensor:
    """Return q(token) f64 [s, K] of drafts i64 [s, K] by laws q [up to K, s, n]; 1 beyond them."""
    ids = law.ids.to(guess.device)
    column = torch.zeros(vocab, dtype=torch.int64, device=ids.device)
    column[ids] = torch.arange(len(ids), device=ids.device)
    given = q.gather(2, column[guess[:, : len(q)]].T[:, :, None])[:, :, 0].T
    return torch.nn.functional.pad(given, (0, guess.shape[1] - len(q)), value=1.0)


def _where(modes: Sequence[SampleMode], mode: SampleMode) -> list[int]:
    return [i for i, m in enumerate(modes) if m is mode]


def _flat(places: Places, rows: Array) -> tuple[Array, Array, Array]:
    """Return of every place of `rows`, flat: which of them it is in, where it is, and how deep."""
    counts = places.k[rows] + 1
    of, step = np.repeat(np.arange(len(rows)), counts), places_in_rows(counts)
    return of, places.starts[rows][of] + step, step


def _coupled(
    load: Upload,
    requests: Sequence[Request],
    places: Places,
    rows: Sequence[int],
    engine_seed: int,
    vocab: int,
) -> tuple[Drawn, Sent] | None:
    """Lay out the places whose token is a race's, and their keys i64 [n]."""
    if not rows:
        return None
    of, where, step = _flat(places, np.asarray(rows))
    mine = [requests[i] for i in rows]
    position = np.asarray([r.output_tokens for r in mine])[of] + step
    keys = draw_keys(keys_of(mine, engine_seed)[of], position, Purpose.COUPLED)
    drawn = drawn_at(load, where, [mine[n].sampling for n in of.tolist()], vocab)
    return drawn, load.add(signed(keys))


def _lossy(
    load: Upload, requests: Sequence[Request], places: Places, rows: Sequence[int], vocab: int
) -> Lossy | None:
    """Lay out greedy rows in which likely drafts hold: the law is that of temperature 1."""
    if not rows or not places.k.max(initial=0):
        return None
    place, draft = grid(places, np.asarray(rows))
    chains, where = chains_of(load, np.asarray(rows), place, draft), place[:, :-1].reshape(-1)
    drawn = drawn_at(load, where, [SamplingParams(temperature=1.0)] * len(where), vocab)
    least = np.asarray([[requests[i].speculation.lossy_threshold] for i in rows])
    return Lossy(chains, drawn, load.add(least))


def _likely(logits: Tensor, lossy: Lossy) -> Tensor:
    """Return bool [n, K]: which drafts are likely enough."""
    draft = lossy.chains.draft.tensor
    law = lossy.drawn.laws(logits).view(*draft.shape, -1)
    given = law.gather(2, draft.clamp_min(0)[:, :, None])[:, :, 0]
    return (given >= lossy.threshold.tensor) & (draft >= 0)
