"""The wire side of the controller: PolicyService over a Host, and its life from bind to drain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from parlay.controller.host import Full, Host, Session, Superseded, UnknownEngine, UnknownVersion
from parlay.protos import codec

SERVICE = "parlay.v1.PolicyService"
OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", codec.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", codec.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
)
STATUS = {
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

    async def steer(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """Serve one engine until it leaves."""
        session: Session | None = None
        stream = self.host.new_stream()
        try:
            async for data in requests:
                request = codec.decode_request(data)
                if isinstance(request, codec.Bye):
                    return
                if isinstance(request, codec.Hello):
                    session, welcome = self.host.hello(request, stream)
                    yield codec.encode_response(welcome)
                elif session is None:
                    raise ValueError("the first message on a stream must be a hello")
                elif (plan := self.host.report(session, stream, request)) is not None:
                    yield codec.encode_response(plan)
                if self.draining:
                    yield codec.encode_response(codec.Config(draining=True))
        except Exception as error:
            await _abort(context, error)
        finally:
            if session is not None:
                self.host.leave(session, stream)

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
            await _abort(context, error)

    async def report(self, data: bytes, context: Context) -> bytes:
        """Take one outcome."""
        try:
            engine_id, outcome = codec.decode_report(data)
            return codec.encode_receipt(self.host.observe(self.host.session(engine_id), outcome))
        except Exception as error:
            await _abort(context, error)

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handlers of PolicyService, on bytes: the codec says better what is wrong."""
        methods: dict[str, Any] = {
            "Steer": grpc.stream_stream_rpc_method_handler(self.steer),
            "Decide": grpc.unary_unary_rpc_method_handler(self.decide),
            "Report": grpc.unary_unary_rpc_method_handler(self.report),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)


async def _abort(context: Context, error: Exception) -> NoReturn:
    """End the call with the status and the one line that fit the error."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    code = next((c for kind, c in STATUS.items() if isinstance(error, kind)), None)
    if code is None:
        log.error("policy failed", exc_info=error)
        code = grpc.StatusCode.INTERNAL
    text = str(error) or type(error).__name__
    log.warning("call ended code=%s reason=%r", code.name, text)
    await context.abort(code, text)


async def serve(
    host: Host,
    target: str,
    ready: Callable[[str], None],
    stop: asyncio.Event,
    grace_s: float = 2.0,
) -> None:
    """Serve at `target` (unix:/path or host:port) until `stop`, then drain for at most `grace_s`.

    Calls `ready` with the address that is served. Raises OSError where it cannot be bound.
    """
    server = grpc.aio.server(options=OPTIONS)
    servicer = Servicer(host)
    checker = health.aio.HealthServicer()
    server.add_generic_rpc_handlers((servicer.handler(),))
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    try:
        port = server.add_insecure_port(target)
    except RuntimeError as error:
        raise OSError(
            f"cannot listen on {target}: in use, or not an address of this host"
        ) from error
    await server.start()
    for name in ("", SERVICE):
        await checker.set(name, health_pb2.HealthCheckResponse.SERVING)
    try:
        ready(target if target.startswith("unix:") else f"{target.rpartition(':')[0]}:{port}")
        await stop.wait()
        servicer.draining = True
        await checker.enter_graceful_shutdown()
    finally:
        await server.stop(grace_s)
