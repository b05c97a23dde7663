"""The files that Medusa heads come in: our own, and the layout of public Medusa checkpoints.

Ours is an `Artefact` by the names of `HeadsConfig.tensor_shapes`; `vocab` names the rows of the
target's head that the heads use.

A public one is a folder with config.json (medusa_num_heads, medusa_num_layers) and
medusa_lm_head.pt or .safetensors with `{head}.{block}.linear.weight` and `.bias`, and
`{head}.{blocks}.weight` for the output layer, with or without `medusa_head.` before
(github.com/FasterDecoding/Medusa).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from parlay.engine.artefact import Artefact, finite
from parlay.engine.families import positive
from parlay.engine.medusa_heads import Heads, HeadsConfig, PlainHeads, RootedHeads
from parlay.engine.model_config import ModelConfig, read_json

SHIPPED_HEADS = Path(__file__).parent / "data" / "medusa-smollm2-135m.safetensors"
PUBLIC_NAMES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_PREFIX = "medusa_head."
_HEADS = Artefact(
    "heads",
    "are",
    1,
    "holds no heads of `parlay distill medusa`",
    "make them again with `parlay distill medusa`",
)
MAX_HEADS = 64
"""Most heads believed: each is a step of its own."""


@dataclasses.dataclass(slots=True, frozen=True)
class OfTarget:
    """What heads use of their target: its sizes, and its embedding and head [vocab, hidden] in the
    dtype and on the device that the heads are to run in.
    """  # noqa: D205

    config: ModelConfig
    embedding: Tensor
    head: Tensor


def save_heads(
    path: Path,
    config: HeadsConfig,
    weights: Mapping[str, Tensor],
    ids: Tensor,
    embedding: Tensor,
    card: Mapping[str, Any],
) -> None:
    """Write rooted heads for the target that reads `embedding`, whole or not at all.

    ids i64 [config.vocab]: rows of the target's head; card: JSON-able facts about them.
    """
    sizes = dataclasses.asdict(config)
    _HEADS.save(path, sizes, weights, config.tensor_shapes(), ids, embedding, card)


def load_heads(path: Path, target: OfTarget) -> Heads:
    """Load heads from a file of ours or a public checkpoint's folder.

    Raises ValueError in one line where they are missing or damaged, or were made for another
    target.
    """
    return load_public(path, target) if path.is_dir() else load_rooted(path, target)


def load_rooted(path: Path, target: OfTarget) -> RootedHeads:
    """Load heads of `parlay distill medusa`; raises as load_heads."""
    header, tensors = _HEADS.read(path)
    config = _config(path, header)
    _HEADS.check_target(path, header, target.embedding)
    ids = _HEADS.ids(path, tensors, config.vocab, target.config.vocab)
    if config.hidden != target.config.hidden or config.state_layers[-1] != target.config.layers:
        raise _HEADS.damaged(path, "config: not the target's sizes")
    weights = _HEADS.weights(path, tensors, config.tensor_shapes())
    return RootedHeads(config, weights, target.embedding, target.head, ids)


def read_heads_card(path: Path) -> dict[str, Any]:
    """Return the facts that heads were saved with; raises ValueError as load_heads."""
    return _HEADS.card(path)


def load_public(path: Path, target: OfTarget) -> PlainHeads:
    """Load a public Medusa checkpoint's folder; raises as load_heads."""
    config = read_json(path / "config.json")
    heads, blocks = (_count(path, config, f"medusa_num_{n}") for n in ("heads", "layers"))
    stored = _public_tensors(path)
    hidden, vocab = target.config.hidden, target.config.vocab

    def get(name: str, *shape: int) -> Tensor:
        if name not in stored:
            raise ValueError(f"heads {path}: {name} is missing, which config.json promises")
        found = stored[name]
        if tuple(found.shape) != shape:
            raise ValueError(
                f"heads {path}: {name} is {list(found.shape)}, this target needs {list(shape)}"
            )
        if not finite(found):
            raise ValueError(f"heads {path}: {name} has NaN or infinity; download them again")
        return found

    residual = [
        [
            (get(f"{i}.{j}.linear.weight", hidden, hidden), get(f"{i}.{j}.linear.bias", hidden))
            for j in range(blocks)
        ]
        for i in range(heads)
    ]
    outputs = [get(f"{i}.{blocks}.weight", vocab, hidden) for i in range(heads)]
    like = target.embedding
    return PlainHeads(residual, outputs, target.config.layers, like.dtype, like.device)


def _public_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a public checkpoint by their names without prefix."""
    file = next((path / name for name in PUBLIC_NAMES if (path / name).is_file()), None)
    if file is None:
        raise ValueError(f"no Medusa heads in {path}: it needs {' or '.join(PUBLIC_NAMES)}")
    try:
        if file.suffix == ".pt":
            stored = torch.load(file, map_location="cpu", weights_only=True)
        else:
            stored = load_file(file)
    except Exception as error:  # the unpickler raises anything over damage
        reason = (str(error).splitlines() or ["unreadable"])[0]
        raise ValueError(f"heads {file} cannot be read ({reason})") from None
    if not isinstance(stored, dict) or not all(isinstance(t, Tensor) for t in stored.values()):
        raise ValueError(f"heads {file} are not a table of tensors")
    return {str(name).removeprefix(_PREFIX): t for name, t in stored.items()}


def _count(path: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise ValueError(f"heads {path}: config.json needs {key}, a whole number of at least 1")
    return value


def _config(path: Path, header: Mapping[str, Any]) -> HeadsConfig:
    try:
        fields = dict(header["config"])
        tuples = {name: tuple(fields[name]) for name in ("blocks", "ffn", "state_layers")}
        config = HeadsConfig(**{**fields, **tuples})
        positive("norm_eps", config.norm_eps)
        sizes = (config.hidden, config.heads, config.vocab)
        if not all(type(n) is int for part in (sizes, *tuples.values()) for n in part):
            raise ValueError("its sizes must be whole numbers")
        if max(config.heads, *config.blocks) > MAX_HEADS:
            raise ValueError(f"heads and their blocks must be at most {MAX_HEADS}")
        return config
    except (KeyError, TypeError, ValueError) as error:
        raise _HEADS.damaged(path, f"config: {error}") from None
