"""Which peers `parlay bench engine` has, how each is started and set, and what mends it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from parlay.engine import bench_vllm
from parlay.engine.bench import Timing
from parlay.engine.bench_hf import ASSISTED, MODES, PROMPT_LOOKUP
from parlay.engine.bench_load import Answer, Entrant, Load
from parlay.engine.bench_memory import peak_mb, reset_peak
from parlay.engine.bench_peer import Peer
from parlay.engine.demo.workload import CONCURRENCIES

VLLM = "vllm"
VLLM_MODES = {"none": "", "ngram": "5 tokens, match of 4"}
PEERS = (*dict.fromkeys(engine for engine, _ in MODES), VLLM)
_NO_BATCH = (ASSISTED, PROMPT_LOOKUP)


def taking_part(without: Sequence[str]) -> list[str]:
    """Return the peers but for those left out; raises ValueError for one that is unknown."""
    for name in without:
        if name not in PEERS:
            raise ValueError(f"--without {name}: no such peer; choose among {', '.join(PEERS)}")
    return [engine for engine in PEERS if engine not in without]


def check_peers(engines: Sequence[str], vllm_python: Path) -> None:
    """Raise ValueError, with how to mend it, where one that takes part is not there."""
    if VLLM in engines:
        if not os.access(vllm_python, os.X_OK):
            raise ValueError(f"{VLLM}: there is no Python at {vllm_python}; {mend(VLLM)}")
        if _wants_openmp() and not _openmp(vllm_python).exists():
            raise ValueError(
                f"{VLLM}: there is no {_openmp(vllm_python)}, without which it speculates many"
                " times slower; `pip install intel-openmp` in its environment brings it,"
                f" --without {VLLM} leaves it out"
            )
    for engine in engines:
        if engine != VLLM and find_spec("transformers") is None:
            raise ValueError(f"{engine}: transformers is not installed; {mend(engine)}")


def mend(engine: str) -> str:
    """Say what helps where a peer is missing or broken."""
    if engine == VLLM:
        return (
            "`make venv-vllm` makes its environment, --vllm-python names the Python of another,"
            f" --without {VLLM} leaves it out"
        )
    return f"`pip install 'transformers>=5'` brings it, --without {engine} leaves it out"


def start_peers(
    stack: ExitStack,
    engines: Sequence[str],
    vllm_python: Path,
    settings: dict[str, Any],
    eos_ids: Sequence[int],
) -> tuple[list[Entrant], dict[str, Any]]:
    """Start every peer's processes, all at once, to end with `stack`.

    settings: as `bench_vllm.open_vllm` has them, less the mode. Return entrants, and by engine what
    the peer said of itself (its version). Raises ValueError.
    """
    started: list[tuple[Peer, str, str, str]] = []
    if hf := [key for key in MODES if key[0] in engines]:
        peer = _hf(hf[0][0], settings)
        stack.callback(peer.close)
        started += [(peer, *key, MODES[key]) for key in hf]
    if VLLM in engines:
        for mode, setting in VLLM_MODES.items():
            peer = _vllm(vllm_python, settings | {"mode": mode})
            stack.callback(peer.close)
            started.append((peer, VLLM, mode, setting))
    about: dict[Peer, Any] = {peer: None for peer, *_ in started}
    for peer in about:
        about[peer] = peer.wait_ready()
    entrants = [_entrant(*each, eos_ids) for each in started]
    return entrants, {engine: about[peer] for peer, engine, *_ in started}


def _hf(name: str, settings: dict[str, Any]) -> Peer:
    """Start transformers, once for all that it does."""
    command = [sys.executable, "-m", "parlay.engine.bench_hf"]
    return Peer(name, mend(name), command, _environment(settings), settings)


def _vllm(python: Path, settings: dict[str, Any]) -> Peer:
    """Start vLLM in one mode."""
    # -P: the script's folder holds modules of ours that must not hide others, no more than ours
    # on the PYTHONPATH. A link is not followed: it is what makes its environment of a Python.
    command = [str(python.absolute()), "-P", bench_vllm.__file__]
    env = {k: v for k, v in _environment(settings).items() if k != "PYTHONPATH"}
    if _wants_openmp():
        env["LD_PRELOAD"] = str(_openmp(python.absolute()))
    return Peer(VLLM, mend(VLLM), command, env, settings)


def _wants_openmp() -> bool:
    """Say whether vLLM wants Intel's OpenMP loaded first, as its manual for CPUs does on x86."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def _openmp(python: Path) -> Path:
    return python.parent.parent / "lib" / "libiomp5.so"


def _environment(settings: Mapping[str, Any]) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(settings["threads"])}


def _entrant(peer: Peer, engine: str, mode: str, setting: str, eos_ids: Sequence[int]) -> Entrant:
    def decode(load: Load) -> Answer:
        job = {
            "engine": engine,
            "mode": mode,
            "concurrency": load.concurrency,
            "prompts": load.prompts,
            "lengths": load.lengths,
            "eos_ids": list(eos_ids),
        }
        counted = reset_peak(peer.pid)
        said = peer.ask(job)
        times = zip(said["ttft_s"], said["total_s"], said["tokens"], strict=True)
        peak = peak_mb(peer.pid) if counted else None
        return Answer(said["seconds"], [Timing(*t) for t in times], peak)

    # generate speculates for one request only.
    concurrencies = (1,) if engine in _NO_BATCH else CONCURRENCIES
    return Entrant(engine, mode, dict.fromkeys(concurrencies, setting), decode)
