"""Distillation of Medusa heads: the loss, what each head is taught, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.unit.distill.test_pipeline import SIZES, call, data, model
from tests.unit.distill.tiny_target import CONFIG, LAYERS, tiny_answers, tiny_target, tiny_weights
from torch.nn import functional as F

from parlay.engine.distill import medusa_train as training
from parlay.engine.distill.examples import Example
from parlay.engine.distill.llama import Body, Target
from parlay.engine.distill.medusa_cli import distill_medusa
from parlay.engine.distill.medusa_measure import WIDEST, figures_of, hits
from parlay.engine.distill.medusa_train import (
    FIRST_SHARE,
    FOLLOWED,
    end_to_end,
    imitated,
    learn_heads,
    new_heads,
    teacher_law,
    train_heads,
)
from parlay.engine.distill.student import new_student, student_config
from parlay.engine.distill.train import Progress
from parlay.engine.medusa_format import OfTarget, load_heads, read_heads_card
from parlay.engine.medusa_heads import RootedHeads

__all__ = ["data", "model"]  # fixtures
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch.optim.Muon")


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return tiny_answers()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_loss_and_gradient_are_those_of_the_plain_formula() -> None:
    normed, rows = torch.randn(1100, 8, requires_grad=True), torch.randn(20, 8)
    states, places = torch.randn(700, 8), torch.randint(0, 700, (1100,))
    label = torch.randint(-1, 20, (1100,))
    p = (states @ rows.T).softmax(-1)
    wanted_law = (1 - FIRST_SHARE) * p + FIRST_SHARE * F.one_hot(p.argmax(-1), 20)
    law = teacher_law(states, rows)
    torch.testing.assert_close(law.float(), wanted_law, atol=2e-3, rtol=1e-2)
    logits = normed @ rows.T
    each = -(law.float()[places] * logits.log_softmax(-1)).sum(-1) * (label >= 0)
    # bfloat16 laws do not sum to exactly 1; the logits' norm counts once all the same.
    (slope,) = torch.autograd.grad(each.sum() / 7, normed)
    sums, hit = imitated(normed, rows, law, places, label)
    (found,) = torch.autograd.grad(sums[0] / 7, normed)
    torch.testing.assert_close(sums[0], each.sum(), atol=0.0, rtol=1e-3)
    torch.testing.assert_close(found, slope, atol=2e-3, rtol=1e-2)
    rank = (logits > logits.gather(1, label[:, None].clamp_min(0))).sum(-1)
    assert torch.equal(hit, (rank < FOLLOWED) & (label >= 0))
    assert float(sums[1].detach()) == float(((rank == 0) & (label >= 0)).sum())


def test_answers_lie_end_to_end_each_beside_the_state_that_made_it() -> None:
    def example(first: int, prompt: int, out: int) -> Example:
        ids = list(range(first, first + prompt + out))
        places = torch.tensor(ids[:-1])[-(out + 1) :].float()  # one more than the answer needs
        return Example("t", ids, prompt, places[:, None, None].expand(-1, 2, 3))

    batch = end_to_end([example(10, 3, 2), example(50, 4, 3)])
    assert batch.tokens.tolist() == [13, 14, 54, 55, 56]
    assert batch.left.tolist() == [1, 0, 2, 1, 0]
    assert batch.states.tolist() == [[t - 1.0] * 6 for t in (13, 14, 54, 55, 56)]


@needs_muon
def test_the_first_head_starts_as_the_draft_it_is_given(target: Target) -> None:
    """Inputs and layers are the draft's, its attention left out."""
    draft = new_student(target, torch.arange(48)).tensors()
    draft["state_proj.weight"] = torch.randn(32, 64) * 0.3
    student = new_heads(target, torch.arange(48), LAYERS, 1, draft)
    heads = RootedHeads(
        student.config, student.tensors(), target.embedding, target.head, student.vocab
    )
    norm = target.body.norm.weight.float().square().mean().sqrt()
    states = torch.randn(6, 2, 32)
    states = states / states.square().mean(-1, keepdim=True).sqrt()
    states[:, 1] *= norm
    tokens = torch.tensor([3, 4, 5, 6, 7, 8])
    size = target.embedding.float().square().mean().sqrt()
    e = target.embedding[tokens].float()
    x = e * size / e.square().mean(-1, keepdim=True).sqrt()
    x = x + states.flatten(1) @ draft["state_proj.weight"].T
    body = Body(student_config(CONFIG, 48, 2))
    own = {n.removeprefix("model."): w.float() for n, w in draft.items() if "model." in n}
    body.load_state_dict(own)
    for layer in body.blocks():
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    wanted = body.norm(x) @ target.head.float().T
    found = heads.step(0, heads.begin(states.bfloat16().flatten(1)), tokens)[1].float()
    torch.testing.assert_close(found, wanted, atol=0.15, rtol=0.1)
    with pytest.raises(ValueError, match="no states"):
        new_heads(target, torch.arange(48), LAYERS, 1, {"model.norm.weight": torch.ones(32)})
    draft["model.layers.0.mlp.up_proj.weight"] = torch.ones(3, 32)
    with pytest.raises(ValueError, match="another shape"):
        new_heads(target, torch.arange(48), LAYERS, 1, draft)


def test_every_head_learns_at_its_own_distance(
    target: Target, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each head is taught the law behind the text up to its place, and reads the text's tokens."""
    monkeypatch.setattr(training, "FOLLOWED_ANYWAY", 1.0)
    seen: list[tuple[list[int], list[int]]] = []
    real = training.imitated

    def spy(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((given[3].tolist(), given[4].tolist()))
        return real(*given)

    monkeypatch.setattr(training, "imitated", spy)
    student = new_heads(target, torch.arange(1, 48), LAYERS, 1)
    batch = end_to_end(examples[:5])
    learn_heads(student, target, batch, torch.Generator())
    answers = [e.ids[e.prompt :] for e in examples[:5]]
    starts = [sum(map(len, answers[:i])) for i in range(5)]
    for head, (places, labels) in enumerate(seen, 1):
        rows = zip(starts, answers, strict=True)
        wanted = [(s + i, a[i] - 1) for s, a in rows for i in range(head, len(a))]
        assert list(zip(places, labels, strict=True)) == wanted
    assert len(seen) == training.HEADS


@needs_muon
def test_training_teaches_and_resumes(
    target: Target, examples: list[Example], tmp_path: Path
) -> None:
    vocab = torch.arange(48)
    student = new_heads(target, vocab, LAYERS, 1)
    states: list[Progress] = []
    checkpoint = tmp_path / "medusa.pt"
    end = train_heads(student, target, examples, 0.01, 1, checkpoint, states.append)
    assert end.steps == len(states) > 3
    assert states[-1].loss < states[0].loss
    before = {name: w.detach().clone() for name, w in student.tensors().items()}
    again = new_heads(target, vocab, LAYERS, 2)
    resumed = train_heads(again, target, examples, 0.01, 1, checkpoint, states.append)
    assert resumed.steps == end.steps
    for name, w in again.tensors().items():
        assert torch.equal(w, before[name]), name
    checkpoint.write_bytes(b"junk")
    with pytest.raises(ValueError, match="cannot be used"):
        train_heads(again, target, examples, 0.01, 1, checkpoint, states.append)


def test_hits_are_the_texts_tokens_and_figures_follow_from_them(
    target: Target, examples: list[Example]
) -> None:
    student = new_heads(target, torch.arange(48), LAYERS, 1)
    heads = RootedHeads(
        student.config, student.tensors(), target.embedding, target.head, student.vocab
    )
    example = max(examples, key=lambda e: len(e.ids))
    found = hits(heads, target, example)
    assert found.shape == (len(example.ids) - 4 - training.HEADS, training.HEADS, WIDEST)
    assert not (found.sum(-1) > 1).any()
    # The stored states give the same guesses as the target's, read anew.
    batch = end_to_end([example])
    _, logits = heads.step(0, heads.begin(batch.states), batch.tokens)
    first = logits.argmax(-1)[: len(found)] == batch.tokens[1 : len(found) + 1]
    assert float((first == found[:, 0, 0]).float().mean()) > 0.8
    made = torch.zeros(4, 2, 5, dtype=torch.bool)
    made[0, :, 0] = made[1, 0, 0] = made[2, 0, 1] = made[3, 1, 0] = True
    figures = figures_of(made)
    assert figures.accepted == [0.5, 0.75]
    assert figures.top == [[0.5, 0.75, 0.75, 0.75, 0.75], [0.5] * 5]
    assert figures.followed == [[0.5, 0.75, 0.75, 0.75, 0.75], [0.5] * 5]
    assert len(hits(heads, target, Example("t", [1, 2, 3, 4], 2, torch.zeros(1, 2, 32)))) == 0


@needs_muon
@pytest.mark.slow
@pytest.mark.usefixtures("data")
def test_from_a_target_to_measured_heads(model: Path, tmp_path: Path) -> None:
    out, figures = tmp_path / "heads.safetensors", tmp_path / "figures.json"
    common = ("--out", out, "--work", tmp_path / "work", "--model", model, "--json", figures)
    result = call(distill_medusa, *common, "--minutes", 0.02, "--prompts", 30)
    assert result.exit_code == 0, result.output
    card = json.loads(figures.read_text(encoding="utf-8"))
    assert card == read_heads_card(out)
    assert card["steps"] > 0
    assert card["seed"] == 1
    assert {"chat", "code"} <= card["tasks"].keys()
    for task in card["tasks"].values():
        assert task["accepted"] == sorted(task["accepted"])
        assert all(row == sorted(row) for row in task["top"])
        assert (len(task["top"]), len(task["top"][0])) == (training.HEADS, WIDEST)
    embedding = tiny_weights(config=SIZES)["model.embed_tokens.weight"]
    heads = load_heads(out, OfTarget(SIZES, embedding, embedding))
    assert heads.state_layers == (1, 3)
    again = call(distill_medusa, *common, "--measure-only")
    assert again.exit_code == 0, again.output
    assert json.loads(figures.read_text(encoding="utf-8")) == card
