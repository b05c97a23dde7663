"""Settings of every test."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# A busy machine must not fail a test, and CI must meet the same examples each time.
settings.register_profile(
    "parlay",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("parlay")
