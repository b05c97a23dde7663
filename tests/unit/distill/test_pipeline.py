"""The whole command on a tiny model: answers, training, file, measured acceptance."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file
from tests.unit.distill.tiny_target import tiny_weights
from typer.testing import CliRunner, Result

from parlay.engine.distill import pipeline
from parlay.engine.distill.cli import distill_draft
from parlay.engine.distill.held_out import HELD_OUT_SEED, held_out_prompts
from parlay.engine.distill.medusa_cli import distill_medusa
from parlay.engine.distill.prompts import training_prompts
from parlay.engine.distill.talk import SHAPES, talk_prompts
from parlay.engine.draft_format import load_draft, read_card, save_draft
from parlay.engine.model_config import ModelConfig

SIZES = ModelConfig(
    hidden=32, layers=3, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=128,
    rope_theta=10000.0, norm_eps=1e-5, context=512, tied=True, eos_ids=(1,),
)  # fmt: skip


class Letters:
    """A tokenizer whose every token is one ASCII letter."""

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [2, *self.encode("".join(m["content"] for m in messages)), 3]

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text if ord(c) < 128]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    save_file(tiny_weights(config=SIZES), folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "vocab_size": 128, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "tie_word_embeddings": True,
        "eos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr(pipeline, "load_tokenizer", lambda _: Letters())
    for name, tokens in (("LONGEST", 160), ("TRAIN_NEW_TOKENS", 8), ("MEASURE_NEW_TOKENS", 8)):
        monkeypatch.setattr(pipeline, name, tokens)
    return folder


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data" / "prompts"
    folder.mkdir(parents=True)
    turns = [json.dumps({"turns": [f"Say {i}", "More"]}) for i in range(3)]
    (folder / "mt_bench_question.jsonl").write_text("\n".join(turns), encoding="utf-8")
    tasks = [json.dumps({"prompt": f"def f{i}():\n"}) for i in range(70)]
    (folder / "HumanEval.jsonl.gz").write_bytes(gzip.compress("\n".join(tasks).encode()))
    monkeypatch.setenv("PARLAY_DATA", str(folder.parent))
    return folder


def call(command: Callable[..., None], *arguments: object) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch.optim.Muon")
@pytest.mark.slow
@pytest.mark.usefixtures("data")
def test_from_a_target_to_a_measured_draft(model: Path, tmp_path: Path) -> None:
    out, figures = tmp_path / "draft.safetensors", tmp_path / "figures.json"
    common = ("--out", out, "--work", tmp_path / "work", "--model", model, "--json", figures)
    result = call(distill_draft, *common, "--minutes", 0.02, "--prompts", 30)
    assert result.exit_code == 0, result.output
    card = json.loads(figures.read_text(encoding="utf-8"))
    assert card == read_card(out)
    assert card["steps"] > 0
    assert card["answer_tokens"] > 100
    assert {"chat", "code"} <= card["accepted"].keys()
    for means in card["accepted"].values():
        assert means == sorted(means)
        assert 0 <= means[0] <= 1
        assert means[3] <= 4
    embedding = tiny_weights(config=SIZES)["model.embed_tokens.weight"]
    config, weights, ids = load_draft(out, embedding)
    assert (config.layers, config.vocab, config.state_layers) == (2, len(ids), (1, 3))

    def measured_again() -> object:
        again = call(distill_draft, *common, "--measure-only")
        assert again.exit_code == 0, again.output
        return json.loads(figures.read_text(encoding="utf-8"))["accepted"]

    assert measured_again() == card["accepted"]
    stateless = dataclasses.replace(config, state_layers=())
    save_draft(out, stateless, weights, ids, embedding, read_card(out))
    without = measured_again()
    weights["state_proj.weight"].zero_()
    save_draft(out, config, weights, ids, embedding, read_card(out))
    assert measured_again() == without != card["accepted"]


@pytest.mark.parametrize(
    ("command", "what"), [(distill_draft, "draft"), (distill_medusa, "medusa")]
)
def test_what_is_missing_is_said_in_one_line(
    command: Callable[..., None],
    what: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def complaint(*arguments: object) -> str:
        result = call(command, "--work", tmp_path / "work", "--model", model, *arguments)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"parlay distill {what}: ")
        assert len(result.stderr.splitlines()) == 1
        return result.stderr

    monkeypatch.delenv("PARLAY_DATA", raising=False)
    assert "--out" in complaint()
    assert "above 0" in complaint("--out", tmp_path / "d", "--minutes", 0)
    assert "PARLAY_DATA" in complaint("--measure-only")
    monkeypatch.setenv("PARLAY_DATA", str(tmp_path))
    assert "none.safetensors" in complaint("--measure-only", "--out", tmp_path / "none.safetensors")


def test_prompts_are_the_same_for_the_same_seed_and_never_twice() -> None:
    for make in (talk_prompts, training_prompts):
        first = [p.text for p in make(200, 1)]
        assert first == [p.text for p in make(200, 1)]
        assert len(set(first)) == 200
        assert set(first) != {p.text for p in make(200, 2)}


def test_held_out_prompts_were_not_trained_on(data: Path) -> None:
    drawn = training_prompts(1500, HELD_OUT_SEED)
    unfiltered = {p.text for p in held_out_prompts(data.parent, [])}
    trained = {p.text for p in training_prompts(400, HELD_OUT_SEED)}
    assert trained & unfiltered
    held_out = [p.text for p in held_out_prompts(data.parent, [(HELD_OUT_SEED, 400)])]
    assert not trained & set(held_out)
    assert {p.text for p in drawn} & set(held_out)


def test_every_shape_of_talk_can_be_filled() -> None:
    texts = [p.text for p in talk_prompts(2000, 3)]
    assert not any("{" in t.replace("{}", "") for t in texts)
    starts = {s.split("{")[0] for s in SHAPES}
    assert all(any(t.startswith(s) for t in texts) for s in starts)
