"""What `parlay serve` can be told: one schema for a TOML file, the environment and flags.

A flag beats the environment, which beats the file, which beats the default. `log_sample` is
`--log-sample`, PARLAY_LOG_SAMPLE, and `log_sample = 0.1` in the file. A policy's settings go with
the policy: whoever names another policy leaves behind what was set for the one below.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parlay.controller.config_kinds import KINDS, LEVELS
from parlay.controller.listener import socket_path
from parlay.policies import DEFAULT_POLICY

Source = tuple[Mapping[str, Any], Callable[[str], str]]
"""Values by key, and how the source names a key."""


def _is(kind: str, about: str, hot: bool = False) -> dict[str, Any]:
    """Say of a field: its kind, one of KINDS; its help; hot: it may change while we run."""
    return {"kind": kind, "help": about, "hot": hot}


@dataclass(slots=True, frozen=True, kw_only=True)
class Config:
    """The schema: each field's default, kind and help; raises ValueError for what cannot be."""

    listen: str = field(
        default="127.0.0.1:50051",
        metadata=_is("text", "where engines ask: unix:/path or host:port (port 0: any)"),
    )
    policy: str = field(default=DEFAULT_POLICY, metadata=_is("text", "the policy that decides"))
    set: Mapping[str, str] = field(
        default_factory=dict, metadata=_is("pairs", "a setting of the policy, key=value")
    )
    log: Path | None = field(
        default=None, metadata=_is("path", "write the decision log into this folder")
    )
    log_sample: float = field(
        default=1.0, metadata=_is("share", "share of requests to log, 0 to 1", hot=True)
    )
    admin: str = field(
        default="", metadata=_is("text", "where parlay admin is served: unix:/path or host:port")
    )
    audit: Path | None = field(
        default=None, metadata=_is("path", "write who changed what into this file, JSON lines")
    )
    snapshots: Path | None = field(
        default=None, metadata=_is("path", "the folder for parlay admin snapshot")
    )
    warm_start: Path | None = field(
        default=None, metadata=_is("path", "let new engines start from this snapshot")
    )
    state: str = field(
        default="memory",
        repr=False,
        metadata=_is(
            "text",
            "where what is learned is kept and shared: memory, file:PATH, redis://, rediss://,"
            " redis+sentinel:// or redis+cluster://",
        ),
    )
    tenant: str = field(
        default="default", metadata=_is("text", "replicas of one tenant learn together")
    )
    model: str = field(
        default="default", metadata=_is("text", "replicas of one model learn together")
    )
    http: str = field(
        default="",
        metadata=_is("text", "where the page, /metrics and /health are served: host:port"),
    )
    http_tokens: Path | None = field(
        default=None,
        metadata=_is("path", "who reads the page or /metrics needs a token of this file"),
    )
    socket_mode: int = field(
        default=0o600, metadata=_is("mode", "who may open the Unix socket of --listen, in octal")
    )
    tls_cert: Path | None = field(
        default=None, metadata=_is("path", "our certificate, PEM, for host:port listeners")
    )
    tls_key: Path | None = field(default=None, metadata=_is("path", "its key, PEM, not encrypted"))
    client_ca: Path | None = field(
        default=None, metadata=_is("path", "engines need a certificate signed by it (mTLS)")
    )
    client_names: tuple[str, ...] = field(
        default=(),
        metadata=_is("names", "names in engines' certificates that may enter; none: all", hot=True),
    )
    tokens: Path | None = field(
        default=None,
        metadata=_is("path", "engines need a token of this file: TOKEN or NAME TOKEN a line"),
    )
    admin_client_ca: Path | None = field(
        default=None, metadata=_is("path", "people need a certificate signed by it")
    )
    admin_names: tuple[str, ...] = field(
        default=(),
        metadata=_is("names", "names in people's certificates that may enter; none: all", hot=True),
    )
    admin_tokens: Path | None = field(
        default=None, metadata=_is("path", "people need a token of this file")
    )
    reflection: bool = field(
        default=False,
        metadata=_is("switch", "let grpcurl and the like ask a listener what it serves"),
    )
    otel: bool = field(
        default=False,
        metadata=_is("switch", "trace unary calls with OpenTelemetry, to where OTEL_* say"),
    )
    log_level: str = field(
        default="warning", metadata=_is("level", f"the least to say: {', '.join(LEVELS)}", hot=True)
    )

    def __post_init__(self) -> None:
        needs = (
            (self.tls_cert, "tls_cert", self.tls_key, "tls_key"),
            (self.tls_key, "tls_key", self.tls_cert, "tls_cert"),
            (self.client_ca, "client_ca", self.tls_cert, "tls_cert"),
            (self.client_names, "client_names", self.client_ca, "client_ca"),
            (self.admin_client_ca, "admin_client_ca", self.tls_cert, "tls_cert"),
            (self.admin_names, "admin_names", self.admin_client_ca, "admin_client_ca"),
            (self.http_tokens, "http_tokens", self.http, "http"),
        )
        for value, name, needed, what in needs:
            if value and not needed:
                raise ValueError(f"{name} needs {what} too")
        plain = "is for host:port: a Unix socket's mode, and tokens, guard it"
        if self.client_ca and self.listen.startswith("unix:"):
            raise ValueError(f"client_ca {plain}")
        if (self.admin_client_ca or self.admin_tokens) and not self.admin:
            raise ValueError("admin_tokens and admin_client_ca need admin, the address")
        if self.admin_client_ca and self.admin.startswith("unix:"):
            raise ValueError(f"admin_client_ca {plain}")
        if self.admin and _address(self.admin) == _address(self.listen):
            raise ValueError(f"admin needs another address than listen: both are {self.listen}")
        if self.admin_tokens and self.admin_tokens == self.tokens:
            raise ValueError("admin_tokens must be another file than tokens: engines are no admins")
        if self.admin_client_ca and self.admin_client_ca == self.client_ca and not self.admin_names:
            raise ValueError("admin_names is needed: engines' certificates have the same signer")


FIELDS = {found.name: found for found in dataclasses.fields(Config)}


def load(
    flags: Mapping[str, Any],
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Return what the three sources say together; flags: by key, None for those not given.

    Raises OSError, or ValueError in one line that names the source and the key.
    """
    named = {key: environ[env] for key in FIELDS if environ.get(env := variable(key))}
    given = {key: value for key, value in flags.items() if value is not None}
    sources: list[tuple[Mapping[str, Any], Callable[[str], str]]] = [
        (named, variable),
        (given, flag),
    ]
    if file is not None:
        sources.insert(0, (_read(file), lambda key: f"{file}: {key}"))
    found: dict[str, Any] = {}
    for values, name in sources:
        parsed = {key: _parsed(key, value, name) for key, value in values.items()}
        if "policy" in parsed:
            found.pop("set", None)
        if "set" in parsed:
            parsed["set"] = found.get("set", {}) | parsed["set"]
        found |= parsed
    try:
        return Config(**found)
    except ValueError as error:
        raise ValueError(str(error) if file is None else f"{file}: {error}") from None


def flag(key: str) -> str:
    """Return a key's flag."""
    return f"--{key.replace('_', '-')}"


def variable(key: str) -> str:
    """Return a key's environment variable."""
    return f"PARLAY_{key.upper()}"


def said_of_file(error: Exception, config: Config | None) -> str:
    """Return an error in one line; of a file that cannot be opened, with the key that names it."""
    if not isinstance(error, OSError) or error.filename is None or error.strerror is None:
        return str(error)
    file = Path(os.fsdecode(error.filename))
    keys = [key for key in FIELDS if config is not None and getattr(config, key) == file]
    return f"{' and '.join(keys)}{': ' * bool(keys)}{file}: {error.strerror}"


def changed(old: Config, new: Config) -> tuple[dict[str, Any], list[str]]:
    """Return what may change at once, by key, and the keys that differ but need a restart."""
    differ = [key for key in FIELDS if getattr(old, key) != getattr(new, key)]
    hot = {key: getattr(new, key) for key in differ if FIELDS[key].metadata["hot"]}
    return hot, [key for key in differ if key not in hot]


def _address(listen: str) -> object:
    """Return what two ways to write an address have in common; of port 0 each is another."""
    path = socket_path(listen)
    if path is not None:
        return os.path.realpath(path)
    return object() if listen.endswith(":0") else listen


def _read(file: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: no TOML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise OSError(f"cannot read {file}: {error.strerror}") from None
    for key in values:
        if key not in FIELDS:
            near = difflib.get_close_matches(key, FIELDS, 1)
            raise ValueError(
                f"{file}: unknown key '{key}'"
                + (f", did you mean '{near[0]}'?" if near else f"; there are {', '.join(FIELDS)}")
            )
    return values


def _parsed(key: str, value: Any, name: Callable[[str], str]) -> Any:
    try:
        return KINDS[FIELDS[key].metadata["kind"]](value)
    except (ValueError, TypeError) as error:
        # What was said of `state` may hold a password; pairs say themselves which is wrong.
        shown = "" if key in ("state", "set") else f"{value!r}: "
        raise ValueError(f"{name(key)} {shown}{error}") from None
