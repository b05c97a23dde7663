"""The file that a draft model is shipped in: int8 rows, a trimmed head, and its card.

safetensors under Hugging Face's names. A matrix NAME is int8 [rows, columns] beside NAME.scale
float16 [rows]; a vector is bfloat16. `vocab` int32 [head rows] is the target's token of each row of
`lm_head.weight`; `state_proj.weight` is there where config.state_layers names states of the target
that it reads. The draft reads the target's own embedding, so that one is not in the file, only its
fingerprint. Metadata `draft`: JSON with version, config (sizes), target, target_embedding,
card (how it was made and what it was measured at).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from parlay.engine.artefact import read_artefact, stored, within
from parlay.engine.int8_rows import quantised
from parlay.engine.model_config import ModelConfig
from parlay.engine.traits import LLAMA

FORMAT_VERSION = 1
_MEND = "make it again with `parlay distill draft`"


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
    tensors: dict[str, Tensor] = {"vocab": ids.to(torch.int32)}
    for name in _shapes(config, embedding.shape[1]):
        w = weights[name].detach().float()
        if w.dim() == 1:
            tensors[name] = w.bfloat16()
        else:
            tensors[name], tensors[f"{name}.scale"] = quantised(w)
    header = {
        "version": FORMAT_VERSION,
        "config": {n: v for n, v in dataclasses.asdict(config).items() if n != "traits"},
        "target_embedding": fingerprint(embedding),
        "card": dict(card),
    }
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, {"draft": json.dumps(header, sort_keys=True)})
    part.rename(path)


def load_draft(path: Path, embedding: Tensor) -> tuple[ModelConfig, dict[str, Tensor], Tensor]:
    """Read a draft: its sizes, bfloat16 weights, and the target's id of each row of its head (i64).

    config.vocab counts the head's rows; embedding is the target's. Raises ValueError in one line
    where the file is missing or damaged, or was made for another target.
    """
    header, tensors = _read(path)
    config = _config(path, header)
    if header.get("target_embedding") != fingerprint(embedding):
        raise ValueError(f"draft {path} was made for another target model; {_MEND} --model TARGET")
    ids = tensors.get("vocab")
    if ids is None or tuple(ids.shape) != (config.vocab,) or not within(ids, len(embedding)):
        raise ValueError(f"draft {path} is damaged (its token ids); {_MEND}")
    weights: dict[str, Tensor] = {}
    for name, shape in _shapes(config, embedding.shape[1]).items():
        weights[name] = stored(tensors, name, shape, f"draft {path} is damaged", _MEND)
    return config, weights, ids.long()


def read_card(path: Path) -> dict[str, Any]:
    """Return the facts that a draft was saved with; raises ValueError as load_draft."""
    card = _read(path)[0].get("card")
    return card if isinstance(card, dict) else {}


def fingerprint(embedding: Tensor) -> str:
    """Name an embedding by its bfloat16 bytes."""
    raw = embedding.detach().cpu().bfloat16().contiguous().view(torch.int16).numpy()
    return hashlib.sha256(raw.data).hexdigest()


def _shapes(config: ModelConfig, target_hidden: int) -> dict[str, tuple[int, ...]]:
    shapes = dataclasses.replace(config, tied=False).tensor_shapes()
    del shapes["model.embed_tokens.weight"]
    if config.state_layers:
        shapes["state_proj.weight"] = (config.hidden, len(config.state_layers) * target_hidden)
    return shapes


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return read_artefact(
        path, "draft", "draft is", "is not a draft of `parlay distill draft`", FORMAT_VERSION, _MEND
    )


def _config(path: Path, header: Mapping[str, Any]) -> ModelConfig:
    try:
        fields = dict(header["config"])
        if "traits" in fields:
            raise ValueError("a draft is a plain Llama")
        tuples = {n: tuple(fields[n]) for n in ("eos_ids", "state_layers") if n in fields}
        return ModelConfig(**{**fields, **tuples})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"draft {path} is damaged (config: {error}); {_MEND}") from None
