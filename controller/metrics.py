"""The observatory as Prometheus metrics: made when asked for, so that deciding costs nothing more.

Names, labels and units of every metric stand in the functions below; dashboards/ uses them, and a
test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from parlay.controller.log import LogCounts
from parlay.controller.observatory import EngineSeen, Observatory
from parlay.controller.overview import NAMES, SILENT_S, mean_gain
from parlay.controller.tally import AGE_EDGES, DECIDE_EDGES_S, POSITIONS, calibration_error
from parlay.policies.types import PROPOSERS, Array, PlanSource, Reason

CONTENT_TYPE = CONTENT_TYPE_LATEST
Engines = list[tuple[str, EngineSeen]]
COUNTS = {
    "parlay_automatic_rollbacks": "Policies taken out without anybody's call.",
    "parlay_audit_failed_writes": "Entries of the audit trail that could not be written.",
    "parlay_state_failed_exchanges": "Exchanges with the store of what is learned that failed.",
}


class LogLag(Protocol):
    """What is asked of a decision log: what became of steps, and how many wait to be written."""

    counts: LogCounts

    @property
    def waiting_steps(self) -> int:
        """Return how many steps wait to be written."""
        ...


class Metrics(Collector):
    """Exposes an observatory, a decision log if there is one, and how far Redis lags if it is used.

    policy: returns the name of the one that is active. redis_lag_s: returns the seconds since
    the newest exchange with Redis that worked. refused: by listener, returns how many calls were;
    counts: by name of COUNTS, returns one of them, 0 where there is none.
    """

    def __init__(
        self,
        observatory: Observatory,
        policy: Callable[[], str],
        log: LogLag | None = None,
        redis_lag_s: Callable[[], float] | None = None,
    ) -> None:
        self.observatory, self.policy = observatory, policy
        self.log, self.redis_lag_s = log, redis_lag_s
        self.refused: dict[str, Callable[[], int]] = {}
        self.counts: dict[str, Callable[[], int]] = {}
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric as it stands."""
        self.observatory.fold()
        engines = list(self.observatory.engines.items())
        now_s = self.observatory.clock()
        yield InfoMetricFamily("parlay", "The sidecar's policy.", {"policy": self.policy()})
        yield from _decisions(engines)
        yield from _outcomes(engines)
        yield from _positions(engines)
        yield from _load(engines, now_s)
        yield from _gains(engines)
        yield from _sidecar(self.refused, self.counts)
        if self.log is not None:
            yield from _log(self.log)
        if self.redis_lag_s is not None:
            lag = GaugeMetricFamily(
                "parlay_redis_lag_seconds", "Time since the newest exchange with Redis that worked."
            )
            lag.add_metric([], self.redis_lag_s())
            yield lag


def _decisions(engines: Engines) -> Iterator[Metric]:
    decided = CounterMetricFamily(
        "parlay_decisions",
        "Rows planned, by proposer and reason; prompts are not counted.",
        labels=("engine", "proposer", "reason"),
    )
    planned = CounterMetricFamily(
        "parlay_planned_draft_tokens",
        "Tokens that plans had rows draft.",
        labels=("engine", "proposer"),
    )
    for engine, seen in engines:
        for p, r in zip(*np.nonzero(seen.total.decisions), strict=True):
            labels = [engine, NAMES[p], Reason(int(r)).name.lower()]
            decided.add_metric(labels, float(seen.total.decisions[p, r]))
        for p in range(1, PROPOSERS):
            planned.add_metric([engine, NAMES[p]], float(seen.total.planned_k[p]))
    yield from (decided, planned)
    yield _histogram(
        "parlay_decide_seconds",
        "Time the policy takes for one plan.",
        DECIDE_EDGES_S,
        [(e, seen.total.decide_s, float(seen.total.decide_sum_s[0])) for e, seen in engines],
    )


def _outcomes(engines: Engines) -> Iterator[Metric]:
    for name, help_text, field in (
        ("parlay_steps", "Steps that engines told of.", "steps"),
        ("parlay_emitted_tokens", "Tokens committed.", "emitted"),
        ("parlay_step_seconds", "Time of the steps told of; goodput is tokens over it.", "step_ms"),
    ):
        metric = CounterMetricFamily(name, help_text, labels=("engine",))
        for engine, seen in engines:
            value = float(getattr(seen.total, field)[0])
            metric.add_metric([engine], 1e-3 * value if field == "step_ms" else value)
        yield metric
    rows = CounterMetricFamily(
        "parlay_plan_rows",
        "Rows by the plan they followed: remote is the sidecar's, local and default are fallbacks.",
        labels=("engine", "source"),
    )
    for engine, seen in engines:
        for source in PlanSource:
            rows.add_metric([engine, source.name.lower()], float(seen.total.sources[source]))
    yield rows
    yield _histogram(
        "parlay_plan_age_steps",
        "Steps between the view a plan was made from and the step that a row followed it in.",
        AGE_EDGES,
        [(e, seen.total.ages, float(seen.total.age_steps[0])) for e, seen in engines],
    )


def _positions(engines: Engines) -> Iterator[Metric]:
    for name, help_text, field in (
        ("parlay_reached_positions", "Drafted positions that verification reached.", "reached"),
        ("parlay_accepted_positions", "Drafted positions whose token was accepted.", "held"),
    ):
        metric = CounterMetricFamily(
            name, f"{help_text} Position 1 is the first.", labels=("engine", "proposer", "position")
        )
        for engine, seen in engines:
            table = getattr(seen.total, field)
            for p in range(1, PROPOSERS):
                for j in range(POSITIONS):
                    if seen.total.reached[p, j]:
                        metric.add_metric([engine, NAMES[p], str(j + 1)], float(table[p, j]))
        yield metric
    error = GaugeMetricFamily(
        "parlay_calibration_error",
        "Expected calibration error of the chance of acceptance, of late; 0 is perfect.",
        labels=("engine", "proposer"),
    )
    for engine, seen in engines:
        for p, value in enumerate(calibration_error(seen.recent.bins).tolist()):
            if value == value:
                error.add_metric([engine, NAMES[p]], value)
    yield error


def _load(engines: Engines, now_s: float) -> Iterator[Metric]:
    views = [(e, seen.newest[-1].view) for e, seen in engines if seen.newest]
    for name, help_text, field in (
        ("parlay_running_requests", "Requests that run.", "running"),
        ("parlay_waiting_requests", "Requests that wait.", "waiting"),
        ("parlay_free_blocks", "KV blocks that are free.", "free_blocks"),
        ("parlay_total_blocks", "KV blocks in all.", "total_blocks"),
    ):
        yield _gauge(name, help_text, ((e, float(getattr(view, field))) for e, view in views))
    yield _gauge(
        "parlay_engine_up",
        f"1 where the engine was heard in the last {SILENT_S:.0f} s.",
        ((e, float(now_s - seen.heard_s <= SILENT_S)) for e, seen in engines),
    )
    ignored = CounterMetricFamily(
        "parlay_ignored_reports",
        "Views and outcomes that came twice or out of order, in this session.",
        labels=("engine",),
    )
    for engine, seen in engines:
        counts = seen.session.counts
        ignored.add_metric([engine], counts.ignored_outcomes + counts.ignored_views)
    yield ignored


def _gains(engines: Engines) -> Iterator[Metric]:
    yield _gauge(
        "parlay_goodput_tokens_per_second",
        "Tokens per second of step time, of late.",
        (
            (e, 1e3 * float(seen.recent.emitted[0]) / max(float(seen.recent.step_ms[0]), 1e-9))
            for e, seen in engines
        ),
    )
    yield _gauge(
        "parlay_expected_gain",
        "Goodput over that of no speculation, as the policy's cost model has it.",
        ((e, mean_gain(seen)) for e, seen in engines),
    )
    reports = [(e, seen.guard.report()) for e, seen in engines if seen.guard is not None]
    for name, help_text, field in (
        ("parlay_guard_on", "1 where the guard lets the policy decide.", "on"),
        ("parlay_guard_gain", "Goodput over that of no speculation, as measured.", "gain"),
        ("parlay_guard_gain_lower", "Lower bound of the measured gain.", "lower"),
        ("parlay_guard_gain_upper", "Upper bound of the measured gain.", "upper"),
        ("parlay_guard_loss_seconds", "Estimated loss beyond the allowed share.", "loss_s"),
        ("parlay_guard_probing_ratio", "Share of the time that measuring cost.", "probing_share"),
    ):
        yield _gauge(name, help_text, ((e, float(getattr(r, field))) for e, r in reports))
    switches = CounterMetricFamily(
        "parlay_guard_switches", "Times the guard turned the policy off or on.", labels=("engine",)
    )
    for engine, report in reports:
        switches.add_metric([engine], report.switches)
    yield switches


def _sidecar(
    refused: Mapping[str, Callable[[], int]], counts: Mapping[str, Callable[[], int]]
) -> Iterator[Metric]:
    calls = CounterMetricFamily(
        "parlay_refused_calls", "Calls without the right token or name.", labels=("listener",)
    )
    for listener, count in refused.items():
        calls.add_metric([listener], count())
    yield calls
    for name, help_text in COUNTS.items():
        metric = CounterMetricFamily(name, help_text)
        metric.add_metric([], counts[name]() if name in counts else 0)
        yield metric


def _log(log: LogLag) -> Iterator[Metric]:
    waiting = GaugeMetricFamily("parlay_log_waiting_steps", "Steps that wait to be written.")
    waiting.add_metric([], log.waiting_steps)
    yield waiting
    counts = log.counts
    for name, help_text, value in (
        ("parlay_log_taken_steps", "Steps given to the decision log.", counts.taken_steps),
        ("parlay_log_dropped_steps", "Steps lost because too many waited.", counts.dropped_steps),
        ("parlay_log_unusable_steps", "Steps whose parts do not fit.", counts.unusable_steps),
        ("parlay_log_failed_writes", "Files that could not be written.", counts.failed_writes),
    ):
        metric = CounterMetricFamily(name, help_text)
        metric.add_metric([], value)
        yield metric


def _gauge(name: str, help_text: str, values: Iterable[tuple[str, float]]) -> GaugeMetricFamily:
    """Return a gauge by engine; nan is left out."""
    gauge = GaugeMetricFamily(name, help_text, labels=("engine",))
    for engine, value in values:
        if value == value:
            gauge.add_metric([engine], value)
    return gauge


def _histogram(
    name: str,
    help_text: str,
    edges: Sequence[float],
    values: Iterable[tuple[str, Array, float]],
) -> HistogramMetricFamily:
    """Return a histogram by engine of counts f64 [edges + 1] and their sum."""
    histogram = HistogramMetricFamily(name, help_text, labels=("engine",))
    for engine, counts, total in values:
        ends = [*(str(float(edge)) for edge in edges), "+Inf"]
        buckets = list(zip(ends, counts.cumsum().tolist(), strict=True))
        histogram.add_metric([engine], buckets, total)
    return histogram
