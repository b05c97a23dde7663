"""State in Redis: one slot a replica, which only it writes, and which ends when it is not renewed.

Keys, of a scope in braces so that a Cluster keeps them together:

    parlay:1:{SCOPE}:writers        set of writers
    parlay:1:{SCOPE}:slot:WRITER    that writer's counts, as bytes; age = its full life - PTTL
    parlay:1:{SCOPE}:own:ENGINE     the newest state of an engine
    parlay:1:{SCOPE}:newest         the newest state of any

Ages come from the server's clock alone. All that a user needs: ~parlay:* +set +get +pttl +sadd
+srem +smembers +pexpire +hello +select, in a Cluster also +cluster|slots +command. (The client
names itself too, with CLIENT SETINFO, and does not mind a refusal.)
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry
from redis.sentinel import Sentinel

from parlay.controller.redis_url import RedisUrl
from parlay.controller.slot import MOST_BYTES, SCHEMA
from parlay.controller.store import SAVED_TTL_S, SLOT_TTL_S, Held, Scope, StoreError

OWN_TTL_S = 86_400.0
_SLOT_MS, _SAVED_MS, _OWN_MS = (int(1e3 * s) for s in (SLOT_TTL_S, SAVED_TTL_S, OWN_TTL_S))
# redis-py has no types for these.
_SENTINEL, _NODE = cast(Any, Sentinel), cast(Any, ClusterNode)


class RedisStore:
    """A store in Redis; connects when it is first used, and again after every failure."""

    def __init__(self, url: RedisUrl) -> None:
        self.url = url
        self._client: Any = None

    def exchange(self, mine: Mapping[tuple[Scope, str], bytes]) -> dict[Scope, dict[str, Held]]:
        """Write each (scope, writer)'s slot; return every slot of these scopes by writer."""
        scopes = list(dict.fromkeys(scope for scope, _ in mine))
        commands: list[tuple[Any, ...]] = []
        for (scope, writer), data in mine.items():
            commands.append(("SET", _key(scope, "slot", writer), data, "PX", _SLOT_MS))
            commands.append(("SADD", _key(scope, "writers"), writer))
        commands += [("PEXPIRE", _key(scope, "writers"), 2 * _SLOT_MS) for scope in scopes]
        commands += [("SMEMBERS", _key(scope, "writers")) for scope in scopes]
        members = self._run(commands)[len(commands) - len(scopes) :]
        writers = [
            (scope, member.decode("utf-8", "replace"))
            for scope, of in zip(scopes, members, strict=True)
            for member in of
        ]
        return self._read(scopes, writers)

    def _read(
        self, scopes: list[Scope], writers: list[tuple[Scope, str]]
    ) -> dict[Scope, dict[str, Held]]:
        keys = [_key(scope, "slot", writer) for scope, writer in writers]
        answers = self._run([(verb, key) for verb in ("GET", "PTTL") for key in keys])
        found: dict[Scope, dict[str, Held]] = {scope: {} for scope in scopes}
        ended = []
        for place, (scope, writer) in enumerate(writers):
            data, left_ms = answers[place], answers[len(keys) + place]
            if data is None:
                ended.append(("SREM", _key(scope, "writers"), writer))
            elif len(data) <= MOST_BYTES:
                found[scope][writer] = Held(data, _age_s(left_ms, _SLOT_MS))
        if ended:
            self._run(ended)
        return found

    def save(self, scope: Scope, engine_id: str, state: bytes) -> None:
        """Keep a state as the engine's own, and as the scope's newest."""
        own = ("SET", _key(scope, "own", engine_id), state, "PX", _OWN_MS)
        self._run([own, ("SET", _key(scope, "newest"), state, "PX", _SAVED_MS)])

    def saved(self, scope: Scope, engine_id: str) -> tuple[Held, bool] | None:
        """Return the engine's own state, else the scope's newest; True: it is its own."""
        for key, full_ms in (
            (_key(scope, "own", engine_id), _OWN_MS),
            (_key(scope, "newest"), _SAVED_MS),
        ):
            data, left_ms = self._run([("GET", key), ("PTTL", key)])
            if data is not None:
                return Held(data, _age_s(left_ms, full_ms)), full_ms == _OWN_MS
        return None

    def close(self) -> None:
        """Let go of the connections."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _run(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Send commands in one go and return their answers; raises StoreError."""
        if not commands:
            return []
        try:
            if self._client is None:
                self._client = _connect(self.url)
            with self._client.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                return cast(list[Any], pipe.execute())
        except (redis.RedisError, OSError) as error:
            if self.url.kind == "cluster":
                # What it knew of its nodes may be what is wrong.
                self._drop()
            text = " ".join(str(error).split()) or type(error).__name__
            raise StoreError(f"{self._named()}: {text}") from None

    def _named(self) -> str:
        kind = "" if self.url.kind == "one" else f" {self.url.kind}"
        return f"redis{kind} at {', '.join(f'{host}:{port}' for host, port in self.url.hosts)}"

    def _drop(self) -> None:
        try:
            self.close()
        except (redis.RedisError, OSError):
            self._client = None


def _key(scope: Scope, *parts: str) -> str:
    return ":".join((f"parlay:{SCHEMA}", f"{{{scope.key}}}", *parts))


def _age_s(left_ms: int, full_ms: int) -> float:
    """Return a key's age; one that never ends was not written here, and is as old as can be."""
    return max(full_ms - left_ms, 0) / 1e3 if left_ms >= 0 else full_ms / 1e3


def _connect(url: RedisUrl) -> Any:
    """Return a client whose every wait has an end, and which tries nothing twice.

    Only a Cluster is asked anything here: which node has what.
    """
    common: dict[str, Any] = {
        "username": url.user or None,
        "password": url.password or None,
        "retry": Retry(NoBackoff(), 0),
        **_limits(url),
    }
    if url.kind == "sentinel":
        watch = _limits(url) | {
            "username": url.sentinel_user or None,
            "password": url.sentinel_password or None,
        }
        sentinel = _SENTINEL(list(url.hosts), sentinel_kwargs=watch, db=url.database, **common)
        return sentinel.master_for(url.service)
    if url.kind == "cluster":
        nodes = [_NODE(host, port) for host, port in url.hosts]
        return RedisCluster(startup_nodes=nodes, require_full_coverage=False, **common)
    (host, port), *_ = url.hosts
    return redis.Redis(host=host, port=port, db=url.database, **common)


def _limits(url: RedisUrl) -> dict[str, Any]:
    """Return deadlines and TLS, as every kind of connection takes them."""
    limits: dict[str, Any] = {
        "socket_timeout": url.timeout_s,
        "socket_connect_timeout": url.timeout_s,
        "socket_keepalive": True,
    }
    if url.tls:
        limits |= {
            "ssl": True,
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
            "ssl_ca_certs": url.ca or None,
            "ssl_certfile": url.cert or None,
            "ssl_keyfile": url.key or None,
            "ssl_min_version": ssl.TLSVersion.TLSv1_2,
        }
    return limits
