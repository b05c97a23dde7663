"""How a client of the sidecar knows whom it talks to and says who it is: TLS files and a token.

Files are read again for each connection: whoever replaces one has rotated it. On a Unix socket,
which the file's mode guards, there is no TLS.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

LEAST_TOKEN, MOST_TOKEN = 16, 512
_FILES = {"ca": "CA_FILE", "cert": "CERT_FILE", "key": "KEY_FILE", "token": "TOKEN_FILE"}


@dataclass(slots=True, frozen=True)
class Credentials:
    """What a client shows and asks for.

    ca: PEM file of who signed the sidecar's certificate, None: no TLS. cert, key: PEM files of our
    own, for mTLS. token: file with a bearer token. server_name: the name in the sidecar's
    certificate, empty: the address's host. Raises ValueError where one is missing to another.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    token: Path | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("credentials: cert and key go together")
        if self.ca is None and (self.cert is not None or self.server_name):
            raise ValueError("credentials: TLS needs ca, the file of who signed the sidecar's")

    def check(self, target: str) -> None:
        """Raise ValueError where the token would travel to another host as plain text."""
        if self.token is not None and self.ca is None and not is_private(target):
            raise ValueError(f"a token for {target} needs TLS: name the ca file too")

    def channel(self, target: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
        """Open a channel; raises OSError where a file cannot be read."""
        self.check(target)
        if self.ca is None or target.startswith("unix:"):
            return grpc.insecure_channel(target, options=options)
        key, cert = (None if file is None else file.read_bytes() for file in (self.key, self.cert))
        if self.server_name:
            options = (*options, ("grpc.ssl_target_name_override", self.server_name))
        found = grpc.ssl_channel_credentials(self.ca.read_bytes(), key, cert)
        return grpc.secure_channel(target, found, options=options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what each call carries; raises OSError, or ValueError for a file without token."""
        if self.token is None:
            return ()
        found = read_tokens(self.token)
        return (("authorization", f"Bearer {found[0][1]}"),)


def from_environment(prefix: str, environ: Mapping[str, str] = os.environ) -> Credentials:
    """Return the credentials that PREFIX_CA_FILE, _CERT_FILE, _KEY_FILE, _TOKEN_FILE name.

    PREFIX_SERVER_NAME too. prefix: PARLAY_SIDECAR for engines, PARLAY_ADMIN for
    people, PARLAY_STATS for who watches an engine.
    """
    named = {field: environ.get(f"{prefix}_{ending}") for field, ending in _FILES.items()}
    paths = {field: Path(value) for field, value in named.items() if value}
    try:
        return Credentials(**paths, server_name=environ.get(f"{prefix}_SERVER_NAME", ""))
    except ValueError as error:
        raise ValueError(f"{prefix}_*_FILE: {error}") from None


def read_tokens(path: Path) -> list[tuple[str, str]]:
    """Return a file's (name, token) pairs: `token` or `name token` a line, # begins a comment.

    Raises OSError, or ValueError in one line that shows no token.
    """
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path}: tokens are of visible ASCII characters") from None
    found: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise ValueError(f"{path}: line {number}: write it as TOKEN or NAME TOKEN")
        if not LEAST_TOKEN <= len(words[-1]) <= MOST_TOKEN or not words[-1].isprintable():
            raise ValueError(
                f"{path}: line {number}: a token has {LEAST_TOKEN} to {MOST_TOKEN} visible"
                " characters; make one with openssl rand -hex 32"
            )
        found.append((words[0] if len(words) == 2 else f"line {number}", words[-1]))
    if not found:
        raise ValueError(f"{path}: there is no token in it")
    return found


def bearer(metadata: Any) -> str:
    """Return the token that a call's metadata carries, else an empty text."""
    for key, value in metadata or ():
        kind, _, token = str(value).partition(" ") if key == "authorization" else ("", "", "")
        if kind.lower() == "bearer":
            return token.strip()
    return ""


def is_private(target: str) -> bool:
    """Say whether only this host can reach an address: unix:/path, or a loopback one."""
    if target.startswith("unix:"):
        return True
    name = target.rpartition(":")[0].strip("[]")
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
