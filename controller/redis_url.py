"""Addresses of Redis as one line: a server, one found by Sentinels, or a Cluster; TLS; a user."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote

SCHEMES = {
    "redis": ("one", False),
    "rediss": ("one", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_PORTS = {"one": 6379, "sentinel": 26379, "cluster": 6379}
_EXAMPLES = {
    "one": "redis://user:password@host:6379/0",
    "sentinel": "redis+sentinel://host1:26379,host2:26379/service/0",
    "cluster": "redis+cluster://host1:6379,host2:6379",
}
_OPTIONS = {"timeout_ms", "ca", "cert", "key", "sentinel_user", "sentinel_password"}
_LEAST_MS, _MOST_MS = 5.0, 5000.0


@dataclass(slots=True, frozen=True)
class RedisUrl:
    """Where Redis is and who asks.

    kind: one, sentinel or cluster. hosts: (host, port) of servers or Sentinels; service: the name
    that the Sentinels know. timeout_s: the longest wait for a connection and for each answer. ca,
    cert, key: paths of PEM files, empty: the system's authorities, no certificate of our own.
    """

    kind: str
    hosts: tuple[tuple[str, int], ...]
    tls: bool = False
    user: str = ""
    password: str = ""
    service: str = ""
    database: int = 0
    timeout_s: float = 0.2
    ca: str = ""
    cert: str = ""
    key: str = ""
    sentinel_user: str = ""
    sentinel_password: str = ""

    def __repr__(self) -> str:
        hosts = ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"RedisUrl({self.kind} {hosts})"


def parse(url: str) -> RedisUrl:
    """Read an address; raises ValueError in one line that shows no password."""
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES or not rest:
        raise ValueError(f"--state {scheme.split(':')[0]}: use one of {', '.join(SCHEMES)}://")
    kind, tls = SCHEMES[scheme]
    rest, _, query = rest.partition("?")
    place, _, path = rest.partition("/")
    login, _, hosts = place.rpartition("@")
    user, _, password = login.partition(":")
    options = _options(scheme, tls, query)
    service, database = _path(scheme, kind, path)
    return RedisUrl(
        kind=kind,
        hosts=tuple(_host(scheme, kind, host) for host in _split(scheme, kind, hosts)),
        tls=tls,
        user=unquote(user),
        password=unquote(password),
        service=service,
        database=database,
        timeout_s=_timeout_s(scheme, options.pop("timeout_ms", "200")),
        **options,
    )


def _split(scheme: str, kind: str, hosts: str) -> list[str]:
    found = hosts.split(",")
    if kind == "one" and len(found) > 1:
        raise ValueError(
            f"--state {scheme}: one host only, such as {_EXAMPLES[kind]}; for more of them use"
            " redis+sentinel or redis+cluster"
        )
    return found


def _host(scheme: str, kind: str, text: str) -> tuple[str, int]:
    host, port = text, ""
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    elif ":" in text:
        host, _, port = text.rpartition(":")
    port = port or str(_PORTS[kind])
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--state {scheme}: '{text}' is no host:port; write {_EXAMPLES[kind]}")
    return host, int(port)


def _path(scheme: str, kind: str, path: str) -> tuple[str, int]:
    """Return (service, database)."""
    parts = [unquote(part) for part in path.split("/") if part]
    service = ""
    if kind == "sentinel":
        if not parts:
            raise ValueError(
                f"--state {scheme}: name the service behind the hosts: {_EXAMPLES[kind]}"
            )
        service = parts.pop(0)
    database = parts.pop(0) if parts else "0"
    if parts or not database.isdecimal() or (kind == "cluster" and database != "0"):
        what = "a cluster has database 0 only" if kind == "cluster" else "a database is a number"
        raise ValueError(f"--state {scheme}: {what}; write {_EXAMPLES[kind]}")
    return service, int(database)


def _options(scheme: str, tls: bool, query: str) -> dict[str, str]:
    found = dict(parse_qsl(query, keep_blank_values=True))
    for name, value in found.items():
        if name not in _OPTIONS:
            raise ValueError(
                f"--state {scheme}: there is no option '{name}'; there are"
                f" {', '.join(sorted(_OPTIONS))}"
            )
        if name in ("ca", "cert", "key"):
            if not tls:
                raise ValueError(
                    f"--state {scheme}: {name} needs TLS: use {scheme}".replace(
                        ": use redis", ": use rediss"
                    )
                )
            if not Path(value).is_file():
                raise ValueError(f"--state {scheme}: {name}={value} is no file")
    if ("cert" in found) != ("key" in found):
        raise ValueError(f"--state {scheme}: cert and key go together")
    return found


def _timeout_s(scheme: str, text: str) -> float:
    try:
        timeout_ms = float(text)
    except ValueError:
        timeout_ms = -1.0
    if not _LEAST_MS <= timeout_ms <= _MOST_MS:
        raise ValueError(
            f"--state {scheme}: timeout_ms must be {_LEAST_MS:g} to {_MOST_MS:g}, not {text}"
        )
    return timeout_ms / 1e3
