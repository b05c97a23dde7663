"""OpenTelemetry spans of the unary calls; a stream lasts as long as its engine, and has none.

A span is the child of the one that the caller's metadata names (W3C's traceparent), and is named
and described by OpenTelemetry's conventions for gRPC servers.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

import grpc

OURS = "parlay."
"""Services whose calls are traced; health and reflection would only add noise."""
FLUSH_S = 2.0
"""How long what was traced last may take to leave before the process ends."""
_FAULTS = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}
"""What is the server's own fault and makes a span an error."""
_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


class Tracing(grpc.aio.ServerInterceptor):
    """Makes a span of every unary call; provider: an OpenTelemetry TracerProvider."""

    def __init__(self, provider: Any) -> None:
        self._api = import_module("opentelemetry.trace")
        self._propagate = import_module("opentelemetry.propagate")
        self._tracer = provider.get_tracer("parlay.controller")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler, within a span where it is unary and ours."""
        handler = await continuation(handler_call_details)
        name = str(handler_call_details.method).strip("/")
        if handler is None or handler.unary_unary is None or not name.startswith(OURS):
            return handler
        return grpc.unary_unary_rpc_method_handler(
            self._within(handler.unary_unary, name),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _within(self, serve: Any, name: str) -> Any:
        service, _, method = name.rpartition("/")
        said = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}

        async def traced(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            metadata = dict(context.invocation_metadata() or ())
            with self._tracer.start_as_current_span(
                name,
                context=self._propagate.extract(metadata),
                kind=self._api.SpanKind.SERVER,
                attributes=said,
                record_exception=False,
                set_status_on_exception=False,
            ) as span:
                try:
                    return await serve(request, context)
                except grpc.aio.AbortError:
                    self._end(span, _code_of(context))
                    raise
                except BaseException as error:
                    self._end(span, grpc.StatusCode.UNKNOWN, type(error).__name__)
                    raise
                finally:
                    if span.is_recording():
                        span.set_attribute("rpc.grpc.status_code", _code_of(context).value[0])

        return traced

    def _end(self, span: Any, code: grpc.StatusCode, words: str = "") -> None:
        if code in _FAULTS:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, words or code.name))


def _code_of(context: Any) -> grpc.StatusCode:
    """Return a call's status; gRPC keeps a number, or nothing while all is well."""
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code
    return _BY_NUMBER.get(code or 0, grpc.StatusCode.UNKNOWN)


def exporting() -> tuple[Tracing, Callable[[], None]]:
    """Return an interceptor and what sends off the last spans, at the end, for FLUSH_S at most.

    Where the process has a TracerProvider already (`opentelemetry-instrument parlay serve`), it is
    used; else spans go by OTLP to where OTEL_EXPORTER_OTLP_* say. Raises ValueError where a package
    is missing.
    """
    try:
        api = import_module("opentelemetry.trace")
        sdk = import_module("opentelemetry.sdk.trace")
        provider = api.get_tracer_provider()
        if isinstance(provider, sdk.TracerProvider):
            return Tracing(provider), lambda: None
        provider = _otlp(sdk)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise ValueError(f"otel needs {error.name}: pip install 'parlay[otel]'") from None

    def leave() -> None:
        # A collector that is away must not keep the process.
        thread = threading.Thread(target=provider.shutdown, name="parlay-otel", daemon=True)
        thread.start()
        thread.join(FLUSH_S)

    return Tracing(provider), leave


def _otlp(sdk: Any) -> Any:
    resources = import_module("opentelemetry.sdk.resources")
    batches = import_module("opentelemetry.sdk.trace.export")
    otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    named = resources.Resource.create()
    if str(named.attributes.get("service.name", "")).startswith("unknown_service"):
        named = named.merge(resources.Resource({"service.name": "parlay"}))
    provider = sdk.TracerProvider(resource=named, shutdown_on_exit=False)
    provider.add_span_processor(batches.BatchSpanProcessor(otlp.OTLPSpanExporter()))
    return provider
