"""How Hugging Face's generate picks a token, so that drafts can be held against it.

Each place is processed and chosen as plain generate would, in the same order and never beyond the
first draft that fails: processors see what they always see. Greedy takes the largest score. Sampled
tokens win a race with noise keyed by their place (`engine/sampling.py`): the law is the softmax of
the scores, and the text does not depend on how it was drafted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as known

from parlay.engine.sampling import Purpose, draw_key, race

_PURE = (
    known.MinLengthLogitsProcessor,
    known.MinNewTokensLengthLogitsProcessor,
    known.MinPLogitsWarper,
    known.NoRepeatNGramLogitsProcessor,
    known.RepetitionPenaltyLogitsProcessor,
    known.SuppressTokensLogitsProcessor,
    known.TemperatureLogitsWarper,
    known.TopKLogitsWarper,
    known.TopPLogitsWarper,
)
"""Functions of their arguments, so that a draft's logits may pass through them as well."""


class Chooser:
    """Picks tokens for one call of generate, of whose seed its noise is made."""

    def __init__(self, processors: Any, do_sample: bool) -> None:
        self.processors = processors
        self._pure = [p for p in processors if type(p) in _PURE]
        # From torch's own generator: torch.manual_seed repeats a text.
        self._key = int(torch.randint(1 << 62, ()).item()) if do_sample else None

    @property
    def is_plain(self) -> bool:
        """Say whether a token is the largest logit and nothing else."""
        return self._key is None and not len(self.processors)

    def scores(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Return processed scores f32 [1, vocab] behind ids [1, n]; call it once a place."""
        scores: Tensor = self.processors(ids, logits) if len(self.processors) else logits
        return scores

    def pick(self, scores: Tensor, position: int) -> int:
        """Return the token of output position `position`."""
        if self._key is None:
            return int(scores.argmax(-1))
        # What warpers have ruled out cannot win: only the rest needs noise.
        support = torch.isfinite(scores[0]).nonzero()[:, 0]
        law = torch.softmax(scores[:, support].double(), -1)
        noise = [draw_key(self._key, position, Purpose.COUPLED)]
        return int(support[race(law, noise, support)])

    def guess(self, ids: Tensor, logits: Tensor, position: int) -> int:
        """Return a drafter's token, drawn with the noise of the token that it guesses."""
        scores = logits.float()
        for processor in self._pure:
            scores = processor(ids, scores)
        return self.pick(scores, position)
