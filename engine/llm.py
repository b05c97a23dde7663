"""Load a model, its draft and its tokenizer from disk into a backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parlay.engine.draft_format import load_draft
from parlay.engine.linear import can_pack
from parlay.engine.medusa_format import OfTarget, load_heads
from parlay.engine.model_config import ModelConfig
from parlay.engine.parallel_orders import DRAFT, TARGET
from parlay.engine.runner import Model, load_model
from parlay.engine.scheduler import DRAFT_WINDOW_TOKENS, EngineConfig
from parlay.engine.tokenizer import Tokenizer
from parlay.engine.tokenizer import load as load_tokenizer
from parlay.engine.torch_backend import DraftModel, TorchBackend
from parlay.engine.weights import default_model_dir, load_checkpoint

if TYPE_CHECKING:
    from parlay.engine.parallel_team import Team

SHIPPED_DRAFT = Path(__file__).parent / "data" / "smollm2_draft.safetensors"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NO_DRAFT = "none"


def load_backend(
    model: str | Path | None = None,
    draft: str | Path | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    threads: int = 1,
    config: EngineConfig | None = None,
    medusa: str | Path | None = None,
    draft_dtype: str | None = None,
    draft_device: str | None = None,
    batch_invariant: bool = False,
    team: Team | None = None,
) -> tuple[TorchBackend, Tokenizer]:
    """Load a backend and its tokenizer.

    model: a checkpoint's folder, None the default model. draft: a file of `parlay distill draft`, a
    checkpoint's folder with the target's tokenizer, "none", or None for the one that is shipped
    with the default model. medusa: a file of `parlay distill medusa` or a public checkpoint's
    folder, None: no heads. dtype "auto": bfloat16 where the device is fast in it. draft_dtype and
    draft_device: the draft model's own, None: the target's. batch_invariant: the target gives a
    token the same bits alone, in a batch and among drafts, which costs speed where the CPU kernels
    do not run. team: of `open_team`, the ranks that run target and draft besides this process, each
    with as many threads. Raises ValueError, and RankLost where a rank is.
    """
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    torch.set_num_threads(threads)
    place, kind = _device(device), _dtype(dtype, device)
    draft_place = place if draft_device is None else _device(draft_device)
    draft_kind = kind if draft_dtype is None else _dtype(draft_dtype, draft_place.type)
    folder = default_model_dir() if model is None else Path(model)
    sizes, weights = load_checkpoint(folder)
    if draft is None and model is None:
        draft = SHIPPED_DRAFT
    window = draft_window_tokens(draft, sizes.context)
    config = config or EngineConfig(context_tokens=sizes.context, draft_window_tokens=window)
    config = replace(config, vocab_tokens=sizes.vocab)
    if config.context_tokens > sizes.context:
        raise ValueError(
            f"the model's context is {sizes.context} tokens, not {config.context_tokens}"
        )
    embedding = weights["model.embed_tokens.weight"]
    loads = _Loads(config.block_tokens, team)
    target = loads.load(TARGET, sizes, weights, embedding, (kind, place), batch_invariant)
    drafter, heads = None, None
    if draft is not None and draft != NO_DRAFT:
        runs_in = draft_kind, target.device if draft_device is None else draft_place
        drafter = _load_draft(Path(draft), target, embedding, runs_in, config, loads)
    if medusa is not None:
        head = weights.get("lm_head.weight", embedding).to(target.device, target.dtype)
        heads = load_heads(Path(medusa), OfTarget(sizes, target.embedding, head))
    return TorchBackend(target, drafter, config, heads=heads), load_tokenizer(folder)


def draft_window_tokens(draft: str | Path | None, context_tokens: int) -> int:
    """Return how much of a text a draft reads: `parlay distill draft` trains on a window."""
    # What others would lose by one is not known.
    return context_tokens if draft and Path(draft).is_dir() else DRAFT_WINDOW_TOKENS


RunsIn = tuple[torch.dtype, torch.device]


@dataclass(slots=True, frozen=True)
class _Loads:
    """Loads models to where they run: this process, or the ranks of a team."""

    block_tokens: int
    team: Team | None

    def load(
        self,
        role: int,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        embedding: Tensor,
        runs_in: RunsIn,
        invariant: bool = False,
    ) -> Model:
        """Load a role's model, which reads `embedding`."""
        if self.team is None or self.team.degrees[role] == 1:
            return load_model(config, weights, embedding, *runs_in, self.block_tokens, invariant)
        from parlay.engine.parallel_model import load_parallel

        return load_parallel(self.team, role, config, weights, embedding, *runs_in, invariant)


def _load_draft(
    path: Path,
    target: Model,
    embedding: Tensor,
    runs_in: RunsIn,
    engine: EngineConfig,
    loads: _Loads,
) -> DraftModel:
    """Load a draft in its dtype to its device; a file's draft reads the target's embedding."""
    if path.is_dir():
        sizes, weights = load_checkpoint(path)
        if sizes.vocab != target.config.vocab:
            raise ValueError(
                f"draft {path} has {sizes.vocab} tokens, the target {target.config.vocab}:"
                " they need the same tokenizer"
            )
        own, ids = weights["model.embed_tokens.weight"], torch.arange(sizes.vocab)
    else:
        sizes, weights, ids = load_draft(path, embedding)
        # One copy serves both where they are alike.
        own = target.embedding if (target.dtype, target.device) == runs_in else embedding
    if sizes.context < engine.context_tokens:
        raise ValueError(
            f"the draft model's context is {sizes.context} tokens, the engine's"
            f" {engine.context_tokens}: take another draft or set context_tokens"
        )
    model = loads.load(DRAFT, sizes, weights, own, runs_in)
    return DraftModel(model, ids.to(model.device))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device '{name}'; use cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device '{name}' is not supported; use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' asked for, but torch sees no GPU; use cpu")
    return device


def _dtype(name: str, device: str) -> torch.dtype:
    if name == "auto":
        fast = device != "cpu" or can_pack(torch.bfloat16, torch.device("cpu"))
        return torch.bfloat16 if fast else torch.float32
    if name not in DTYPES:
        raise ValueError(f"unknown dtype '{name}'; choose auto, {' or '.join(DTYPES)}")
    return DTYPES[name]
