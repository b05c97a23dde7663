"""A scheduler that calls its hooks as vLLM's does, over requests whose text is known beforehand."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np


class Status(enum.Enum):
    RUNNING = 1
    FINISHED_STOPPED = 2
    FINISHED_LENGTH_CAPPED = 3
    FINISHED_ABORTED = 4


@dataclass
class Output:
    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]]
    finished_req_ids: set[str]
    total_num_scheduled_tokens: int
    num_spec_tokens_to_schedule: int = 0
    num_invalid_spec_tokens: dict[str, int] | None = None


@dataclass
class Drafts:
    req_ids: list[str]
    draft_token_ids: list[list[int]]


@dataclass(eq=False)
class FakeRequest:
    request_id: str
    prompt_token_ids: list[int]
    answer: list[int]
    sampling_params: Any = None
    all_token_ids: list[int] = field(default_factory=list)
    spec_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    is_prefill_chunk: bool = False
    status: Status = Status.RUNNING
    stop_reason: str | None = None

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids)
        if self.sampling_params is None:
            self.sampling_params = SimpleNamespace(extra_args=None, temperature=0.0, seed=None)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - len(self.prompt_token_ids)

    @property
    def max_tokens(self) -> int:
        return len(self.answer)

    def is_finished(self) -> bool:
        return self.status is not Status.RUNNING

    def rest(self) -> list[int]:
        return self.answer[self.num_output_tokens :]


def config(**spec: Any) -> Any:
    """A configuration as vLLM's; spec: of its speculation, None for none."""
    given = {"method": "draft_model", "num_speculative_tokens": 4, **spec}
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**given),
        parallel_config=SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1),
        model_config=SimpleNamespace(enforce_eager=True),
    )


Propose = Callable[[FakeRequest, int], list[int]]


class FakeScheduler:
    """Runs all its requests at once; `chunk`: most tokens of a prompt in a step.

    propose(request, k) drafts; `steps` keeps (asked depth, tokens verified) of each.
    """

    def __init__(
        self, vllm_config: Any, propose: Propose, chunk: int = 64, asynchronous: bool = False
    ) -> None:
        self.vllm_config, self.propose, self.chunk = vllm_config, propose, chunk
        self.scheduler_config = SimpleNamespace(async_scheduling=asynchronous)
        self.max_model_len, self.max_num_scheduled_tokens = 4096, 512
        self.requests: dict[str, FakeRequest] = {}
        self.running: list[FakeRequest] = []
        self.waiting: list[FakeRequest] = []
        pool = SimpleNamespace(get_num_free_blocks=lambda: 50, num_gpu_blocks=100)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)
        self.num_spec_tokens = vllm_config.speculative_config.num_speculative_tokens
        self.finished_req_ids: set[str] = set()
        self.steps: list[tuple[int, dict[str, int]]] = []
        self._unfinished: list[Output] = []

    def add(self, request: FakeRequest) -> FakeRequest:
        self.requests[request.request_id] = request
        self.running.append(request)
        return request

    def run(self) -> None:
        """Step until everything is answered; asynchronously one step ahead of the tokens."""
        while self.running or self._unfinished:
            if self.running:
                self._unfinished.append(self._schedule())
            depth = 2 if self.scheduler_config.async_scheduling else 1
            if len(self._unfinished) == depth or not self.running:
                self._finish(self._unfinished.pop(0))

    def abort(self, request: FakeRequest) -> None:
        request.status = Status.FINISHED_ABORTED
        self._remove(request)

    def shutdown(self) -> None:
        pass

    def _schedule(self) -> Output:
        scheduled, drafts = {}, {}
        for request in self.running:
            ready = request.num_tokens + request.num_output_placeholders
            left = ready - request.num_computed_tokens
            if left > 1:
                scheduled[request.request_id] = min(left, self.chunk)
                continue
            tokens = list(request.spec_token_ids)
            request.spec_token_ids = []
            scheduled[request.request_id] = left + len(tokens)
            if tokens:
                drafts[request.request_id] = tokens
        out = Output(scheduled, drafts, self.finished_req_ids, sum(scheduled.values()))
        out.num_spec_tokens_to_schedule = self.num_spec_tokens
        self.finished_req_ids = set()
        self._update_after_schedule(out)
        self.steps.append((out.num_spec_tokens_to_schedule, {k: len(v) for k, v in drafts.items()}))
        return out

    def _update_after_schedule(self, out: Output) -> None:
        for name, tokens in out.num_scheduled_tokens.items():
            request = self.requests[name]
            request.num_computed_tokens += tokens
            ready = request.num_tokens + request.num_output_placeholders
            request.is_prefill_chunk = request.num_computed_tokens < ready
            if self.scheduler_config.async_scheduling and not request.is_prefill_chunk:
                drafted = len(out.scheduled_spec_decode_tokens.get(name, ()))
                request.num_output_placeholders += 1 + drafted
                request.spec_token_ids = [-1] * out.num_spec_tokens_to_schedule

    def _finish(self, out: Output) -> None:
        names = list(out.num_scheduled_tokens)
        drawn = [self._draw(out, name) for name in names]
        index = {name: i for i, name in enumerate(names)}
        self.update_from_output(
            out, SimpleNamespace(sampled_token_ids=drawn, req_id_to_index=index)
        )
        if not self.scheduler_config.async_scheduling:
            k = out.num_spec_tokens_to_schedule
            live = [self.requests[n] for n in names if n in self.requests]
            made = [[] if r.is_prefill_chunk else self.propose(r, k) for r in live]
            self.update_draft_token_ids(Drafts([r.request_id for r in live], made))

    def _draw(self, out: Output, name: str) -> list[int]:
        request = self.requests.get(name)
        if request is None or request.is_prefill_chunk:
            return []
        rest, held = request.rest(), 0
        drafts = out.scheduled_spec_decode_tokens.get(name, [])
        if drafts and drafts[0] == -1:
            drafts = self.propose(request, len(drafts))
        while held < min(len(drafts), len(rest) - 1) and drafts[held] == rest[held]:
            held += 1
        return rest[: held + 1]

    def update_from_output(self, out: Output, model: Any) -> None:
        for name in out.num_scheduled_tokens:
            request, tokens = self.requests.get(name), model.sampled_token_ids
            if request is None or not (new := tokens[model.req_id_to_index[name]]):
                continue
            rejected = len(out.scheduled_spec_decode_tokens.get(name, ())) - (len(new) - 1)
            request.num_computed_tokens -= rejected
            if self.scheduler_config.async_scheduling:
                request.num_output_placeholders -= rejected + len(new)
            request.all_token_ids.extend(new)
            if not request.rest():
                request.status = Status.FINISHED_LENGTH_CAPPED
                self._remove(request)

    def update_draft_token_ids(self, drafts: Drafts) -> None:
        for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            if name in self.requests and not self.requests[name].is_prefill_chunk:
                self.requests[name].spec_token_ids = tokens

    def _remove(self, request: FakeRequest) -> None:
        del self.requests[request.request_id]
        self.running.remove(request)
        self.finished_req_ids.add(request.request_id)


def often_right(seed: int = 0, right: float = 0.7) -> Propose:
    """Return a drafter each of whose tokens is right so often."""
    rng = np.random.default_rng(seed)

    def propose(request: FakeRequest, k: int) -> list[int]:
        rest = (request.rest() + [0] * k)[:k]
        return [t if rng.random() < right else t + 1 for t in rest]

    return propose
