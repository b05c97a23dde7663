"""Metrics against what they count, and dashboards and alerts against the metrics there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.watching import Clock, run_steps

import parlay.controller
from parlay.controller.host import Host
from parlay.controller.log import LogCounts
from parlay.controller.metrics import Metrics
from parlay.controller.observatory import Observatory

DASHBOARDS = Path(next(iter(parlay.controller.__path__))) / "dashboards"
NAME = re.compile(r"\bparlay_[a-z_]+")


class FullLog:
    counts = LogCounts(taken_steps=9, dropped_steps=2)
    waiting_steps = 7


def exposed() -> str:
    clock = Clock()
    host = Host("pilot", watch=Observatory(clock))
    assert host.watch is not None
    run_steps(host, "one", 120, clock=clock)
    run_steps(host, "two", 40, clock=clock)
    metrics = Metrics(host.watch, lambda: host.policy, FullLog(), lambda: 1.5)
    metrics.refused["admin"] = lambda: 3
    metrics.counts["parlay_automatic_rollbacks"] = lambda: 2
    return metrics.text().decode()


def test_counters_count() -> None:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(exposed()):
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    steps = {labels["engine"]: value for labels, value in found["parlay_steps_total"]}
    assert steps == {"one": 120, "two": 40}
    assert found["parlay_info"] == [({"policy": "pilot"}, 1.0)]
    assert found["parlay_log_waiting_steps"] == [({}, 7.0)]
    assert found["parlay_log_dropped_steps_total"] == [({}, 2.0)]
    assert found["parlay_redis_lag_seconds"] == [({}, 1.5)]
    assert found["parlay_refused_calls_total"] == [({"listener": "admin"}, 3.0)]
    assert found["parlay_automatic_rollbacks_total"] == [({}, 2.0)]
    assert found["parlay_audit_failed_writes_total"] == [({}, 0.0)]
    assert found["process_resident_memory_bytes"][0][1] > 1e6
    reached = sum(value for _, value in found["parlay_reached_positions_total"])
    accepted = sum(value for _, value in found["parlay_accepted_positions_total"])
    assert reached > accepted > 0


@pytest.mark.parametrize("file", ["grafana.json", "alerts.yaml"])
def test_dashboards_and_alerts_name_only_metrics_that_are_there(file: str) -> None:
    text = (DASHBOARDS / file).read_text(encoding="utf-8")
    if file.endswith(".json"):
        json.loads(text)
    named = set(NAME.findall(text)) - {"parlay_sidecar"}
    assert len(named) > 5
    # A histogram's name stands for its buckets, and what has no value yet is declared all the same.
    declared = set(re.findall(r"# TYPE (\w+)", exposed()))
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in named} <= declared
