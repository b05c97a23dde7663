import numpy as np
import pytest

from parlay.policies.types import DRAFT_MODEL, MEDUSA, NGRAM
from parlay.sim.latent import COLD_TOKENS, Latents, TaskLaw

LAW = TaskLaw(
    match_rate=0.4,
    accept={NGRAM: (0.5, 0.8), DRAFT_MODEL: (0.6, 0.7, 0.8), MEDUSA: (0.7, 0.3)},
    shift_sd=0.6,
    phase_shift=0.5,
)
EVEN = TaskLaw(1.0, {NGRAM: (0.5,), DRAFT_MODEL: (0.6,), MEDUSA: (0.7, 0.3)}, 0.0, 0.0)


def admitted(law: TaskLaw, requests: int, tokens: int, seed: int = 1) -> tuple[Latents, np.ndarray]:
    latents = Latents([law], depth=6, seed=seed)
    return latents, np.array([latents.admit(i, 0, tokens) for i in range(requests)])


def test_a_requests_luck_depends_on_its_number_alone() -> None:
    one, rows = admitted(LAW, 20, 50)
    other = Latents([LAW], depth=6, seed=1)
    row = other.admit(13, 0, 50)
    at = np.arange(50)
    for proposer in (NGRAM, DRAFT_MODEL, MEDUSA):
        here = one.held(np.repeat(rows[13], 50), at, proposer)
        assert (here == other.held(np.repeat(row, 50), at, proposer)).all()
    assert (one.match[rows[13], :50] == other.match[row, :50]).all()
    elsewhere = Latents([LAW], depth=6, seed=2)
    assert (elsewhere.shift[elsewhere.admit(13, 0, 50), :50] != other.shift[row, :50]).any()


@pytest.mark.parametrize("proposer", [NGRAM, DRAFT_MODEL, MEDUSA])
def test_drafts_hold_as_often_as_the_law_says(proposer: int) -> None:
    latents, rows = admitted(EVEN, 40, 500)
    held = np.concatenate(
        [latents.held(rows, np.full(len(rows), at), proposer) for at in range(COLD_TOKENS, 500)]
    )
    chance = latents.chance(rows[:1], np.array([COLD_TOKENS]), proposer)[0]
    for j, survival in enumerate(np.cumprod(chance)[:3]):
        assert abs((held > j).mean() - survival) < 0.02


def test_the_first_outputs_accept_at_half_their_rate() -> None:
    latents, rows = admitted(EVEN, 3000, 10)
    first = latents.held(rows, np.zeros(len(rows), np.intp), DRAFT_MODEL)
    assert abs((first > 0).mean() - 0.3) < 0.03


def test_proposers_agree_more_often_than_chance() -> None:
    latents, rows = admitted(EVEN, 60, 400)
    right = [
        np.concatenate([latents.held(rows, np.full(60, at), p) > 0 for at in range(5, 400)])
        for p in (NGRAM, DRAFT_MODEL)
    ]
    both = (right[0] & right[1]).mean()
    # Two normals of correlation .4, one above 0 and one above its 40% point: .367 against .3.
    assert 0.34 < both < 0.40


def test_phases_last_sixty_tokens_and_shift_both_ways() -> None:
    latents, rows = admitted(LAW, 200, 600)
    shift = latents.shift[rows, :600]
    turns = (np.diff(shift, axis=1) != 0).mean()
    assert abs(turns - 1 / 60) < 0.003
    assert abs(np.ptp(shift, axis=1).max() - 2 * LAW.phase_shift) < 1e-9
    assert abs(shift.mean(axis=1).std() - LAW.shift_sd) < 0.15


def test_confidence_and_match_length_tell_of_the_acceptance() -> None:
    latents, rows = admitted(LAW, 300, 100)
    at = np.full(len(rows), 50)
    true = latents.chance(rows, at, DRAFT_MODEL)[:, 0]
    shown = latents.confidence(rows, at, np.full(len(rows), DRAFT_MODEL))[:, 0]
    assert 0.3 < np.corrcoef(true, shown)[0, 1] < 0.9
    matched = latents.match[rows, :100] > 0
    assert abs(matched.mean() - LAW.match_rate) < 0.02
    odds = latents.shift[rows, :100][matched]
    assert np.corrcoef(odds, np.log(latents.match[rows, :100][matched]))[0, 1] > 0.3


def test_what_may_be_known_of_now_is_the_law_at_this_phase() -> None:
    latents, rows = admitted(LAW, 50, 100)
    at = np.full(50, 20)
    survival = latents.survival_now(rows, at)
    assert (np.diff(survival, axis=2) <= 1e-12).all()
    unmatched = latents.match[rows, 20] == 0
    assert (survival[unmatched, NGRAM] == 0).all()
    first = latents.chance(rows, at, DRAFT_MODEL)[:, 0]
    assert np.allclose(survival[:, DRAFT_MODEL, 0], first)


def test_rows_come_back_and_longer_requests_keep_what_is_there() -> None:
    latents, rows = admitted(LAW, 64, 50)
    before = latents.coin[rows[5], :, :50].copy()
    longer = latents.admit(64, 0, 900)
    assert longer not in rows
    assert (latents.coin[rows[5], :, :50] == before).all()
    latents.release(int(rows[7]))
    assert latents.admit(65, 0, 50) == rows[7]
