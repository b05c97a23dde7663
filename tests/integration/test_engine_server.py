"""`parlay engine`, spoken to by OpenAI's own client over a real socket."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from tests.serving import CONFIG, EOS, MODEL, VOCAB, get, post, serving, tiny_service, until

from parlay.engine.server.app import MAX_BODY_BYTES, Service

MESSAGES = [{"role": "user", "content": "hé"}]
LONG = {"model": MODEL, "prompt": "long", "max_tokens": 120, "ignore_eos": True}


@pytest.fixture(scope="module")
def service() -> Service:
    return tiny_service()


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
    with serving(service) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def completion(client: openai.OpenAI, **more: Any) -> Any:
    create: Any = client.completions.create
    return create(**({"model": MODEL, "prompt": "hé", "temperature": 0} | more))


def chat(client: openai.OpenAI, **more: Any) -> Any:
    create: Any = client.chat.completions.create
    return create(**({"model": MODEL, "messages": MESSAGES} | more))


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "parlay"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_a_prompt_that_was_there_before_is_not_computed_again(client: openai.OpenAI) -> None:
    prompt = list(range(1, 60))
    first, second = (completion(client, prompt=prompt, max_tokens=2) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= 32
    assert second.choices[0].text == first.choices[0].text


def test_a_completion_and_its_usage(client: openai.OpenAI) -> None:
    done = completion(client, max_tokens=40)
    (choice,) = done.choices
    assert (done.object, choice.finish_reason, choice.logprobs) == (
        "text_completion",
        "length",
        None,
    )
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 40)
    assert done.usage.total_tokens == 43
    spent = done.usage.speculation
    assert 0 < spent["accepted"] <= spent["drafted"]
    assert spent["steps"] + spent["accepted"] >= 40
    mean = 1 + spent["accepted"] / spent["steps"]
    assert spent["mean_acceptance_length"] == pytest.approx(mean, abs=1e-3)


def test_speculation_is_the_requests_own_choice_and_changes_no_token(
    client: openai.OpenAI,
) -> None:
    texts = []
    for speculation in ({"enabled": False}, {"max_k": 2}, {"proposers": ["ngram"]}, {}):
        done = completion(client, max_tokens=60, extra_body={"speculation": speculation})
        texts.append(done.choices[0].text)
        spent = done.usage.speculation
        if "enabled" in speculation:
            assert (spent["drafted"], spent["steps"]) == (0, 60)
        if "max_k" in speculation:
            assert 0 < spent["drafted"] <= 2 * spent["steps"]
    assert len(set(texts)) == 1


def test_lossy_drafts_are_the_requests_own_choice_and_usage_says_so(
    service: Service, url: str, client: openai.OpenAI
) -> None:
    def counted() -> int:
        return service.meter.lossy_requests

    before = counted()
    plain = completion(client, max_tokens=60)
    assert plain.usage.speculation["lossy"] is False
    assert counted() == before
    lossy = [{"speculation": {"lossy_threshold": p, "proposers": ["ngram"]}} for p in (1e-9, 1.0)]
    # Together with requests that did not ask for it, which are left alone.
    with ThreadPoolExecutor(4) as pool:
        bodies = [{}, lossy[0], {}, lossy[1]]
        done = list(pool.map(lambda b: completion(client, max_tokens=60, extra_body=b), bodies))
    texts = [d.choices[0].text for d in done]
    assert texts[0] == texts[2] == texts[3] == plain.choices[0].text
    assert texts[1] != texts[0]
    assert [d.usage.speculation["lossy"] for d in done] == [False, True, False, True]
    spent = done[1].usage.speculation
    assert spent["accepted"] == spent["drafted"] > 0
    assert counted() == before + 2
    assert f"parlay_engine_lossy_requests_total {before + 2}.0" in get(f"{url}/metrics").decode()
    streamed = completion(
        client, max_tokens=9, stream=True, stream_options={"include_usage": True},
        extra_body=lossy[0],
    )  # fmt: skip
    assert list(streamed)[-1].usage.speculation["lossy"] is True


def test_a_seed_makes_it_reproducible(client: openai.OpenAI) -> None:
    texts = [chat(client, seed=n, max_tokens=20).choices[0].message.content for n in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("more", [{}, {"stop": [","]}, {"logprobs": 2}, {"max_tokens": 1}])
def test_a_streamed_completion_is_the_whole_one(client: openai.OpenAI, more: Any) -> None:
    asked = {"max_tokens": 50, "seed": 3, "temperature": 1} | more
    whole = completion(client, **asked)
    chunks = list(completion(client, stream=True, stream_options={"include_usage": True}, **asked))
    *parts, last = chunks
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    reasons = [part.choices[0].finish_reason for part in parts]
    assert reasons == [None] * (len(parts) - 1) + [whole.choices[0].finish_reason]
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.speculation["steps"] > 0
    assert len({chunk.id for chunk in chunks}) == 1
    if "logprobs" in more:
        told = [part.choices[0].logprobs for part in parts if part.choices[0].logprobs]
        for name in ("tokens", "text_offset"):
            joined = [value for part in told for value in getattr(part, name)]
            assert joined == getattr(whole.choices[0].logprobs, name)


@pytest.mark.parametrize("more", [{}, {"stop": "^"}, {"logprobs": True, "top_logprobs": 2}])
def test_a_streamed_chat_is_the_whole_one(client: openai.OpenAI, more: Any) -> None:
    whole = chat(client, seed=5, max_tokens=50, **more).choices[0]
    chunks = [c.choices[0] for c in chat(client, seed=5, max_tokens=50, stream=True, **more)]
    assert chunks[0].delta.role == "assistant"
    assert "".join(c.delta.content or "" for c in chunks) == whole.message.content
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == whole.finish_reason
    told = [entry for c in chunks if c.logprobs for entry in c.logprobs.content]
    expected = whole.logprobs.content if whole.logprobs else []
    assert [e.bytes for e in told] == [e.bytes for e in expected]
    assert all(len(e.top_logprobs) == 2 for e in told)


def test_a_stop_string_is_left_out_and_told_of(client: openai.OpenAI) -> None:
    whole = completion(client, max_tokens=40).choices[0].text
    stop = next(a + b for a, b in pairwise(whole[5:]) if "\ufffd" not in a + b)
    done = completion(client, max_tokens=40, stop=[stop, "never there"], logprobs=0).choices[0]
    assert done.finish_reason == "stop"
    assert done.text == whole[: whole.index(stop)]
    assert len(done.logprobs.tokens) >= len(done.text.replace("\ufffd", ""))
    assert done.logprobs.top_logprobs is None


def test_token_ids_are_a_prompt(client: openai.OpenAI, service: Service) -> None:
    ids = service.tokenizer.encode("hé")
    texts = [completion(client, prompt=p, max_tokens=9).choices[0].text for p in ("hé", ids, [ids])]
    assert len(set(texts)) == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("completions", b"{", 400, "invalid_json"),
        ("completions", {"model": "gpt", "prompt": "x"}, 404, "model_not_found"),
        ("completions", {"model": MODEL, "prompt": "x", "n": 2}, 400, "unsupported_field"),
        ("completions", {"model": MODEL, "prompt": "x", "nn": 2}, 400, "unknown_field"),
        ("completions", {"model": MODEL, "prompt": [VOCAB]}, 400, None),
        ("completions", {"model": MODEL, "prompt": "x" * 128}, 400, "context_length_exceeded"),
        ("completions", {"model": MODEL, "prompt": "x" * 20_000}, 400, "context_length_exceeded"),
        ("completions", {"model": MODEL, "prompt": "x", "max_tokens": 128}, 400,
         "context_length_exceeded"),
        ("completions", b"x" * (MAX_BODY_BYTES + 1), 413, None),
        ("chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "refuse"}]},
         400, None),
        ("chat/completions", {"model": MODEL, "messages": []}, 400, None),
        ("embeddings", {"model": MODEL, "input": "x"}, 404, None),
        ("models", {}, 405, None),
    ],
)  # fmt: skip
def test_refusals(url: str, path: str, body: Any, status: int, code: str | None) -> None:
    answered, said, _ = post(f"{url}/v1/{path}", body)
    assert (answered, said["error"]["code"]) == (status, code)
    assert set(said) == {"error"}
    assert set(said["error"]) == {"message", "type", "param", "code"}
    assert said["error"]["message"]


def test_the_longest_prompt_that_fits_gets_its_token(client: openai.OpenAI) -> None:
    done = completion(client, prompt="x" * 127, max_tokens=1)
    assert done.usage.total_tokens == CONFIG.context_tokens
    open_end = chat(client, extra_body={"ignore_eos": True})
    assert open_end.usage.total_tokens == CONFIG.context_tokens
    assert open_end.choices[0].finish_reason == "length"


def test_metrics_and_health(url: str, client: openai.OpenAI) -> None:
    completion(client, max_tokens=40)
    seen = {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in get(f"{url}/metrics").decode().splitlines()
        if not line.startswith("#")
    }
    assert seen["parlay_engine_output_tokens_total"] >= 40
    drafted = seen['parlay_engine_drafted_tokens_total{proposer="draft_model"}']
    accepted = seen['parlay_engine_accepted_tokens_total{proposer="draft_model"}']
    assert 0 < accepted <= drafted
    assert seen['parlay_engine_requests_total{finish_reason="length"}'] >= 1
    assert seen['parlay_engine_http_answers_total{path="/v1/completions",status="200"}'] >= 1
    assert seen["parlay_engine_step_seconds_count"] > 0
    assert seen["parlay_engine_running_requests"] == 0
    assert seen["parlay_engine_free_blocks"] == CONFIG.target_blocks
    assert json.loads(get(f"{url}/health"))["status"] == "ok"


def connect(url: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and leave its answer unread."""
    place = urlsplit(url)
    assert place.hostname is not None
    sock = socket.create_connection((place.hostname, place.port or 0))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def slowed(service: Service, seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make every step take a while; returns a list that grows by one a step."""
    steps: list[int] = []
    engine, step = service.worker.engine, service.worker.engine.step

    def slow() -> Any:
        time.sleep(seconds)
        steps.append(len(engine.scheduler.running))
        return step()

    monkeypatch.setattr(engine, "step", slow)
    return steps


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_blocks_within_a_step(
    service: Service, url: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = service.worker.engine.scheduler
    steps = slowed(service, 0.05, monkeypatch)
    sock = connect(url, LONG | {"stream": stream, "speculation": {"enabled": False}})
    until(lambda: scheduler.target.free < CONFIG.target_blocks and len(steps) > 3)
    before = len(steps)
    sock.close()
    until(lambda: scheduler.target.free == CONFIG.target_blocks)
    assert len(steps) - before <= 2  # the one that ran, and one if the news came during it
    until(lambda: service.worker.in_flight == 0)
    assert scheduler.draft.free == CONFIG.draft_blocks
    assert service.meter.finish_reasons["abort"] > 0


def test_a_client_may_go_away_while_it_waits_or_before_its_body_has_come(
    service: Service, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed(service, 0.01, monkeypatch)
    socks = [connect(url, LONG) for _ in range(CONFIG.max_running + 3)]
    until(lambda: service.worker.in_flight == len(socks))
    half = connect(url, LONG)
    socks.append(half)
    for sock in reversed(socks):
        sock.close()
    place = urlsplit(url)
    with socket.create_connection((place.hostname or "", place.port or 0)) as torn:
        torn.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
    until(lambda: service.worker.in_flight == 0)
    until(lambda: not service.worker.engine.has_work)
    assert service.worker.engine.scheduler.target.free == CONFIG.target_blocks


def test_too_many_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    service = tiny_service(max_waiting=1)
    slowed(service, 0.02, monkeypatch)
    with serving(service) as url, ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(lambda _: post(f"{url}/v1/completions", LONG), range(9)))
    statuses = sorted(status for status, _, _ in answers)
    assert statuses == [200] * 5 + [429] * 4
    headers, said = next((h, b) for status, b, h in answers if status == 429)
    assert int(headers["retry-after"]) >= 1
    assert said["error"]["code"] == "overloaded"


def test_ending_lets_requests_finish_and_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    service = tiny_service()
    slowed(service, 0.01, monkeypatch)
    answers: list[Any] = []
    with serving(service) as url:
        asking = threading.Thread(
            target=lambda: answers.append(post(f"{url}/v1/completions", LONG))
        )
        asking.start()
        until(lambda: service.worker.engine.scheduler.running != [])
    asking.join()
    ((status, body, _),) = answers
    assert (status, body["usage"]["completion_tokens"]) == (200, 120)
    with pytest.raises(OSError, match="refused"):
        post(f"{url}/v1/completions", LONG)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_leaves_nobody_waiting(
    stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = tiny_service()

    def broken(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(service.worker.engine.backend, "verify", broken)
    with serving(service) as url:
        sock = connect(url, LONG | {"stream": stream})
        said = b""
        while piece := sock.recv(4096):
            said += piece
        sock.close()
    assert service.worker.crashed
    assert b"the engine failed" in said
    assert (b" 200 " if stream else b" 500 ") in said.splitlines()[0]
    assert "the device is gone" in caplog.text


def test_the_end_token_ends_a_text_and_has_no_entry(
    service: Service, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = completion(client, max_tokens=30, logprobs=0).choices[0]
    text = next(t for t in whole.logprobs.tokens[5:] if len(t) == 1)
    ids = [t for t in range(EOS) if service.tokenizer.decode([t]) == text]
    at = whole.logprobs.tokens.index(text)
    rules = service.worker.engine.rules
    object.__setattr__(rules, "eos_ids", frozenset(ids))
    try:
        done = completion(client, max_tokens=30, logprobs=0)
        ignored = completion(client, max_tokens=30, extra_body={"ignore_eos": True})
    finally:
        object.__setattr__(rules, "eos_ids", frozenset({EOS}))
    assert done.choices[0].finish_reason == "stop"
    assert done.usage.completion_tokens == at + 1
    assert ignored.choices[0].text == whole.text
