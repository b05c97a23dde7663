"""Makes the stubs beside the protos, in a virtual environment of their own.

`python protos/generate.py` writes them; with `--check` it compares them with the committed ones.
Stubs of the oldest supported protobuf load on newer ones, not the other way round: the tools are
pinned.
"""

from __future__ import annotations

import argparse
import filecmp
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

TOOLS = ("grpcio-tools==1.66.2", "setuptools<80", "mypy-protobuf==3.6.0")
PROTOS = Path(__file__).resolve().parent
TOOLS_DIR = PROTOS.parent / "build" / "protoc"


def tools() -> Path:
    """Return the Python that has the pinned tools; makes its environment on first use."""
    python = TOOLS_DIR / "bin" / "python"
    stamp = TOOLS_DIR / "tools.txt"
    wanted = "\n".join(TOOLS)
    if not stamp.exists() or stamp.read_text() != wanted:
        venv.create(TOOLS_DIR, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *TOOLS], check=True)
        stamp.write_text(wanted)
    return python


def generate(out: Path) -> list[Path]:
    """Write every proto's stubs under `out`; return their paths relative to it."""
    python = tools()
    sources = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.rglob("*.proto"))
    plugin = f"--plugin=protoc-gen-mypy={python.parent / 'protoc-gen-mypy'}"
    outputs = [f"--python_out={out}", f"--grpc_python_out={out}", f"--mypy_out=quiet:{out}"]
    command = [str(python), "-m", "grpc_tools.protoc", f"-I{PROTOS}", plugin, *outputs, *sources]
    subprocess.run(command, check=True)
    return stubs(out)


def stubs(folder: Path) -> list[Path]:
    """Return the stubs that are under `folder`, relative to it."""
    found = (p for p in folder.rglob("*_pb2*") if p.suffix in (".py", ".pyi"))
    return sorted(p.relative_to(folder) for p in found)


def stale() -> list[str]:
    """Return what is wrong with the committed stubs, a line each."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = generate(Path(folder))
        committed = set(stubs(PROTOS))
        wrong = [f"{path}: has no proto" for path in sorted(committed - set(fresh))]
        for path in fresh:
            if path not in committed:
                wrong.append(f"{path}: missing")
            elif not filecmp.cmp(PROTOS / path, Path(folder) / path, shallow=False):
                wrong.append(f"{path}: differs from its proto")
    return wrong


def main() -> int:
    """Run as a command; exit status 1 where --check found something."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    if not parser.parse_args().check:
        generate(PROTOS)
        return 0
    wrong = stale()
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        print("mend with: python protos/generate.py, then commit the stubs", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
