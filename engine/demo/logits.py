"""Logits recomputed to judge divergences: float32 over whole texts, bf16 by plain decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from parlay.engine.models import Llama
from parlay.engine.runner import Model, Runner
from parlay.engine.spans import Spans
from parlay.policies.types import Array

ROW_COUNTS = (4, 16)
BLOCK_TOKENS = 16


def float32_copy(checkpoint: str | Path, device: torch.device) -> Llama:
    """Load a checkpoint in float32."""
    from parlay.engine.weights import load_checkpoint  # `parlay gpu-check` has no files to read

    config, weights = load_checkpoint(checkpoint)
    return Llama(config, weights, weights["model.embed_tokens.weight"], torch.float32, device)


class TorchOracle:
    """Recomputes with the model that was run, and with an exact copy of it in float32."""

    def __init__(self, model: Model, exact: Model, prompt_ids: Sequence[list[int]]) -> None:
        self.model, self.exact, self.prompt_ids = model, exact, prompt_ids

    @torch.inference_mode()
    def top_two(self, prompt: int, output: Sequence[int]) -> tuple[Array, Array]:
        """Return the float32 top two ids i64 [n, 2] and their gap [n] at an output's places."""
        top = self._logits(prompt, output).topk(2)
        gap = top.values[:, 0] - top.values[:, 1]
        return top.indices.cpu().numpy(), gap.cpu().numpy()

    @torch.inference_mode()
    def behind(
        self, prompt: int, output: Sequence[int], tokens: Sequence[tuple[int, int]]
    ) -> Array:
        """Return how far tokens (place in the output, id) are behind the best, in logits."""
        logits = self._logits(prompt, output)
        place, ids = torch.tensor(tokens, device=logits.device).T
        best: Array = (logits[place].amax(-1) - logits[place, ids]).cpu().numpy()
        return best

    def _logits(self, prompt: int, output: Sequence[int]) -> Tensor:
        """Return float32 logits [n, vocab] at an output's places."""
        start = len(self.prompt_ids[prompt])
        tokens = [*self.prompt_ids[prompt], *output[:-1]]
        return _Rows(self.exact, [tokens]).read(0, len(tokens))[start - 1 :].float()

    @torch.inference_mode()
    def noise(self, outputs: Mapping[int, Sequence[int]], quantile: float) -> float:
        """Return that quantile of |bf16 gap - float32 gap|, decoding plainly at ROW_COUNTS."""
        exact = {p: self.top_two(p, output) for p, output in outputs.items()}
        errors = [
            self._errors([(p, outputs[p], exact[p]) for p in group])
            for rows in ROW_COUNTS
            for group in _groups(sorted(outputs), rows)
        ]
        return float(np.quantile(np.concatenate(errors), quantile))

    def _errors(self, group: Sequence[tuple[int, Sequence[int], tuple[Array, Array]]]) -> Array:
        """Decode a group's outputs side by side, one token a row and step, and compare its gaps."""
        texts = [[*self.prompt_ids[p], *output[:-1]] for p, output, _ in group]
        starts = [len(self.prompt_ids[p]) - 1 for p, _, _ in group]
        rows = _Rows(self.model, texts)
        for row, start in enumerate(starts):
            rows.fill(row, start)
        found: list[float] = []
        for step in range(min(len(output) for _, output, _ in group)):
            logits = rows.step([start + step for start in starts])
            for row, (_, _, (top, gap)) in enumerate(group):
                a, b = (logits[row, int(t)].item() for t in top[step])
                found.append(abs(a - b - float(gap[step])))
        return np.asarray(found)


def _groups(prompts: Sequence[int], rows: int) -> list[list[int]]:
    """Return groups of exactly `rows` prompts; the last ones come round again to fill up."""
    count = -(-len(prompts) // rows)
    return [[prompts[(g * rows + i) % len(prompts)] for i in range(rows)] for g in range(count)]


class _Rows:
    """Texts read by a model into a cache of their own, each row with its own blocks."""

    def __init__(self, model: Model, texts: Sequence[list[int]]) -> None:
        self.model, self.texts = model, texts
        each = -(-max(len(t) for t in texts) // BLOCK_TOKENS)
        self.tables = [list(range(r * each, (r + 1) * each)) for r in range(len(texts))]
        self.runner = Runner(model, each * len(texts), BLOCK_TOKENS)

    def fill(self, row: int, upto: int) -> None:
        """Read a row's first tokens for their keys and values."""
        if upto:
            self._hidden([row], [0], [upto])

    def read(self, row: int, upto: int) -> Tensor:
        """Return logits [upto, head rows] after each of a row's first tokens."""
        return self.model.logits(self._hidden([row], [0], [upto]))

    def step(self, at: Sequence[int]) -> Tensor:
        """Return logits [rows, head rows] after each row's token at its position."""
        rows = range(len(self.texts))
        return self.model.logits(self._hidden(rows, at, [1] * len(at))).float()

    def _hidden(self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
        spans = Spans([self.tables[r] for r in rows], starts, lengths)
        fed = [self.texts[r][s : s + n] for r, s, n in zip(rows, starts, lengths, strict=True)]
        return self.runner.read(fed, spans)
