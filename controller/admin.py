"""AdminService over a Host: messages to calls, errors to statuses, every change to the audit trail.

Whoever is let through the listener's door (`access.py`) may change policies; a door that asks
nothing is a unix socket that only its owner can open, or a port of this host alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc

from parlay.controller import admin_messages as m
from parlay.controller.access import CALLER, Context
from parlay.controller.audit import Audit
from parlay.controller.candidate import Stage
from parlay.controller.host import Host
from parlay.controller.learned_states import taken, write_snapshot
from parlay.controller.shadow import Beside, value_of
from parlay.controller.standing import NotNow, UnknownEngine
from parlay.policies.policy import entry_of, every_policy
from parlay.v1 import admin_pb2 as pb

SAYS = "parlay-user"
"""Metadata key under which a client says who it is; its own word, written down as such."""
MOST_GRACE_MS = 600_000
STATUS = {
    UnknownEngine: grpc.StatusCode.NOT_FOUND,
    NotNow: grpc.StatusCode.FAILED_PRECONDITION,
    ValueError: grpc.StatusCode.INVALID_ARGUMENT,
    OSError: grpc.StatusCode.UNAVAILABLE,
}
log = logging.getLogger("parlay.controller")
Done = TypeVar("Done")
Drain = Callable[[float], int]
"""Refuse new streams, cut open ones after so many seconds; returns how many are open."""


class AdminServicer:
    """Serves people; snapshots: the folder they are written to, None refuses them."""

    def __init__(
        self, host: Host, audit: Audit, drain: Drain, snapshots: Path | None = None
    ) -> None:
        self._host, self._audit, self._drain, self._snapshots = host, audit, drain, snapshots
        host.lifecycle.note = self._noted

    async def ListPolicies(
        self, request: pb.ListPoliciesRequest, context: Context
    ) -> pb.ListPoliciesResponse:
        """List the registered policies, with those that are active or on trial."""
        cycle = self._host.lifecycle
        found = [m.active(cycle, cycle.standing.spec)]
        found += [
            m.active(self._host.lifecycle, spec)
            for spec in dict.fromkeys(cycle.standing.own.values())
        ]
        found += [
            m.status(self._host.lifecycle, candidate) for candidate in cycle.candidates.values()
        ]
        used = {status.spec.name for status in found}
        found += [m.idle(self._host.lifecycle, name) for name in every_policy() if name not in used]
        return pb.ListPoliciesResponse(policies=sorted(found, key=lambda s: (s.spec.name, s.stage)))

    async def DescribePolicy(
        self, request: pb.DescribePolicyRequest, context: Context
    ) -> pb.DescribePolicyResponse:
        """Describe one policy; that of a shadow takes up to some seconds, on another thread."""
        cycle, name = self._host.lifecycle, request.name
        try:
            entry = entry_of(name)
        except ValueError as error:
            await _abort(context, error)
        candidate = cycle.candidates.get(name)
        if candidate is not None:
            status = m.status(self._host.lifecycle, candidate)
            if candidate.stage is Stage.SHADOW:
                await _add_value(status.evidence, cycle.beside(candidate))
        else:
            active = [cycle.standing.spec, *cycle.standing.own.values()]
            spec = next((spec for spec in active if spec.name == name), None)
            status = (
                m.idle(self._host.lifecycle, name)
                if spec is None
                else m.active(self._host.lifecycle, spec)
            )
        about = " ".join((entry.settings.__doc__ or "").split())
        settings = [
            pb.Setting(name=f.name, default_value=m.written(f.default), help=about)
            for f in dataclasses.fields(entry.settings)
        ]
        return pb.DescribePolicyResponse(status=status, settings=settings)

    async def ActivatePolicy(
        self, request: pb.ActivatePolicyRequest, context: Context
    ) -> pb.ActivatePolicyResponse:
        """Make a policy active at once."""
        spec = m.spec_in(request.spec)
        engine_id = request.engine_id if request.HasField("engine_id") else None
        of = m.arguments(spec) | ({} if engine_id is None else {"engine_id": engine_id})
        now, before = await self._do(
            context,
            "activate",
            of,
            request.reason,
            lambda: self._host.lifecycle.activate(spec, engine_id),
            lambda done: f"done, before: {done[1].name}",
        )
        previous = m.active(self._host.lifecycle, before)
        if before not in (self._host.lifecycle.standing.spec, now):
            previous.stage = pb.STAGE_UNSPECIFIED
        return pb.ActivatePolicyResponse(
            active=m.active(self._host.lifecycle, now), previous=previous
        )

    async def ShadowPolicy(
        self, request: pb.ShadowPolicyRequest, context: Context
    ) -> pb.ShadowPolicyResponse:
        """Begin or end shadowing."""
        spec = m.spec_in(request.spec)
        of = m.arguments(spec) | {"enabled": request.enabled}
        candidate = await self._do(
            context,
            "shadow",
            of,
            request.reason,
            lambda: self._host.lifecycle.shadow(spec, request.enabled),
        )
        return pb.ShadowPolicyResponse(status=m.status(self._host.lifecycle, candidate))

    async def CanaryPolicy(
        self, request: pb.CanaryPolicyRequest, context: Context
    ) -> pb.CanaryPolicyResponse:
        """Begin, change or end a canary."""
        spec, share, pairs = m.spec_in(request.spec), request.share, request.switch_back
        candidate = await self._do(
            context,
            "canary",
            m.arguments(spec) | {"share": share, "switch_back": pairs},
            request.reason,
            lambda: self._host.lifecycle.canary(spec, share, pairs),
        )
        return pb.CanaryPolicyResponse(status=m.status(self._host.lifecycle, candidate))

    async def PromotePolicy(
        self, request: pb.PromotePolicyRequest, context: Context
    ) -> pb.PromotePolicyResponse:
        """Make a candidate active if it is measured to be faster."""
        verdict = await self._do(
            context,
            "promote",
            {"policy": request.name, "force": request.force},
            request.reason,
            lambda: self._host.lifecycle.promote(request.name, request.force),
            lambda done: done.words if done.promoted else f"refused: {done.words}",
        )
        return pb.PromotePolicyResponse(
            promoted=verdict.promoted,
            ratio=verdict.speed.ratio,
            ratio_low=verdict.speed.low,
            ratio_high=verdict.speed.high,
            blocks=verdict.speed.pairs,
            explanation=verdict.words,
        )

    async def RollBackPolicy(
        self, request: pb.RollBackPolicyRequest, context: Context
    ) -> pb.RollBackPolicyResponse:
        """Go back to what decided before."""
        now, out = await self._do(
            context,
            "roll back",
            {},
            request.reason,
            lambda: self._host.lifecycle.roll_back(request.reason),
            lambda done: f"done, active: {done[0].name}, taken out: {done[1].name}",
        )
        taken_out = m.idle(self._host.lifecycle, out.name)
        taken_out.spec.CopyFrom(m.message(out))
        return pb.RollBackPolicyResponse(
            active=m.active(self._host.lifecycle, now), taken_out=taken_out
        )

    async def CreateSnapshot(
        self, request: pb.CreateSnapshotRequest, context: Context
    ) -> pb.CreateSnapshotResponse:
        """Write down what was learned; the file is written on another thread."""
        engine_id = request.engine_id if request.HasField("engine_id") else None
        of = {} if engine_id is None else {"engine_id": engine_id}
        folder, snapshot = await self._attempt(
            context, "snapshot", of, "", lambda: self._take(engine_id)
        )
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{os.getpid()}.npz"
        try:
            size = await asyncio.to_thread(write_snapshot, folder / name, snapshot)
        except OSError as error:
            problem = OSError(f"cannot write {folder / name}: {error.strerror or error}")
            await self._refuse(context, "snapshot", of, "", problem)
        self._audit.write(_who(context), "snapshot", of, "", f"done: {name}, {size} bytes")
        return pb.CreateSnapshotResponse(
            snapshot_id=name, size_bytes=size, state_version=snapshot.state_version
        )

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Refuse new streams, and cut open ones after a grace."""

        def drain() -> int:
            if request.grace_ms > MOST_GRACE_MS:
                raise ValueError(f"grace_ms must be at most {MOST_GRACE_MS}")
            return self._drain(1e-3 * request.grace_ms)

        streams = await self._do(
            context,
            "drain",
            {"grace_ms": request.grace_ms},
            "",
            drain,
            lambda many: f"done, open streams: {many}",
        )
        return pb.DrainResponse(open_streams=streams)

    async def _do(
        self,
        context: Context,
        what: str,
        of: Mapping[str, Any],
        why: str,
        work: Callable[[], Done],
        words: Callable[[Done], str] = lambda _: "done",
    ) -> Done:
        """Do the work and write it down, or write down why not and end the call."""
        done = await self._attempt(context, what, of, why, work)
        self._audit.write(_who(context), what, of, why, words(done))
        return done

    async def _attempt(
        self,
        context: Context,
        what: str,
        of: Mapping[str, Any],
        why: str,
        work: Callable[[], Done],
    ) -> Done:
        try:
            return work()
        except Exception as error:
            await self._refuse(context, what, of, why, error)

    async def _refuse(
        self, context: Context, what: str, of: Mapping[str, Any], why: str, error: Exception
    ) -> NoReturn:
        self._audit.write(_who(context), what, of, why, f"refused: {_line(error)}")
        await _abort(context, error)

    def _take(self, engine_id: str | None) -> tuple[Path, Any]:
        if self._snapshots is None:
            raise NotNow("no folder for snapshots: start parlay serve with --snapshots FOLDER")
        if engine_id is not None:
            return self._snapshots, taken([self._host.session(engine_id)])
        return self._snapshots, taken(list(self._host.sessions.values()))

    def _noted(self, what: str, policy: str, why: str) -> None:
        log.warning("%s policy=%s why=%r", what, policy, why)
        self._audit.write({"peer": "controller"}, what, {"policy": policy}, why)


async def _add_value(evidence: pb.TrialEvidence, kept: list[Beside]) -> None:
    try:
        found = await asyncio.to_thread(value_of, kept)
    except ValueError as error:
        evidence.no_value = _line(error)
        return
    evidence.value.CopyFrom(m.value(found))


def _who(context: Context) -> dict[str, str]:
    """Return who calls: the peer as gRPC knows it, what it proved, and what it says of itself."""
    said = dict(context.invocation_metadata() or ()).get(SAYS)
    who = {"peer": context.peer() or "unknown", **CALLER.get()}
    return who | ({} if said is None else {"says": str(said)})


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


async def _abort(context: Context, error: Exception) -> NoReturn:
    """End the call with the status and the one line that fit the error."""
    code = next((c for kind, c in STATUS.items() if isinstance(error, kind)), None)
    if code is None:
        log.error("admin call failed", exc_info=error)
        code = grpc.StatusCode.INTERNAL
    await context.abort(code, _line(error))
