"""Listeners that tell what they serve, asked by a reflection client; only where it is on."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from tests.integration.test_security import ADMIN, ENGINE, bearer, ended, serving, token_file

from parlay.controller.access import Door
from parlay.controller.tokens import Tokens
from parlay.protos.credentials import Credentials

WAIT_S = 30.0
METHOD = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
needs_library = pytest.mark.skipif(
    importlib.util.find_spec("grpc_reflection") is None, reason="needs grpcio-reflection"
)


def client(channel: grpc.Channel) -> Any:
    """Return a client of the library's own, which asks as grpcurl does."""
    database = import_module("grpc_reflection.v1alpha.proto_reflection_descriptor_database")
    return database.ProtoReflectionDescriptorDatabase(channel)


@needs_library
def test_a_listener_tells_its_services_methods_and_messages(tmp_path: Path) -> None:
    with serving(tmp_path, Door(), Door(), reflection=True) as served:
        with grpc.insecure_channel(served.target) as channel:
            known = client(channel)
            services = {"parlay.v1.PolicyService", "grpc.health.v1.Health"}
            assert services < set(known.get_services())
            assert "parlay.v1.AdminService" not in known.get_services()
            pool = DescriptorPool(known)
            service = pool.FindServiceByName("parlay.v1.PolicyService")
            assert [m.name for m in service.methods] == ["Steer", "Decide", "Report"]
            assert "hello" in service.methods[0].input_type.fields_by_name
        with grpc.insecure_channel(served.admin) as channel:
            assert "parlay.v1.AdminService" in client(channel).get_services()


@needs_library
def test_it_stands_behind_the_listeners_door(tmp_path: Path) -> None:
    engines = Tokens(token_file(tmp_path, "engines", ENGINE))
    people = Tokens(token_file(tmp_path, "people", ADMIN))
    doors = Door(tokens=engines, others=people), Door(tokens=people, others=engines)
    with serving(tmp_path, *doors, reflection=True) as served:
        for target, right, wrong in (
            (served.target, ENGINE, ADMIN),
            (served.admin, ADMIN, ENGINE),
        ):
            for said, code in (
                ((), "UNAUTHENTICATED"),
                (bearer(wrong), "PERMISSION_DENIED"),
                (bearer(right), "OK"),
            ):
                found = ended(Credentials(), target, METHOD, said, "stream_stream")
                assert found[0] == code


def test_it_is_off_unless_it_is_asked_for(tmp_path: Path) -> None:
    with serving(tmp_path, Door(), Door()) as served:
        for target in (served.target, served.admin):
            found = ended(Credentials(), target, METHOD, (), "stream_stream")
            assert found[0] == "UNIMPLEMENTED"


@pytest.mark.parametrize(
    ("flag", "absent", "said"),
    [
        ("--reflection", "grpc_reflection", "reflection needs grpcio-reflection: pip install"),
        ("--otel", "opentelemetry", "otel needs opentelemetry"),
    ],
)
def test_what_is_asked_for_and_not_installed_is_one_line(
    tmp_path: Path, flag: str, absent: str, said: str
) -> None:
    program = (
        f"import sys; sys.modules[{absent!r}] = None\n"
        "import runpy; runpy.run_module('parlay.controller', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--listen", f"unix:{tmp_path}/s.sock", flag],
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(f"parlay serve: {said}")
    assert "parlay[" in done.stderr
    assert done.stderr.count("\n") == 1
