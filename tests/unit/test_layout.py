"""The shape of the project: packages, directions of import, freedom from torch, no machine path."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("controller", "engine", "policies", "protos", "sim")
WIRE = {"protos", "v1", "wire"}
MAY_IMPORT = {
    "policies": {"policies"},
    "protos": {"policies"} | WIRE,
    "engine": {"engine", "policies"},
    "sim": {"sim", "engine", "policies"},
    "controller": {"controller", "policies"} | WIRE,
}
KNOW_THE_WIRE = {
    "engine/bench_fleet.py",
    "engine/bench_rpc.py",
    "engine/remote.py",
    "engine/stats.py",
    "engine/stats_client.py",
    "engine/stats_door.py",
}
TORCH_FREE = [
    "parlay.engine." + name
    for name in (
        "backend",
        "kv_cache",
        "planner",
        "plugins.adapter",
        "prefix_cache",
        "request",
        "scheduler",
        "stats_hub",
        "step",
        "tree",
        "virtual",
    )
]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from (p.relative_to(ROOT) for p in sorted((ROOT / folder).rglob("*.py")))


def package_of(folder: Path) -> str:
    parts = folder.parts
    return ".".join(parts[1:] if parts[:2] == ("protos", "parlay") else ("parlay", *parts))


def module_of(file: Path) -> str:
    package = package_of(file.parent)
    return package if file.stem == "__init__" else f"{package}.{file.stem}"


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_folder_with_python_is_a_package_of_the_wheel() -> None:
    packages = project()["tool"]["setuptools"]["packages"]
    assert sorted(packages) == sorted({package_of(file.parent) for file in sources()})


def test_every_command_points_to_a_function() -> None:
    scripts = project()["project"]["scripts"]
    commands = project()["project"]["entry-points"]["parlay.commands"]
    files = {module_of(file): file for file in sources()}
    for name, target in (scripts | commands).items():
        module, function = target.split(":")
        assert module in files, f"{name}: no module {module}"
        tree = ast.parse((ROOT / files[module]).read_text(encoding="utf-8"))
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in defined, f"{name}: {module} has no function {function}"


def test_imports_run_one_way() -> None:
    for file in sources():
        allowed = MAY_IMPORT[file.parts[0]] | (WIRE if str(file) in KNOW_THE_WIRE else set())
        for name in imports(file):
            parts = name.split(".")
            if parts[0] == "parlay":
                assert parts[1] in allowed, f"{file} must not import {name}"


def test_policies_need_no_library_but_numpy() -> None:
    known = {*sys.stdlib_module_names, "parlay", "numpy"}
    for file in sources():
        if file.parts[0] == "policies":
            used = {name.split(".")[0] for name in imports(file)}
            extra = used - known - ({"typer", "rich", "click"} if file.name == "cli.py" else set())
            assert not extra, f"{file} must not import {extra}"


def test_loop_policies_and_sidecar_are_free_of_torch() -> None:
    light = [m for m in map(module_of, sources()) if m.split(".")[1] in ("policies", "controller")]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name + ' imports torch'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *TORCH_FREE, *light],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_no_tracked_file_names_a_place_on_a_machine() -> None:
    places = ("work", "root", "opt/wheels", "opt/pypi", "tmp/smol", "tmp/v", r"home/\w+", "Users")
    hosts = ("pypi" + r"\.org", "python" + r"hosted\.org", "download" + r"\.pytorch")
    pattern = re.compile(rf"(?<![\w.])/(?:{'|'.join(places)})/|{'|'.join(hosts)}")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b""
        if b"\0" not in content:
            found = pattern.search(content.decode("utf-8"))
            assert found is None, f"{name} names {found.group()!r}" if found else ""
