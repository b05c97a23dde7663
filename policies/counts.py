"""What one replica counted of accepted and rejected drafts: sums that can be added to others'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from parlay.policies.types import PROPOSERS, Array


@dataclass(slots=True, frozen=True)
class Counts:
    """Discounted sums of one writer, and the rows by which they, and others', are discounted.

    places f64 [2, channels, K]: rejections and exposures at each position. rows f64 [PROPOSERS]:
    drafts counted since the writer began, never discounted. task_id u32 [tasks]; task_counts f64
    [2, tasks, PROPOSERS]: rejections and expected ones; task_rows f64 [tasks, PROPOSERS].
    """

    places: Array
    rows: Array
    task_id: Array
    task_counts: Array
    task_rows: Array

    @classmethod
    def none(cls, channels: int, k_max: int) -> Counts:
        """Return the counts of a writer that has seen nothing."""
        return cls(
            np.zeros((2, channels, k_max)),
            np.zeros(PROPOSERS),
            np.zeros(0, np.uint32),
            np.zeros((2, 0, PROPOSERS)),
            np.zeros((0, PROPOSERS)),
        )

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, Array], channels: int, k_max: int) -> Counts:
        """Undo `arrays`; raises ValueError where one lacks, has another shape or no sum's value."""
        names = [field.name for field in fields(cls)]
        missing = set(names) - set(arrays)
        if missing:
            raise ValueError(f"counts lack {', '.join(sorted(missing))}")
        tasks = np.size(arrays["task_id"])
        shapes = [
            (2, channels, k_max),
            (PROPOSERS,),
            (tasks,),
            (2, tasks, PROPOSERS),
            (tasks, PROPOSERS),
        ]
        for name, shape in zip(names, shapes, strict=True):
            array = arrays[name]
            if np.shape(array) != shape:
                raise ValueError(f"counts: {name} has shape {np.shape(array)}, not {shape}")
            if not (np.isfinite(array).all() and (array >= 0).all()):
                raise ValueError(f"counts: {name} holds what is no sum of counts")
        if len(np.unique(arrays["task_id"])) != tasks:
            raise ValueError("counts: a task stands there twice")
        kinds = [np.uint32 if name == "task_id" else float for name in names]
        return cls(*(np.array(arrays[n], kind) for n, kind in zip(names, kinds, strict=True)))
