"""The wire side of the controller: PolicyService over a Host, and its life from bind to drain.

AdminService, where it is asked for, has a listener of its own (`admin.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from parlay.controller.access import Access, Denied, Door, Unauthenticated
from parlay.controller.admin import AdminServicer
from parlay.controller.audit import Audit
from parlay.controller.host import Full, Host, Session, Superseded, UnknownEngine, UnknownVersion
from parlay.controller.listener import socket_path
from parlay.controller.reflection import reflect
from parlay.controller.seldom import Seldom
from parlay.controller.tracing import Tracing
from parlay.protos import codec
from parlay.v1 import admin_pb2_grpc

SERVICE = "parlay.v1.PolicyService"
CUT_SHARE = 0.75
ADMIN_SERVICE = "parlay.v1.AdminService"
OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", codec.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", codec.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
)
ADMIN_OPTIONS = (("grpc.so_reuseport", 0),)
MOST_CALLS = 1024
"""Calls and streams at a time on a listener; more are RESOURCE_EXHAUSTED before they are read."""


_QUIET_TURNS, _MOST_TURNS = 4, 64
"""Turns of the event loop without a report before one is learned from, and turns waited at most. A
report that has come takes a few of them until it is read."""


class Draining(ValueError):
    """No new streams are taken, or this one had its grace."""


STATUS = {
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Denied: grpc.StatusCode.PERMISSION_DENIED,
    Draining: grpc.StatusCode.UNAVAILABLE,
    UnknownVersion: grpc.StatusCode.FAILED_PRECONDITION,
    UnknownEngine: grpc.StatusCode.NOT_FOUND,
    Superseded: grpc.StatusCode.ABORTED,
    Full: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ValueError: grpc.StatusCode.INVALID_ARGUMENT,
}
log = logging.getLogger("parlay.controller")
Context = grpc.aio.ServicerContext[bytes, bytes]


class Servicer:
    """Turns messages into calls of the host and errors into statuses; messages stay bytes here."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.draining = False
        self._cut = False
        self._open: set[asyncio.Task[Any]] = set()
        self._reports, self._learning = 0, asyncio.Lock()
        self._seldom: defaultdict[grpc.StatusCode, Seldom] = defaultdict(Seldom)

    def drain(self, grace_s: float) -> int:
        """Refuse new streams, cut the open ones after `grace_s`; return how many are open."""
        self.draining = True
        asyncio.get_running_loop().call_later(grace_s, self._cut_all)
        return len(self._open)

    def _cut_all(self) -> None:
        self._cut = True
        for task in tuple(self._open):
            task.cancel()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        """Count the stream of this task while it is open; raises Draining."""
        if self.draining:
            raise Draining("the controller is draining: come back later")
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._cut:
                raise
            raise Draining("the controller is draining, and the time to leave is over") from None
        finally:
            self._open.discard(task)

    async def steer(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """Serve one engine until it leaves."""
        session: Session | None = None
        stream = self.host.new_stream()
        try:
            with self._opened():
                async for data in requests:
                    request = codec.open_request(data)
                    if isinstance(request, codec.Bye):
                        return
                    if isinstance(request, codec.Hello):
                        session, welcome = self.host.hello(request, stream)
                        yield codec.encode_response(welcome)
                    elif session is None:
                        raise ValueError("the first message on a stream must be a hello")
                    else:
                        self._reports += 1
                        plan = self.host.report(session, stream, request)
                        if plan is not None:
                            yield codec.encode_response(plan)
                        if session.put_off is not None:
                            await self._settle(session)
                    if self.draining:
                        yield codec.encode_response(codec.Config(draining=True))
        except Exception as error:
            await self._abort(context, error)
        finally:
            if session is not None:
                self.host.leave(session, stream)

    async def _settle(self, session: Session) -> None:
        """Learn what was put off, one engine after the other and other engines' plans first."""
        async with self._learning:
            quiet, reports = 0, self._reports
            for _ in range(_MOST_TURNS):
                await asyncio.sleep(0)
                quiet = quiet + 1 if reports == self._reports else 0
                reports = self._reports
                if quiet == _QUIET_TURNS:
                    break
            self.host.settle(session)

    async def decide(self, data: bytes, context: Context) -> bytes:
        """Serve one plan."""
        try:
            hello, view = codec.decode_decide(data)
            session, _ = self.host.hello(hello)
            plan = self.host.decide(session, view)
            if plan is None:
                raise ValueError(f"step {view.step_id} is not above the last one decided")
            return codec.encode_decision(plan)
        except Exception as error:
            await self._abort(context, error)

    async def report(self, data: bytes, context: Context) -> bytes:
        """Take one outcome."""
        try:
            engine_id, outcome = codec.decode_report(data)
            return codec.encode_receipt(self.host.observe(self.host.session(engine_id), outcome))
        except Exception as error:
            await self._abort(context, error)

    async def _abort(self, context: Context, error: Exception) -> NoReturn:
        """End the call with the status and the one line that fit the error."""
        if isinstance(error, grpc.aio.AbortError):
            raise error
        found = (code for kind, code in STATUS.items() if isinstance(error, kind))
        code, text = next(found, grpc.StatusCode.INTERNAL), str(error) or type(error).__name__
        left_out = self._seldom[code].due()
        if left_out is not None:
            failed = error if code is grpc.StatusCode.INTERNAL else None
            log.log(
                logging.WARNING if failed is None else logging.ERROR,
                "call ended code=%s reason=%r others_since_last_said=%d",
                *(code.name, text, left_out),
                exc_info=failed,
            )
        await context.abort(code, text)

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handlers of PolicyService, on bytes: the codec says better what is wrong."""
        methods: dict[str, Any] = {
            "Steer": grpc.stream_stream_rpc_method_handler(self.steer),
            "Decide": grpc.unary_unary_rpc_method_handler(self.decide),
            "Report": grpc.unary_unary_rpc_method_handler(self.report),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)


async def serve(
    host: Host,
    target: str,
    ready: Callable[[str], None],
    stop: asyncio.Event,
    grace_s: float = 2.0,
    admin_target: str | None = None,
    audit: Audit | None = None,
    snapshots: Path | None = None,
    door: Door | None = None,
    admin_door: Door | None = None,
    tracing: Tracing | None = None,
    reflection: bool = False,
) -> None:
    """Serve at `target` (unix:/path or host:port) until `stop`, then drain for at most `grace_s`.

    admin_target: where AdminService listens, None nowhere; audit, snapshots: see `AdminServicer`;
    door, admin_door: how each is guarded; tracing: makes spans of unary calls; reflection: whether
    listeners tell what they serve. Calls `ready` with the address that is served. Raises OSError
    where one cannot be bound, ValueError where other hosts reach one that asks nothing.
    """
    servicer, checker = Servicer(host), health.aio.HealthServicer()
    server, address = _policy_server(servicer, checker, target, door or Door(), tracing, reflection)
    tasks: set[asyncio.Task[None]] = set()

    def drain(after_s: float) -> int:
        tasks.add(asyncio.ensure_future(checker.enter_graceful_shutdown()))
        return servicer.drain(after_s)

    people = None
    if admin_target is not None:
        ours = AdminServicer(host, audit or Audit(), drain, snapshots)
        people = _admin_server(ours, admin_target, admin_door or Door(), tracing, reflection)
        await people.start()
    await server.start()
    for name in ("", SERVICE):
        await checker.set(name, health_pb2.HealthCheckResponse.SERVING)
    try:
        ready(address)
        await stop.wait()
        # Who is still there then is told why; what gRPC cancels it logs as an error of ours.
        servicer.drain(CUT_SHARE * grace_s)
        await checker.enter_graceful_shutdown()
    finally:
        await server.stop(grace_s)
        if people is not None:
            await people.stop(grace_s)


def _server(
    door: Door, options: Sequence[tuple[str, Any]], tracing: Tracing | None
) -> grpc.aio.Server:
    """Return a server behind a door; one that asks nothing costs nothing."""
    guards: list[grpc.aio.ServerInterceptor] = [] if tracing is None else [tracing]
    if door.asks:
        guards.append(Access(door))
    return grpc.aio.server(interceptors=guards, options=options, maximum_concurrent_rpcs=MOST_CALLS)


def _bind(server: grpc.aio.Server, target: str, door: Door) -> str:
    """Bind a server, a Unix socket with its door's mode; return its address. Raises OSError."""
    path = socket_path(target)
    try:
        if path is None and door.tls is not None:
            port = server.add_secure_port(target, door.tls.credentials())
        else:
            port = server.add_insecure_port(target)
    except RuntimeError as error:
        raise OSError(
            f"cannot listen on {target}: in use, or not an address of this host"
        ) from error
    if path is None:
        return f"{target.rpartition(':')[0]}:{port}"
    # Bound, but not listening before `start`: nobody can have connected.
    path.chmod(door.mode)
    return target


def _policy_server(
    servicer: Servicer,
    checker: health.aio.HealthServicer,
    target: str,
    door: Door,
    tracing: Tracing | None,
    reflection: bool,
) -> tuple[grpc.aio.Server, str]:
    """Return a server of PolicyService and health, and its address; bound as `_admin_server`'s."""
    door.check(target, "the sidecar")
    server = _server(door, OPTIONS, tracing)
    server.add_generic_rpc_handlers((servicer.handler(),))
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    if reflection:
        reflect(server, (SERVICE, health.SERVICE_NAME))
    return server, _bind(server, target, door)


def _admin_server(
    servicer: AdminServicer, target: str, door: Door, tracing: Tracing | None, reflection: bool
) -> grpc.aio.Server:
    """Return a server of AdminService, bound where only this host, or who is let in, calls it."""
    door.check(target, "admin")
    server = _server(door, ADMIN_OPTIONS, tracing)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    if reflection:
        reflect(server, (ADMIN_SERVICE,))
    _bind(server, target, door)
    return server
