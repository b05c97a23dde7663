"""Which drafts hold: greedy, coupled and rejection verification; the output's law is kept.

Greedy and coupled: the target's token at a place is a function of its context (argmax, or argmax of
a race with keyed noise); a draft holds if it is that token. Rejection (Leviathan et al. 2023, Chen
et al. 2023): token x drawn from q holds with probability min(1, p(x) / q(x)), else one from (p -
q)+ is drawn. Where a request asks for the lossy rule a draft holds also if it is likely enough
(`lossy.py`); others are never subject to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from parlay.engine.lossy import likely
from parlay.engine.request import Request, SampleMode, SamplingParams
from parlay.engine.sampling import (
    Purpose,
    draw_key,
    first_choices,
    probabilities,
    race,
    request_key,
    uniform,
)
from parlay.policies.types import Array


@dataclass(slots=True)
class DraftLaw:
    """What sampled drafts were drawn from: law float64 [depth][rows, n], a list of tensors or one,
    over token ids i64 [n].

    row maps a batch row to a row of law; a batch row that is absent drafted point masses. watched:
    laws [n] that nothing was drafted from, by batch row.
    """  # noqa: D205

    row: dict[int, int]
    law: list[Tensor] | Tensor
    ids: Tensor
    watched: dict[int, Tensor] = field(default_factory=dict)

    def whole(self, device: torch.device) -> Tensor:
        """Return float64 [depth, rows, n] on a device; there must be a law."""
        law = self.law if isinstance(self.law, Tensor) else torch.stack(self.law)
        return law.to(device)


@dataclass(slots=True)
class Places:
    """Where a pass's logits belong: rows i64, the batch rows that emit; k i32 [rows], their drafts;
    starts i64 [rows + 1], each one's first place; drafts i64 [batch rows, K]. fed: the token that
    the pass reads at each place, i64 [places] on the logits' device, where the host has yet to read
    what was drafted.
    """  # noqa: D205

    rows: Array
    k: Array
    starts: Array
    drafts: Array
    fed: Tensor | None = None


def places_of(rows: Array, drafts: Array, k: Array) -> Places:
    """Lay out the places of batch rows `rows`: k + 1 each, the last one behind every draft."""
    return Places(rows, k[rows], np.concatenate(([0], np.cumsum(k[rows] + 1))), drafts)


def accept(
    logits: Tensor,
    requests: Sequence[Request],
    places: Places,
    law: DraftLaw | None,
    engine_seed: int,
) -> tuple[Array, Array]:
    """Return accepted i32 [rows] and tokens i64 [rows, K + 1], -1 beyond accepted + 1.

    logits [places, vocab]; requests are the batch's.
    """
    modes = [requests[row].sampling.mode for row in places.rows]
    accepted = np.zeros(len(modes), np.int32)
    tokens = np.full((len(modes), int(places.k.max(initial=0)) + 1), -1, np.int64)
    choice = first_choices(logits)
    drawn = [i for i, mode in enumerate(modes) if mode is SampleMode.COUPLED]
    if drawn:
        where, keys, p = _laws(logits, requests, places, drawn, Purpose.COUPLED, engine_seed)
        choice[where] = race(p, keys, _ids(p))
    chosen = choice.cpu().numpy()
    for i, mode in enumerate(modes):
        if mode is not SampleMode.REJECTION:
            run, request = chosen[places.starts[i] : places.starts[i + 1]], requests[places.rows[i]]
            draft = places.drafts[places.rows[i], : places.k[i]]
            holds = run[:-1] == draft
            if request.speculation.lossy and len(draft):
                holds |= likely(logits[places.starts[i] : places.starts[i + 1]], request, draft)
            accepted[i] = held = int(np.cumprod(holds).sum())
            tokens[i, :held], tokens[i, held] = draft[:held], run[held]
    drawn = [i for i, mode in enumerate(modes) if mode is SampleMode.REJECTION]
    if drawn:
        reject(logits, requests, places, drawn, law, engine_seed, accepted, tokens)
    return accepted, tokens


def overlaps(
    logits: Tensor, requests: Sequence[Request], places: Places, law: DraftLaw | None
) -> dict[int, float]:
    """Return sum min(p, q) over the law q of each batch row that is watched, at its first place."""
    watched = {} if law is None else law.watched
    first = dict(zip(places.rows.tolist(), places.starts.tolist(), strict=False))
    found = {}
    for row, q in watched.items():
        assert law is not None
        at = first[row]
        (p,) = probabilities(logits[at : at + 1], [requests[row].sampling])
        found[row] = float(torch.minimum(p[law.ids.to(p.device)], q.to(p.device)).sum())
    return found


def _laws(
    logits: Tensor,
    requests: Sequence[Request],
    places: Places,
    drawn: list[int],
    purpose: Purpose,
    engine_seed: int,
) -> tuple[Tensor, list[int], Tensor]:
    """Return the places of rows `drawn`, in order: indices, keys for `purpose` and float64 laws."""
    where: list[int] = []
    keys: list[int] = []
    params: list[SamplingParams] = []
    for i in drawn:
        request = requests[places.rows[i]]
        key, first = request_key(request, engine_seed), request.output_tokens
        count = int(places.k[i]) + 1
        where.extend(range(places.starts[i], places.starts[i + 1]))
        keys.extend(draw_key(key, first + j, purpose) for j in range(count))
        params.extend([request.sampling] * count)
    index = torch.tensor(where, device=logits.device)
    return index, keys, probabilities(logits[index], params)


def reject(
    logits: Tensor,
    requests: Sequence[Request],
    places: Places,
    drawn: list[int],
    law: DraftLaw | None,
    engine_seed: int,
    accepted: Array,
    tokens: Array,
) -> None:
    """Fill accepted and tokens for rows `drawn` by rejection sampling."""
    _, accept_keys, p = _laws(logits, requests, places, drawn, Purpose.ACCEPT, engine_seed)
    finals, keys, first = torch.empty_like(p[: len(drawn)]), [], 0
    for n, i in enumerate(drawn):
        row, k = int(places.rows[i]), int(places.k[i])
        draft = places.drafts[row, :k]
        guess = torch.from_numpy(draft).to(p.device)
        mine, sampled = p[first : first + k + 1], law is not None and row in law.row
        q = _drafted_from(law, row, guess, p.shape[-1]) if law is not None and sampled else None
        p_token = mine[torch.arange(k), guess].cpu().numpy()
        q_token = np.ones(k) if q is None else q[torch.arange(k), guess].cpu().numpy()
        draws = np.asarray([uniform(key) for key in accept_keys[first : first + k]])
        request = requests[row]
        holds = draws * q_token < p_token
        holds |= p_token >= request.speculation.lossy_threshold
        held = int(np.cumprod(holds).sum())
        finals[n] = mine[held] if held == k else _residual(mine[held], q, held, int(draft[held]))
        key = request_key(request, engine_seed)
        keys.append(draw_key(key, request.output_tokens + held, Purpose.RESIDUAL))
        accepted[i], tokens[i, :held] = held, draft[:held]
        first += k + 1
    last = race(finals, keys, _ids(p)).cpu().numpy()
    tokens[drawn, accepted[drawn]] = last


def _drafted_from(law: DraftLaw, row: int, guess: Tensor, vocab: int) -> Tensor:
    """Return float64 [k, vocab]: the laws that a row's drafts were drawn from."""
    q = torch.zeros(len(guess), vocab, dtype=torch.float64, device=guess.device)
    ids = law.ids.to(q.device)  # a draft model may have a device of its own
    for j in range(len(guess)):
        q[j, ids] = law.law[j][law.row[row]].to(q.device)
    return q


def _residual(p: Tensor, q: Tensor | None, place: int, token: int) -> Tensor:
    """Return (p - q)+, unnormalised, where q is a drafter's law or a point mass on its token."""
    if q is None:
        rest = p.clone()
        rest[token] = 0.0
    else:
        rest = (p - q[place]).clamp_min_(0.0)
    # p == q leaves nothing but rounding; then any draw from p is right.
    return rest if float(rest.sum()) > 0.0 else p


def _ids(p: Tensor) -> Tensor:
    return torch.arange(p.shape[-1], device=p.device)
