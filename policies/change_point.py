"""Has a task begun to accept otherwise? Page's CUSUM on what the hazard model did not foretell.

A draft's rejections less those foretold, each place's chance times the frailty known before it, are
a martingale's steps while the model holds, whatever chose k. By task and proposer they are summed
until their variance makes a block, so that a block is about a standard normal deviate however many
requests run, and two one-sided CUSUMs of the blocks (Page 1954) ring for a shift of either sign.
What the model is always wrong by, and by how much blocks scatter beyond chance, is learned slowly
and taken out first: a steady process that the model says badly is steady all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from parlay.policies.acceptance_rows import TASKS
from parlay.policies.types import PROPOSERS, Array

_BLOCK_VARIANCE = 1.0
_CLIP = 3.0
_DRIFT, _ALARM = 0.5, 12.0
"""In standard deviations of a block. For normal blocks one false alarm in half a million of each
task and proposer (Siegmund 1985, both sides); a shift of two is found in eight blocks."""
_SETTLED_BLOCKS = 24
_MEMORY_BLOCKS = 200
_LEAST_SCATTER = 0.5
_FIELDS = ("excess", "variance", "blocks", "bias", "scatter", "up", "down")


class ChangePoints:
    """Sums and CUSUMs f64 [TASKS, PROPOSERS], tasks by their rows of the acceptance tables."""

    def __init__(self) -> None:
        self.found_in_all = 0
        self._at = {name: np.zeros((TASKS, PROPOSERS)) for name in _FIELDS}
        self._at["scatter"][:] = 1.0
        self._noted = False

    def note(
        self,
        task: Array | int,
        proposer: Array | int,
        excess: Array | float,
        variance: Array | float,
    ) -> None:
        """Hear of drafts, [n] or one: rejections beyond those foretold, and their variance."""
        self._noted = True
        at: Any = (task, proposer)
        if isinstance(task, int):
            self._at["excess"][at] += excess
            self._at["variance"][at] += variance
            return
        np.add.at(self._at["excess"], at, excess)
        np.add.at(self._at["variance"], at, variance)

    def found(self) -> list[tuple[int, int]]:
        """Return (task, proposer) of which the blocks that are full now ring; they start anew."""
        if not self._noted:
            return []
        at, self._noted = self._at, False
        full = (at["variance"] >= _BLOCK_VARIANCE).nonzero()
        if not len(full[0]):
            return []
        z = at["excess"][full] / np.sqrt(at["variance"][full])
        z = np.minimum(np.maximum(z, -_CLIP), _CLIP)
        at["excess"][full] = at["variance"][full] = 0.0
        ring = self._sum(full, z)
        rang = [(int(t), int(p)) for t, p, r in zip(*full, ring, strict=True) if r]
        for cell in rang:
            for name in _FIELDS:
                at[name][cell] = 0.0
            at["scatter"][cell] = 1.0
        self.found_in_all += len(rang)
        return rang

    def _sum(self, full: tuple[Array, ...], z: Array) -> Array:
        """Add blocks z [n] to their CUSUMs; return bool [n], which ring."""
        at = self._at
        blocks = at["blocks"][full] + 1.0
        off = z - at["bias"][full]
        y = off / np.sqrt(at["scatter"][full])
        settled = blocks > _SETTLED_BLOCKS
        up = np.where(settled, np.maximum(at["up"][full] + y - _DRIFT, 0.0), 0.0)
        down = np.where(settled, np.maximum(at["down"][full] - y - _DRIFT, 0.0), 0.0)
        # As if some blocks of an unbiased model had been seen before.
        pace = 1.0 / np.minimum(blocks + _SETTLED_BLOCKS, _MEMORY_BLOCKS)
        scatter = at["scatter"][full]
        scatter += pace * (np.minimum(off**2, _CLIP**2) - scatter)
        at["blocks"][full], at["up"][full], at["down"][full] = blocks, up, down
        at["bias"][full] += pace * off
        at["scatter"][full] = np.maximum(scatter, _LEAST_SCATTER)
        ring: Array = np.maximum(up, down) > _ALARM
        return ring

    def state(self, rows: Array) -> dict[str, Array]:
        """Return everything that later alarms depend on; rows: those of tasks, in their order."""
        return {
            "found": np.asarray(self.found_in_all),
            "tasks": np.stack([self._at[name][rows] for name in _FIELDS]),
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`, whose tasks have the rows 0, 1, ... now.

        Raises ValueError where it does not fit.
        """
        tasks = np.asarray(state.get("tasks", 0))
        if "found" not in state or tasks.ndim != 3 or len(tasks) != len(_FIELDS):
            raise ValueError("the change-points' state is incomplete or of another version")
        self.__dict__.update(type(self)().__dict__)
        self.found_in_all = int(state["found"])
        for name, values in zip(_FIELDS, tasks, strict=True):
            self._at[name][: len(values)] = values
