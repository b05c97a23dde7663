"""Where what was learned outlives the process: the seam that memory, a file and Redis stand behind.

Whoever calls a store may be made to wait, and does so from a thread of its own (`sharing.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from parlay.controller.slot import SCHEMA

SLOT_TTL_S = 60.0
"""A slot that is not renewed for so long is gone."""
SAVED_TTL_S = 7 * 86_400.0


class StoreError(Exception):
    """The store could not be reached, or did not do as asked; says why in one line."""


@dataclass(slots=True, frozen=True)
class Scope:
    """Who learns together: replicas that serve a tenant's model with the same policy and drafts.

    proposer_mask: bit p set where the engine has proposer p; k_max: longest draft, the length of
    the statistics.
    """

    tenant: str
    model: str
    proposer_mask: int
    policy: str
    k_max: int

    @property
    def key(self) -> str:
        """Return the scope as text: of letters, digits, - . _ ~ % and slashes between its parts."""
        parts = (self.tenant, self.model, f"p{self.proposer_mask:x}", self.policy, f"k{self.k_max}")
        return "/".join(quote(part, safe="") for part in (*parts, f"s{SCHEMA}"))


@dataclass(slots=True, frozen=True)
class Held:
    """Bytes that a store holds, and how long ago they were written."""

    data: bytes
    age_s: float


class Store(Protocol):
    """Keeps a slot for each writer of a scope, renewed all the time, and states saved at times.

    Every method may take as long as the store's deadlines let it, and raises StoreError.
    """

    def exchange(self, mine: Mapping[tuple[Scope, str], bytes]) -> dict[Scope, dict[str, Held]]:
        """Write each (scope, writer)'s slot; return every slot of these scopes by writer."""
        ...

    def save(self, scope: Scope, engine_id: str, state: bytes) -> None:
        """Keep a state as the engine's own, and as the scope's newest."""
        ...

    def saved(self, scope: Scope, engine_id: str) -> tuple[Held, bool] | None:
        """Return the engine's own state, else the scope's newest; True: it is its own."""
        ...

    def close(self) -> None:
        """Let go of connections and files."""
        ...


def open_store(url: str) -> Store:
    """Return the store that `--state` names; touches no network. Raises ValueError in one line."""
    from parlay.controller.snapshot import MemoryStore, open_file

    kind, separator, rest = url.partition(":")
    if url == "memory":
        return MemoryStore()
    if kind == "file":
        if not rest.removeprefix("//"):
            raise ValueError("--state file: needs a path, such as file:/var/lib/parlay/state")
        return open_file(Path(rest.removeprefix("//")))
    if separator and kind.startswith("redis"):
        try:
            from parlay.controller.redis_store import RedisStore
        except ModuleNotFoundError as error:
            if error.name != "redis":
                raise
            raise ValueError("--state redis needs redis-py: pip install 'parlay[redis]'") from None
        from parlay.controller.redis_url import parse

        return RedisStore(parse(url))
    raise ValueError(
        f"--state {kind if separator else url}: use memory, file:PATH, redis://, rediss://,"
        " redis+sentinel:// or redis+cluster://"
    )
