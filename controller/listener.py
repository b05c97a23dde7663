"""Addresses that a process is about to listen on: checked before, cleaned up after."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

PROBE_S = 1.0
MAX_PATH_BYTES = 107
MAX_PORT = 65535


def claim(listen: str) -> None:
    """Check an address and remove a socket that nobody listens on; raises OSError or ValueError."""
    path = socket_path(listen)
    if path is None:
        _try_port(listen)
    else:
        _claim_path(path)


def release(listen: str) -> None:
    """Remove our socket."""
    path = socket_path(listen)
    if path is not None:
        path.unlink(missing_ok=True)


def socket_path(listen: str) -> Path | None:
    """Return the path of a unix: address, None for any other."""
    if not listen.startswith("unix:"):
        return None
    return Path(listen.removeprefix("unix://").removeprefix("unix:"))


def _try_port(listen: str) -> None:
    """Bind and let go: what gRPC says about a port that is taken is long and unclear."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > MAX_PORT:
        raise ValueError(f"--listen {listen}: write it as unix:/path or host:port")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen on {listen}: {error.strerror}") from None


def _claim_path(path: Path) -> None:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise OSError(
            f"cannot listen on {path}: a socket's path has at most {MAX_PATH_BYTES} bytes"
        )
    if not path.parent.is_dir():
        raise OSError(f"cannot listen on {path}: its folder does not exist")
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise OSError(f"cannot listen on {path}: a file of that name is there and is no socket")
    if _listens(path):
        raise OSError(f"cannot listen on {path}: another process does")
    path.unlink(missing_ok=True)


def _listens(path: Path) -> bool:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except TimeoutError:
            return True
        return True
