"""What the demo's report says in words."""

from __future__ import annotations

from typing import Any

import pytest

from parlay.engine.demo.report import _closed, disturbance


@pytest.mark.parametrize(
    ("headroom", "closed", "words"),
    [
        (0.064, 3.23, "more than tuning by hand won"),
        (0.064, 0.5, "50% of the 6.4% that tuning by hand won over one setting for all"),
        (0.064, -0.2, "none of the 6.4% that tuning by hand won over one setting for all"),
        (0.021, None, "where tuning by hand won only 2.1% over one setting for all"),
        (-0.01, None, "where tuning by hand won nothing over one setting for all"),
    ],
)
def test_adaptives_share_of_what_tuning_wins(
    headroom: float, closed: float | None, words: str
) -> None:
    assert _closed({"headroom": headroom, "headroom_closed": closed}) == words


def report(steps: list[float], **speeds: tuple[float, float]) -> dict[str, Any]:
    modes = {m: {"tokens_per_s_min": a, "tokens_per_s_max": b} for m, (a, b) in speeds.items()}
    step_ms = dict(zip(("1", "4", "16"), steps, strict=True))
    return {"modes": modes, "run": {"plain_step_ms": step_ms}}


def test_a_busy_machine_is_noticed() -> None:
    assert disturbance(report([8, 10, 14], none=(50, 52), adaptive=(60, 90))) is None
    assert disturbance(report([8, 7.9, 8], none=(50, 57))) is None
    falls = disturbance(report([8, 17, 14], none=(50, 52)))
    assert falls is not None
    assert "8 ms at 1, 17 ms at 4, 14 ms at 16" in falls
    spread = disturbance(report([8, 10, 14], none=(50, 52), gate=(50, 60)))
    assert spread == "one round of gate was 20% faster than another"
