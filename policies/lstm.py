"""A long short-term memory cell in numpy: what a recurrent policy remembers of each request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parlay.policies.types import Array


@dataclass(slots=True, frozen=True)
class Lstm:
    """One layer (Hochreiter and Schmidhuber 1997), its gates in the order input, forget, new, out.

    input_weight f32 [4 size, inputs], hidden_weight f32 [4 size, size], bias f32 [4 size].
    """

    input_weight: Array
    hidden_weight: Array
    bias: Array

    @property
    def size(self) -> int:
        """Return how many numbers a request's state and its output each have."""
        return int(self.hidden_weight.shape[1])

    def step(self, x: Array, memory: Array) -> Array:
        """Return the memory f32 [2, rows, size] (output, state) after inputs f32 [rows, inputs]."""
        hidden, state = memory
        gates = x @ self.input_weight.T + hidden @ self.hidden_weight.T + self.bias
        into, keep, new, out = np.split(gates, 4, axis=1)
        state = _share(keep) * state + _share(into) * np.tanh(new)
        return np.stack([_share(out) * np.tanh(state), state])

    def fits(self, inputs: int) -> bool:
        """Say whether the shapes belong together, for so many inputs."""
        if self.hidden_weight.ndim != 2:
            return False
        four = 4 * self.size
        shapes = (self.input_weight.shape, self.hidden_weight.shape, self.bias.shape)
        return shapes == ((four, inputs), (four, self.size), (four,))


def _share(x: Array) -> Array:
    """Return the logistic function, which no number makes overflow."""
    found: Array = 0.5 * (1.0 + np.tanh(0.5 * x))
    return found
