"""Under parlay, Hugging Face's generate gives what it gives by itself."""

from __future__ import annotations

import ast
import itertools
import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy.stats import chisquare
from tests.tiny import AnyPlan
from tests.tiny_hf import EOS, VOCAB, tiny_pair
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from parlay.engine.planner import LocalPlanner
from parlay.engine.plugins.huggingface import Speculator, install, parlay_generate, uninstall
from parlay.policies.policy import Stateless
from parlay.policies.types import (
    BatchView,
    Plan,
    PlanSource,
    Proposer,
    StepOutcome,
    StopKind,
    StopRule,
)

ARMS = (Proposer.NONE, Proposer.NGRAM, Proposer.DRAFT_MODEL)
PROCESSING = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 3, "min_new_tokens": 20},
    {"prompt_lookup_num_tokens": 3},
]


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return tiny_pair()


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.utils.logging.set_verbosity_error()


def any_arm(model: Any, draft: Any, seed: int = 0, stop: StopRule | None = None) -> Speculator:
    return Speculator(model, draft, planner=LocalPlanner(AnyPlan(ARMS, 7, seed, stop)))


def prompt(seed: int, tokens: int = 12) -> dict[str, Any]:
    source = torch.Generator().manual_seed(seed)
    part = torch.randint(4, VOCAB, (1, tokens), generator=source)
    ids = torch.cat([part, part], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def ours(model: Any, speculator: Speculator, **kwargs: Any) -> Any:
    return model.generate(**kwargs, custom_generate=parlay_generate, speculator=speculator)


def check_greedy(pair: tuple[Any, Any], prompts: int, processing: dict[str, Any]) -> Speculator:
    """Compare our texts with plain generate's; prompt lookup must not come in our way."""
    model, draft = pair
    speculator = any_arm(model, draft)
    plain = {k: v for k, v in processing.items() if k != "prompt_lookup_num_tokens"}
    for seed in range(prompts):
        given = {**prompt(seed), "do_sample": False, "max_new_tokens": 32}
        expected = model.generate(**given, **plain)
        assert torch.equal(ours(model, speculator, **given, **processing), expected)
    assert not speculator.counters.errors
    assert not speculator.counters.fallbacks
    return speculator


def test_greedy_text_is_plain_generates_under_any_arms(pair: tuple[Any, Any]) -> None:
    counts = check_greedy(pair, 20, {}).counters.as_dict()
    for proposer in ("ngram", "draft_model"):
        assert 20 < counts["accepted_tokens"][proposer] < counts["drafted_tokens"][proposer]


@pytest.mark.parametrize("processing", PROCESSING, ids="-".join)
def test_greedy_text_is_plain_generates_whatever_processes_it(
    pair: tuple[Any, Any], processing: dict[str, Any]
) -> None:
    accepted = check_greedy(pair, 4, processing).counters.accepted
    assert accepted[Proposer.DRAFT_MODEL] > 5


@pytest.mark.parametrize(
    "stop",
    [
        StopRule(StopKind.SURVIVAL, 0.3),
        StopRule(StopKind.ENTROPY, 0.4),
        StopRule(StopKind.PROBABILITY, 0.5),
    ],
    ids=lambda s: s.kind.name.lower(),
)
def test_a_draft_may_stop_early(pair: tuple[Any, Any], stop: StopRule) -> None:
    model, draft = pair
    always = LocalPlanner(AnyPlan((Proposer.DRAFT_MODEL,), 6, fixed_k=True, stop_rule=stop))
    speculator = Speculator(model, draft, planner=always)
    given = {**prompt(1), "do_sample": False, "max_new_tokens": 40, "min_new_tokens": 40}
    assert torch.equal(ours(model, speculator, **given), model.generate(**given))
    drafted = speculator.counters.drafted[Proposer.DRAFT_MODEL]
    assert 0 < drafted < 6 * (speculator.counters.steps - 8)


def test_padding_on_the_left_is_not_read(pair: tuple[Any, Any]) -> None:
    model, draft = pair
    given = prompt(3)
    padded = {
        "input_ids": torch.cat([torch.zeros(1, 5, dtype=torch.long), given["input_ids"]], 1),
        "attention_mask": torch.cat([torch.zeros(1, 5), torch.ones(1, 24)], 1).long(),
    }
    asked = {"do_sample": False, "max_new_tokens": 40}
    speculator = any_arm(model, draft)
    found = ours(model, speculator, **padded, **asked)
    assert torch.equal(found, model.generate(**padded, **asked))
    assert torch.equal(found[:, 5:], model.generate(**given, **asked))
    assert speculator.counters.accepted.sum() > 5


def test_a_sliding_window_gives_back_what_it_forgot() -> None:
    torch.manual_seed(1)
    config = MistralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCAB, sliding_window=8, initializer_range=0.5,
        eos_token_id=None, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    speculator = any_arm(model, model)
    for seed in range(2):
        given = {**prompt(seed), "do_sample": False, "max_new_tokens": 30}
        assert torch.equal(ours(model, speculator, **given), model.generate(**given))
    assert speculator.counters.accepted.sum() > 20


def test_a_cache_goes_on_where_a_turn_ended(pair: tuple[Any, Any]) -> None:
    model, draft = pair
    asked = {"do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True}

    def talk(generate: Callable[..., Any]) -> list[Any]:
        first = generate(**prompt(5), **asked)
        ids = torch.cat([first.sequences, torch.full((1, 3), 9)], 1)
        mask = torch.ones_like(ids)
        second = generate(input_ids=ids, attention_mask=mask, cache=first.cache, **asked)
        return [first.sequences, second.sequences, second.cache.get_seq_length()]

    speculator = any_arm(model, draft)
    mine = talk(lambda **kwargs: ours(model, speculator, **kwargs))
    theirs = talk(model.generate)
    assert all(torch.equal(a, b) for a, b in zip(mine[:2], theirs[:2], strict=True))
    assert mine[2] == theirs[2] == theirs[1].shape[1] - 1


def test_scores_and_logits_are_those_of_each_token(pair: tuple[Any, Any]) -> None:
    model, draft = pair
    asked = {
        **prompt(7), "do_sample": False, "max_new_tokens": 30, "repetition_penalty": 1.2,
        "output_scores": True, "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    mine, theirs = ours(model, any_arm(model, draft), **asked), model.generate(**asked)
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.cat(mine[name]), torch.cat(theirs[name]))


class Diary(StoppingCriteria):
    """A stateful criterion and processor: keeps what it saw, stops after its 30th token."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []
        self.asked: list[tuple[int, ...]] = []

    def process(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.asked.append(tuple(ids[0].tolist()))
        scores[:, len(self.asked) % VOCAB] += 2.0
        return scores

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.seen.append(tuple(ids[0].tolist()))
        return torch.tensor([len(self.seen) >= 30])


def test_processors_and_criteria_with_a_state_see_what_they_always_see(
    pair: tuple[Any, Any],
) -> None:
    model, draft = pair
    diaries = []
    for generate in (model.generate, lambda **k: ours(model, any_arm(model, draft), **k)):
        diary = Diary()
        generate(
            **prompt(2),
            do_sample=False,
            max_new_tokens=60,
            logits_processor=LogitsProcessorList([diary.process]),
            stopping_criteria=StoppingCriteriaList([diary]),
        )
        diaries.append(diary)
    assert diaries[0].seen == diaries[1].seen
    assert diaries[0].asked == diaries[1].asked


class Sink:
    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1


def test_installed_generate_streams_and_stays_itself(pair: tuple[Any, Any]) -> None:
    model, draft = pair
    given = {**prompt(4), "do_sample": False, "max_new_tokens": 30}
    theirs, mine = Sink(), Sink()
    expected = model.generate(**given, streamer=theirs)
    arms = AnyPlan(ARMS, 7)
    speculator = install(model, draft, planner=LocalPlanner(arms))
    try:
        assert torch.equal(model.generate(**given, streamer=mine), expected)
        assert torch.equal(model.generate(given["input_ids"], max_new_tokens=30), expected)
        assert torch.equal(model.generate(**given, assistant_model=draft), expected)
    finally:
        uninstall(model)
    assert (mine.got, mine.ends) == (theirs.got, 1)
    steps = speculator.counters.steps
    assert 0 < steps < 3 * 30
    model.generate(**given)
    assert speculator.counters.steps == steps


def test_installed_generate_takes_hints_and_counts_what_it_leaves_alone(
    pair: tuple[Any, Any],
) -> None:
    model, draft = pair
    given = {**prompt(4), "do_sample": False, "max_new_tokens": 30, "min_new_tokens": 30}
    static = {**given, "cache_implementation": "static"}
    expected, static_text = model.generate(**given), model.generate(**static)
    speculator = install(model, draft, planner=LocalPlanner(AnyPlan(ARMS, 7)))
    counts = speculator.counters
    hints = {"proposers": "ngram"}
    try:
        assert torch.equal(model.generate(**given, hints=hints), expected)
        assert counts.drafted[Proposer.NGRAM] > counts.drafted[Proposer.DRAFT_MODEL] == 0
        steps = counts.steps
        assert torch.equal(model.generate(**static, hints=hints), static_text)
    finally:
        uninstall(model)
    assert (counts.steps, sum(counts.fallbacks.values())) == (steps, 1)


class _Words:
    """As much of a tokenizer as stop strings need: a token is a letter."""

    def __init__(self) -> None:
        self.words = {chr(97 + i): i for i in range(VOCAB)}

    def get_vocab(self) -> dict[str, int]:
        return self.words

    def _convert_id_to_token(self, token: int) -> str:
        return list(self.words)[token]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)

    def __call__(self, text: str, **_: Any) -> Any:
        return {"input_ids": [self.words[letter] for letter in text]}

    def __len__(self) -> int:
        return VOCAB


def test_installed_generate_knows_stop_strings(pair: tuple[Any, Any]) -> None:
    model, draft = pair
    given = {**prompt(6), "do_sample": False, "max_new_tokens": 40}
    words = _Words()
    whole = model.generate(**given)[0, 24:].tolist()
    stop = list(words.words)[whole[10]]
    asked = {**given, "stop_strings": [stop], "tokenizer": words}
    expected = model.generate(**asked)
    install(model, draft, planner=LocalPlanner(AnyPlan(ARMS, 7)))
    try:
        assert torch.equal(model.generate(**asked), expected)
        with pytest.raises(ValueError, match="tokenizer"):
            model.generate(**given, stop_strings=[stop])
    finally:
        uninstall(model)
    assert expected.shape[1] <= 24 + 11


class Hears(AnyPlan):
    """Keeps the last outcomes."""

    def __init__(self) -> None:
        super().__init__(ARMS, 7)
        self.heard: list[StepOutcome] = []

    def observe(self, outcome: StepOutcome) -> None:
        self.heard.append(outcome)


def test_a_policy_hears_of_every_draft_verified_up_to_the_end(pair: tuple[Any, Any]) -> None:
    model, draft = pair
    policy = Hears()
    speculator = Speculator(model, draft, planner=LocalPlanner(policy))
    given = {**prompt(9), "do_sample": False, "max_new_tokens": 60, "min_new_tokens": 60}
    ours(model, speculator, **given)
    drafted, verified, accepted, emitted = (
        np.concatenate([getattr(o, name) for o in policy.heard])
        for name in ("drafted_k", "verified_k", "accepted", "emitted")
    )
    assert emitted.sum() == 60
    assert (verified == drafted)[:-1].all()
    assert (emitted == accepted + 1)[:-1].all()
    assert (accepted + 1 < verified).any(), "rejected with drafts behind it"
    assert (accepted == verified)[verified > 0].any()
    assert [o.prefill_tokens for o in policy.heard] == [24] + [0] * (len(drafted) - 1)
    assert [o.padded_tokens for o in policy.heard[1:]] == (1 + drafted[1:]).tolist()


def test_a_draft_model_of_few_positions_drafts_within_them(pair: tuple[Any, Any]) -> None:
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=40, n_embd=16, n_layer=1, n_head=2, eos_token_id=EOS
    )
    model, draft = pair[0], GPT2LMHeadModel(config).eval()
    always = LocalPlanner(AnyPlan((Proposer.DRAFT_MODEL,), 6, fixed_k=True))
    speculator = Speculator(model, draft, planner=always)
    given = {**prompt(1), "do_sample": False, "max_new_tokens": 40, "min_new_tokens": 40}
    assert torch.equal(ours(model, speculator, **given), model.generate(**given))
    assert 6 < speculator.counters.drafted[Proposer.DRAFT_MODEL] < 6 * 20


SAMPLING = [{"top_k": 0, "temperature": 1.0}, {"top_k": 3, "top_p": 0.9, "temperature": 0.8}]


@pytest.mark.parametrize("sampling", SAMPLING, ids=["plain", "top-k-top-p"])
def test_a_seeds_text_does_not_depend_on_how_it_was_drafted(
    pair: tuple[Any, Any], sampling: dict[str, Any]
) -> None:
    model, draft = pair
    alone = Speculator(model, draft, "none")
    arms = any_arm(model, draft)
    texts = []
    for seed in range(6):
        given = {**prompt(seed), "do_sample": True, "max_new_tokens": 32, **sampling}
        both = []
        for speculator in (alone, arms):
            torch.manual_seed(seed)
            both.append(ours(model, speculator, **given))
        assert torch.equal(*both)
        texts.append(tuple(both[0][0].tolist()))
    assert len(set(texts)) == 6
    assert arms.counters.accepted[Proposer.DRAFT_MODEL] > 10


LENGTH, SMALL = 3, 5


def exact_joint(model: Any, ids: torch.Tensor, sampling: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return P of each text of LENGTH tokens: the model over every prefix, plain processors."""
    joint = np.ones((SMALL,) * LENGTH)
    for length in range(LENGTH):
        for prefix in itertools.product(range(SMALL), repeat=length):
            text = torch.cat([ids, torch.tensor([prefix], dtype=torch.long)], 1)
            out = model.generate(
                text, attention_mask=torch.ones_like(text), do_sample=True, max_new_tokens=1,
                output_scores=True, return_dict_in_generate=True, **sampling,
            )  # fmt: skip
            law = torch.softmax(out.scores[0][0].double(), -1).numpy()
            joint[prefix] *= law.reshape((SMALL,) + (1,) * (LENGTH - length - 1))
    assert joint.sum() == pytest.approx(1.0)
    return joint


def chi_square_p(draws: int, sampling: dict[str, Any]) -> float:
    """Return the p-value of texts drawn under random arms against the exact joint law."""
    model, draft = tiny_pair(SMALL, 0.1, eos_token_id=None)
    ids = torch.tensor([[1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]])
    joint = exact_joint(model, ids, sampling)
    speculator, counts = any_arm(model, draft), np.zeros_like(joint)
    torch.manual_seed(11)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": True}
    for _ in range(draws):
        text = ours(model, speculator, **given, max_new_tokens=LENGTH, **sampling)
        counts[tuple(text[0, ids.shape[1] :].tolist())] += 1
    assert counts[joint == 0].sum() == 0, "a text came out that cannot"
    assert speculator.counters.accepted[Proposer.DRAFT_MODEL] > draws / 20
    expected = joint * draws
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    pooled = np.append(expected[~rare], expected[rare].sum())
    keep = pooled > 0
    return float(chisquare(observed[keep], pooled[keep]).pvalue)


def test_sampled_text_has_the_exact_joint_law() -> None:
    assert chi_square_p(200, SAMPLING[1]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLING, ids=["plain", "top-k-top-p"])
def test_sampled_text_has_the_exact_joint_law_in_many_draws(sampling: dict[str, Any]) -> None:
    assert chi_square_p(6000, sampling) > 1e-3


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "beam search": {"num_beams": 3},
    "batch": {"input_ids": prompt(0)["input_ids"].repeat(2, 1), "attention_mask": None},
    "no cache": {"use_cache": False},
    "attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "static cache": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_cannot_speculate_is_decoded_as_ever(
    pair: tuple[Any, Any], case: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, draft = pair
    asked = {**prompt(8), "do_sample": False, "max_new_tokens": 12, **UNSUPPORTED[case]}
    speculator = any_arm(model, draft)
    expected = model.generate(**asked)
    with caplog.at_level(logging.WARNING, "parlay.plugin"):
        found = [ours(model, speculator, **asked) for _ in range(2)]
    for text in found:
        same = (expected, text) if torch.is_tensor(text) else (expected.sequences, text.sequences)
        assert torch.equal(*same)
    assert sum(speculator.counters.fallbacks.values()) == 2
    assert len(caplog.records) == 1
    assert "is not speculated" in caplog.text or "are not" in caplog.text


def test_sampling_several_texts_falls_back(pair: tuple[Any, Any]) -> None:
    model, draft = pair
    asked = {**prompt(8), "do_sample": True, "num_return_sequences": 3, "max_new_tokens": 12}
    torch.manual_seed(0)
    expected = model.generate(**asked)
    torch.manual_seed(0)
    assert torch.equal(ours(model, any_arm(model, draft), **asked), expected)


def test_what_makes_no_sense_is_said(pair: tuple[Any, Any]) -> None:
    model, draft = pair
    with pytest.raises(ValueError, match="same tokenizer"):
        Speculator(model, tiny_pair(VOCAB + 1)[0])
    with pytest.raises(ValueError, match="unknown hint 'depth'"):
        ours(model, any_arm(model, draft), **prompt(0), max_new_tokens=3, hints={"depth": 1})
    given = {**prompt(0), "num_beams": 2, "do_sample": False, "max_new_tokens": 3}
    with pytest.raises(ValueError, match="cannot stream"):
        ours(model, any_arm(model, draft), **given, token_streamer=Sink())


def test_hints_hold_a_request_back(pair: tuple[Any, Any]) -> None:
    model, draft = pair
    given = {**prompt(0), "do_sample": False, "max_new_tokens": 30}
    speculator = any_arm(model, draft)
    ours(model, speculator, **given, hints={"speculate": False})
    assert speculator.counters.drafted.sum() == 0
    ours(model, speculator, **given, hints={"proposers": "draft_model"})
    assert speculator.counters.drafted[Proposer.NGRAM] == 0
    assert speculator.counters.drafted[Proposer.DRAFT_MODEL] > 0


def test_a_model_learns_from_one_call_to_the_next_without_being_told(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = pair
    monkeypatch.setenv("PARLAY_POLICY", "fixed")
    monkeypatch.setenv("PARLAY_SET", "proposer=ngram k=2")
    heard: list[int] = []
    import parlay.engine.plugins.huggingface as plugin

    for _ in range(2):
        model.generate(**prompt(0), max_new_tokens=20, custom_generate=parlay_generate)
        heard.append(plugin._speculators[model][id(None)].counters.steps)
    assert 0 < heard[0] < heard[1]


class Fails(Stateless):
    name = "fails"

    def __init__(self) -> None:
        self.inner, self.left = AnyPlan(ARMS, 5), 10

    def decide(self, view: BatchView) -> Plan:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("worn out")
        return self.inner.decide(view)


def test_a_policy_that_breaks_changes_no_text(pair: tuple[Any, Any]) -> None:
    model, draft = pair
    given = {**prompt(9), "do_sample": False, "max_new_tokens": 60, "min_new_tokens": 60}
    speculator = Speculator(model, draft, planner=LocalPlanner(Fails()))
    assert torch.equal(ours(model, speculator, **given), model.generate(**given))
    assert speculator.counters.errors > 0


@pytest.fixture
def service() -> Iterator[Any]:
    from tests.sidecars import FIXED, running

    with (
        tempfile.TemporaryDirectory(prefix="parlay-") as folder,
        running(f"unix:{folder}/sidecar.sock", *FIXED) as sidecar,
    ):
        yield sidecar


@pytest.mark.slow
def test_faults_of_the_sidecar_change_no_text(pair: tuple[Any, Any], service: Any) -> None:
    model, draft = pair
    given = [{**prompt(s), "do_sample": False, "max_new_tokens": 60} for s in range(12)]
    expected = [model.generate(**g) for g in given]
    speculator = Speculator(model, draft, "ngram_gate", {}, service.target)
    plans = speculator.counters.plans

    def all_the_same() -> None:
        for asked, text in zip(given, expected, strict=True):
            assert torch.equal(ours(model, speculator, **asked), text)

    try:
        for _ in range(100):
            all_the_same()
            if plans[PlanSource.REMOTE]:
                break
        assert plans[PlanSource.REMOTE] > 0
        service.freeze()
        before = plans[PlanSource.LOCAL]
        all_the_same()
        assert plans[PlanSource.LOCAL] > before
        service.thaw()
        service.kill()
        all_the_same()
        service.start()
        all_the_same()
        assert speculator.counters.errors == 0
        assert speculator.counters.inside_most_us < 1e6
    finally:
        speculator.close()


def test_a_text_ends_at_its_end_though_more_was_drafted(pair: tuple[Any, Any]) -> None:
    model, draft = pair
    ends, ended = [EOS, 4, 5, 6, 7], 0
    speculator = any_arm(model, draft, seed=5)
    for seed in range(30, 38):
        given = {**prompt(seed), "do_sample": False, "max_new_tokens": 20, "eos_token_id": ends}
        text = ours(model, speculator, **given)
        assert torch.equal(text, model.generate(**given))
        ended += int(text[0, -1]) in ends
    assert ended > 4


@pytest.mark.slow
def test_the_readmes_command_speculates() -> None:
    page = Path(__file__).parents[2] / "engine/plugins/HUGGINGFACE.md"
    command = re.search(r"<<'EOF'\n(.*?)\nEOF\n", page.read_text(encoding="utf-8"), re.S)
    assert command is not None
    done = subprocess.run(
        [sys.executable, "-c", command[1]], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said, counts = done.stdout.strip().rsplit("\n", 1)
    assert "return" in said
    assert sum(ast.literal_eval(counts)["accepted_tokens"].values()) > 0
