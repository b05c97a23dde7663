"""The wheel holds what a user needs and imports without the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("controller", "engine", "policies", "protos", "sim")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy, so that no build folder is read or left."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for folder in filter(lambda name: (ROOT / name).is_dir(), FOLDERS):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "-w", str(out), str(tree)], check=True, timeout=300)
    (built,) = out.glob("parlay-*.whl")
    return built


def test_wheel_holds_code_stubs_schemas_and_weights(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for package, folder in settings["tool"]["setuptools"]["package-dir"].items():
        inside = package.replace(".", "/")
        assert f"{inside}/py.typed" in names
        for file in (ROOT / folder).rglob("*"):
            relative = file.relative_to(ROOT / folder)
            kept = file.suffix in (".py", ".pyi", ".proto") or relative.parts[0] == "data"
            if file.is_file() and kept and relative.parts[0] != "parlay":
                assert f"{inside}/{relative}" in names
    assert {"parlay/v1/policy_pb2.pyi", "parlay/wire/v1/policy_pb2.py"} <= names
    assert not [name for name in names if name.startswith(("tests", "parlay/__init__"))]


def test_installed_wheel_imports_and_lists_policies(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import parlay.v1.policy_pb2, parlay.wire.v1.policy_pb2, parlay.protos, parlay.engine\n"
        "from parlay.policies.policy import registry\n"
        "print(parlay.engine.__file__, 'goodput' in registry())"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path[:0] = {[str(tmp_path), *_site()]}\n{code}",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}/parlay/engine/__init__.py True\n"


def _site() -> list[str]:
    """Return the folders of installed packages; -S leaves out the editable install beside them."""
    return [path for path in sys.path if path.endswith("site-packages")]
