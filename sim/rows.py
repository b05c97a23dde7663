"""What is said of a policy in a scenario: its goodput against the others', its waits, its price."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from parlay.policies.policy import registry
from parlay.policies.types import Array
from parlay.sim.speed import Speed
from parlay.sim.tally import Episode

BEST_STATIC, BEST_GATE, NONE = "best_static", "best_ngram_gate", "none"
_UNPUBLISHED = (NONE, "fixed", "ngram_gate", "goodput", "pilot", "learned")
"""References, and what is ours: all others are controllers that somebody published."""
_NAN = float("nan")
_OFTEN = 90.0


@dataclass(slots=True, frozen=True)
class Slo:
    """What a request is promised: its first token, and each further one on average.

    0: what nine requests in ten get of it without speculation.
    """

    ttft_s: float = 0.0
    tpot_ms: float = 0.0

    def filled(self, none: Sequence[Episode]) -> Slo:
        """Return it with what was left open taken from `none`."""
        return Slo(
            self.ttft_s or _quantile(_waits(none, "ttft_s"), _OFTEN),
            self.tpot_ms or _quantile(_waits(none, "tpot_ms"), _OFTEN),
        )

    def kept(self, own: Sequence[Episode]) -> float:
        """Return the share of requests that got both; one of one token has no pace to keep."""
        ttft, tpot = _waits(own, "ttft_s"), _waits(own, "tpot_ms")
        if not len(ttft):
            return _NAN
        return float(np.mean((ttft <= self.ttft_s) & ~(tpot > self.tpot_ms)))


NINE_IN_TEN = Slo()


@dataclass(slots=True, frozen=True)
class Row:
    """How one policy did in one scenario; nan where there is nothing to compare with.

    ci95: of ratio_to_none, published_ci95 of ratio_to_best_published: the best of the published
    controllers that were asked for. goodput: tokens per second, at equal work where the load
    changes (`speed.py`). drafting and catching_up (the draft model reading KV that it owed, the
    price of switching it on): shares of the time. trying: share of the request-steps planned to
    learn something. slo_kept: share of requests (`Slo`). what: the setting that was tuned.
    """

    scenario: str
    policy: str
    goodput: float
    ratio_to_none: float
    ratio_to_best_static: float
    ratio_to_best_ngram_gate: float
    share_of_hazard_oracle: float
    share_of_filtering_oracle: float
    ratio_to_best_published: float
    ci95: tuple[float, float]
    published_ci95: tuple[float, float]
    mean_k: float
    drafting: float
    catching_up: float
    trying: float
    slo_kept: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    ttft_p50_s: float
    ttft_p99_s: float
    what: str = ""


def rows_of(
    scenario: str,
    episodes: Mapping[str, list[Episode]],
    speed: Speed,
    slo: Slo,
    tuned: Mapping[str, str],
) -> list[Row]:
    """Return a row a policy of `episodes`, `none` among them, each with one a seed."""
    rates = {name: speed(own) for name, own in episodes.items()}
    best = max(filter(_published, rates), key=rates.__getitem__, default="")
    return [_row(scenario, name, episodes, rates, best, speed, slo, tuned) for name in episodes]


def _row(
    scenario: str,
    policy: str,
    episodes: Mapping[str, list[Episode]],
    rates: Mapping[str, float],
    best: str,
    speed: Speed,
    slo: Slo,
    tuned: Mapping[str, str],
) -> Row:
    own, rate = episodes[policy], rates[policy]
    ttft, tpot = _waits(own, "ttft_s"), _waits(own, "tpot_ms")
    rows = max(sum(float(e.bucket_rows.sum()) for e in own), 1.0)
    time_s = sum(e.step_s for e in own)
    return Row(
        scenario=scenario,
        policy=policy,
        goodput=rate,
        ratio_to_none=rate / rates[NONE],
        ratio_to_best_static=rate / rates.get(BEST_STATIC, _NAN),
        ratio_to_best_ngram_gate=rate / rates.get(BEST_GATE, _NAN),
        share_of_hazard_oracle=rate / rates.get("hazard_oracle", _NAN),
        share_of_filtering_oracle=rate / rates.get("filtering_oracle", _NAN),
        ratio_to_best_published=rate / rates.get(best, _NAN),
        ci95=speed.interval(own, episodes[NONE]),
        published_ci95=speed.interval(own, episodes[best]) if best else (_NAN, _NAN),
        mean_k=sum(float(e.bucket_k.sum()) for e in own) / rows,
        drafting=sum(e.draft_s for e in own) / time_s,
        catching_up=sum(e.catch_up_s for e in own) / time_s,
        trying=sum(e.tries for e in own) / rows,
        slo_kept=slo.kept(own),
        tpot_p50_ms=_quantile(tpot, 50),
        tpot_p99_ms=_quantile(tpot, 99),
        ttft_p50_s=_quantile(ttft, 50),
        ttft_p99_s=_quantile(ttft, 99),
        what=tuned.get(policy, ""),
    )


def _waits(episodes: Sequence[Episode], name: str) -> Array:
    return np.concatenate([np.asarray(getattr(e, name), float) for e in episodes])


def _quantile(waits: Array, percent: float) -> float:
    known = waits[np.isfinite(waits)]
    return float(np.percentile(known, percent)) if len(known) else _NAN


def _published(policy: str) -> bool:
    name = policy.partition(":")[0]
    return name in registry() and name not in _UNPUBLISHED


def as_json(rows: Iterable[Row]) -> dict[str, object]:
    """Return the table as `--json` writes it."""
    return {"rows": [asdict(row) for row in rows]}
