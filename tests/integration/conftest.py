"""What tests of whole processes share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket's, as pytest's own need not be."""
    with tempfile.TemporaryDirectory(prefix="parlay-") as name:
        yield Path(name)
