"""Reports that wait for the sidecar: the newest stay, and nobody is left asleep."""

from __future__ import annotations

from parlay.engine.outbox import QUEUE_REPORTS, Outbox, Report


def report(run: int = 0) -> Report:
    return Report(run, None, None)


def drained(outbox: Outbox) -> list[Report | None]:
    return [outbox.get() for _ in range(len(outbox))]


def test_a_full_queue_loses_its_oldest_report_and_says_so() -> None:
    outbox = Outbox()
    lost = [outbox.put(report(run)) for run in range(QUEUE_REPORTS + 3)]
    assert lost == [0] * QUEUE_REPORTS + [1] * 3
    kept = drained(outbox)
    assert [r.run for r in kept if r is not None] == list(range(3, QUEUE_REPORTS + 3))


def test_a_full_queue_keeps_the_word_that_wakes_the_writer() -> None:
    outbox = Outbox()
    outbox.wake()
    for _ in range(QUEUE_REPORTS):
        assert outbox.put(report()) == 0
    kept = drained(outbox)
    assert kept.count(None) == 1
    assert len(kept) <= QUEUE_REPORTS + 1
