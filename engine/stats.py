"""StatsService: an engine's steps and requests over gRPC, to watch and to ask for.

A thread of its own serves: it takes what the step loop left in the hub, makes messages of it (once,
however many watch) and never makes the loop wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from parlay.engine.address import check_address
from parlay.engine.stats_door import StatsDoor, check_reach
from parlay.engine.stats_hub import RequestStats, StatsHub, Step, TooMany
from parlay.protos import messages as m
from parlay.protos.credentials import from_environment
from parlay.v1 import stats_pb2 as pb
from parlay.wire.v1 import stats_pb2 as raw

__all__ = ["StatsHub", "StatsServer", "serve_stats"]

SERVICE = "parlay.v1.StatsService"
MAX_INTERVAL_MS = 3_600_000
POLL_S = 0.02
"""How often the hub is looked at while somebody watches: steps are told so late at most."""
IDLE_POLL_S = 0.05
START_S = 10.0
GRACE_S = 0.5
MAX_REQUEST_BYTES = 4096
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    # A watcher whose machine is gone would keep its place for ever.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)
log = logging.getLogger("parlay.stats")
Context = grpc.aio.ServicerContext[bytes, bytes]


class StatsServer:
    """Serves a hub at `address` from a thread of its own until closed; one server a hub.

    address: unix:/path, or host:port of this host alone (port 0: any; the attribute says which).
    tokens: a file of those that let callers in, None: that of PARLAY_STATS_TOKEN_FILE, if named.
    Raises ValueError or OSError, one line, where it cannot be served.
    """

    def __init__(self, hub: StatsHub, address: str, tokens: Path | None = None) -> None:
        _claim(address)
        tokens = tokens or from_environment("PARLAY_STATS").token
        others = from_environment("PARLAY_SIDECAR").token
        self._doors = [] if tokens is None else [StatsDoor(tokens, others)]
        self._hub = hub
        started: Future[str] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(address, started), name="parlay-stats", daemon=True
        )
        self._thread.start()
        self.address = started.result(START_S)

    def close(self) -> None:
        """End every stream in good order and let go; takes a second or so at most."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: so are we
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_S)
        if (path := _socket_path(self.address)) is not None:
            path.unlink(missing_ok=True)

    def _run(self, address: str, started: Future[str]) -> None:
        try:
            asyncio.run(self._serve(address, started))
        except Exception as error:
            if started.done():
                log.exception("stats are served no more")
            else:
                started.set_exception(error)

    async def _serve(self, address: str, started: Future[str]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = grpc.aio.server(interceptors=self._doors, options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((_handler(_Servicer(self._hub)),))
        checker = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checker, server)
        try:
            port = server.add_insecure_port(address)
        except RuntimeError:
            raise OSError(
                f"stats cannot be served at {address}: gRPC cannot listen there"
            ) from None
        await server.start()
        for name in ("", SERVICE):
            await checker.set(name, health_pb2.HealthCheckResponse.SERVING)
        pump = asyncio.ensure_future(_pump(self._hub))
        host = address.rpartition(":")[0]
        started.set_result(address if address.startswith("unix:") else f"{host}:{port}")
        try:
            await self._stop.wait()
        finally:
            pump.cancel()
            self._hub.end()
            await checker.enter_graceful_shutdown()
            await server.stop(GRACE_S)


def serve_stats(hub: StatsHub, address: str, tokens: Path | None = None) -> StatsServer:
    """Serve a hub; `close` what is returned. Raises as StatsServer."""
    return StatsServer(hub, address, tokens)


async def _pump(hub: StatsHub) -> None:
    """Take what the step loop leaves, again and again: it wakes nobody itself."""
    while True:
        try:
            hub.absorb()
        except Exception:
            log.exception("a step was not counted")
        await asyncio.sleep(POLL_S if hub.subscribers else IDLE_POLL_S)


class _Servicer:
    """The methods, on bytes; every one runs on the serving thread, as the hub asks."""

    def __init__(self, hub: StatsHub) -> None:
        self.hub = hub

    async def watch(self, data: bytes, context: Context) -> None:
        """Send steps until the caller leaves or we do."""
        request = await _parsed(pb.WatchStatsRequest, data, context)
        interval_ms = request.min_interval_ms
        if interval_ms > MAX_INTERVAL_MS:
            text = f"min_interval_ms must be at most {MAX_INTERVAL_MS}, not {interval_ms}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        try:
            with self.hub.subscribe(newest_only=interval_ms > 0) as subscription:
                while (step := await subscription.next()) is not None:
                    try:
                        response = _response(self.hub.engine_id, step, subscription.lost_steps)
                    except ValueError as error:
                        log.warning("step not sent error=%r", str(error))
                        subscription.lost_steps += 1
                        continue
                    await context.write(response)
                    if interval_ms:
                        await asyncio.sleep(interval_ms / 1e3)
        except TooMany as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    async def request(self, data: bytes, context: Context) -> bytes:
        """Answer for one request."""
        request_id = (await _parsed(pb.GetRequestStatsRequest, data, context)).request_id
        stats = self.hub.request(request_id)
        if stats is None:
            text = f"request {request_id} is neither running nor among the last that ended"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        assert stats is not None
        return bytes(_request_message(stats).SerializeToString())


def _handler(servicer: _Servicer) -> grpc.GenericRpcHandler:
    methods: dict[str, Any] = {
        "WatchStats": grpc.unary_stream_rpc_method_handler(servicer.watch),
        "GetRequestStats": grpc.unary_unary_rpc_method_handler(servicer.request),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


async def _parsed(kind: Any, data: bytes, context: Context) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError:
        text = f"the message is no {kind.DESCRIPTOR.full_name}"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)


def _response(engine_id: str, step: Step, lost_steps: int) -> bytes:
    """Return a WatchStatsResponse; what every watcher gets of a step is made once."""
    if not step.message:
        message = raw.WatchStatsResponse(
            engine_id=engine_id,
            counters=pb.EngineCounters(**dataclasses.asdict(step.counters)),
        )
        m.write_outcome(message.report.outcome, step.outcome)
        m.write_view(message.report.view, step.view)
        if step.plan is not None:
            m.write_plan(message.plan, step.plan)
        step.message = message.SerializeToString()
    # Messages written one after the other are one message with the fields of both.
    return step.message + raw.WatchStatsResponse(lost_steps=lost_steps).SerializeToString()


def _request_message(stats: RequestStats) -> pb.GetRequestStatsResponse:
    return pb.GetRequestStatsResponse(
        request_id=stats.request_id,
        task=stats.task,
        prompt_tokens=stats.prompt_tokens,
        output_tokens=stats.output_tokens,
        steps=stats.steps,
        preemptions=stats.preemptions,
        ttft_ms=stats.ttft_ms,
        tpot_ms=stats.tpot_ms,
        proposers=[
            pb.ProposerStats(
                proposer=proposer,  # type: ignore[arg-type]
                steps=steps,
                drafted_tokens=drafted,
                verified_tokens=verified,
                accepted_tokens=accepted,
            )
            for proposer, (steps, drafted, verified, accepted) in enumerate(stats.proposers)
            if steps
        ],
        finished=stats.finished,
    )


def _claim(address: str) -> None:
    """Raise where an address cannot be served: what gRPC says of one that is taken is long."""
    check_address(address[:-1] + "1" if address.endswith(":0") else address, "stats")
    check_reach(address)
    try:
        if (path := _socket_path(address)) is not None:
            _claim_path(path)
        else:
            name, _, port = address.rpartition(":")
            found = socket.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
            with socket.socket(*found[:3]) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(found[4])
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(f"stats cannot be served at {address}: {why}") from None


def _claim_path(path: Path) -> None:
    """Raise OSError where a socket cannot be made: one nobody listens on is gRPC's to replace."""
    if not path.parent.is_dir():
        raise OSError(f"there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise OSError(f"folder {path.parent} is not writable")
    if path.exists() and not path.is_socket():
        raise OSError("there is a file of that name, and it is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
    raise OSError("somebody serves there already")


def _socket_path(address: str) -> Path | None:
    path = address.removeprefix("unix:")
    return None if path == address else Path(path.removeprefix("//"))
