"""One number for each request, for baselines that move it by what the last draft did."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from parlay.policies.types import Array, BatchView, StepOutcome

_FORGET_STEPS = 512
_SWEEP_STEPS = 64


class PerRequest:
    """Numbers by request id; those not seen for some hundred steps are forgotten."""

    def __init__(self) -> None:
        self._value: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        self._steps = 0

    def of(self, view: BatchView, start: float) -> Array:
        """Return f64 [rows], `start` for requests that have none; one without output is new."""
        for new in view.request_id[view.output_tokens == 0].tolist():
            self._value.pop(new, None)
        return np.array([self._value.get(r, start) for r in view.request_id.tolist()], float)

    def put(self, request_id: int, value: float) -> None:
        """Set a request's number."""
        self._value[request_id] = value

    def get(self, request_id: int, start: float) -> float:
        """Return a request's number, `start` where it has none."""
        return self._value.get(request_id, start)

    def saw(self, outcome: StepOutcome) -> None:
        """Note who ran in a step, once a step."""
        self._steps += 1
        self._seen.update(dict.fromkeys(outcome.request_id.tolist(), self._steps))
        if self._steps % _SWEEP_STEPS == 0:
            gone = [r for r, at in self._seen.items() if self._steps - at > _FORGET_STEPS]
            for request_id in gone:
                del self._seen[request_id]
                self._value.pop(request_id, None)

    def state(self) -> dict[str, Array]:
        """Return every number."""
        return {
            "request_id": np.fromiter(self._value, np.uint64, len(self._value)),
            "value": np.fromiter(self._value.values(), float, len(self._value)),
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """Take a state from `state()`; raises ValueError where it does not fit."""
        if not {"request_id", "value"} <= set(state) or len(state["request_id"]) != len(
            state["value"]
        ):
            raise ValueError("the state is incomplete or of another policy")
        ids, values = state["request_id"].tolist(), state["value"].tolist()
        self._value = dict(zip(ids, values, strict=True))
        self._seen = dict.fromkeys(self._value, self._steps)
