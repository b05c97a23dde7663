"""Addresses that a process is about to listen on: checked before, cleaned up after."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from pathlib import Path

PROBE_S = 1.0
MAX_PATH_BYTES = 107
MAX_PORT = 65535
HANDOVER_S = 5.0
"""How long to wait for a process that holds the address and no longer, or not yet, listens."""
_POLL_S = 0.05


class Claim:
    """An address that is ours until released; of a Unix socket, a lock file beside it says so.

    Without a lock two that start at once both find nobody there, and each removes the other's
    socket: gRPC unlinks whatever is at its path, when it binds and when it ends.
    """

    def __init__(self, path: Path | None = None, lock: int | None = None) -> None:
        self._path, self._lock = path, lock
        self._socket: tuple[int, int] | None = None

    def bound(self) -> None:
        """Take what is at the path now for our socket."""
        self._socket = None if self._path is None else _identity(self._path)

    def release(self) -> None:
        """Remove our socket, and no other's that took its place, and let others have the address.

        Nothing happens the second time.
        """
        lock, self._lock = self._lock, None
        if self._path is None or lock is None:
            return
        with contextlib.suppress(OSError):
            if self._socket is not None and _identity(self._path) == self._socket:
                self._path.unlink(missing_ok=True)
            _lock_file(self._path).unlink(missing_ok=True)
        os.close(lock)


def claim(listen: str) -> Claim:
    """Check an address and remove a socket that nobody listens on; raises OSError or ValueError."""
    path = socket_path(listen)
    if path is None:
        # What gRPC says about a port that is taken is long and unclear.
        bind(listen, "--listen", "unix:/path or host:port").close()
        return Claim()
    return _claim_path(path)


def socket_path(listen: str) -> Path | None:
    """Return the path of a unix: address, None for any other."""
    if not listen.startswith("unix:"):
        return None
    return Path(listen.removeprefix("unix://").removeprefix("unix:"))


def bind(address: str, flag: str, ways: str = "host:port") -> socket.socket:
    """Return a socket bound to host:port (port 0: any); raises OSError or ValueError.

    flag: how the address was given; ways: how it may be written.
    """
    host, _, port = address.rpartition(":")
    # isdigit alone is true of superscripts, too.
    if not (host and port.isascii() and port.isdigit()) or int(port) > MAX_PORT:
        raise ValueError(f"{flag} {address}: write it as {ways}")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(where)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {error.strerror}") from None
    return bound


def _claim_path(path: Path) -> Claim:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise OSError(
            f"cannot listen on {path}: a socket's path has at most {MAX_PATH_BYTES} bytes"
        )
    if not path.parent.is_dir():
        raise OSError(f"cannot listen on {path}: its folder does not exist")
    found = Claim(path, _locked(path))
    try:
        if _other_listens(path):
            raise _taken(path)
        path.unlink(missing_ok=True)
    except BaseException:
        found.release()
        raise
    return found


def _locked(path: Path) -> int:
    """Return what holds the lock of a path; whoever is about to end, or to listen, is waited for.

    Raises OSError where another process keeps it.
    """
    file, until_s = _lock_file(path), time.monotonic() + HANDOVER_S
    while True:
        listens = _other_listens(path)
        try:
            lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise OSError(f"cannot listen on {path}: {file}: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            if listens or time.monotonic() >= until_s:
                raise _taken(path) from None
            time.sleep(_POLL_S)
            continue
        of = os.fstat(lock)
        if _identity(file) == (of.st_dev, of.st_ino):
            return lock
        # Whoever held it removed it meanwhile: a lock of a file that has no name keeps nobody out.
        os.close(lock)


def _lock_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from another of the same name, None where there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _taken(path: Path) -> OSError:
    return OSError(f"cannot listen on {path}: another process does")


def _other_listens(path: Path) -> bool:
    """Say whether somebody listens at a path; raises OSError where it is of a file."""
    if not path.exists():
        return False
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise OSError(f"cannot listen on {path}: a file of that name is there and is no socket")
    return _listens(path)


def _listens(path: Path) -> bool:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except TimeoutError:
            return True
        return True
