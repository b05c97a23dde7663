"""Open what a server serves: model, policy or sidecar, engine and counts."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parlay.engine.generate import Placement, open_engine
from parlay.engine.llm import draft_window_tokens
from parlay.engine.model_config import load_config
from parlay.engine.scheduler import EngineConfig
from parlay.engine.server.app import Service
from parlay.engine.server.meter import Meter
from parlay.engine.server.worker import Worker
from parlay.engine.stats_hub import StatsHub
from parlay.engine.step import Engine
from parlay.engine.tokenizer import Tokenizer
from parlay.engine.weights import DEFAULT_MODEL, default_model_dir

MAX_WAITING = 256
"""Requests that may wait beyond those that run; more are told to come again."""


@dataclass(slots=True, frozen=True)
class Model:
    """What to load, and how much of it runs at once; None: the default model, its own draft, its
    whole context. corpus: files of texts that drafts may be taken from.
    """  # noqa: D205

    folder: Path | None = None
    draft: str | None = None
    max_running: int = 16
    context_tokens: int | None = None
    medusa: Path | None = None
    corpus: Sequence[Path] = ()
    runs: Placement = field(default_factory=Placement)

    @property
    def name(self) -> str:
        """Return the name that clients use."""
        return DEFAULT_MODEL if self.folder is None else self.folder.resolve().name


@contextmanager
def open_service(
    model: Model, policy: str, settings: Mapping[str, Any], sidecar: str | None, engine_id: str
) -> Iterator[Service]:
    """Load a model under a policy, or under a sidecar with it as fallback.

    Raises ValueError in one line where the model, the policy, a setting or a file cannot be used.
    """
    folder = default_model_dir() if model.folder is None else model.folder
    with open_engine(
        model.folder,
        policy,
        settings,
        sidecar,
        model.runs,
        model.corpus,
        engine_id,
        draft=model.draft,
        medusa=model.medusa,
        config=_config(model, load_config(folder).context),
    ) as (engine, tokenizer):
        says = policy if sidecar is None else f"sidecar {sidecar}"
        yield make_service(engine, tokenizer, model.name, says, engine.config.vocab_tokens)


@contextmanager
def open_stats(target: str, engine_id: str) -> Iterator[StatsHub]:
    """Serve what an engine is about to do at `target`; raises ValueError or OSError, one line."""
    from parlay.engine.stats import serve_stats

    hub = StatsHub(engine_id)
    with closing(serve_stats(hub, target)):
        yield hub


def _config(model: Model, whole_tokens: int) -> EngineConfig:
    """Return the engine's sizes: one whole context always fits, as do the defaults' blocks."""
    plain = EngineConfig()
    context = model.context_tokens or whole_tokens
    blocks = max(plain.target_blocks, -(-context // plain.block_tokens))
    return EngineConfig(
        max_running=model.max_running,
        target_blocks=blocks,
        draft_blocks=blocks,
        context_tokens=context,
        draft_window_tokens=draft_window_tokens(model.draft, whole_tokens),
    )


def make_service(
    engine: Engine,
    tokenizer: Tokenizer,
    name: str,
    policy: str,
    vocab: int,
    max_waiting: int = MAX_WAITING,
) -> Service:
    """Put a service around an engine; vocab: token ids that a prompt may hold."""
    meter = Meter(name, policy, engine.scheduler)
    worker = Worker(engine, meter, max_waiting)
    return Service(name, int(time.time()), tokenizer, vocab, worker, meter)


def engine_name(port: int) -> str:
    """Return the id under which a sidecar knows this engine again after a restart."""
    return f"{socket.gethostname()}:{port}"
