"""Whatever becomes of the sidecar in mid-run, output stays the same and no step waits for it.

Every fault is a real one: of a process, a socket, a line, a clock, a disk. Each test asserts, by
`steered`, that greedy float32 and coupled outputs are those without speculation, and that no step's
planning cost the engine's thread more than 2 ms; and that the sidecar steers again within 2 s of
the fault's end.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.faulty_line import FaultyLine, flipping, garbage
from tests.load import RECOVERED_S, Steered, steered
from tests.sidecars import FIXED, WAIT_S, Sidecar, count, running

from parlay.engine.planner import LocalPlanner
from parlay.engine.remote import EngineInfo, RemotePlanner
from parlay.engine.remote_call import SILENCE_S
from parlay.policies.decision_log import log_files
from parlay.policies.policy import make_policy

DAY_S = 86_400


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    with running("127.0.0.1:0", *FIXED) as found:
        yield found


@pytest.fixture
def line(sidecar: Sidecar) -> Iterator[FaultyLine]:
    with contextlib.closing(FaultyLine(int(sidecar.target.rpartition(":")[2]))) as found:
        yield found


def long(*values: object) -> list[object]:
    """Return the first value for every run of the tests, the others for the slow ones."""
    first, *others = values
    return [first, *(pytest.param(value, marks=pytest.mark.slow) for value in others)]


# --- The process and its socket ------------------------------------------------------------------


@pytest.mark.parametrize("times", long(1, 5))
def test_killed_and_started_again(folder: Path, times: int) -> None:
    with (
        running(f"unix:{folder}/s.sock", *FIXED) as sidecar,
        steered(sidecar.target) as load,
    ):
        for number in range(times):
            sidecar.kill()
            load.until_alone()
            # Long enough for the pauses between two attempts to have grown, but at first.
            load.run(1.5 * (number > 0))
            sidecar.start()
            load.recovers()
        assert load.planner.stats.reconnects == times


@pytest.mark.parametrize("seconds", long(0.4, 5.0))
def test_frozen(folder: Path, seconds: float) -> None:
    with (
        running(f"unix:{folder}/s.sock", *FIXED) as sidecar,
        steered(sidecar.target) as load,
    ):
        for _ in range(2):
            sidecar.freeze()
            load.until_alone()
            load.run(seconds)
            sidecar.thaw()
            load.recovers()
        assert (load.planner.stats.endings["silent"] > 0) == (seconds > 2 * SILENCE_S)


def test_its_socket_deleted_and_made_anew(folder: Path) -> None:
    with (
        running(f"unix:{folder}/s.sock", *FIXED) as sidecar,
        steered(sidecar.target) as load,
    ):
        (folder / "s.sock").unlink()
        # The stream that is open goes on without it.
        remote, _ = load.run(0.3)
        assert remote > 0
        assert load.planner.stats.endings.total() == 0
        sidecar.send(signal.SIGTERM)
        load.until(lambda: sidecar.process.poll() is not None)
        sidecar.stop()
        load.until_alone()
        sidecar.start()
        assert (folder / "s.sock").exists()
        load.recovers()


# --- The line ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", long(0.8, 5.0))
def test_a_slow_network(line: FaultyLine, seconds: float) -> None:
    with steered(f"127.0.0.1:{line.port}") as load:
        line.delay_s = 0.2
        load.until_alone()
        load.run(seconds)
        # A plan that is 400 ms old is of another batch.
        remote, _ = load.run(0.2)
        assert remote == 0
        line.delay_s = 0.0
        load.recovers()


@pytest.mark.parametrize("seconds", long(0.0, 5.0))
def test_a_network_that_was_slow_from_the_start(line: FaultyLine, seconds: float) -> None:
    line.delay_s = 0.2
    load = Steered(f"127.0.0.1:{line.port}")
    with contextlib.closing(load.planner), load.meter.watching():
        load.until(lambda: load.planner.connected)
        # On a busy machine a first try may end; were the network too slow for one, all would.
        ended = load.planner.stats.endings.total()
        load.run(seconds)
        assert load.planner.connected
        assert load.planner.stats.endings.total() == ended
        line.delay_s = 0.0
        load.recovers()
        load.check()


@pytest.mark.parametrize("kind", ["flipped", "garbage"])
@pytest.mark.parametrize("seconds", long(0.6, 5.0))
def test_frames_that_come_damaged(line: FaultyLine, kind: str, seconds: float) -> None:
    damages: dict[str, Callable[[int], Callable[[bytes], bytes]]] = {
        "flipped": lambda seed: flipping(seed, 0.2),
        "garbage": garbage,
    }
    with steered(f"127.0.0.1:{line.port}") as load:
        for seed in range(1 if seconds < 1.0 else 4):
            line.damage = damages[kind](seed)
            load.until(lambda: load.planner.stats.endings.total() > 0)
            load.run(seconds)
            line.damage = None
            load.recovers()


def test_metadata_that_is_no_text_is_said_without_it(sidecar: Sidecar, line: FaultyLine) -> None:
    line.damage = lambda data: data.replace(b"Bearer s3cret", b"Bearer s3c\xbeet")
    with grpc.insecure_channel(f"127.0.0.1:{line.port}") as channel:
        decide: Any = channel.unary_unary("/parlay.v1.PolicyService/Decide")
        for _ in range(20):
            with pytest.raises(grpc.RpcError) as caught:
                decide(b"", metadata=(("authorization", "Bearer s3cret"),), timeout=10.0)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    deadline_s = time.monotonic() + WAIT_S
    while not any("metadata of a call is no text" in line for line in sidecar.errors):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert not any("s3c" in line or "Traceback" in line for line in sidecar.errors)


@pytest.mark.parametrize("times", long(5, 300))
def test_a_line_that_is_cut_again_and_again(line: FaultyLine, times: int) -> None:
    with steered(f"127.0.0.1:{line.port}") as load:
        stats = load.planner.stats
        held = (0, 0)
        for number in range(1, times + 1):
            line.cut()
            load.until(lambda number=number: stats.reconnects == number, RECOVERED_S)  # type: ignore[misc]
            load.recovers()
            if number == min(times, 50) // 2:
                held = (count(os.getpid(), "fd"), count(os.getpid(), "task"))
        assert count(os.getpid(), "fd") <= held[0] + 4
        assert count(os.getpid(), "task") <= held[1] + 4


# --- Its clock -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clock_jump() -> Iterator[Path]:
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler to make another clock with")
    with tempfile.TemporaryDirectory(prefix="parlay-") as name:
        library, source = Path(name, "clock.so"), Path(__file__).parents[1] / "clock_jump.c"
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        yield library


@pytest.mark.slow
def test_a_wall_clock_that_jumps(
    folder: Path, clock_jump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset, real = folder / "offset", time.time
    offset.write_bytes(struct.pack("q", 0))

    def jump(seconds: int) -> None:
        with offset.open("r+b") as file:
            file.write(struct.pack("q", seconds))
        monkeypatch.setattr(time, "time", lambda: real() + seconds)

    environ = {"LD_PRELOAD": str(clock_jump), "CLOCK_JUMP": str(offset)}
    jump(DAY_S)
    now = subprocess.run(["date", "+%s"], env=os.environ | environ, capture_output=True, check=True)
    assert int(now.stdout) > real() + DAY_S - 60
    jump(0)
    options = ("--state", f"file:{folder}/state", "--log", f"{folder}/log")
    with (
        running(f"unix:{folder}/s.sock", *FIXED, *options, environ=environ) as sidecar,
        steered(sidecar.target) as load,
    ):
        for seconds in (DAY_S, -DAY_S, 3600, 0):
            jump(seconds)
            load.run(0.5)
            remote, local = load.run(1.0)
            assert remote > 4 * local
        assert load.planner.stats.reconnects == 0
        assert load.planner.stats.endings.total() == 0


# --- Its disk ------------------------------------------------------------------------------------


def _limited(sidecar: Sidecar, folder: Path, full: bool) -> None:
    """Let no file of the process grow beyond some bytes: its writes fail in the kernel."""
    _, hard = resource.prlimit(sidecar.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(sidecar.pid, resource.RLIMIT_FSIZE, (512 if full else hard, hard))


def _filled(sidecar: Sidecar, folder: Path, full: bool) -> None:
    """Fill the file system that the folder is on."""
    filler = folder / "filler"
    filler.unlink(missing_ok=True)
    if full:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """Mount a file system of a megabyte on the folder."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("full", [_limited, _filled])
def test_a_disk_that_is_full_for_the_log(
    folder: Path, full: Callable[[Sidecar, Path, bool], None]
) -> None:
    log = folder / "log"
    with (
        _small_disk(log) if full is _filled else contextlib.nullcontext(),
        running(f"unix:{folder}/s.sock", *FIXED, "--log", str(log)) as sidecar,
        steered(sidecar.target) as load,
    ):
        full(sidecar, log, True)
        # What is held is written when nothing has come for two seconds.
        time.sleep(2.5)
        load.until(lambda: any("cannot be written" in line for line in sidecar.errors))
        remote, local = load.run(1.0)
        assert remote > 4 * local
        files = set(log_files(log))
        full(sidecar, log, False)
        load.until(lambda: bool(set(log_files(log)) - files), RECOVERED_S)
        assert load.planner.stats.endings.total() == 0


# --- Many who come and go ------------------------------------------------------------------------


def _visit(target: str, number: int) -> None:
    """Come and go in one of many ways: politely, or not, or not as a client of this protocol."""
    host, _, port = target.rpartition(":")
    with socket.create_connection((host, int(port)), 5.0) as visitor:
        if number % 3 == 1:
            visitor.sendall(
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
            )
        elif number % 3 == 2:
            visitor.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(64))
        if number % 2:
            # Ends it by a reset, with whatever was under way.
            visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("times", long(60, 1000))
def test_a_thousand_connects_and_disconnects(sidecar: Sidecar, times: int) -> None:
    with steered(sidecar.target) as load:
        nobody = LocalPlanner(make_policy("none"))
        held: tuple[int, int, float] = (0, 0, 0.0)
        for number in itertools.count():
            _visit(sidecar.target, number)
            guest = RemotePlanner(sidecar.target, EngineInfo(f"guest-{number % 8}"), nobody)
            if number % 4:
                load.until(lambda guest=guest: guest.connected)  # type: ignore[misc]
            guest.close()
            load.step()
            if number == times // 3:
                held = (count(sidecar.pid, "fd"), count(sidecar.pid, "task"), sidecar.resident_mb())
            if number == times:
                break
        load.recovers()
        load.until(lambda: count(sidecar.pid, "fd") <= held[0] + 4)
        assert count(sidecar.pid, "task") <= held[1] + 4
        assert sidecar.resident_mb() < held[2] + 12.0
