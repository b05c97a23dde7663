"""Settings of every test."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# A busy machine must not fail a test, and CI must meet the same examples each time.
settings.register_profile(
    "parlay",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("parlay")

# Triton's own functions, too, are bound for its interpreter or for a GPU as it is imported, which
# torch may do in any test.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
