"""Stores without a server: bytes of a slot, addresses, memory, and the file that is whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from parlay.controller import snapshot
from parlay.controller.redis_url import parse
from parlay.controller.slot import SCHEMA, Damaged, decode, encode
from parlay.controller.snapshot import MemoryStore, open_file
from parlay.controller.store import SLOT_TTL_S, Scope, StoreError, open_store
from parlay.policies.types import Array

SCOPE = Scope("tenant", "model", 7, "goodput", 8)
KINDS = st.sampled_from(["f8", "f4", "i8", "i2", "u8", "u4", "u1", "?", ">f8", ">u4"])
ARRAYS = st.dictionaries(
    st.text(max_size=8),
    KINDS.flatmap(lambda kind: hnp.arrays(kind, hnp.array_shapes(min_dims=0, min_side=0))),
    max_size=4,
)

# --- Bytes ---------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(ARRAYS)
def test_a_slot_goes_round(arrays: dict[str, Array]) -> None:
    found = decode(encode(arrays))
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype.newbyteorder("<")


@settings(max_examples=40)
@given(ARRAYS, st.integers(0, 10_000), st.integers(1, 255))
def test_any_changed_byte_is_found(arrays: dict[str, Array], place: int, change: int) -> None:
    data = bytearray(encode(arrays))
    place %= len(data)
    if place in (6, 7):
        return
    data[place] ^= change
    with pytest.raises(Damaged):
        decode(bytes(data))


@given(st.binary(max_size=64))
def test_rubbish_is_damaged_and_nothing_else(data: bytes) -> None:
    for text in (data, encode({})[:12] + data):
        with pytest.raises(Damaged):
            decode(text)


def test_a_slot_that_is_cut_or_of_another_version_is_refused() -> None:
    data = encode({"a": np.arange(5.0)})
    for end in range(len(data)):
        with pytest.raises(Damaged):
            decode(data[:end])
    with pytest.raises(Damaged, match=f"schema {SCHEMA + 1}, not {SCHEMA}"):
        decode(data[:4] + bytes([SCHEMA + 1]) + data[5:])


def test_objects_are_not_stored() -> None:
    with pytest.raises(ValueError, match="cannot be stored"):
        encode({"a": np.array([{}], object)})


# --- Addresses -----------------------------------------------------------------------------------


def test_addresses_of_every_kind() -> None:
    one = parse("redis://me:p%40ss@host:7000/3?timeout_ms=50")
    assert (one.kind, one.hosts, one.database, one.tls) == ("one", (("host", 7000),), 3, False)
    assert (one.user, one.password, one.timeout_s) == ("me", "p@ss", 0.05)
    assert parse("rediss://[::1]").hosts == (("::1", 6379),)
    assert parse("rediss://host").tls
    watched = parse("redis+sentinel://:pw@a,b:1/shared/2?sentinel_password=x")
    assert watched.hosts == (("a", 26379), ("b", 1))
    assert (watched.service, watched.database) == ("shared", 2)
    assert (watched.password, watched.sentinel_password) == ("pw", "x")
    many = parse("rediss+cluster://a:1,b:2")
    assert (many.kind, many.tls, many.hosts) == ("cluster", True, (("a", 1), ("b", 2)))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nonsense", "use memory, file:PATH"),
        ("https://host", "use memory, file:PATH"),
        ("file:", "needs a path"),
        ("file:///no/such/folder/state", "cannot write"),
        ("redis://", "use one of"),
        ("redis:host", "use one of"),
        ("redis+other://host", "use one of"),
        ("redis://:secret@host:port", "is no host:port"),
        ("redis://:secret@host:99999", "is no host:port"),
        ("redis://:secret@a,b", "one host only"),
        ("redis://:secret@host/two", "a database is a number"),
        ("redis://:secret@host/1/2", "a database is a number"),
        ("redis+sentinel://:secret@host", "name the service"),
        ("redis+cluster://:secret@host/1", "database 0 only"),
        ("redis://:secret@host?colour=red", "no option 'colour'"),
        ("redis://:secret@host?timeout_ms=soon", "timeout_ms must be 5 to 5000"),
        ("redis://:secret@host?timeout_ms=0", "timeout_ms must be 5 to 5000"),
        ("redis://:secret@host?ca=/x", "ca needs TLS"),
        ("rediss://:secret@host?ca=/no/such/file", "is no file"),
    ],
)
def test_a_wrong_address_is_told_in_one_line(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"--state|cannot write") as told:
        open_store(url)
    assert says in str(told.value)
    assert "\n" not in str(told.value)
    assert "secret" not in str(told.value)


def test_a_scope_cannot_break_out_of_its_key() -> None:
    keys = {
        Scope(tenant, model, 7, "pilot", 8).key
        for tenant, model in [("a/b", "c"), ("a", "b/c"), ("a}:x{", "c"), ("", "c"), ("ä b", "c")]
    }
    assert len(keys) == 5
    assert not any(set(key) & set("{}: *\n") for key in keys)


# --- Memory and the file -------------------------------------------------------------------------


def test_memory_gives_every_slot_and_forgets_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    other = Scope("tenant", "other", 7, "goodput", 8)
    store.exchange({(SCOPE, "a"): b"1", (other, "x"): b"9"})
    found = store.exchange({(SCOPE, "b"): b"2"})
    assert list(found) == [SCOPE]
    assert {writer: held.data for writer, held in found[SCOPE].items()} == {"a": b"1", "b": b"2"}
    now_s = time.monotonic() + SLOT_TTL_S + 1.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    assert list(store.exchange({(SCOPE, "b"): b"2"})[SCOPE]) == ["b"]


def test_an_engine_finds_its_own_state_first(tmp_path: Path) -> None:
    store = open_store(f"file:{tmp_path / 'state'}")
    assert store.saved(SCOPE, "a") is None
    store.save(SCOPE, "a", b"of a")
    store.save(SCOPE, "b", b"of b")
    store.close()
    again = open_store(f"file:{tmp_path / 'state'}")
    for engine, data, own in (("a", b"of a", True), ("b", b"of b", True), ("c", b"of b", False)):
        found = again.saved(SCOPE, engine)
        assert found is not None
        assert (found[0].data, found[1]) == (data, own)
        assert 0.0 <= found[0].age_s < 60.0
    assert again.saved(Scope("t", "m", 1, "p", 2), "a") is None
    again.close()
    assert not list(tmp_path.glob("*.part"))


def test_a_file_has_one_writer(tmp_path: Path) -> None:
    store = open_file(tmp_path / "state")
    with pytest.raises(ValueError, match="another sidecar writes it"):
        open_file(tmp_path / "state")
    store.close()
    open_file(tmp_path / "state").close()


def test_what_cannot_be_written_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    store = open_file(path)
    store.save(SCOPE, "a", b"first")
    before = path.read_bytes()

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    monkeypatch.setattr(snapshot, "WRITE_EVERY_S", 0.0)
    with pytest.raises(StoreError, match="No space left"):
        store.save(SCOPE, "a", b"second")
    assert path.read_bytes() == before
    monkeypatch.undo()
    store.close()
    found = (again := open_file(path)).saved(SCOPE, "a")
    again.close()
    assert found is not None
    assert found[0].data == b"second"


@pytest.mark.parametrize("content", [b"", b"rubbish" * 9, encode({"a": np.zeros(3)})])
def test_a_damaged_file_is_put_aside(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state"
    path.write_bytes(content)
    store = open_file(path)
    assert store.saved(SCOPE, "a") is None
    store.close()
    assert (tmp_path / "state.damaged").read_bytes() == content
    assert "is not used" in caplog.text


def test_a_file_that_would_be_too_large_keeps_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MOST_BYTES", 5000)
    store = open_file(tmp_path / "state")
    for engine in "abcd":
        store.save(SCOPE, engine, engine.encode() * 1000)
    store.close()
    again = open_file(tmp_path / "state")
    found = [again.saved(SCOPE, engine) for engine in "abcd"]
    again.close()
    assert [held[0].data[:1] for held in found if held] == [b"d", b"d", b"c", b"d"]


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    code = (
        "import sys, pathlib\n"
        "from parlay.controller import snapshot\n"
        "from parlay.controller.store import Scope\n"
        "snapshot.WRITE_EVERY_S = 0.0\n"
        "store = snapshot.open_file(pathlib.Path(sys.argv[1]))\n"
        "for n in range(10**9):\n"
        "    store.save(Scope('t', 'm', 7, 'p', 8), 'e', bytes([n % 256]) * 300_000)\n"
        "    print(n, flush=True)\n"
    )
    for wait_s in (0.0, 0.013, 0.029):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        time.sleep(wait_s)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        store = open_file(path)
        found = store.saved(Scope("t", "m", 7, "p", 8), "e")
        store.close()
        assert found is not None
        assert len(set(found[0].data)) == 1
        assert len(found[0].data) == 300_000
