import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from parlay.policies.policy import make_policy
from parlay.policies.types import DRAFT_MODEL, NGRAM
from parlay.sim.counterfactual import TracedRequest, TraceLuck, read_traces, write_traces
from parlay.sim.episode import run_episode
from parlay.sim.load import arrivals_of
from parlay.sim.oracle import hazard_oracle
from parlay.sim.record import ngram_counts
from parlay.sim.scenario import Scenario, Stage

GOOD = {
    "id": "a",
    "task": "logs",
    "prompt_tokens": 5,
    "k_max": {"ngram": 4},
    "accepted": {"ngram": [0, 2, 1]},
    "drafted": {"ngram": [0, 4, 4]},
    "match_tokens": [0, 3, 4],
}


def request(seed: int, outputs: int = 30) -> TracedRequest:
    rng = np.random.default_rng(seed)
    drafted = np.where(rng.random(outputs) < 0.6, 8, 0)
    accepted = np.minimum(rng.integers(0, 6, outputs), drafted)
    model = rng.integers(0, 5, outputs)
    return TracedRequest(
        f"r{seed}",
        "logs" if seed % 2 else "chat",
        10 + seed,
        {NGRAM: 8, DRAFT_MODEL: 6},
        {NGRAM: drafted, DRAFT_MODEL: np.full(outputs, 6)},
        {NGRAM: accepted, DRAFT_MODEL: model},
        np.where(drafted > 0, 1 + rng.integers(0, 9, outputs), 0),
        {DRAFT_MODEL: rng.random((outputs, 6)).astype(np.float32)},
    )


def closed(path: Path, concurrency: int) -> Scenario:
    stage = Stage({"chat": 1.0}, concurrency)
    return Scenario("replay", "t", "h200_8b", (stage,), 60, 0, acceptance=str(path))


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    wrote = [request(seed) for seed in range(3)]
    assert write_traces(path, wrote) == 3
    for one, other in zip(wrote, read_traces(path), strict=True):
        assert (one.name, one.task, one.prompt_tokens) == (
            other.name, other.task, other.prompt_tokens,
        )  # fmt: skip
        assert dict(one.k_max) == dict(other.k_max)
        assert (one.match_tokens == other.match_tokens).all()
        for proposer in (NGRAM, DRAFT_MODEL):
            assert (one.drafted[proposer] == other.drafted[proposer]).all()
            assert (one.accepted[proposer] == other.accepted[proposer]).all()
        shown = other.confidence[DRAFT_MODEL]
        assert np.abs(one.confidence[DRAFT_MODEL] - shown).max() < 6e-4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"accepted": {"ngram": [0, 5, 1]}}, "accepts more than it drafted"),
        ({"accepted": {"ngram": [0, 2]}}, "each of the 3 output positions"),
        ({"drafted": {"oracle": [0, 4, 4]}}, "same proposers"),
        ({"drafted": {"ngram": [0, -4, 4]}}, "whole numbers"),
        ({"match_tokens": []}, "no output positions"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"confidence": {"ngram": [[2.0], [], []]}}, "between 0 and 1"),
        ({"confidence": {"ngram": [[0.5]]}}, "each of the 3 positions"),
        ({"k_max": None}, "k_max|items|NoneType"),
    ],
)
def test_a_faulty_line_is_named_by_its_number(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, **change}) + "\n")
    with pytest.raises(ValueError, match=f"trace.jsonl:2: .*({said})") as error:
        list(read_traces(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "said"), [("", "empty"), ("{", "trace.jsonl:1")])
def test_a_file_without_requests_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        list(read_traces(path))
    with pytest.raises(ValueError, match="calibrate trace"):
        list(read_traces(tmp_path / "none.jsonl"))


def test_a_gzipped_file_is_read_and_a_broken_one_refused(tmp_path: Path) -> None:
    plain, zipped = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl.gz"
    write_traces(plain, [request(seed) for seed in range(3)])
    whole = gzip.compress(plain.read_bytes())
    zipped.write_bytes(whole)
    assert [r.name for r in read_traces(zipped)] == [r.name for r in read_traces(plain)]
    for broken in (whole[:-20], b"{}", whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]):
        zipped.write_bytes(broken)
        with pytest.raises(ValueError, match=r"trace\.jsonl\.gz") as error:
            list(read_traces(zipped))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("proposer", [NGRAM, DRAFT_MODEL])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_replay_accepts_what_was_recorded(
    tmp_path: Path, proposer: int, concurrency: int
) -> None:
    path = tmp_path / "trace.jsonl"
    recorded = [request(seed) for seed in range(4)]
    write_traces(path, recorded)
    scenario, k = closed(path, concurrency), 3
    seen: list[tuple[int, int, int, int]] = []
    places: dict[int, int] = {}

    def make(limits, backend):  # type: ignore[no-untyped-def]
        name = {NGRAM: "ngram", DRAFT_MODEL: "draft_model"}[proposer]
        inner = make_policy("fixed", {"proposer": name, "k": k}, limits)
        decide, observe = inner.decide, inner.observe

        def noted(view):  # type: ignore[no-untyped-def]
            places.update(zip(view.request_id.tolist(), view.output_tokens.tolist(), strict=True))
            return decide(view)

        def heard(outcome):  # type: ignore[no-untyped-def]
            for row in np.flatnonzero(outcome.emitted):
                key = int(outcome.request_id[row])
                line = backend.rows.get(key, backend.luck.admit(key, 0, 0))
                verified, accepted = int(outcome.verified_k[row]), int(outcome.accepted[row])
                seen.append((line, places[key], verified, accepted))
            observe(outcome)

        inner.decide, inner.observe = noted, heard  # type: ignore[method-assign]
        return inner

    run_episode(scenario, make, arrivals_of(scenario), 0)
    assert len(seen) > 40
    for line, at, verified, accepted in seen:
        one = recorded[line]
        assert verified <= min(k, int(one.drafted[proposer][at]))
        assert accepted == min(verified, int(one.accepted[proposer][at]))


def test_only_what_was_recorded_can_be_drafted_with() -> None:
    luck = TraceLuck([request(1)], depth=8)
    assert luck.proposer_mask == 1 | 1 << NGRAM | 1 << DRAFT_MODEL


def test_oracles_of_hazards_say_that_there_are_none(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_traces(path, [request(1)])
    scenario = closed(path, 1)
    with pytest.raises(ValueError, match="no hazards"):
        run_episode(scenario, lambda limits, b: hazard_oracle(b, limits), arrivals_of(scenario), 0)


def test_the_ngram_is_scored_as_it_would_have_guessed() -> None:
    prompt, out = [1, 2, 3, 4, 9, 1, 2], [3, 4, 7, 5]
    drafted, held, match = ngram_counts(prompt, out)
    # 1 2 was followed by 3 4 9 ...: two hold, then 7 comes instead of 9.
    assert drafted[0] > 2
    assert held.tolist() == [2, 1, 0, 0]
    assert match[0] == 2
    assert match[3] == 0
