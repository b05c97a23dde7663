"""Counts of the server as Prometheus metrics, made when asked for.

The engine's thread and the event loop each add to their own counts; reading needs no lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from parlay.engine.request import Request
from parlay.engine.scheduler import Scheduler
from parlay.policies.types import PROPOSERS, PlanSource, Proposer, StepOutcome

CONTENT_TYPE = CONTENT_TYPE_LATEST
STEP_EDGES_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_EDGES_MS = 1e3 * np.asarray(STEP_EDGES_S)


class Meter(Collector):
    """Adds up what the engine did and what was answered; `text` exposes it.

    drafted, accepted i64 [PROPOSERS]; sources i64 [PlanSource]: rows that emitted, by the plan they
    followed; step_counts i64 [edges + 1].
    """

    def __init__(self, model: str, policy: str, scheduler: Scheduler) -> None:
        self.model, self.policy, self.scheduler = model, policy, scheduler
        self.prompt_tokens = self.output_tokens = self.preemptions = self.lossy_requests = 0
        self.finish_reasons: Counter[str] = Counter()
        self.answers: Counter[tuple[str, int]] = Counter()
        self.drafted, self.accepted = np.zeros((2, PROPOSERS), np.int64)
        self.sources = np.zeros(len(PlanSource), np.int64)
        self.step_counts = np.zeros(len(STEP_EDGES_S) + 1, np.int64)
        self.step_ms = 0.0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def added(self, request: Request) -> None:
        """Count a request that the engine took."""
        self.prompt_tokens += request.prompt_tokens
        self.lossy_requests += request.speculation.lossy

    def stepped(self, outcome: StepOutcome) -> None:
        """Count a step."""
        self.output_tokens += int(outcome.emitted.sum())
        np.add.at(self.drafted, outcome.proposer, outcome.drafted_k)
        np.add.at(self.accepted, outcome.proposer, outcome.accepted)
        np.add.at(self.sources, outcome.plan_source, outcome.emitted > 0)
        self.step_counts[np.searchsorted(_EDGES_MS, outcome.step_ms)] += 1
        self.step_ms += outcome.step_ms

    def finished(self, request: Request) -> None:
        """Count a request that has ended."""
        assert request.finish_reason is not None
        self.finish_reasons[request.finish_reason.value] += 1
        self.preemptions += request.preemptions

    def answered(self, path: str, status: int) -> None:
        """Count an answer."""
        self.answers[path, status] += 1

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric as it stands."""
        about = {"model": self.model, "policy": self.policy}
        yield InfoMetricFamily("parlay_engine", "The model and what decides.", about)
        yield from self._requests()
        for name, help_text, value in (
            ("prompt_tokens", "Prompt tokens of requests taken.", self.prompt_tokens),
            ("output_tokens", "Tokens generated.", self.output_tokens),
            ("preemptions", "Times a request that has ended lost its blocks.", self.preemptions),
            ("lossy_requests", "Requests taken that allow lossy drafts.", self.lossy_requests),
        ):
            yield CounterMetricFamily(f"parlay_engine_{name}", help_text, value)
        yield from self._speculation()
        for name, help_text, now in (
            ("running_requests", "Requests that run.", len(self.scheduler.running)),
            ("waiting_requests", "Requests that wait.", len(self.scheduler.waiting)),
            ("free_blocks", "KV blocks that are free.", self.scheduler.target.free),
            ("total_blocks", "KV blocks in all.", self.scheduler.target.total),
        ):
            yield GaugeMetricFamily(f"parlay_engine_{name}", help_text, now)
        ends = [*(str(edge) for edge in STEP_EDGES_S), "+Inf"]
        buckets = list(zip(ends, self.step_counts.cumsum().tolist(), strict=True))
        steps = HistogramMetricFamily("parlay_engine_step_seconds", "Time of a step.")
        steps.add_metric([], buckets, 1e-3 * self.step_ms)
        yield steps

    def _requests(self) -> Iterator[Metric]:
        answers = CounterMetricFamily(
            "parlay_engine_http_answers", "Answers by path and status.", labels=("path", "status")
        )
        for (path, status), count in sorted(self.answers.items()):
            answers.add_metric([path, str(status)], count)
        ended = CounterMetricFamily(
            "parlay_engine_requests", "Requests that ended, by reason.", labels=("finish_reason",)
        )
        for reason, count in sorted(self.finish_reasons.items()):
            ended.add_metric([reason], count)
        yield from (answers, ended)

    def _speculation(self) -> Iterator[Metric]:
        for name, help_text, counts in (
            ("drafted_tokens", "Tokens drafted.", self.drafted),
            ("accepted_tokens", "Drafted tokens that held.", self.accepted),
        ):
            metric = CounterMetricFamily(f"parlay_engine_{name}", help_text, labels=("proposer",))
            for p in range(1, PROPOSERS):
                metric.add_metric([Proposer(p).name.lower()], int(counts[p]))
            yield metric
        rows = CounterMetricFamily(
            "parlay_engine_plan_rows",
            "Rows that emitted, by the plan they followed.",
            labels=("source",),
        )
        for source in PlanSource:
            rows.add_metric([source.name.lower()], int(self.sources[source]))
        yield rows
