"""Text to tokens and back, chat templates as transformers renders them, text that streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from parlay.engine import tokenizer
from parlay.engine.tokenizer import StreamDecoder

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "eos_token_id": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 400,
}
SPECIAL = ["<s>", "</s>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "{{ m.role | tojson }}: {{ m.content | tojson }}"
    "{% if loop.last %}{% break %}{% endif %}{{ ';' }}\n"
    "{% endfor %}{% if add_generation_prompt %}{{ eos_token }}>{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": 'Grüße, "日本" 🎲'},
]
TEXT = "the bets hold, so the chain pays; naïve 日本 🎲🎲 text"


def byte_level() -> Tokenizer:
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([TEXT] * 4, trainer)
    return model


def sentence_pieces() -> Tokenizer:
    """Build what Llama 2 has: spaces as a letter, unknown characters as bytes."""
    pieces = [
        "<unk>",
        *SPECIAL,
        *(f"<0x{b:02X}>" for b in range(256)),
        *"▁abet",
        "▁b",
        "▁be",
        "▁bet",
    ]
    merges = [("▁", "b"), ("▁b", "e"), ("▁be", "t")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    model.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    model.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    model.add_special_tokens(SPECIAL)
    return model


def write(folder: Path, model: Tokenizer, template: str | None = TEMPLATE, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model.save(str(folder / "tokenizer.json"))
    named = {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module", params=[byte_level, sentence_pieces])
def loaded(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tokenizer.Tokenizer:
    return tokenizer.load(write(tmp_path_factory.mktemp("tokenizer"), request.param()))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tokenizer.Tokenizer:
    return tokenizer.load(write(tmp_path_factory.mktemp("plain"), byte_level()))


def test_text_survives_encoding(loaded: tokenizer.Tokenizer) -> None:
    assert loaded.decode(loaded.encode(TEXT)) == TEXT
    assert loaded.eos_ids == (1,)


def check_stream(loaded: tokenizer.Tokenizer, ids: list[int], cuts: list[int]) -> str:
    """Return what streamed, having checked that whole characters came, and the decoded text."""
    decoder, pieces, at = StreamDecoder(loaded), [], 0
    for cut in [*sorted(cuts), len(ids)]:
        pieces.append(decoder.push(ids[at:cut]))
        at = max(at, cut)
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    streamed = "".join(pieces) + decoder.flush()
    assert streamed == loaded.decode(ids)
    return streamed


@given(text=st.text(), cuts=st.lists(st.integers(0, 40)))
def test_streamed_text_is_the_text(loaded: tokenizer.Tokenizer, text: str, cuts: list[int]) -> None:
    assert check_stream(loaded, loaded.encode(text), cuts) == text


@given(ids=st.lists(st.integers(0, 299)), cuts=st.lists(st.integers(0, 40)))
def test_streams_any_bytes(plain: tokenizer.Tokenizer, ids: list[int], cuts: list[int]) -> None:
    check_stream(plain, ids, cuts)


def test_streams_whole_characters(loaded: tokenizer.Tokenizer) -> None:
    decoder = StreamDecoder(loaded)
    pieces = [decoder.push([token]) for token in loaded.encode("a 🐍 b")]
    assert "".join(pieces) == "a 🐍 b"
    assert all("\ufffd" not in piece for piece in pieces)
    assert "" in pieces
    decoder.push(loaded.encode("🐍")[:-1])
    assert decoder.flush().endswith("\ufffd")


def test_renders_a_chat(plain: tokenizer.Tokenizer) -> None:
    assert plain.render(CHAT) == (
        '<s>"system": "Be <brief>.";\n"user": "Grüße, \\"日本\\" 🎲"</s>>'
    )
    ids = plain.chat(CHAT)
    assert (ids[0], ids.count(0), ids.count(1)) == (0, 1, 1)


def test_finds_the_template_in_the_settings(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level(), template=None, chat_template="{{ messages | length }}")
    assert tokenizer.load(folder).render(CHAT) == "2"


def test_takes_the_default_of_many_templates(tmp_path: Path) -> None:
    many = [{"name": "tools", "template": "1"}, {"name": "default", "template": "2"}]
    folder = write(tmp_path, byte_level(), template=None, chat_template=many)
    assert tokenizer.load(folder).render(CHAT) == "2"
    folder = write(tmp_path, byte_level(), template=None, chat_template=many[:1])
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.load(folder).render(CHAT)


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        # What the templates of Qwen2, Qwen3 and Gemma 3 use, in little.
        (
            "{% if messages[0]['role'] != 'system' %}{{ '[system]be kind.\\n' }}{% endif %}"
            "{% for m in messages %}"
            "{{ '[' + m['role'] + ']' + m['content'] + '.\\n' }}{% endfor %}",
            '[system]Be <brief>..\n[user]Grüße, "日本" 🎲.\n',
        ),
        (
            "{%- set ns = namespace(last=messages|length - 1) %}"
            "{%- for m in messages[::-1] if m.role == 'user' and m.content is string %}"
            "{%- set ns.last = loop.index0 %}{%- endfor %}"
            "{{- ns.last }} {{ messages[-1].content.split(',')[0].lstrip('G') }}"
            "{%- if tools %}tools{% endif %}"
            "{%- if enable_thinking is defined and enable_thinking is false %}quiet{% endif %}",
            "0 rüße",
        ),
        (
            "{{ bos_token }}{%- if messages[0]['content'] is string -%}"
            "{%- set first = messages[0]['content'] + '\\n' -%}{%- endif -%}"
            "{%- for m in messages[1:] -%}"
            "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
            "{{ raise_exception('roles must alternate') }}{%- endif -%}"
            "{{ '[' + m['role'] + ']' + (first if loop.first else '') }}{{ m['content'] | trim }}"
            "{%- endfor -%}{%- if add_generation_prompt -%}{{ '[model]\\n' }}{%- endif -%}",
            '<s>[user]Be <brief>.\nGrüße, "日本" 🎲[model]\n',
        ),
        (
            "{{ {'b': 1, 'a': '<é>'} | tojson(separators=(',', ':'), sort_keys=True) }}",
            '{"a":"<é>","b":1}',
        ),
    ],
    ids=["qwen2", "qwen3", "gemma3", "tojson"],
)
def test_renders_what_families_write(tmp_path: Path, template: str, rendered: str) -> None:
    assert tokenizer.load(write(tmp_path, byte_level(), template)).render(CHAT) == rendered


def test_neither_cuts_nor_pads_as_training_did(tmp_path: Path) -> None:
    model = byte_level()
    model.enable_truncation(3)
    model.enable_padding(length=900)
    loaded = tokenizer.load(write(tmp_path, model))
    assert loaded.decode(loaded.encode(TEXT)) == TEXT
    assert 3 < len(loaded.encode(TEXT)) < 900


def test_names_what_is_wrong(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level())
    with pytest.raises(ValueError, match="refuses these messages: no tools"):
        tokenizer.load(folder).chat([{"role": "tool", "content": ""}])
    with pytest.raises(ValueError, match="refuses these messages"):
        tokenizer.load(write(folder, byte_level(), "{{ ''.__class__.mro() }}")).chat(CHAT)
    with pytest.raises(ValueError, match=r"the chat template at .* cannot be read"):
        tokenizer.load(write(folder, byte_level(), "{% if %}"))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template; --raw gives it"):
        tokenizer.load(folder).chat(CHAT)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        tokenizer.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        tokenizer.load(folder)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ messages[0]['content'] + 1 }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ strftime_now(5) }}",
    ],
    ids=["division", "type", "recursion", "range", "time"],
)
def test_a_template_that_fails_is_one_line(tmp_path: Path, template: str) -> None:
    loaded = tokenizer.load(write(tmp_path, byte_level(), template))
    with pytest.raises(
        ValueError, match=r"the chat template fails: .*; --raw leaves it out"
    ) as said:
        loaded.chat(CHAT)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"{{ " + b"(" * 20000], ids=["bytes", "deep"])
def test_a_template_that_cannot_be_read_is_one_line(tmp_path: Path, content: bytes) -> None:
    folder = write(tmp_path, byte_level())
    (folder / "chat_template.jinja").write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot be read: .*; mend it or take it out") as said:
        tokenizer.load(folder)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("token", [{"x": 1}, {"content": None}, 5, ["<s>"]])
def test_a_special_token_without_text_is_refused(tmp_path: Path, token: Any) -> None:
    folder = write(tmp_path, byte_level(), bos_token=token)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json has a bos_token that is no text"):
        tokenizer.load(folder)


def test_tokens_that_the_model_has_not_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level(), "{{ messages[0].content }}")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 2}))
    loaded = tokenizer.load(folder)
    assert loaded.encode("") == []
    assert loaded.encode("</s>") == [1]
    for encode in (loaded.encode, lambda text: loaded.chat([{"role": "user", "content": text}])):
        with pytest.raises(ValueError, match="not in the model's vocabulary of 2") as said:
            encode("a")
        assert "\n" not in str(said.value)


@pytest.mark.slow
def test_renders_and_encodes_as_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from parlay.engine.weights import default_model_dir

    for folder in (write(tmp_path / "made", byte_level()), default_model_dir()):
        theirs, ours = AutoTokenizer.from_pretrained(folder), tokenizer.load(folder)
        for chat in (CHAT, CHAT[1:], [*CHAT, {"role": "assistant", "content": "  so\n"}]):
            rendered = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            assert ours.render(chat) == rendered
            assert ours.chat(chat) == theirs(rendered, add_special_tokens=False)["input_ids"]
        assert ours.encode(TEXT) == theirs(TEXT)["input_ids"]
        ids = list(range(200))
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
