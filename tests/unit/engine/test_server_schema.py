"""Bodies of the HTTP server: what is taken, and one clear refusal for everything else."""

from __future__ import annotations

import json
from math import isnan
from typing import Any

import pytest

from parlay.engine.request import ALL_PROPOSERS
from parlay.engine.server.errors import ApiError
from parlay.engine.server.fields import parse_object
from parlay.engine.server.schema import Ask, chat_ask, check_model, completion_ask
from parlay.policies.types import K_LIMIT, Proposer

THERE = 1 << Proposer.NONE | 1 << Proposer.NGRAM | 1 << Proposer.DRAFT_MODEL
USER = {"role": "user", "content": "hi"}


def completion(**body: Any) -> Ask:
    return completion_ask({"model": "m", "prompt": "p"} | body, THERE)


def chat(**body: Any) -> Ask:
    return chat_ask({"model": "m", "messages": [USER]} | body, THERE)


def test_defaults_are_those_of_the_api() -> None:
    ask = completion()
    assert (ask.prompt, ask.max_tokens, ask.stream, ask.top_logprobs) == ("p", 16, False, None)
    params = ask.sampling_params(16)
    assert (params.temperature, params.top_p, params.seed, params.stop) == (1.0, 1.0, None, ())
    assert (ask.speculation.max_k, ask.speculation.proposer_mask) == (K_LIMIT, ALL_PROPOSERS)
    assert isnan(ask.speculation.tpot_target_ms)
    assert chat().max_tokens is None


def test_null_is_absent() -> None:
    every = ["temperature", "top_p", "seed", "stop", "n", "logprobs", "stream", "speculation"]
    assert completion(**dict.fromkeys([*every, "suffix", "best_of", "whatever"])) == completion()


def test_what_changes_nothing_is_taken() -> None:
    neutral = {"n": 1, "presence_penalty": 0.0, "logit_bias": {}, "user": "me", "store": False}
    assert completion(**neutral, echo=False, best_of=1) == completion()
    assert chat(**neutral, tools=[], response_format={"type": "text"}) == chat()


def test_every_field_arrives() -> None:
    ask = chat(
        temperature=0, top_p=0.5, top_k=3, seed=7, stop="x", max_completion_tokens=9, logprobs=True,
        top_logprobs=2, stream=True, stream_options={"include_usage": True}, ignore_eos=True,
        speculation={"max_k": 2, "proposers": ["ngram"], "tpot_target_ms": 40, "task": "code"},
    )  # fmt: skip
    params = ask.sampling_params(9)
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.0, 0.5, 3, 7)
    assert (params.stop, params.ignore_eos, params.logprobs, ask.max_tokens) == (("x",), True, 2, 9)
    assert ask.stream
    assert ask.include_usage
    mask = 1 << Proposer.NONE | 1 << Proposer.NGRAM
    assert (ask.speculation.max_k, ask.speculation.proposer_mask) == (2, mask)
    assert (ask.speculation.tpot_target_ms, ask.speculation.task) == (40.0, "code")


def test_speculation_can_be_turned_off() -> None:
    assert completion(speculation={"enabled": False, "max_k": 4}).speculation.max_k == 0


def test_lossy_drafts_are_asked_for_by_name_or_not_there() -> None:
    for speculation in (None, {}, {"max_k": 3}, {"lossy_threshold": None}):
        assert not completion(speculation=speculation).speculation.lossy
    ask = completion(speculation={"lossy_threshold": 0.25}, logprobs=2)
    assert ask.speculation.lossy
    assert ask.speculation.lossy_threshold == 0.25


def test_parts_and_roles_become_plain_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    echoed = {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None}
    ask = chat(messages=[{"role": "developer", "content": parts}, echoed, USER])
    assert ask.prompt == [
        {"role": "system", "content": "ab"}, {"role": "assistant", "content": "c"}, USER,
    ]  # fmt: skip


def test_one_prompt_in_a_list_is_that_prompt() -> None:
    assert completion(prompt=["p"]) == completion()
    assert completion(prompt=[[1, 2]]).prompt == completion(prompt=[1, 2]).prompt == [1, 2]


BOTH = [
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
    ({"n": 2}, "n"),
    ({"n": True}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.0}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", 1]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": {}}, "stop"),
    ({"stop": 0}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": 1}, "frequency_penalty"),
    ({"logit_bias": {"1": 2}}, "logit_bias"),
    ({"store": True}, "store"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"speculation": True}, "speculation"),
    ({"speculation": {"k": 3}}, "speculation.k"),
    ({"speculation": {"enabled": 1}}, "speculation.enabled"),
    ({"speculation": {"max_k": K_LIMIT + 1}}, "speculation.max_k"),
    ({"speculation": {"max_k": -1}}, "speculation.max_k"),
    ({"speculation": {"proposers": "ngram"}}, "speculation.proposers"),
    ({"speculation": {"proposers": ["medusa"]}}, "speculation.proposers"),
    ({"speculation": {"proposers": ["none"]}}, "speculation.proposers"),
    ({"speculation": {"tpot_target_ms": 0}}, "speculation.tpot_target_ms"),
    ({"speculation": {"task": "x" * 65}}, "speculation.task"),
    ({"speculation": {"lossy_threshold": 0}}, "speculation.lossy_threshold"),
    ({"speculation": {"lossy_threshold": 1.1}}, "speculation.lossy_threshold"),
    ({"speculation": {"lossy_threshold": True}}, "speculation.lossy_threshold"),
    ({"speculation": {"lossy_threshold": 0.3}, "seed": 1}, "speculation.lossy_threshold"),
    ({"speculation": {"lossy_threshold": 0.3, "max_k": 0}}, "speculation.lossy_threshold"),
    ({"speculation": {"lossy_threshold": 0.3, "enabled": False}}, "speculation.lossy_threshold"),
]
COMPLETION = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [1, 1.5]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "s"}, "suffix"),
    ({"messages": [USER]}, "messages"),
]
CHAT = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["hi"]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [USER | {"name": "n"}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "messages[0].content[0].text"),
    ({"logprobs": 2}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"tools": [{}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"prompt": "p"}, "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), BOTH + COMPLETION)
def test_completions_refuse(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        completion(**body)
    check(refused.value, param)


@pytest.mark.parametrize(("body", "param"), BOTH + CHAT)
def test_chats_refuse(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**body)
    check(refused.value, param)


def check(error: ApiError, param: str) -> None:
    assert (error.status, error.param) == (400, param)
    assert param.split(".")[-1] in error.message
    assert "\n" not in error.message
    assert len(error.message) < 200


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'"x"', b"\xff", b'{"a": NaN}', b'{"a": Infinity}', b"[" * 100_000,
        b'{"a": "\\ud800"}', b'{"\\uDFFF": 1}', b"1" * 5000, b'{"a":' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parse_object(body)
    assert refused.value.status == 400
    json.dumps(refused.value.body(), ensure_ascii=False).encode()


def test_characters_beyond_the_basic_plane_may_be_escaped() -> None:
    assert parse_object(b'{"a": "\\ud83c\\udfb2"}') == {"a": "\U0001f3b2"}


def test_another_model_is_not_found() -> None:
    check_model(completion(), "m")
    with pytest.raises(ApiError) as refused:
        check_model(completion(model="gpt"), "m")
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
