"""Bearer tokens of a file: who holds one is known by its name; a file that changes is read anew.

Only hashes are kept. Old and new tokens stand in the file side by side while clients move over.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from parlay.protos.credentials import read_tokens

CHECK_S = 1.0
"""The file is looked at no more often."""
_READ_BY_ALL = 0o004
log = logging.getLogger("parlay.controller")


class Tokens:
    """The tokens of `path`; raises OSError or ValueError where there are none to begin with.

    A file that becomes unreadable or malformed later is said in the log, and the tokens read before
    stay: empty it of a token by removing its line.
    """

    def __init__(self, path: Path, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.version = 0
        """Grows whenever other tokens were read."""
        self._clock_s, self._looked_s = clock_s, clock_s()
        self._names, self._seen = _read(path), _mark(path)

    def name_of(self, token: str) -> str | None:
        """Return the name of a token, None for one that is not in the file (any more)."""
        self.refresh()
        asked = _hashed(token)
        found = None
        # Looks at all, so that how long it takes tells nothing.
        for known, name in self._names.items():
            if hmac.compare_digest(known, asked):
                found = name
        return found

    def refresh(self, at_once: bool = False) -> None:
        """Read the file anew if it has changed; looks at most once a second unless `at_once`."""
        now_s = self._clock_s()
        if not at_once and now_s - self._looked_s < CHECK_S:
            return
        self._looked_s = now_s
        seen = _mark(self.path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            names = _read(self.path)
        except (OSError, ValueError) as error:
            log.error("tokens not read anew, those before stay valid error=%r", str(error))
            return
        if names != self._names:
            self._names, self.version = names, self.version + 1
            log.warning("tokens read anew path=%s tokens=%d", self.path, len(names))


def _read(path: Path) -> dict[bytes, str]:
    if path.stat().st_mode & _READ_BY_ALL:
        raise ValueError(f"{path}: everybody can read these tokens: chmod o-r it")
    return {_hashed(token): name for name, token in read_tokens(path)}


def _mark(path: Path) -> tuple[int, ...]:
    """Return what changes when a file does; of a link, its target's (so Kubernetes swaps them)."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return (found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode)


def _hashed(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
