"""State in this process's memory, and in one file that is there as a whole or not at all."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from parlay.controller.slot import MOST_BYTES, Damaged, decode, encode
from parlay.controller.store import SAVED_TTL_S, SLOT_TTL_S, Held, Scope, StoreError
from parlay.policies.files import check_writable
from parlay.policies.types import Array

MOST_SAVED = 128
"""States kept; the one saved longest ago makes room."""
WRITE_EVERY_S = 5.0
_NEWEST, _OWN = "newest", "own"
log = logging.getLogger("parlay.controller")

States = dict[str, tuple[bytes, float]]
"""By name: a state, and when it was written, in seconds since 1970."""


class MemoryStore:
    """Engines of this process learn together; nothing outlives it, unless `put` keeps it.

    put: gets all saved states every few seconds, where there are new ones, and may raise
    StoreError; end: is called at the end.
    """

    def __init__(
        self,
        states: States | None = None,
        put: Callable[[States], None] | None = None,
        end: Callable[[], None] | None = None,
    ) -> None:
        self._slots: dict[Scope, dict[str, tuple[bytes, float]]] = {}
        self._states = dict(states or {})
        self._put, self._end = put, end
        self._unwritten, self._written_s = False, -WRITE_EVERY_S
        self._lock = threading.Lock()

    def exchange(self, mine: Mapping[tuple[Scope, str], bytes]) -> dict[Scope, dict[str, Held]]:
        """Write each (scope, writer)'s slot; return every slot of these scopes by writer."""
        now_s, found = time.monotonic(), dict[Scope, dict[str, Held]]()
        with self._lock:
            for (scope, writer), data in mine.items():
                self._slots.setdefault(scope, {})[writer] = (data, now_s)
            for scope in {scope for scope, _ in mine}:
                slots = {w: s for w, s in self._slots[scope].items() if now_s - s[1] < SLOT_TTL_S}
                self._slots[scope] = slots
                found[scope] = {w: Held(data, now_s - then) for w, (data, then) in slots.items()}
        return found

    def save(self, scope: Scope, engine_id: str, state: bytes) -> None:
        """Keep a state as the engine's own, and as the scope's newest."""
        now_s = time.time()
        with self._lock:
            for name in (_name(_OWN, scope, engine_id), _name(_NEWEST, scope)):
                self._states.pop(name, None)
                self._states[name] = (state, now_s)
            while len(self._states) > MOST_SAVED:
                del self._states[next(iter(self._states))]
            self._unwritten = True
        if time.monotonic() - self._written_s >= WRITE_EVERY_S:
            self._write()

    def saved(self, scope: Scope, engine_id: str) -> tuple[Held, bool] | None:
        """Return the engine's own state, else the scope's newest; True: it is its own."""
        for name, own in ((_name(_OWN, scope, engine_id), True), (_name(_NEWEST, scope), False)):
            with self._lock:
                state, written_s = self._states.get(name, (b"", 0.0))
            age_s = max(time.time() - written_s, 0.0)
            if state and age_s < SAVED_TTL_S:
                return Held(state, age_s), own
        return None

    def close(self) -> None:
        """Write what is new and let go of the file."""
        try:
            self._write()
        finally:
            end, self._end = self._end, None
            if end is not None:
                end()

    def _write(self) -> None:
        with self._lock:
            states, due = dict(self._states), self._unwritten
        if self._put is not None and due:
            self._written_s = time.monotonic()
            self._put(states)
            self._unwritten = False


def open_file(path: Path) -> MemoryStore:
    """Return a store over a file that only this process writes.

    A file that is damaged, or another version's, is put aside as PATH.damaged and said so. Raises
    ValueError where the file cannot be written, or another process holds it.
    """
    check_writable(path)
    lock = _claim(path)
    try:
        states = _read(path) if path.exists() else {}
    except (OSError, Damaged) as error:
        aside, states = path.with_name(path.name + ".damaged"), {}
        log.warning("state file=%s is not used, moved to %s: %s", path, aside, error)
        try:
            path.replace(aside)
        except OSError:
            os.close(lock)
            raise ValueError(f"--state file:{path}: it is no state and cannot be moved") from None
    return MemoryStore(states, lambda kept: _write_file(path, kept), lambda: os.close(lock))


def _name(kind: str, scope: Scope, engine_id: str = "") -> str:
    return f"{kind} {scope.key} {engine_id}"


def _claim(path: Path) -> int:
    """Return a lock on PATH.lock, which ends with the process."""
    lock = -1
    try:
        lock = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if lock >= 0:
            os.close(lock)
        why = "another sidecar writes it" if isinstance(error, BlockingIOError) else error.strerror
        raise ValueError(f"--state file:{path}: {why}") from None
    return lock


def _read(path: Path) -> States:
    if path.stat().st_size > MOST_BYTES:
        raise Damaged(f"it has more than {MOST_BYTES} bytes")
    arrays = decode(path.read_bytes())
    times, states = arrays.pop("written_at_s", np.zeros(0)), list(arrays.items())
    if times.shape != (len(states),) or any(state.dtype != np.uint8 for _, state in states):
        raise Damaged("it is no state file")
    return {
        name: (state.tobytes(), float(written))
        for (name, state), written in zip(states, times, strict=True)
    }


def _write_file(path: Path, states: States) -> None:
    """Write the file whole, on the disk before it takes its name; raises StoreError.

    Where it would be too large, the states saved longest ago are left out.
    """
    kept, size = States(), 0
    for name, (state, written) in reversed(states.items()):
        size += len(state) + len(name) + 256
        if size < MOST_BYTES:
            kept[name] = (state, written)
    newest_last = dict(reversed(kept.items()))
    arrays: dict[str, Array] = {
        name: np.frombuffer(state, np.uint8) for name, (state, _) in newest_last.items()
    }
    arrays["written_at_s"] = np.array([written for _, written in newest_last.values()])
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(encode(arrays))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from None
