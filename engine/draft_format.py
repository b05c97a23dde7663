"""The file that a draft model is shipped in: int8 rows, a trimmed head, and its card.

An `Artefact` under Hugging Face's names; `vocab` goes with the rows of `lm_head.weight`.
`state_proj.weight` is there where config.state_layers names states of the target that it reads. The
draft reads the target's own embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from parlay.engine.artefact import Artefact
from parlay.engine.model_config import ModelConfig
from parlay.engine.traits import LLAMA

_DRAFT = Artefact(
    "draft",
    "is",
    1,
    "is not a draft of `parlay distill draft`",
    "make it again with `parlay distill draft`",
)


def save_draft(
    path: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    ids: Tensor,
    embedding: Tensor,
    card: Mapping[str, Any],
) -> None:
    """Write a draft, a plain Llama, that reads `embedding`.

    weights: Hugging Face's names, lm_head.weight trimmed to the rows that ids i64 [config.vocab]
    names. card: JSON-able facts about it.
    """
    assert config.traits == LLAMA, "a draft is a plain Llama"
    sizes = {n: v for n, v in dataclasses.asdict(config).items() if n != "traits"}
    names = _shapes(config, embedding.shape[1])
    _DRAFT.save(path, sizes, weights, names, ids, embedding, card)


def load_draft(path: Path, embedding: Tensor) -> tuple[ModelConfig, dict[str, Tensor], Tensor]:
    """Read a draft: its sizes, bfloat16 weights, and the target's id of each row of its head (i64).

    config.vocab counts the head's rows; embedding is the target's. Raises ValueError in one line
    where the file is missing or damaged, or was made for another target.
    """
    header, tensors = _DRAFT.read(path)
    config = _config(path, header)
    _DRAFT.check_target(path, header, embedding)
    ids = _DRAFT.ids(path, tensors, config.vocab, len(embedding))
    return config, _DRAFT.weights(path, tensors, _shapes(config, embedding.shape[1])), ids


def read_card(path: Path) -> dict[str, Any]:
    """Return the facts that a draft was saved with; raises ValueError as load_draft."""
    return _DRAFT.card(path)


def _shapes(config: ModelConfig, target_hidden: int) -> dict[str, tuple[int, ...]]:
    shapes = dataclasses.replace(config, tied=False).tensor_shapes()
    del shapes["model.embed_tokens.weight"]
    if config.state_layers:
        shapes["state_proj.weight"] = (config.hidden, len(config.state_layers) * target_hidden)
    return shapes


def _config(path: Path, header: Mapping[str, Any]) -> ModelConfig:
    try:
        fields = dict(header["config"])
        if "traits" in fields:
            raise ValueError("a draft is a plain Llama")
        tuples = {n: tuple(fields[n]) for n in ("eos_ids", "state_layers") if n in fields}
        return ModelConfig(**{**fields, **tuples})
    except (KeyError, TypeError, ValueError) as error:
        raise _DRAFT.damaged(path, f"config: {error}") from None
