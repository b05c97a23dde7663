"""--corpus: what its files may hold, and drafts that come from them, in both commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from safetensors.torch import load_file, save_file
from tests.serving import byte_tokenizer, tiny_checkpoint
from typer.testing import CliRunner

from parlay.engine import cli
from parlay.engine.corpus import proposer_from, read_texts
from parlay.engine.generate import Generated, Placement, generate, open_engine
from parlay.engine.request import Request, SamplingParams
from parlay.engine.server import cli as server_cli
from parlay.engine.server.launch import Model, open_service
from parlay.engine.step import Engine
from parlay.engine.tokenizer import Tokenizer

PROMPT, LETTERS = "what is it?", "abcdefghijklmnopqrstuvwxyz"
SAMPLING = SamplingParams(max_tokens=60, ignore_eos=True)
POLICY: tuple[str, dict[str, Any]] = ("fixed", {"proposer": "ngram", "k": 4})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that answers in letters: bytes of other characters would not read as a text."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model") / "letters")
    tensors = load_file(folder / "model.safetensors")
    ids = byte_tokenizer().encode(LETTERS)
    kept = tensors["lm_head.weight"][ids].clone()
    tensors["lm_head.weight"].zero_()
    tensors["lm_head.weight"][ids] = kept
    save_file(tensors, folder / "model.safetensors")
    return folder


def generated(folder: Path, corpus: Sequence[Path]) -> Generated:
    with open_engine(folder, *POLICY, None, Placement("float32"), corpus) as (engine, tokenizer):
        ids = tokenizer.encode(PROMPT)
        return generate(engine, tokenizer, ids, SAMPLING, lambda _: None)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Generated:
    return generated(folder, ())


@pytest.fixture
def corpus(alone: Generated, tmp_path: Path) -> list[Path]:
    """The answer in one file, something else in another."""
    files = [tmp_path / "other.txt", tmp_path / "answer.txt"]
    files[0].write_text("nothing of it", encoding="utf-8")
    files[1].write_text(f"once more: {PROMPT}{alone.text} and so on", encoding="utf-8-sig")
    return files


def test_a_corpus_that_holds_the_answer_is_guessed_from(
    folder: Path, alone: Generated, corpus: list[Path]
) -> None:
    assert len(alone.text) == 60
    done = generated(folder, corpus)
    assert done.text == alone.text
    # Five tokens a step, but for the prompt's own and what is left at the end.
    assert done.steps <= 14 < alone.steps
    assert done.accepted_tokens > alone.accepted_tokens
    other = generated(folder, corpus[:1])
    assert (other.text, other.accepted_tokens) == (alone.text, alone.accepted_tokens)


def test_a_server_guesses_every_request_from_it(
    folder: Path, alone: Generated, corpus: list[Path]
) -> None:
    model = Model(folder, corpus=corpus, runs=Placement("float32"))
    with open_service(model, *POLICY, None, "test") as service:
        requests = [ask(service.worker.engine, service.tokenizer) for _ in range(2)]
    for request in requests:
        assert service.tokenizer.decode(request.output) == alone.text
        assert request.steps <= 14


def ask(engine: Engine, tokenizer: Tokenizer) -> Request:
    request = engine.add(tokenizer.encode(PROMPT), SAMPLING)
    while not request.finished:
        engine.step()
    return request


def test_files_are_texts_of_their_own(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b")]
    for file, text in zip(files, ("abcdx", "yzefg"), strict=True):
        file.write_text(text, encoding="utf-8")
    tokenizer = byte_tokenizer()
    proposer = proposer_from(read_texts(files), tokenizer)
    for tail, said in (("bc", "dx"), ("yz", "efg"), ("x", "")):
        ids = tokenizer.encode(tail)
        request = Request(1, ids, len(ids), computed=len(ids) - 1)
        (guess,) = proposer.lookup([request], 4).tokens.tolist()
        assert tokenizer.decode([t for t in guess if t >= 0]) == said


BAD = [
    (None, "No such file"),
    (b"", "is empty"),
    (b" \n\t", "is empty"),
    (b"a\xff", "is no UTF-8 text"),
    (b"a\0b", "is binary"),
    ("folder", "Is a directory"),
]


def bad_file(folder: Path, data: bytes | str | None) -> Path:
    file = folder / "corpus.txt"
    if isinstance(data, bytes):
        file.write_bytes(data)
    elif data is not None:
        file.mkdir()
    return file


@pytest.mark.parametrize(("data", "says"), BAD)
def test_what_is_no_text_is_named(data: bytes | str | None, says: str, tmp_path: Path) -> None:
    file = bad_file(tmp_path, data)
    with pytest.raises(ValueError, match=says) as refused:
        read_texts([file])
    assert str(refused.value).startswith(f"--corpus {file} ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("command", "words"), [(cli.generate, ["hello"]), (server_cli.engine, ["--port", "0"])]
)
def test_commands_say_so_before_they_load_a_model(
    command: Callable[..., None],
    words: list[str],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr("parlay.engine.llm.load_backend", loaded)
    app = typer.Typer()
    app.command()(command)
    (tmp_path / "here").write_text("a text", encoding="utf-8")
    corpus = [f"--corpus={tmp_path / name}" for name in ("here", "none")]
    done = CliRunner().invoke(app, [*words, "--model", str(folder), *corpus])
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    said = f"parlay {command.__name__}: --corpus {tmp_path / 'none'} cannot be read"
    assert line.startswith(said)
