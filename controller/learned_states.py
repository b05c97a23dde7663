"""What engines' policies have learned, as one file: to warm-start a replica with.

An operator takes and names it (`parlay admin snapshot`, `parlay serve --warm-start`); what a
sidecar keeps by itself is the store's (`snapshot.py`, `--state`), and wins where there is both.

An npz without pickles: `head` is JSON (format, and each engine's policy, settings and limits), the
arrays of engine number n lie under `n/`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from parlay.controller.session import Session, Spec, spec_of
from parlay.policies.policy import EngineLimits, Policy
from parlay.policies.shared_stats import known_state
from parlay.policies.types import Array

FORMAT = 1
log = logging.getLogger("parlay.controller")


@dataclass(slots=True, frozen=True)
class Saved:
    """One engine's policy as it was left; steps: how many outcomes it had learned from."""

    engine_id: str
    spec: Spec
    limits: EngineLimits
    state: dict[str, Array]
    state_version: int
    steps: int


@dataclass(slots=True, frozen=True)
class Snapshot:
    """Engines of one controller."""

    engines: tuple[Saved, ...]

    @property
    def state_version(self) -> int:
        """Newest state version in it."""
        return max((saved.state_version for saved in self.engines), default=0)

    def warmed(self, policy: Policy, spec: Spec, limits: EngineLimits, engine_id: str) -> Policy:
        """Return `policy`, new, with the state of the same engine, else of the longest taught one.

        Only of the same spec and limits. A state that does not fit is said, and left out.
        """
        fits = [s for s in self.engines if s.spec == spec and s.limits == limits]
        fits.sort(key=lambda s: (s.engine_id == engine_id, s.steps))
        if not fits:
            return policy
        try:
            policy.load(fits[-1].state)
        except (ValueError, KeyError) as error:
            log.warning("snapshot does not fit engine=%s error=%r", engine_id, str(error))
            return spec.make(limits)
        return policy


def taken(sessions: list[Session]) -> Snapshot:
    """Return what the sessions' active policies know now, from others too; arrays are copies."""
    saved = []
    for s in sessions:
        state, steps = known_state(s.policy), s.counts.outcomes
        saved.append(Saved(s.engine_id, s.spec, s.limits, state, s.state_version, steps))
    return Snapshot(tuple(saved))


def write_snapshot(path: Path, snapshot: Snapshot) -> int:
    """Write a snapshot, as a whole or not at all; return its bytes. Raises OSError."""
    heads, arrays = [], dict[str, Array]()
    for number, saved in enumerate(snapshot.engines):
        heads.append(
            {
                "engine_id": saved.engine_id,
                "policy": saved.spec.name,
                "settings": dict(saved.spec.settings),
                "limits": dataclasses.asdict(saved.limits),
                "state_version": saved.state_version,
                "steps": saved.steps,
            }
        )
        arrays |= {f"{number}/{key}": value for key, value in saved.state.items()}
    head = np.array(json.dumps({"format": FORMAT, "engines": heads}))
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, head=head, **arrays)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path.stat().st_size


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot; raises ValueError where it is none, OSError where it cannot be read."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            head = json.loads(str(file["head"]))
            if head["format"] != FORMAT:
                raise KeyError(f"format {head['format']}")
            arrays = {name: file[name] for name in file.files if name != "head"}
        engines = (_saved(n, one, arrays) for n, one in enumerate(head["engines"]))
        return Snapshot(tuple(engines))
    except OSError as error:
        raise OSError(f"cannot read snapshot {path}: {error.strerror or error}") from None
    except (LookupError, TypeError, AttributeError, ValueError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path} is no snapshot of a controller of format {FORMAT}") from error


def _saved(number: int, head: Mapping[str, Any], arrays: Mapping[str, Array]) -> Saved:
    limits = dict(head["limits"])
    limits["bucket_edges"] = tuple(limits["bucket_edges"])
    start = f"{number}/"
    state = {k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)}
    return Saved(
        engine_id=head["engine_id"],
        spec=spec_of(head["policy"], head["settings"]),
        limits=EngineLimits(**limits),
        state=state,
        state_version=head["state_version"],
        steps=head["steps"],
    )
