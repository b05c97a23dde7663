"""Compile the kernels for this very machine, once, into the user's cache folder."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from parlay.engine.weights import cache_dir

SOURCE = Path(__file__).with_name("llama.c")
FLAGS = ("-O3", "-march=native", "-fPIC", "-shared")
NEEDS = frozenset(("avx512f", "avx512bw", "avx512vl", "avx512_bf16"))
COMPILE_TIMEOUT_S = 120.0
OFF = "PARLAY_KERNELS"
log = logging.getLogger("parlay.engine")


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the compiled kernels; None, logged once, where this machine cannot have them.

    PARLAY_KERNELS=off leaves them out.
    """
    if os.environ.get(OFF) == "off":
        return None
    flags = cpu_flags()
    if not flags >= NEEDS:
        return None
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        log.warning("no C compiler found, decoding without own kernels; install gcc or set CC")
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler, flags)))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        log.warning(
            "kernels not compiled, decoding without them: %s", detail.strip().splitlines()[-1]
        )
        return None


def cpu_flags() -> frozenset[str]:
    """Return what this machine's processor can do, in Linux's words; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((x.split() for x in lines if x.startswith("flags")), ()))


def _compiled(compiler: str, flags: frozenset[str]) -> Path:
    """Return the library for this source, compiler and processor; compile it where it is new."""
    source = SOURCE.read_bytes()
    names = (compiler, *FLAGS, *sorted(flags))
    key = hashlib.sha256(source + "\0".join(names).encode()).hexdigest()[:16]
    library = cache_dir() / "kernels" / f"llama-{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            part = Path(folder) / library.name
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(part), "-lm"]
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S
            )
            part.rename(library)
    return library
