"""Snapshots: what is written is what is read, and a replica goes on from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.unit.controller.trials import Running

from parlay.controller.host import Host
from parlay.controller.learned_states import read_snapshot, taken, write_snapshot
from parlay.controller.session import spec_of
from parlay.policies.policy import EngineLimits


def taught() -> Running:
    engine = Running(Host("thompson"))
    engine.run(40)
    return engine


def test_a_replica_decides_as_the_engine_would_have(tmp_path: Path) -> None:
    engine, path = taught(), tmp_path / "s.npz"
    size = write_snapshot(path, taken([engine.session]))
    assert size == path.stat().st_size
    read = read_snapshot(path)
    assert read.engines[0].spec == spec_of("thompson")
    replica = Running(Host("thompson", warm=read), engine.history, "another")
    view = engine.history.view()
    ours, theirs = engine.session.policy.decide(view), replica.session.policy.decide(view)
    np.testing.assert_array_equal(ours.k, theirs.k)
    np.testing.assert_array_equal(ours.propensity, theirs.propensity)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.npz"]


def test_its_own_state_comes_before_that_of_a_better_taught_engine() -> None:
    host = Host("thompson")
    one, two = Running(host, engine_id="one"), Running(host, engine_id="two")
    one.run(5)
    two.run(30)
    snapshot = taken([one.session, two.session])
    for engine_id, of in (("one", one), ("two", two), ("three", two)):
        warm = Running(Host("thompson", warm=snapshot), engine_id=engine_id).session.policy.state()
        for name, array in of.session.policy.state().items():
            np.testing.assert_array_equal(array, warm[name])


def test_another_policy_or_other_limits_start_cold() -> None:
    snapshot, limits = taken([taught().session]), EngineLimits(k_max=3)
    made = spec_of("thompson").make(limits)
    before = {name: array.copy() for name, array in made.state().items()}
    for spec, given in ((spec_of("thompson"), limits), (spec_of("none"), taught().session.limits)):
        assert snapshot.warmed(made, spec, given, "e") is made
    for name, array in made.state().items():
        np.testing.assert_array_equal(array, before[name])


def test_a_state_that_does_not_fit_is_left_out() -> None:
    snapshot = taken([taught().session])
    snapshot.engines[0].state.clear()
    Running(Host("thompson", warm=snapshot)).run(3)


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04 broken"])
def test_what_is_no_snapshot_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "s.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"s\.npz is no snapshot of a controller"):
        read_snapshot(path)
    np.savez(path, other=np.zeros(1))
    with pytest.raises(ValueError, match=r"s\.npz is no snapshot of a controller"):
        read_snapshot(path)


def test_a_snapshot_with_pickles_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    np.savez(path, head=np.array([object()], dtype=object))
    with pytest.raises(ValueError, match="is no snapshot"):
        read_snapshot(path)
