"""gRPC reflection: grpcurl and the like ask a listener what it serves. Off unless it is asked for.

It stands behind the listener's door as every other method does.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import grpc

from parlay.v1 import admin_pb2, policy_pb2

SCHEMAS = (policy_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)
"""What is told of methods and messages; named here so that both have been loaded."""


def check_reflection() -> Any:
    """Return the library's module; raises ValueError where it is not installed."""
    try:
        return import_module("grpc_reflection.v1alpha.reflection")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("grpc_reflection"):
            raise
        raise ValueError(
            "reflection needs grpcio-reflection: pip install 'parlay[reflection]'"
        ) from None


def reflect(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Let a server that is not started yet tell of `services`; raises as `check_reflection`."""
    library = check_reflection()
    library.enable_server_reflection((*services, library.SERVICE_NAME), server)
