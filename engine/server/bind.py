"""Bind the address to serve on, before anything that takes long."""

from __future__ import annotations

import socket


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to host and port (0: any); raises ValueError or OSError in one line."""
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must be between 0 and 65535, not {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(where)
            bound.listen(1)  # on some systems only this finds out that the port is in use
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return bound


def url_of(bound: socket.socket) -> str:
    """Return the URL under which a bound socket is reached."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
