"""Files of weights that parlay makes: safetensors with one JSON object about them in the header.

A matrix NAME is int8 [rows, columns] beside NAME.scale float16 [rows], a vector bfloat16; `vocab`
int32 [rows] is the target's token of each row of the file's head. The target's own embedding is
not in the file, only its fingerprint. The object: version, config (sizes), target_embedding, card
(how the weights were made and what they were measured at).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from parlay.engine.int8_rows import quantised, widened


@dataclass(slots=True, frozen=True)
class Artefact:
    """One kind of such files.

    name: the header's key, and with its verb, "is" or "are", how errors begin; foreign: what they
    say of a file of another kind; mend: how to make one again.
    """

    name: str
    verb: str
    version: int
    foreign: str
    mend: str

    def save(
        self,
        path: Path,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        names: Iterable[str],
        ids: Tensor,
        embedding: Tensor,
        card: Mapping[str, Any],
    ) -> None:
        """Write the weights of these names, whole or not at all; config and card: JSON-able."""
        tensors: dict[str, Tensor] = {"vocab": ids.to(torch.int32)}
        for name in names:
            if weights[name].dim() == 1:
                tensors[name] = weights[name].detach().bfloat16()
            else:
                tensors[name], tensors[f"{name}.scale"] = quantised(weights[name])
        header = {
            "version": self.version,
            "config": dict(config),
            "target_embedding": _fingerprint(embedding),
            "card": dict(card),
        }
        part = path.with_name(path.name + ".part")
        save_file(tensors, part, {self.name: json.dumps(header, sort_keys=True)})
        part.rename(path)

    def read(self, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return a file's header object and its tensors; raises ValueError in one line."""
        if not path.is_file():
            raise ValueError(f"{self.name} {path} {self.verb} missing; {self.mend}")
        try:
            with safe_open(path, framework="pt") as opened:
                header = json.loads((opened.metadata() or {}).get(self.name, "null"))
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise self.damaged(path, error) from None
        if not isinstance(header, dict):
            raise ValueError(f"{path} {self.foreign}")
        if header.get("version") != self.version:
            has = "has" if self.verb == "is" else "have"
            raise ValueError(
                f"{self.name} {path} {has} format {header.get('version')}, this parlay reads"
                f" {self.version}; {self.mend}"
            )
        return header, tensors

    def card(self, path: Path) -> dict[str, Any]:
        """Return the facts that a file was saved with; raises ValueError as `read`."""
        card = self.read(path)[0].get("card")
        return card if isinstance(card, dict) else {}

    def check_target(self, path: Path, header: Mapping[str, Any], embedding: Tensor) -> None:
        """Raise ValueError where a file was made for a target with another embedding."""
        if header.get("target_embedding") != _fingerprint(embedding):
            was = "was" if self.verb == "is" else "were"
            raise ValueError(
                f"{self.name} {path} {was} made for another target model;"
                f" {self.mend} --model TARGET"
            )

    def ids(self, path: Path, tensors: Mapping[str, Tensor], rows: int, vocab: int) -> Tensor:
        """Return the token of each row of the head, i64 [rows], all of them below `vocab`."""
        ids = tensors.get("vocab")
        if ids is None or tuple(ids.shape) != (rows,) or not _within(ids, vocab):
            raise self.damaged(path, "token ids")
        return ids.long()

    def weights(
        self, path: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Tensor]:
        """Return the tensors of these shapes in bfloat16, widened where they are int8."""
        return {name: self._weight(path, tensors, name, shape) for name, shape in shapes.items()}

    def damaged(self, path: Path, what: object) -> ValueError:
        """Return the error that says what of a file is wrong."""
        return ValueError(f"{self.name} {path} {self.verb} damaged ({what}); {self.mend}")

    def _weight(
        self, path: Path, tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]
    ) -> Tensor:
        w, scale = tensors.get(name), tensors.get(f"{name}.scale")
        if w is None or tuple(w.shape) != shape:
            raise self.damaged(path, name)
        if w.dtype == torch.int8:
            if scale is None or w.dim() != 2 or scale.shape != w.shape[:1]:
                raise self.damaged(path, f"{name}.scale")
            w = widened(w, scale)
        w = w.bfloat16()
        if not finite(w):
            raise self.damaged(path, f"{name} has NaN or infinity")
        return w


def finite(w: Tensor) -> bool:
    """Say whether no number is NaN or infinite."""
    # Both ends tell of all: a NaN anywhere comes out at them, in one pass without a copy.
    return bool(torch.stack(torch.aminmax(w)).isfinite().all())


def _within(ids: Tensor, count: int) -> bool:
    """Say whether every id is a whole number, one of 0 .. count - 1."""
    return ids.dtype in (torch.int32, torch.int64) and bool(((ids >= 0) & (ids < count)).all())


def _fingerprint(embedding: Tensor) -> str:
    """Name an embedding by its bfloat16 bytes."""
    raw = embedding.detach().cpu().bfloat16().contiguous().view(torch.int16).numpy()
    return hashlib.sha256(raw.data).hexdigest()
