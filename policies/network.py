"""A small network as a file: safetensors whose metadata says what goes in and what comes out.

The format is an 8-byte little-endian length, a JSON header and the tensors' bytes; read here
without its library, so that serving needs numpy only, and without pickle.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from parlay.policies.features import ACTION_NAMES, FEATURES, SCHEMA
from parlay.policies.lstm import Lstm
from parlay.policies.types import Array

_KEY = "parlay"
_MOST_HEADER = 1 << 20
_CLIP = 8.0
_RELU = "relu"
_LSTM = ("input_weight", "hidden_weight", "bias")
ACTIVATIONS = ("tanh", _RELU)


@dataclass(slots=True)
class Network:
    """A multilayer perceptron from raw features to one logit an action.

    weights [out, in] and biases [out] f32, layer by layer; the features are centred and scaled,
    each [features]. card: what it was trained on and how it scored. lstm: reads the features before
    the layers do, and remembers each request.
    """

    weights: list[Array]
    biases: list[Array]
    centre: Array
    scale: Array
    activation: str = "tanh"
    card: Mapping[str, Any] = field(default_factory=dict)
    lstm: Lstm | None = None

    def logits(self, features: Array) -> Array:
        """Return f32 [rows, actions] from raw features f32 [rows, features]."""
        assert self.lstm is None, "this network remembers: use recall"
        return self._head(self._scaled(features))

    def recall(self, features: Array, memory: Array) -> tuple[Array, Array]:
        """Return logits f32 [rows, actions], and the memory f32 [2, rows, size] after them."""
        assert self.lstm is not None, "this network has no memory: use logits"
        memory = self.lstm.step(self._scaled(features), memory)
        return self._head(memory[0]), memory

    def _scaled(self, features: Array) -> Array:
        x: Array = np.clip((features - self.centre) * self.scale, -_CLIP, _CLIP)
        return x

    def _head(self, x: Array) -> Array:
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = x @ weight.T + bias
            x = np.maximum(x, 0.0) if self.activation == _RELU else np.tanh(x)
        logits: Array = x @ self.weights[-1].T + self.biases[-1]
        return logits


def save_network(path: Path, network: Network) -> None:
    """Write a network; a reader finds the old file or the new one, never half of it."""
    tensors = {"features.centre": network.centre, "features.scale": network.scale}
    for i, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
        tensors[f"layer.{i}.weight"], tensors[f"layer.{i}.bias"] = weight, bias
    if network.lstm is not None:
        tensors |= {f"lstm.{name}": getattr(network.lstm, name) for name in _LSTM}
    about = {
        "schema": SCHEMA,
        "features": list(FEATURES),
        "actions": list(ACTION_NAMES),
        "activation": network.activation,
        "card": dict(network.card),
    }
    header: dict[str, Any] = {"__metadata__": {_KEY: json.dumps(about)}}
    body = b""
    for name, tensor in tensors.items():
        data = np.ascontiguousarray(tensor, "<f4").tobytes()
        place = [len(body), len(body) + len(data)]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": place}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(len(text).to_bytes(8, "little") + text + body)
    os.replace(part, path)


def load_network(path: Path) -> Network:
    """Read a network; raises ValueError in one line where it is damaged or of another schema."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the network {path}: {error.strerror or error}") from None
    try:
        header, body = _split(data)
        about = json.loads(header.pop("__metadata__")[_KEY])
        tensors = {name: _tensor(entry, body) for name, entry in header.items()}
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"the network {path} is damaged or was not made by parlay train ({said})"
        ) from None
    _check(path, about)
    return _assembled(path, about, tensors)


def _split(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(data[:8], "little")
    if not 0 < size <= min(_MOST_HEADER, len(data) - 8):
        raise ValueError(f"a header of {size} bytes in a file of {len(data)}")
    return dict(json.loads(data[8 : 8 + size])), data[8 + size :]


def _tensor(entry: Mapping[str, Any], body: bytes) -> Array:
    start, end = entry["data_offsets"]
    if entry["dtype"] != "F32" or not 0 <= start <= end <= len(body):
        raise ValueError("a tensor is not f32 or lies outside the file")
    return np.frombuffer(body[start:end], "<f4").reshape(entry["shape"])


def _check(path: Path, about: Mapping[str, Any]) -> None:
    if not isinstance(about, dict) or about.get("schema") != SCHEMA:
        found = about.get("schema") if isinstance(about, dict) else None
        raise ValueError(
            f"the network {path} is of schema {found}, this parlay reads {SCHEMA}: train it again"
        )
    for key, ours in (("features", FEATURES), ("actions", ACTION_NAMES)):
        theirs = about.get(key)
        if theirs != list(ours):
            listed = map(str, theirs) if isinstance(theirs, list) else ()
            unlike = sorted(set(ours) ^ set(listed))[:3]
            raise ValueError(
                f"the network {path} has other {key} than this parlay"
                f" ({', '.join(unlike) or 'in another order'}): train it again"
            )
    if about.get("activation") not in ACTIVATIONS or not isinstance(about.get("card"), dict):
        raise ValueError(f"the network {path} needs a card and one of {', '.join(ACTIVATIONS)}")


def _assembled(path: Path, about: Mapping[str, Any], tensors: dict[str, Array]) -> Network:
    remembers = any(name.startswith("lstm.") for name in tensors)
    count = sum(name.endswith(".weight") for name in tensors)
    lstm: Lstm | None = None
    names = {f"layer.{i}.{part}" for i in range(count) for part in ("weight", "bias")}
    names |= {"features.centre", "features.scale"}
    if remembers:
        names |= {f"lstm.{name}" for name in _LSTM}
    if set(tensors) != names or not count:
        raise ValueError(f"the network {path} lacks tensors: {sorted(names ^ set(tensors))[:3]}")
    weights = [tensors[f"layer.{i}.weight"] for i in range(count)]
    biases = [tensors[f"layer.{i}.bias"] for i in range(count)]
    centre, scale = tensors["features.centre"], tensors["features.scale"]
    if remembers:
        lstm = Lstm(*(tensors[f"lstm.{name}"] for name in _LSTM))
        if not lstm.fits(len(FEATURES)):
            raise ValueError(f"the network {path} has an LSTM whose parts do not fit")
    first = lstm.size if lstm else len(FEATURES)
    sizes = [first, *(len(bias) if bias.ndim == 1 else -1 for bias in biases)]
    shapes = list(zip(sizes[1:], sizes[:-1], strict=True))
    fits = [w.shape for w in weights] == shapes and sizes[-1] == len(ACTION_NAMES)
    if not fits or not centre.shape == scale.shape == (len(FEATURES),):
        raise ValueError(f"the network {path} has layers that do not fit: {sizes}")
    if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
        raise ValueError(f"the network {path} holds numbers that are not finite")
    return Network(weights, biases, centre, scale, str(about["activation"]), about["card"], lstm)
