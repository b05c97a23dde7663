"""`parlay generate`: decode one prompt, text as it comes, and what speculation did for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parlay.engine.corpus import proposer_from, read_texts
from parlay.engine.planner import LocalPlanner, Planner
from parlay.engine.request import Request, SamplingParams, SpeculationParams
from parlay.engine.sparing import SparingPlanner
from parlay.engine.step import Engine
from parlay.engine.tokenizer import StreamDecoder, Tokenizer
from parlay.policies.policy import make_policy
from parlay.policies.types import PlanSource, Proposer, StepOutcome

if TYPE_CHECKING:
    from parlay.engine.torch_backend import TorchBackend


class StopText:
    """Passes text on up to the first complete stop string, holding back what may start one."""

    def __init__(self, stop: Sequence[str], write: Callable[[str], None]) -> None:
        self._stop, self._write = stop, write
        self._hold = max((len(s) for s in stop), default=1) - 1
        self._held, self._ended = "", False

    @property
    def ended(self) -> bool:
        """Say whether a stop string has come."""
        return self._ended

    def push(self, text: str) -> None:
        """Take the next piece of text."""
        self._held += text
        found = [(at + len(s), at) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found and not self._ended:
            # The one that is complete first, however much text came at once.
            self._pass(min(found)[1])
            self._ended = True
        if not self._ended:
            self._pass(len(self._held) - self._hold)

    def flush(self) -> None:
        """Pass on what is held back: no more text comes."""
        if not self._ended:
            self._pass(len(self._held))

    def _pass(self, count: int) -> None:
        if count > 0:
            self._write(self._held[:count])
            self._held = self._held[count:]


@dataclass(slots=True)
class Generated:
    """What came of a prompt: its text, why it ended, and counts over its steps."""

    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    tokens_per_s: float = 0.0
    mean_acceptance_length: float = 0.0
    steps_by_proposer: dict[str, int] = field(default_factory=dict)
    steps_by_plan_source: dict[str, int] = field(default_factory=dict)

    def stats(self) -> str:
        """Return the counts as one line."""
        who = ", ".join(f"{name} {n}" for name, n in self.steps_by_proposer.items())
        plans = ", ".join(f"{name} {n}" for name, n in self.steps_by_plan_source.items())
        later = f", then {self.tpot_ms:.1f} ms each" if self.output_tokens > 1 else ""
        return (
            f"{_count(self.output_tokens, 'token')} in {_count(self.steps, 'step')} ({who}; plans: "
            f"{plans}), {self.mean_acceptance_length:.2f} a step; "
            f"{self.accepted_tokens} of {_count(self.drafted_tokens, 'drafted token')} accepted; "
            f"{self.tokens_per_s:.1f} tokens/s, first token after {self.ttft_ms:.0f} ms{later}"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def generate(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    write: Callable[[str], Any],
) -> Generated:
    """Decode a prompt on an idle engine; `write` gets its text in pieces."""
    pieces: list[str] = []

    def emit(text: str) -> None:
        pieces.append(text)
        write(text)

    decoder, text = StreamDecoder(tokenizer), StopText(sampling.stop, emit)
    clock = engine.backend.clock
    times: list[float] = []

    def on_tokens(_: Request, tokens: list[int]) -> None:
        times.append(clock())
        text.push(decoder.push(tokens))

    start_s = clock()
    request = engine.add(prompt_ids, sampling, SpeculationParams(), on_tokens)
    outcomes: list[StepOutcome] = []
    while not request.finished:
        outcome = engine.step()
        assert outcome is not None, "an unfinished request, but nothing to do"
        outcomes.append(outcome)
    text.push(decoder.flush())
    text.flush()
    return _summary(request, outcomes, "".join(pieces), start_s, times)


def _summary(
    request: Request,
    outcomes: Sequence[StepOutcome],
    text: str,
    start_s: float,
    times: Sequence[float],
) -> Generated:
    emitting = [o for o in outcomes if o.emitted[0] > 0]
    proposers = Counter(Proposer(int(o.proposer[0])).name.lower() for o in emitting)
    sources = Counter(PlanSource(int(o.plan_source[0])).name.lower() for o in emitting)
    total_s, ttft_s = times[-1] - start_s, times[0] - start_s
    assert request.finish_reason is not None
    return Generated(
        text=text,
        finish_reason=request.finish_reason.value,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        steps=request.steps,
        drafted_tokens=request.drafted,
        accepted_tokens=request.accepted,
        ttft_ms=1e3 * ttft_s,
        tpot_ms=1e3 * (total_s - ttft_s) / max(request.output_tokens - 1, 1),
        tokens_per_s=request.output_tokens / total_s,
        mean_acceptance_length=float(np.mean([o.accepted[0] + 1 for o in emitting])),
        steps_by_proposer=dict(proposers),
        steps_by_plan_source=dict(sources),
    )


@dataclass(slots=True, frozen=True)
class Placement:
    """How and where models run: the arguments of `load_backend` that have these names.

    tensor_parallel, draft_tensor_parallel: how many ranks run the target, and the draft model; of
    those that both have rank 0 is this process, which does all else. overlap: whether a policy here
    decides while the target's pass runs; None: on a GPU.
    """

    dtype: str = "auto"
    device: str = "cpu"
    draft_dtype: str | None = None
    draft_device: str | None = None
    batch_invariant: bool = False
    tensor_parallel: int = 1
    draft_tensor_parallel: int = 1
    overlap: bool | None = None

    def __str__(self) -> str:
        """Return who runs what, as a ready line says it; empty: this process everything."""
        if self.tensor_parallel == self.draft_tensor_parallel == 1:
            return ""
        return f"tensor parallel: target {self.tensor_parallel}, draft {self.draft_tensor_parallel}"

    @contextmanager
    def load(self, model: Path | None, **load: Any) -> Iterator[tuple[TorchBackend, Tokenizer]]:
        """Load a backend, with a process for each rank behind 0; they end with the context.

        load: other arguments of `load_backend`. Raises ValueError, and RankLost where one is.
        """
        from parlay.engine.parallel_team import open_team

        named = asdict(self)
        del named["overlap"]
        degrees = named.pop("tensor_parallel"), named.pop("draft_tensor_parallel")
        with open_team(*degrees) as team:
            # torch takes a second: only when it is needed, and while the ranks start
            from parlay.engine.llm import load_backend

            yield load_backend(model, **named, team=team, **load)


@contextmanager
def open_engine(
    model: Path | None,
    policy: str,
    settings: Mapping[str, Any],
    sidecar: str | None,
    runs: Placement = Placement(),
    corpus: Sequence[Path] = (),
    engine_id: str = "generate",
    **load: Any,
) -> Iterator[tuple[Engine, Tokenizer]]:
    """Load a model (None: the default one) under a policy, or under a sidecar with it as fallback.

    corpus: files of texts that drafts may be taken from. engine_id: how a sidecar knows it. load:
    other arguments of `load_backend`. Raises ValueError in one line where the model, the policy, a
    setting or a file cannot be used.
    """
    make_policy(policy, settings)  # a wrong name should not wait for the model
    texts = read_texts(corpus)
    with runs.load(model, **load) as (backend, tokenizer):
        if texts:
            backend.ngram = proposer_from(texts, tokenizer)
        decides = make_policy(policy, settings, backend.limits())
        overlap = backend.target.device.type == "cuda" if runs.overlap is None else runs.overlap
        config = replace(backend.config, overlap=overlap and sidecar is None)
        planner: Planner = LocalPlanner(decides) if config.overlap else SparingPlanner(decides)
        if sidecar is not None:
            from parlay.engine.remote import EngineInfo, RemotePlanner

            planner = RemotePlanner(sidecar, EngineInfo(engine_id, backend.limits()), planner)
        with closing(planner):
            engine = Engine(backend, planner, config, tokenizer.decode, tokenizer.eos_ids)
            yield engine, tokenizer


def unheard(planner: Planner) -> str | None:
    """Say why no plan came from a sidecar that was asked; None where one came or none was asked."""
    from parlay.engine.remote import RemotePlanner

    if not isinstance(planner, RemotePlanner) or planner.stats.plans_remote:
        return None
    return planner.stats.last_error or "it was silent"
