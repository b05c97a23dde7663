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

SOURCE = Path(__file__).with_name("llama.c")
NGRAM_SOURCE = Path(__file__).with_name("ngram.c")
FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-pthread")
SYMBOLS = (
    "parlay_pack",
    "parlay_linear",
    "parlay_scratch_bytes",
    "parlay_forward",
    "parlay_launch",
    "parlay_land",
    "parlay_move",
)
NGRAM_SYMBOLS = (
    "parlay_ngram_new",
    "parlay_ngram_free",
    "parlay_ngram_extend",
    "parlay_ngram_propose",
)
NEEDS = frozenset(("avx512f", "avx512bw", "avx512vl", "avx512_bf16"))
COMPILE_TIMEOUT_S = 120.0
OFF = "PARLAY_KERNELS"
log = logging.getLogger("parlay.engine")


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the compiled kernels; None, logged once, where this machine cannot have them.

    PARLAY_KERNELS=off leaves them out.
    """
    return _load(SOURCE, SYMBOLS, NEEDS)


@functools.cache
def load_ngram() -> ctypes.CDLL | None:
    """Return the compiled n-gram index, as `load` does the kernels; it runs on any processor."""
    return _load(NGRAM_SOURCE, NGRAM_SYMBOLS, frozenset())


def _load(source: Path, symbols: tuple[str, ...], needs: frozenset[str]) -> ctypes.CDLL | None:
    if os.environ.get(OFF) == "off":
        return None
    flags = cpu_flags()
    if not flags >= needs:
        return None
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        log.warning("no C compiler found, going on without own kernels; install gcc or set CC")
        return None
    try:
        return _compiled(source, symbols, compiler, flags)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        log.warning(
            "kernels not compiled, going on without them: %s", detail.strip().splitlines()[-1]
        )
        return None


def cpu_flags() -> frozenset[str]:
    """Return what this machine's processor can do, in Linux's words; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((x.split() for x in lines if x.startswith("flags")), ()))


def _compiled(
    source: Path, symbols: tuple[str, ...], compiler: str, flags: frozenset[str]
) -> ctypes.CDLL:
    """Load the library for this source, compiler and processor; compile it where none is sound."""
    from parlay.engine.weights import cache_dir  # a GPU's engine needs no safetensors

    names = (compiler, *FLAGS, *sorted(flags))
    key = hashlib.sha256(source.read_bytes() + "\0".join(names).encode()).hexdigest()[:16]
    library = cache_dir() / "kernels" / f"{source.stem}-{key}.so"
    # To map a library that was cut short is to die of SIGBUS: only a whole one may be tried.
    if _sum_of(library) == _text_of(_sum_file(library)) is not None:
        try:
            return _opened(library, symbols)
        except (OSError, ValueError) as error:
            log.warning("compiling the kernels again: %s", error)
    return _compile(source, symbols, compiler, library)


def _compile(source: Path, symbols: tuple[str, ...], compiler: str, library: Path) -> ctypes.CDLL:
    """Compile into the cache, and load; what cannot be loaded never gets there."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        part, part_sum = Path(folder) / library.name, Path(folder) / "sum"
        command = [compiler, *FLAGS, str(source), "-o", str(part), "-lm"]
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S
        )
        part_sum.write_text(f"{_sum_of(part)}\n", encoding="ascii")
        # From here, since dlopen would answer with what it loaded from the final path before.
        kernels = _opened(part, symbols)
        part.replace(library)
        part_sum.replace(_sum_file(library))
    return kernels


def _opened(library: Path, symbols: tuple[str, ...]) -> ctypes.CDLL:
    """Load a library; raises ValueError where it has not got our functions."""
    kernels = ctypes.CDLL(str(library))
    missing = [name for name in symbols if not hasattr(kernels, name)]
    if missing:
        raise ValueError(f"{library.name} lacks {', '.join(missing)}")
    return kernels


def _sum_file(library: Path) -> Path:
    return library.with_suffix(".so.sha256")


def _sum_of(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def _text_of(file: Path) -> str | None:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
