"""A tiny engine behind the HTTP server on a real socket, and what tests say to it."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import gc
import json
import resource
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jinja2
import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file
from tests.tiny import AnyPlan, tiny_llama
from tokenizers import decoders, models, pre_tokenizers

from parlay.engine import stats_hub
from parlay.engine.backend import Batch, Drafts, Verified
from parlay.engine.model_config import from_hf
from parlay.engine.planner import LocalPlanner
from parlay.engine.scheduler import EngineConfig
from parlay.engine.server.app import Service
from parlay.engine.server.bind import bind, url_of
from parlay.engine.server.launch import make_service, open_stats
from parlay.engine.server.serve import HttpServer
from parlay.engine.step import Engine
from parlay.engine.tokenizer import Tokenizer
from parlay.engine.torch_backend import DraftModel, TorchBackend
from parlay.engine.virtual import Hazards, Task, VirtualBackend
from parlay.policies.policy import Policy, make_policy
from parlay.policies.types import Array, Proposer

MODEL, VOCAB, EOS, WAIT_S = "tiny", 258, 257, 30.0
CONFIG = EngineConfig(
    max_running=4,
    token_budget=64,
    block_tokens=4,
    target_blocks=96,
    draft_blocks=96,
    context_tokens=128,
)
SMALL = dataclasses.replace(CONFIG, target_blocks=40, draft_blocks=32)
"""Four requests need twice as much at times: some are preempted, drafts fall short."""
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.role[0] }}{{ m.content }}{% endfor %}>"
)


def byte_model() -> tokenizers.Tokenizer:
    """A token a byte, so that most characters beyond ASCII take several; 256 is <s>, 257 </s>."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Of the words it has seen it would keep up to 10,000, 250 bytes each: no leak, but not flat.
    bpe = models.BPE({c: i for i, c in enumerate(letters)}, [], cache_capacity=0)
    model = tokenizers.Tokenizer(bpe)
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<s>", "</s>"])
    return model


def byte_tokenizer() -> Tokenizer:
    return Tokenizer(byte_model(), jinja2.Environment().from_string(TEMPLATE), {}, (EOS,), VOCAB)


def tiny_service(
    config: EngineConfig = CONFIG, max_waiting: int = 1000, policy: str = "any"
) -> Service:
    """A tiny model of bytes under random plans of all it has; the draft only misses </s>."""
    draft = tiny_llama(VOCAB, 2, 3)
    head = draft.head
    draft.head = lambda x: head(x)[:, :EOS]
    backend = TorchBackend(
        tiny_llama(VOCAB, 2, 3), DraftModel(draft, torch.arange(EOS)), config, seed=1
    )
    plans: Policy = AnyPlan((Proposer.NONE, Proposer.NGRAM, Proposer.DRAFT_MODEL), 4)
    if policy != "any":
        plans = make_policy(policy, {}, backend.limits())
    planner = LocalPlanner(plans)
    tokenizer = byte_tokenizer()
    engine = Engine(backend, planner, config, tokenizer.decode, tokenizer.eos_ids)
    return make_service(engine, tokenizer, MODEL, policy, VOCAB, max_waiting)


class VirtualBytes(VirtualBackend):
    """A virtual engine whose text is bytes: what the server itself costs, without torch."""

    def verify(self, batch: Batch, drafts: Drafts, verify_k: Array) -> Verified:
        verified = VirtualBackend.verify(self, batch, drafts, verify_k)
        verified.tokens = np.where(verified.tokens < 0, -1, verified.tokens % 256)
        return verified


def virtual_service() -> Service:
    """A virtual model behind a server, with the small cache; it has no logprobs."""
    task = Task({Proposer.NGRAM: (0.7,), Proposer.DRAFT_MODEL: (0.8,)})
    backend = VirtualBytes(Hazards(defaultdict(lambda: task)))
    planner = LocalPlanner(AnyPlan((Proposer.NGRAM, Proposer.DRAFT_MODEL), 4))
    tokenizer = byte_tokenizer()
    engine = Engine(backend, planner, SMALL, tokenizer.decode, tokenizer.eos_ids)
    return make_service(engine, tokenizer, MODEL, "any", VOCAB, 1000)


@contextmanager
def serving(service: Service) -> Iterator[str]:
    """Serve on a port of its own, in a thread; yields the URL."""
    up = threading.Event()
    with closing(bind("127.0.0.1", 0)) as bound:
        url = url_of(bound)
        server = HttpServer(service, bound, up.set)
        thread = threading.Thread(target=lambda: asyncio.run(server.run_until_ended()))
        thread.start()
        try:
            assert up.wait(WAIT_S)
            yield url
        finally:
            server.end()
            thread.join(WAIT_S)
            assert not thread.is_alive()


_MALL_INFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALL_INFO.split())


def held() -> dict[str, int]:
    """Return what this process holds once garbage is gone and what is free has been given back.

    blocks: of Python's allocator; malloc_bytes: what C and C++ have asked for; resident_bytes.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _MallInfo
    info = libc.mallinfo2()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return {
        "blocks": sys.getallocatedblocks(),
        "malloc_bytes": info.uordblks + info.hblkhd,
        "resident_bytes": resident,
    }


def main() -> None:
    """Serve with a small cache, in a process of its own, until told to end.

    It says its URL, and at SIGUSR1 what it holds. The argument is `virtual`, `any` or a policy,
    whose steps are served too, to be watched.
    """
    (kind,) = sys.argv[1:]
    with ExitStack() as stack:
        # oneDNN keeps code for each number of rows that a product has seen, up to 1024 kernels: 100
        # MB for this model, and a thousand requests do not see the end of it.
        stack.enter_context(mock.patch("parlay.engine.layers.can_pack", return_value=False))
        bound = stack.enter_context(closing(bind("127.0.0.1", 0)))
        service = virtual_service() if kind == "virtual" else tiny_service(SMALL, policy=kind)
        if kind not in ("virtual", "any"):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            hub = stack.enter_context(open_stats(f"unix:{folder}/stats.sock", "soak"))
            hub.attach(service.worker.engine)
            stats_hub.REMEMBERED_REQUESTS = 64  # so that it is full before anybody measures
        draft = service.worker.engine.scheduler.draft

        def tell(*_: object) -> None:
            found = held() | {"draft_blocks": draft.total - draft.free}
            print(json.dumps(found), flush=True)

        signal.signal(signal.SIGUSR1, tell)
        server = HttpServer(service, bound, lambda: print(url_of(bound), flush=True))
        asyncio.run(server.run_until_ended())


def tiny_checkpoint(folder: Path) -> Path:
    """Write the tiny model with its tokenizer as a Hugging Face folder."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 24,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "max_position_embeddings": 128, "vocab_size": VOCAB, "eos_token_id": EOS,
    }  # fmt: skip
    rng = torch.Generator().manual_seed(3)
    shapes = from_hf(config).tensor_shapes()
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=rng) * 0.4
        for name, shape in shapes.items()
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    byte_model().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def post(url: str, body: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return status, JSON and headers of an answer; body: JSON, or bytes as they stand."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, json.loads(answer.read()), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), dict(error.headers)


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        body: bytes = answer.read()
        return body


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds; fail where it does not come to."""
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s, "it never came to hold"
        time.sleep(0.005)


if __name__ == "__main__":
    main()
