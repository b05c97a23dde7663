"""Trainings with several seeds and settings, here or on a Ray cluster; the best one stays.

Each run is scored in the engine's loop on a seed that nobody trains on: the geometric mean over
scenarios of its goodput by no speculation's. Ray (Moritz et al., OSDI'18) carries a run's task to
whichever machine has a core free and its network back; parlay has to be installed there.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parlay.policies.files import write_json
from parlay.sim.train import Training, train

_KNOCK_S = 5.0
Found = tuple[bytes, dict[str, Any]]
"""A network's file and its card."""
Done = Callable[[int, float], None]
"""Told of each run that has ended: its number and its score."""


@dataclass(slots=True, frozen=True)
class Run:
    """One training that has ended; score: goodput by no speculation's, mean over scenarios."""

    number: int
    seed: int
    settings: Mapping[str, float]
    score: float
    card: Mapping[str, Any]


def grid(task: Training, choices: Mapping[str, Sequence[float]], seeds: int) -> list[Training]:
    """Return a task for each combination of settings and each of `seeds` seeds, from task's on.

    Raises ValueError where the learner has no such setting.
    """
    names = list(choices)
    return [
        dataclasses.replace(
            task,
            seed=task.seed + seed,
            settings={**task.settings, **dict(zip(names, values, strict=True))},
        )
        for values in itertools.product(*choices.values())
        for seed in range(seeds)
    ]


def sweep(
    tasks: Sequence[Training],
    workers: int = 1,
    ray: str = "",
    rows: int | None = None,
    done: Done = lambda number, score: None,
) -> list[Run]:
    """Train all tasks, the best first in what is returned; its network is written to task.out.

    Beside it `.sweep.json` tells of all. ray: a cluster's address, "local" for one on this machine;
    without, `workers` processes. Raises ValueError where Ray is asked for and is not there.
    """
    if not tasks:
        raise ValueError("a sweep needs at least one run")
    out = tasks[0].out
    ended = _on_ray(tasks, ray, rows) if ray else _on_processes(tasks, workers, rows)
    runs: list[Run] = []
    best: tuple[float, bytes] | None = None
    for number, (network, card) in ended:
        score = score_of(card)
        runs.append(Run(number, tasks[number].seed, tasks[number].settings, score, card))
        if best is None or score > best[0]:
            best = score, network
        done(number, score)
    assert best is not None
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    part.write_bytes(best[1])
    os.replace(part, out)
    runs.sort(key=lambda run: -run.score)
    write_json(
        out.with_name(out.name + ".sweep.json"), {"runs": [dataclasses.asdict(r) for r in runs]}
    )
    return runs


def score_of(card: Mapping[str, Any]) -> float:
    """Return a network's goodput by no speculation's, the geometric mean over its scenarios."""
    ratios = [scored["learned"] / scored["none"] for scored in card["tokens_per_s"].values()]
    return float(np.exp(np.mean(np.log(ratios))))


def trained(task: Training, rows: int | None) -> Found:
    """Train in a folder of this machine's own, and return what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        own = dataclasses.replace(task, out=Path(folder) / "network.safetensors")
        card = train(own) if rows is None else train(own, rows=rows)
        return own.out.read_bytes(), card


def _on_processes(
    tasks: Sequence[Training], workers: int, rows: int | None
) -> Iterator[tuple[int, Found]]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(workers, 1), mp_context=spawn) as pool:
        futures = {pool.submit(trained, task, rows): i for i, task in enumerate(tasks)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _on_ray(
    tasks: Sequence[Training], address: str, rows: int | None
) -> Iterator[tuple[int, Found]]:
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ValueError(
            "Ray is not installed: pip install 'parlay[ray]', or leave --ray out to use processes"
        ) from None
    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        raise ValueError(f"no Ray cluster at '{address}' ({said})") from None
    try:
        remote = ray.remote(num_cpus=1)(trained)
        left = {remote.remote(task, rows): i for i, task in enumerate(tasks)}
        while left:
            ready, _ = ray.wait(list(left))
            for one in ready:
                yield left.pop(one), ray.get(one)
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raise OSError where nobody listens at HOST:PORT; Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), _KNOCK_S).close()
