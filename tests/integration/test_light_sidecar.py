"""The sidecar with nothing installed but what the package itself asks for: no torch above all."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import grpc
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.integration.test_web import steer

ROOT = Path(__file__).parents[2]
WAIT_S = 30.0
LIST = "/parlay.v1.AdminService/ListPolicies"
PROGRAM = """
import json, runpy, sys
absent = frozenset(json.loads(sys.argv.pop(1)))
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
runpy.run_module("parlay.controller", run_name="__main__")
"""


def needed(asked: Iterator[str], found: set[str]) -> set[str]:
    """Add what the requirements come to, theirs included, by canonical name."""
    for text in asked:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        needed(iter(metadata.requires(name) or ()), found)
    return found


def absent() -> list[str]:
    """Return every module that is installed here and that the sidecar does not ask for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    base = needed(iter(project["dependencies"]), {"parlay"})
    return sorted(
        module
        for module, owners in metadata.packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & base
    )


def test_it_decides_and_ends_with_its_own_dependencies_alone(tmp_path: Path) -> None:
    missing = absent()
    assert {"torch", "transformers", "scipy", "pyarrow", "starlette", "redis"} <= set(missing)
    assert not {"numpy", "grpc", "grpc_health", "google", "typer", "parlay"} & set(missing)
    address = f"unix:{tmp_path}/s.sock"
    options = ("--listen", address, "--policy", "pilot", "--admin", f"unix:{tmp_path}/a.sock")
    state = ("--state", f"file:{tmp_path}/state", "--audit", str(tmp_path / "audit"))
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(missing), *options, *state],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert "serving on" in process.stdout.readline()
        steer(address, 20)
        with grpc.insecure_channel(f"unix:{tmp_path}/a.sock") as channel:
            listed: Callable[..., bytes] = channel.unary_unary(LIST)
            assert b"pilot" in listed(b"", timeout=WAIT_S)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors) == (0, "")
    assert (tmp_path / "state").exists()
