from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.unit.distill.tiny_target import CONFIG, tiny_target, tiny_weights

from parlay.engine.distill.examples import Example, batches, read_shards, write_shard
from parlay.engine.distill.generate import PROMPT_STATES, Decoder, Job, answer, generate
from parlay.engine.distill.states import target_states

LAYERS = (1, 3)


def decoder() -> Decoder:
    return Decoder(CONFIG, tiny_weights(), 100, LAYERS)


def jobs(count: int, temperature: float = 0.0) -> list[Job]:
    rng = torch.Generator().manual_seed(5)
    return [
        Job(f"t{i % 2}", torch.randint(2, 48, (3 + i % 5,), generator=rng).tolist(), temperature, i)
        for i in range(count)
    ]


def test_states_are_those_of_a_pass_over_the_whole_text() -> None:
    ended: list[Job] = []
    generate(decoder(), jobs(150), 12, ended.append)  # more than there are slots
    assert len(ended) == 150
    target = tiny_target()
    for job in ended[::10]:
        assert len(job.states) == len(job.out) <= 12
        assert 1 not in job.out[:-1]
        states = torch.cat(job.states)
        wanted = target_states(target, job.prompt + job.out[:-1], LAYERS)
        torch.testing.assert_close(states, wanted, atol=0.2, rtol=0.05)
        # A single place may be off by bf16's rounding of scores; on the whole they agree closely.
        assert float((states - wanted).float().abs().mean()) < 0.03
        logits = (states[len(job.prompt) - 1 :, -1] @ target.head.T).float()
        assert logits.argmax(-1).tolist() == job.out


def test_of_a_long_prompt_the_states_a_window_needs_are_kept() -> None:
    ended: list[Job] = []
    prompt = torch.randint(2, 48, (80,), generator=torch.Generator().manual_seed(6)).tolist()
    generate(decoder(), [Job("t", prompt, 0.0, 0)], 5, ended.append)
    states = torch.cat(ended[0].states)
    assert PROMPT_STATES == 65
    assert len(states) == PROMPT_STATES + len(ended[0].out) - 1
    wanted = target_states(tiny_target(), prompt + ended[0].out[:-1], LAYERS)[-len(states) :]
    assert float((states - wanted).float().abs().mean()) < 0.03


def test_alone_the_last_states_are_told() -> None:
    plain = Decoder(CONFIG, tiny_weights(), 100)
    torch.testing.assert_close(plain.prefill(0, [5, 6, 7]), decoder().prefill(0, [5, 6, 7])[:, 1:])


def test_draws_do_not_depend_on_the_batch() -> None:
    together: list[Job] = []
    generate(decoder(), jobs(6, 0.9), 8, together.append)
    outs = {job.seed: job.out for job in together}
    assert len({tuple(out) for out in outs.values()}) > 1
    alone: list[Job] = []
    generate(decoder(), jobs(6, 0.9)[2:3], 8, alone.append)
    assert alone[0].out == outs[2]


def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    done: list[int] = []
    answer(decoder, jobs(70), 6, tmp_path, done.append)
    before = {tuple(e.ids): e for e in read_shards(tmp_path)}
    assert sum(done) == len(before) == 70
    (tmp_path / "00001.safetensors").unlink()
    done.clear()
    answer(decoder, jobs(70), 6, tmp_path, done.append)
    assert done[0] == 64
    assert sum(done) == 70
    assert {tuple(e.ids) for e in read_shards(tmp_path)} == before.keys()
    answer(never, jobs(70), 6, tmp_path, done.append)


def never() -> Decoder:
    raise AssertionError("nothing is left to do")


def test_shards_keep_their_examples(tmp_path: Path) -> None:
    examples = [
        Example("chat", [1, 2, 3], 1, torch.randn(2, 2, 4).bfloat16()),
        Example("code", [4, 5, 6, 7], 3, torch.randn(3, 2, 4).bfloat16()),
    ]
    write_shard(tmp_path / "0.safetensors", examples)
    for old, new in zip(examples, read_shards(tmp_path), strict=True):
        assert (new.task, new.ids, new.prompt) == (old.task, old.ids, old.prompt)
        assert torch.equal(new.states, old.states)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "0.safetensors").write_bytes(b"not a shard")
    with pytest.raises(ValueError, match=r"0\.safetensors is damaged"):
        list(read_shards(tmp_path))


def test_batches_hold_everything_once_within_their_size() -> None:
    lengths = torch.randint(1, 60, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    groups = batches(lengths, 128)
    assert sorted(i for g in groups for i in g) == list(range(200))
    assert all(len(g) * max(lengths[i] for i in g) <= 128 for g in groups)
    assert len(groups) < 1.3 * sum(lengths) / 128 + 1
