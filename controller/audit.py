"""The audit trail: who did what to the policies, when, why, and what came of it.

JSON lines, appended and flushed one by one. A file that has grown full becomes `.1`, the one before
`.2`; older ones are dropped. What cannot be written is counted and said in the process's own log:
no call fails for it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20
FILES = 4
"""Files kept, the current one included."""
MOST_TEXT = 1000
"""Characters kept of what a caller may choose freely."""
log = logging.getLogger("parlay.controller")


def _now() -> datetime:
    return datetime.now(UTC)


class Audit:
    """Appends to `path` (None: to the process's own log alone); `failed_writes` counts losses."""

    def __init__(
        self,
        path: Path | None = None,
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], datetime] = _now,
    ) -> None:
        self.failed_writes = 0
        self._path, self._most, self._clock = path, most_bytes, clock

    def write(
        self,
        who: Mapping[str, str],
        what: str,
        of: Mapping[str, Any],
        why: str = "",
        outcome: str = "done",
    ) -> None:
        """Write down that `who` did `what`; of: its arguments; never raises for the disk."""
        entry = {
            "when": self._clock().isoformat(timespec="milliseconds"),
            "who": {key: _short(value) for key, value in who.items()},
            "what": what,
            "of": {key: _short(value) for key, value in of.items()},
            "why": _short(why),
            "outcome": _short(outcome),
        }
        line = json.dumps(entry)
        log.info("audit %s", line)
        if self._path is None:
            return
        try:
            self._rotate(self._path, len(line) + 1)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            self.failed_writes += 1
            log.error(
                "audit trail cannot be written path=%s error=%r entry=%s",
                *(self._path, str(error), line),
            )

    def _rotate(self, path: Path, more_bytes: int) -> None:
        if not path.exists() or path.stat().st_size + more_bytes <= self._most:
            return
        for number in range(FILES - 1, 0, -1):
            older = path if number == 1 else path.with_name(f"{path.name}.{number - 1}")
            if older.exists():
                older.replace(path.with_name(f"{path.name}.{number}"))


def _short(value: Any) -> Any:
    """Return a value with its texts cut; a mapping's too."""
    if isinstance(value, Mapping):
        return {str(key)[:MOST_TEXT]: _short(of) for key, of in value.items()}
    return value[:MOST_TEXT] if isinstance(value, str) else value
