"""Where a sidecar can be asked: unix:/path or host:port. What gRPC says comes late and is long."""

from __future__ import annotations

import os

MAX_PATH_BYTES = 107
MAX_PORT = 65535


def check_address(target: str, what: str = "sidecar") -> None:
    """Raise ValueError where `target` can be no address; `what` names who listens there."""
    if target.startswith("unix:"):
        path = target.removeprefix("unix:")
        if not path or "\0" in path:
            raise ValueError(f"{what} {target!r}: the path is missing, write it as unix:/path")
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise ValueError(f"{what} {target}: a socket's path has at most {MAX_PATH_BYTES} bytes")
        return
    host, _, port = target.rpartition(":")
    digits = port.isascii() and port.isdigit()
    if not host or any(c in "/\0 " for c in host) or not digits or not 0 < int(port) <= MAX_PORT:
        raise ValueError(f"{what} {target!r}: write it as unix:/path or host:port")
