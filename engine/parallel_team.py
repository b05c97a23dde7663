"""The processes that run models together with this one, which is rank 0: started, told, ended."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.engine.parallel_orders import OPTIONS, READY, Join, Order

if TYPE_CHECKING:
    from parlay.engine.parallel_group import Group

DEADLINE_S = 60.0
"""How long one rank waits for another in the middle of a pass before it gives up."""
START_S = 300.0
"""How long a rank may take to start, and to lay out its part of a model."""
END_S = 5.0
"""How long a rank may take to end before it is killed."""


class RankLost(ConnectionError):
    """A rank is gone or does not answer, and the engine cannot go on without it."""


class Team:
    """Rank 0's side: starts the others, tells them what to do, and ends them.

    degrees: how many ranks run the target and the draft, the first so many; loaded: the roles whose
    model is there. One thing is done at a time, whatever thread asks for it. Raises ValueError for
    a degree below 1; `RankLost`, from whatever is done together, in one line that says who is lost
    and why.
    """

    def __init__(self, target: int, draft: int = 1, deadline_s: float = DEADLINE_S) -> None:
        self.degrees, self.deadline_s = (target, draft), deadline_s
        for option, degree in zip(OPTIONS, self.degrees, strict=True):
            if degree < 1:
                raise ValueError(f"{option} must be at least 1, not {degree}")
        self.world, self.loaded = max(self.degrees), set[int]()
        self._folder = tempfile.TemporaryDirectory(prefix="parlay-ranks-")
        self._lock, self._groups, self._lost = threading.RLock(), list["Group"](), ""
        self._ranks = [_Rank(rank) for rank in range(1, self.world)]

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """Return the processes of the ranks behind 0."""
        return [rank.process for rank in self._ranks]

    def join(self) -> None:
        """Wait until everybody is there; nothing the second time. Raises ValueError, RankLost."""
        from parlay.engine import parallel_group as groups

        if self._groups:
            return
        if groups.is_joined():
            raise ValueError("one engine of several ranks a process: torch.distributed is in use")
        import torch

        where = str(Path(self._folder.name) / "store")
        threads = torch.get_num_threads()
        order = Join(groups.backend(), where, self.world, self.degrees, self.deadline_s, threads)
        with self._blame(self._ranks):
            self._ready(self._ranks)
            for rank in self._ranks:
                rank.orders.send(order)
            self._groups = groups.join(order, 0)
            self._ready(self._ranks)

    @contextmanager
    def together(self, role: int, *orders: Order, answer_s: float | None = None) -> Iterator[Group]:
        """Give a role's ranks an order, or each its own; yield their group, to do rank 0's part in.

        answer_s: wait so long until each of them says that it is done; None: do not.
        """
        ranks = self._ranks[: self.degrees[role] - 1]
        each = orders * len(ranks) if len(orders) == 1 else orders
        with self._lock, self._blame(ranks):
            for rank, order in zip(ranks, each, strict=True):
                rank.orders.send(order)
            yield self._groups[role]
            if answer_s is not None:
                self._ready(ranks, answer_s)

    def close(self) -> None:
        """End every rank; one that does not is killed."""
        for rank in self._ranks:
            if self._lost or not self._groups:
                rank.process.kill()  # it may be stuck, or still be starting
            with suppress(OSError):
                rank.orders.send(None)
        if self._groups:
            from parlay.engine.parallel_group import leave

            leave()
            self._groups = []
        end_s = time.monotonic() + END_S
        for rank in self._ranks:
            rank.end(max(end_s - time.monotonic(), 0.0))
        self._ranks = []
        self._folder.cleanup()

    def _ready(self, ranks: list[_Rank], wait_s: float = START_S) -> None:
        """Wait until each says that it is; raises RankLost."""
        for rank in ranks:
            said = rank.said(wait_s)
            if said != READY:
                raise RankLost(said or f"rank {rank.rank} did not answer within {wait_s:g} s")

    @contextmanager
    def _blame(self, ranks: list[_Rank]) -> Iterator[None]:
        """Turn what fails because of another rank into RankLost; nothing goes on after a fault."""
        if self._lost:
            raise RankLost(self._lost)
        try:
            yield
        except BaseException as error:
            found = str(error) if isinstance(error, RankLost) else self._found(error, ranks)
            self._lost = found or f"rank 0 failed: {type(error).__name__}"
            if found:
                raise RankLost(found) from error
            raise

    def _found(self, error: BaseException, ranks: list[_Rank]) -> str:
        """Say which rank is to blame for an error here, and why; empty: none is."""
        if not isinstance(error, RuntimeError | OSError):
            return ""
        for wait_s in (0.0, 1.0):  # its end may show a little later than its silence
            for rank in ranks:
                if (said := rank.said(wait_s)) not in ("", READY):
                    return said
        late = f"a rank did not answer within {self.deadline_s:g} s"
        return late if "imed out" in str(error) else ""


class _Rank:
    """A follower's process and the pipe to it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.orders, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "parlay.engine.parallel_rank",
                    str(theirs.fileno()),
                    str(rank),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # a terminal's Ctrl-C is for rank 0
            )

    def said(self, wait_s: float) -> str:
        """Return READY, or why the rank is gone; empty: nothing within so many seconds."""
        try:
            if not self.orders.poll(wait_s):
                return ""
            said = str(self.orders.recv())
        except (EOFError, OSError):
            return f"rank {self.rank} ended ({self._code()})"
        return said if said == READY else f"rank {self.rank} failed: {said}"

    def end(self, wait_s: float) -> None:
        """Wait so long for the end of the process, then make it."""
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.orders.close()

    def _code(self) -> str:
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "no exit code"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


@contextmanager
def open_team(target: int, draft: int = 1, deadline_s: float = DEADLINE_S) -> Iterator[Team | None]:
    """Start the ranks that target and draft need besides this process; None: they need none."""
    if target == draft == 1:
        yield None
        return
    with closing(Team(target, draft, deadline_s)) as team:
        yield team
