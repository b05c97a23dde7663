"""Which attention a cache gets, and that the kernels compile for a GPU where none is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.tiny import CPU, tiny_llama
from tests.triton_cases import INTERPRETED

from parlay.engine.attention import choice
from parlay.engine.attention.choice import choose_attention
from parlay.engine.attention.sdpa import SdpaAttention
from parlay.engine.attention.triton import TritonAttention

CUDA = torch.device("cuda")


def chosen(monkeypatch: pytest.MonkeyPatch, named: str | None, device: torch.device) -> object:
    if named is None:
        monkeypatch.delenv("PARLAY_ATTENTION", raising=False)
    else:
        monkeypatch.setenv("PARLAY_ATTENTION", named)
    return choose_attention(device)


def test_triton_serves_cuda_and_sdpa_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, None, CUDA) is TritonAttention
    assert chosen(monkeypatch, None, CPU) is SdpaAttention
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert chosen(monkeypatch, None, CUDA) is SdpaAttention


def test_the_environment_settles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, "sdpa", CUDA) is SdpaAttention
    assert chosen(monkeypatch, "triton", CUDA) is TritonAttention
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert chosen(monkeypatch, "triton", CPU) is TritonAttention


def test_what_cannot_be_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^PARLAY_ATTENTION=flash: set it to triton or sdpa, .*$"):
        chosen(monkeypatch, "flash", CPU)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"^PARLAY_ATTENTION=triton on cpu: needs CUDA, or .*$"):
        chosen(monkeypatch, "triton", CPU)
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^PARLAY_ATTENTION=triton: .* pip install .*$"):
        chosen(monkeypatch, "triton", CUDA)


@pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=0: the kernels are not for a CPU")
def test_a_models_cache_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARLAY_ATTENTION", "triton")
    assert isinstance(tiny_llama(8, 1, 0).new_cache(4, 4), TritonAttention)


@pytest.mark.slow
def test_the_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """The interpreter takes much that the compiler refuses."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    script = Path(__file__).parents[2] / "triton_compile.py"
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["bf16", "fp16", "fp32"]
