"""Sessions of the sidecar: whom it remembers, what it ignores, whom it refuses."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlay.controller import host as host_module
from parlay.controller import listener
from parlay.controller.config_kinds import parse_settings
from parlay.controller.host import Full, Host, Session, Superseded, UnknownEngine, UnknownVersion
from parlay.controller.listener import claim, socket_path
from parlay.policies.policy import EngineLimits
from parlay.policies.synthetic import LIMITS, History
from parlay.protos.codec import Hello, StepReport


def greet(host: Host, engine_id: str = "e", **fields: Any) -> tuple[Session, int]:
    stream = host.new_stream()
    session, _ = host.hello(Hello(engine_id, LIMITS, **fields), stream)
    return session, stream


def test_a_repeated_or_late_outcome_is_counted_and_not_learned_from() -> None:
    host, history = Host("goodput"), History(4)
    session, stream = greet(host)
    outcomes = []
    for _ in range(3):
        plan = host.report(session, stream, StepReport(None, history.view()))
        assert plan is not None
        assert plan.step_id == history.step_id
        outcomes.append(history.step(plan))
    host.observe(session, outcomes[0])
    host.observe(session, outcomes[2])
    before = {name: array.copy() for name, array in session.policy.state().items()}
    for stale in (outcomes[2], outcomes[0], outcomes[1]):
        assert not host.observe(session, stale)
    assert session.counts.ignored_outcomes == 3
    assert session.counts.outcomes == 2
    after = session.policy.state()
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name])


def test_a_view_is_decided_once() -> None:
    host, view = Host("none"), History(4).view()
    session, stream = greet(host)
    assert host.report(session, stream, StepReport(None, view)) is not None
    assert host.report(session, stream, StepReport(None, view)) is None
    assert session.counts.ignored_views == 1


def test_what_was_learned_outlives_the_stream() -> None:
    host, history = Host("goodput"), History(4)
    session, stream = greet(host)
    host.observe(session, history.step(None))
    host.leave(session, stream)
    again, welcome = host.hello(Hello("e", LIMITS), host.new_stream())
    assert again is session
    assert welcome.resumed
    assert welcome.last_step_id == 0
    assert welcome.policy == "goodput"


def test_a_new_run_starts_step_ids_over_and_keeps_what_was_learned() -> None:
    host, history = Host("goodput"), History(4)
    session, _ = greet(host, run_id=1)
    first = history.step(None)
    assert host.observe(session, first)
    again, welcome = host.hello(Hello("e", LIMITS, run_id=2), host.new_stream())
    assert again is session
    assert welcome.last_step_id is None
    assert host.observe(session, first)


def test_other_limits_get_another_policy_and_end_the_older_stream() -> None:
    host = Host("none")
    session, stream = greet(host)
    other, welcome = host.hello(Hello("e", EngineLimits(k_max=2)), host.new_stream())
    assert other is not session
    assert not welcome.resumed
    with pytest.raises(Superseded):
        host.report(session, stream, StepReport(None, None))


def test_the_newest_stream_of_an_engine_wins() -> None:
    host = Host("none")
    session, old = greet(host)
    _, new = greet(host)
    with pytest.raises(Superseded):
        host.report(session, old, StepReport(None, None))
    host.leave(session, old)
    host.report(session, new, StepReport(None, None))


def test_another_protocol_version_is_refused_by_name() -> None:
    with pytest.raises(UnknownVersion, match=r"version 2 is not spoken here, only 1"):
        Host("none").hello(Hello("e", protocol_version=2))


def test_an_engine_that_did_not_say_hello_is_unknown() -> None:
    with pytest.raises(UnknownEngine, match="'ghost'"):
        Host("none").session("ghost")


def test_the_engine_that_left_longest_ago_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "MAX_SESSIONS", 2)
    host = Host("none")
    first, stream = greet(host, "a")
    greet(host, "b")
    with pytest.raises(Full):
        greet(host, "c")
    host.leave(first, stream)
    greet(host, "c")
    assert set(host.sessions) == {"b", "c"}


def test_an_unknown_policy_or_setting_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="unknown policy 'best'"):
        Host("best")
    with pytest.raises(ValueError, match="no setting 'speed'"):
        Host("goodput", {"speed": "11"})


def test_settings_are_pairs() -> None:
    assert parse_settings(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    for wrong in ("a", "=1"):
        with pytest.raises(ValueError, match="write it as key=value"):
            parse_settings([wrong])


@pytest.mark.parametrize(
    "listen", ["", "50051", "host:", ":50051", "host:port", "host:70000", "unix", "host:²"]
)
def test_an_address_must_be_one(listen: str) -> None:
    with pytest.raises(ValueError, match=r"unix:/path or host:port"):
        claim(listen)


def test_a_path_has_one_owner_who_removes_only_its_own_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDOVER_S", 0.1)
    path = tmp_path / "s"
    first = claim(f"unix:{path}")
    with pytest.raises(OSError, match="another process does"):
        claim(f"unix:{path}")
    with socket.socket(socket.AF_UNIX) as ours, socket.socket(socket.AF_UNIX) as theirs:
        ours.bind(str(path))
        first.bound()
        path.rename(tmp_path / "aside")
        theirs.bind(str(path))
        first.release()
        assert path.is_socket()
        second = claim(f"unix:{path}")
        assert not path.exists()
        (tmp_path / "aside").rename(path)
        second.bound()
        first.release()
        assert path.is_socket()
        second.release()
    assert list(tmp_path.iterdir()) == []


def test_paths_of_unix_addresses() -> None:
    assert str(socket_path("unix:/a/b.sock")) == "/a/b.sock"
    assert str(socket_path("unix:///a/b.sock")) == "/a/b.sock"
    assert str(socket_path("unix:b.sock")) == "b.sock"
    assert socket_path("localhost:1") is None
