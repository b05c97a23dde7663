"""The learned policy: its file, what it may do, its draws, its memory, the features it sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.policies.features import (
    ACTION_NAMES,
    DEPTH,
    FEATURES,
    K_OF,
    PROPOSER_OF,
    WIDTHS,
    Prices,
    Rows,
    Shown,
    Tracker,
    allowed,
)
from parlay.policies.network import Network, load_network, save_network
from parlay.policies.policy import EngineLimits, make_policy, registry
from parlay.policies.synthetic import History
from parlay.policies.types import DRAFT_MODEL, MEDUSA, NGRAM, Array, Plan
from parlay.policies.watched import Watched

LIMITS = EngineLimits(0b1111, 8, (), 4096)


def network(seed: int = 0) -> Network:
    rng = np.random.default_rng(seed)
    sizes = [len(FEATURES), 64, 64, len(ACTION_NAMES)]
    shapes = list(zip(sizes[1:], sizes[:-1], strict=True))
    return Network(
        [rng.normal(0.0, 0.3, shape).astype(np.float32) for shape in shapes],
        [rng.normal(0.0, 0.3, n).astype(np.float32) for n, _ in shapes],
        np.zeros(len(FEATURES), np.float32),
        np.ones(len(FEATURES), np.float32),
        "tanh",
        {"scenarios": ["mixed"]},
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_network(tmp_path / "n.safetensors", network())
    return tmp_path / "n.safetensors"


def learned(path: Path, **settings: Any) -> Any:
    return make_policy("learned", {"path": str(path), **settings}, LIMITS)


def play(policy: Any, history: History, steps: int) -> list[Plan]:
    plans = []
    for _ in range(steps):
        plans.append(policy.decide(history.view()))
        policy.observe(history.step(plans[-1]))
    return plans


def rewritten(path: Path, change: Any) -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    about = json.loads(header["__metadata__"]["parlay"])
    change(about, header)
    header["__metadata__"]["parlay"] = json.dumps(about)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def test_a_network_comes_back_as_it_was_saved(path: Path) -> None:
    saved, found = network(), load_network(path)
    x = np.random.default_rng(1).normal(size=(5, len(FEATURES))).astype(np.float32)
    np.testing.assert_array_equal(saved.logits(x), found.logits(x))
    assert found.card == {"scenarios": ["mixed"]}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_file_is_safetensors(path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = safetensors.load_file(path)
    np.testing.assert_array_equal(tensors["layer.0.weight"], network().weights[0])


def set_schema(about: Any, _: Any) -> None:
    about["schema"] = 99


def other_features(about: Any, _: Any) -> None:
    about["features"][0] = "mood"


def no_list(about: Any, _: Any) -> None:
    about["features"] = 5


def other_actions(about: Any, _: Any) -> None:
    about["actions"].reverse()


def no_metadata(_: Any, header: Any) -> None:
    header["__metadata__"] = {"parlay": "{}"}
    header["layer.0.weight"]["dtype"] = "F16"


def bad_shape(_: Any, header: Any) -> None:
    header["layer.0.weight"]["shape"].reverse()


def huge_shape(_: Any, header: Any) -> None:
    header["layer.0.weight"]["shape"] = [10**30]


def outside(_: Any, header: Any) -> None:
    header["layer.0.bias"]["data_offsets"][1] += 10**6


def lost_layer(_: Any, header: Any) -> None:
    del header["layer.1.bias"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_schema, "schema 99"),
        (other_features, "other features"),
        (no_list, "other features"),
        (huge_shape, "damaged"),
        (other_actions, "other actions"),
        (no_metadata, "damaged"),
        (bad_shape, "do not fit"),
        (outside, "damaged"),
        (lost_layer, "lacks tensors"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(path: Path, change: Any, says: str) -> None:
    rewritten(path, change)
    with pytest.raises(ValueError, match=says) as error:
        learned(path)
    assert "\n" not in str(error.value)


@given(st.data())
def test_a_damaged_file_is_refused(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    file = tmp_path_factory.mktemp("n") / "n.safetensors"
    save_network(file, network())
    whole = file.read_bytes()
    kept = data.draw(st.integers(0, len(whole) - 1))
    file.write_bytes(whole[:kept])
    with pytest.raises(ValueError, match="damaged"):
        load_network(file)


def test_numbers_that_are_not_finite_are_refused(path: Path) -> None:
    bad = network()
    bad.weights[1][3, 3] = np.nan
    save_network(path, bad)
    with pytest.raises(ValueError, match="not finite"):
        learned(path)


def test_without_a_file_it_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set path to a network"):
        make_policy("learned", {}, LIMITS)
    with pytest.raises(ValueError, match="cannot read"):
        learned(tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="seed must be"):
        learned(tmp_path, seed=-1)
    with pytest.raises(ValueError, match="no setting"):
        make_policy("learned", {"file": "x"}, LIMITS)
    assert "learned" not in registry()


@pytest.mark.parametrize("sample", [False, True])
def test_it_does_only_what_rows_may_do(path: Path, sample: bool) -> None:
    policy, history = learned(path, sample=sample), History(16, 1)
    drafted = set()
    for _ in range(60):
        view = history.view()
        view.proposer_mask[::3] &= ~np.uint8(1 << DRAFT_MODEL)
        view.max_k[::5] = np.minimum(view.max_k[::5], 2)
        plan = policy.decide(view)
        k, who = plan.k.astype(int), plan.proposer
        assert (k <= np.where(view.prefill_tokens > 0, 0, view.max_k)).all()
        assert (((view.proposer_mask >> who) & 1 > 0) | (k == 0)).all()
        assert (view.match_tokens[who == NGRAM] > 0).all()
        drafted |= set(who[k > 0].tolist())
        policy.observe(history.step(plan))
    assert drafted


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 15), st.booleans()),
        min_size=1,
        max_size=8,
    )
)
def test_masks_say_what_may_be_done(rows: list[tuple[int, int, int, bool]]) -> None:
    match, max_k, mask, prefill = (np.array(column) for column in zip(*rows, strict=True))
    may = allowed(match, max_k, mask.astype(np.uint8), prefill)
    for row, (m, k, bits, prompt) in enumerate(rows):
        for action, (who, depth) in enumerate(zip(PROPOSER_OF, K_OF, strict=True)):
            able = depth <= k and not prompt and bits >> who & 1 and (who != NGRAM or m > 0)
            assert may[row, action] == (action == 0 or bool(able))


def test_draws_have_the_chances_that_they_tell(path: Path) -> None:
    view = History(3, 2).view()
    best = learned(path).decide(view)
    np.testing.assert_array_equal(best.propensity, 1.0)
    told: list[dict[tuple[int, int], float]] = [{} for _ in range(len(view))]
    count: list[dict[tuple[int, int], int]] = [{} for _ in range(len(view))]
    tries = 700
    policy = learned(path, sample=True, seed=5)
    for step in range(tries):
        policy.steps = step
        plan = policy.decide(view)
        for row in range(len(view)):
            pair = (int(plan.proposer[row]), int(plan.k[row]))
            told[row].setdefault(pair, float(plan.propensity[row]))
            count[row][pair] = count[row].get(pair, 0) + 1
    for row in range(len(view)):
        assert 0.95 < sum(told[row].values()) < 1.0 + 1e-5
        for pair, chance in told[row].items():
            slack = 4.0 * np.sqrt(chance * (1.0 - chance) / tries) + 1e-3
            assert count[row].get(pair, 0) / tries == pytest.approx(chance, abs=slack)
    again = learned(path, sample=True, seed=5)
    other = learned(path, sample=True, seed=6)
    same = [p.decide(History(64, 2).view()).k for p in (learned(path, sample=True, seed=5), again)]
    np.testing.assert_array_equal(*same)
    assert not np.array_equal(same[0], other.decide(History(64, 2).view()).k)


@pytest.mark.parametrize("sample", [False, True])
def test_a_loaded_state_goes_on_with_the_same_decisions(path: Path, sample: bool) -> None:
    policy, history = learned(path, sample=sample), History(9, 3)
    play(policy, history, 90)
    view, again = history.view(), learned(path, sample=sample)
    view.draft_kv_lag[:] = 300
    outcome = history.step(policy.decide(view))
    again.load({k: v.copy() for k, v in policy.state().items()})
    policy.observe(outcome)
    again.observe(outcome)
    for key, value in policy.state().items():
        np.testing.assert_array_equal(value, again.state()[key], err_msg=key)
    changed = 0
    for _ in range(60):
        ours, theirs = (p.decide(history.view()) for p in (policy, again))
        np.testing.assert_array_equal(ours.proposer, theirs.proposer)
        np.testing.assert_array_equal(ours.k, theirs.k)
        np.testing.assert_array_equal(ours.propensity, theirs.propensity)
        changed += len(set(zip(ours.proposer.tolist(), ours.k.tolist(), strict=True))) > 1
        outcome = history.step(ours)
        policy.observe(outcome)
        again.observe(outcome)
    assert changed
    for key in policy.state():
        lacking = {k: v for k, v in policy.state().items() if k != key}
        with pytest.raises(ValueError, match="lack"):
            learned(path).load(lacking)


def rows_of(n: int, match: int = 5) -> Rows:
    return Rows(
        row=np.arange(n),
        batch=np.zeros(n, np.intp),
        task=np.zeros(n, np.intp),
        match_tokens=np.full(n, match),
        output_tokens=np.full(n, 50),
        recent_accept=np.full(n, 2.0),
        draft_kv_lag=np.ones(n),
        temperature=np.zeros(n),
        tpot_target_ms=np.full(n, np.nan),
    )


def prices(unit_ms: float) -> Prices:
    one = np.ones(1)
    return Prices(
        decoding=4.0 * one,
        kv_tokens=4000.0 * one,
        verify_ms=unit_ms * (1.0 + 0.1 * np.array(WIDTHS))[:, None],
        pass_ms=0.2 * unit_ms * one,
        medusa_ms=0.05 * unit_ms * one,
        ngram_ms=0.01 * unit_ms * one,
        catch_up_ms=0.001 * unit_ms * one,
        prefill_share=0.0 * one,
        slack=0.0 * one,
    )


def taught(chance: dict[int, float], requests: int, seed: int) -> Tracker:
    """Return a tracker that saw 100 steps of drafts of 4 tokens."""
    n, rng = requests, np.random.default_rng(seed)
    tracker, zero = Tracker(1, n, 1), np.zeros(n, np.intp)
    for _ in range(100):
        who = rng.choice(list(chance), n)
        holds = rng.random((n, DEPTH)) < np.array([chance[p] for p in who])[:, None]
        accepted = np.minimum(np.cumprod(holds, axis=1).sum(axis=1), 4)
        shown = Shown(
            np.arange(n), zero, zero, who, np.full(n, 5), accepted, np.full(n, 4), zero + 50
        )
        tracker.learn(np.arange(n), shown)
    return tracker


def test_the_hazards_of_each_proposer_are_found() -> None:
    chance = {NGRAM: 0.9, DRAFT_MODEL: 0.6, MEDUSA: 0.4}
    trackers = [taught(chance, 96, seed) for seed in range(6)]
    seen = np.mean([t.columns(rows_of(96), prices(1.0)) for t in trackers], axis=(0, 1))
    for name, p in (("ngram", 0.9), ("draft", 0.6), ("medusa", 0.4)):
        expected = sum(p**j for j in (1, 2, 3))
        assert seen[FEATURES.index(f"accepts_{name}:3")] == pytest.approx(expected, rel=0.05)
    unmatched = trackers[0].columns(rows_of(96, match=0), prices(1.0))
    assert (unmatched[:, FEATURES.index("accepts_ngram:1")] == 0.0).all()


@given(st.floats(1e-3, 1e3))
def test_a_machine_twice_as_fast_looks_the_same(unit_ms: float) -> None:
    seen: list[Array] = []
    for ms in (1.0, unit_ms):
        tracker = Tracker(1, 4, 1)
        for _ in range(5):
            one = np.ones(1)
            tracker.ran(9.0 * one, 2.0 * ms * one, 4.0 * one, np.array([[0.5, 0.2, 0.3, 0.4]]))
        seen.append(tracker.columns(rows_of(4), prices(ms)))
    np.testing.assert_allclose(seen[0], seen[1], rtol=1e-4, atol=1e-6)


def test_an_id_that_comes_back_with_less_output_is_new() -> None:
    watched = Watched()
    ids, known = np.array([7], np.uint64), np.array([40])
    row, fresh = watched.requests.rows_of(ids, known)
    assert len(fresh) == 1
    watched.requests.output[row] += 3
    assert len(watched.requests.rows_of(ids, known + 3)[1]) == 0
    assert len(watched.requests.rows_of(ids, np.array([0]))[1]) == 1
    for step in range(600):
        watched.requests.rows_of(np.array([8], np.uint64), np.array([step]))
    assert watched.requests.known(ids).tolist() == [-1]
