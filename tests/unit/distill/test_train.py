from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.unit.distill.tiny_target import tiny_answers, tiny_target
from torch.nn import functional as F

from parlay.engine.distill import train as training
from parlay.engine.distill.examples import Example, windowed
from parlay.engine.distill.llama import Target
from parlay.engine.distill.student import ARGMAX_SHARE, distilled, frequent_ids, new_student
from parlay.engine.distill.train import Optimizer, Progress, epoch, learn, rate_at, restore, train

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch.optim.Muon")


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return tiny_answers()


def test_loss_and_gradients_are_those_of_the_plain_formula() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(1100, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    taught, teacher_head = torch.randn(1100, 6), torch.randn(20, 6)
    weight = (torch.rand(1100) < 0.8).float()
    p = (taught @ teacher_head.T).softmax(-1)
    label = (1 - ARGMAX_SHARE) * p + ARGMAX_SHARE * F.one_hot(p.argmax(-1), 20)
    plain = (-(label * (hidden @ head.T).log_softmax(-1)).sum(-1) * weight).sum() / 7
    wanted = torch.autograd.grad(plain, (hidden, head))
    sums = distilled(hidden, head, taught, teacher_head, weight)
    found = torch.autograd.grad(sums[0] / 7, (hidden, head))
    torch.testing.assert_close(sums[0] / 7, plain)
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w, atol=1e-4, rtol=1e-3)
    agreed = ((hidden @ head.T).argmax(-1) == p.argmax(-1)).float() @ weight
    assert float(sums[1].detach()) == float(agreed.detach())


def test_batches_teach_each_output_at_the_place_before_it(examples: list[Example]) -> None:
    known = torch.ones(48, dtype=torch.bool)
    known[:10] = False
    seen = 0
    for batch in epoch(examples, known, seed=1):
        seen += len(batch.at)
        assert len(batch.at) == len(batch.taught) == len(batch.weight)
        following = [int(batch.ids.flatten()[a + 1]) for a in batch.at.tolist()[:1]]
        assert batch.weight[0] == float(following[0] >= 10)
    assert seen == sum(len(e.hidden) for e in examples)


def test_each_place_reads_the_states_before_it_where_they_are_known() -> None:
    prompt, length = 10, 40
    place = torch.arange(length - 1.0)
    # At place i of the text the layers' states are i + 1 and -i - 1: none 0, as what is not known.
    states = (place + 1)[:, None, None] * torch.tensor([1.0, -1.0])[:, None].expand(-1, 3)
    example = windowed(Example("t", list(range(length)), prompt, states), 4)
    start = prompt - 4
    masked: list[bool] = []
    for seed in range(20):
        batch = next(epoch([example], torch.ones(48, dtype=torch.bool), seed))
        assert batch.ids[0].tolist() == list(range(start, length - 1))
        for token, read in zip(batch.ids[0].tolist(), batch.states[0], strict=True):
            assert read.shape == (6,)
            if token >= prompt:
                masked.append(not read.any())
            if token < prompt or read.any():
                assert read.tolist() == [token] * 3 + [-token] * 3
        # Taught is the last state of the place that predicts: of its own token.
        own = batch.ids.flatten()[batch.at] + 1
        assert torch.equal(batch.taught, -own[:, None].expand(-1, 3).float())
    assert 0.2 < sum(masked) / len(masked) < 0.6


def test_the_first_token_of_a_text_has_no_states_before_it() -> None:
    example = Example("t", [4, 5, 6, 7], 3, torch.ones(3, 1, 2))
    batch = next(epoch([example], torch.ones(48, dtype=torch.bool), 0))
    assert batch.states[0].tolist() == [[0, 0], [1, 1], [1, 1]]


def test_training_teaches_the_target(target: Target, examples: list[Example]) -> None:
    vocab = frequent_ids((e.ids[e.prompt :] for e in examples), 40)
    student, known = new_student(target, vocab, 2), torch.zeros(48, dtype=torch.bool)
    known[vocab] = True
    optimizer, stands = Optimizer(student), []
    for turn in range(60):
        batch = next(epoch(examples, known, turn))
        stands.append(learn(student, target, batch, target.head[vocab]))
        optimizer.step(1e-2)
    assert bool(student.state_proj.any())
    (first_loss, first_agreed), (loss, agreed) = stands[0], stands[-1]
    assert loss < first_loss - 0.1
    assert agreed > first_agreed + 0.1


def test_a_killed_run_resumes(
    target: Target, examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "CHECKPOINT_EVERY_S", 0.0)
    path, vocab = tmp_path / "checkpoint.pt", torch.arange(40)
    first, second = new_student(target, vocab, 2), new_student(target, vocab, 2)

    weights: list[torch.Tensor] = []

    def die(state: Progress) -> None:
        if state.steps == 3:
            raise KeyboardInterrupt
        weights[:] = [p.detach().clone() for p in first.tensors().values()]

    with pytest.raises(KeyboardInterrupt):
        train(first, target, examples, 60.0, 0, path, die)
    kept = restore(path, Optimizer(second))
    assert kept.steps == 2
    for live, old in zip(second.tensors().values(), weights, strict=True):
        assert torch.equal(live, old)
    stands: list[Progress] = []
    end = train(second, target, examples, kept.used_s / 60 + 1e-9, 0, path, stands.append)
    assert [s.steps for s in stands] == [3]
    assert end.tokens > kept.tokens


def test_checkpoint_of_other_sizes_is_refused(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    small, large = (new_student(target, torch.arange(n), 2) for n in (20, 30))
    training.save(path, Optimizer(small), Progress())
    with pytest.raises(ValueError, match="delete it"):
        restore(path, Optimizer(large))
    path.write_bytes(b"junk")
    with pytest.raises(ValueError, match="delete it"):
        restore(path, Optimizer(small))


def test_rate_warms_up_and_falls_to_nothing() -> None:
    rates = [rate_at(x / 100) for x in range(101)]
    peak = rates.index(max(rates))
    assert rates[0] == 0.0
    assert 0 < peak < 10
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 1e-9


def test_frequent_ids_count_tokens_not_texts() -> None:
    assert frequent_ids([[5, 5, 5, 5], [3, 2], [3, 2], [2]], 2).tolist() == [2, 5]
