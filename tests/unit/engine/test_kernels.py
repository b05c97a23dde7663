"""The CPU kernels against the torch model, and their promise that a row never sees its batch."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.tiny import CPU, tiny_config
from torch import Tensor

from parlay.engine.kernels import build
from parlay.engine.kernels.native import NativeLlama, fits
from parlay.engine.model_config import ModelConfig
from parlay.engine.models import Llama
from parlay.engine.runner import Model, Runner, load_model
from parlay.engine.spans import Spans

VOCAB = 77  # ends within a panel
TABLES = [[3, 9, 1, 7, 20], [2, 5, 4, 11, 30], [8, 6, 10, 12, 40]]
SHAPES = {
    "share 3": (6, 2, 64),
    "share 5": (5, 1, 64),
    "wide heads": (6, 2, 128),
    "narrow": (4, 4, 32),
}

pytestmark = pytest.mark.skipif(build.load() is None, reason="needs AVX512_BF16 and a C compiler")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def _fresh_build() -> Iterator[None]:
    """Load the kernels anew here, and once more afterwards."""
    build.load.cache_clear()
    yield
    build.load.cache_clear()


def config_of(shape: str) -> ModelConfig:
    heads, kv_heads, head_dim = SHAPES[shape]
    return dataclasses.replace(
        tiny_config(VOCAB, 3),
        hidden=96, ffn=160, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
    )  # fmt: skip


def weights_of(config: ModelConfig) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(5)
    weights = {n: torch.randn(s, generator=rng) for n, s in config.tensor_shapes().items()}
    return {n: 1 + 0.1 * w if w.dim() == 1 else 0.2 * w for n, w in weights.items()}


def logits_of(
    model: Model, ids: Tensor, starts: list[int], ends: list[int], runner: Runner
) -> list[Tensor]:
    lengths = [e - s for s, e in zip(starts, ends, strict=True)]
    fed = [ids[r, s:e].tolist() for r, (s, e) in enumerate(zip(starts, ends, strict=True))]
    hidden = runner.read(fed, Spans(TABLES[: len(starts)], starts, lengths))
    return list(model.logits(hidden).split(lengths))


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_as_near_to_float32_as_torchs_in_bfloat16(shape: str) -> None:
    config = config_of(shape)
    weights = weights_of(config)
    embedding = weights["model.embed_tokens.weight"]
    rounded = {name: w.bfloat16().float() for name, w in weights.items()}
    exact = Llama(config, rounded, embedding.bfloat16().float(), torch.float32, CPU)
    rough = Llama(config, weights, embedding, torch.bfloat16, CPU)
    ours = NativeLlama(config, weights, embedding)
    runners = [Runner(m, 64, 16, taps=(1, 3)) for m in (exact, rough, ours)]
    ids = torch.randint(0, VOCAB, (3, 75), generator=torch.Generator().manual_seed(1))
    # A prompt, then ragged steps across block edges, then drafts of several lengths.
    for starts, ends in (
        ([0, 0, 0], [40, 1, 63]),
        ([40, 1, 63], [41, 18, 64]),
        ([41, 18, 64], [50, 19, 75]),
    ):
        found = [torch.cat(logits_of(r.model, ids, starts, ends, r)).float() for r in runners]
        error, allowed = ((f - found[0]).square().mean().sqrt() for f in (found[2], found[1]))
        assert error <= 1.1 * allowed
        spans = Spans(TABLES, ends, [1, 1, 1])
        kept = [r.states_before(spans, ends).float() for r in runners]
        assert (kept[2] - kept[0]).abs().max() < 0.05 * kept[0].abs().max()


@torch.inference_mode()
def test_a_row_gets_the_same_bits_alone_in_a_batch_and_among_drafts() -> None:
    config = config_of("share 3")
    weights = weights_of(config)
    model = NativeLlama(config, weights, weights["model.embed_tokens.weight"])
    ids = torch.randint(0, VOCAB, (3, 60), generator=torch.Generator().manual_seed(2))
    together, alone = Runner(model, 64, 16), Runner(model, 64, 16)
    logits_of(model, ids, [0, 0, 0], [33, 20, 7], together)
    drafted = logits_of(model, ids, [33, 20, 7], [60, 29, 8], together)
    logits_of(model, ids[1:2], [0], [20], alone)
    for at in range(20, 29):
        hidden = alone.read([[int(ids[1, at])]], Spans([TABLES[0]], [at], [1]))
        torch.testing.assert_close(model.logits(hidden)[0], drafted[1][at - 20], atol=0, rtol=0)


@torch.inference_mode()
def test_rejected_tokens_leave_no_trace_in_the_cache() -> None:
    config = config_of("share 3")
    weights = weights_of(config)
    model = NativeLlama(config, weights, weights["model.embed_tokens.weight"])
    ids = torch.randint(0, VOCAB, (1, 40), generator=torch.Generator().manual_seed(2))
    clean, dirty = Runner(model, 64, 16), Runner(model, 64, 16)
    for runner in (clean, dirty):
        logits_of(model, ids, [0], [20], runner)
    logits_of(model, (ids + 7) % VOCAB, [20], [37], dirty)
    expected, got = (logits_of(model, ids, [20], [25], r)[0] for r in (clean, dirty))
    torch.testing.assert_close(got, expected, atol=0, rtol=0)


@torch.inference_mode()
def test_a_draft_reads_narrow_embeddings_and_states_as_torch_does() -> None:
    config = dataclasses.replace(config_of("share 3"), state_layers=(1, 3))
    weights = weights_of(config) | {
        "in_proj.weight": torch.randn(96, 10) * 0.3,
        "state_proj.weight": torch.randn(96, 2 * 32) * 0.3,
    }
    embedding, states = torch.randn(VOCAB, 10), torch.randn(4, 64).bfloat16()
    ids = torch.tensor([1, 5, 9, 76])
    models = (
        Llama(config, weights, embedding, torch.bfloat16, CPU),
        NativeLlama(config, weights, embedding),
    )
    for given in (None, states):
        theirs, ours = (m.embed(ids, given).float() for m in models)
        torch.testing.assert_close(ours, theirs, atol=0.03, rtol=0.02)


@pytest.mark.usefixtures("_fresh_build")
def test_what_does_not_fit_runs_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("share 3")
    weights = weights_of(config)
    embedding = weights["model.embed_tokens.weight"]
    assert fits(config, torch.bfloat16, CPU)
    assert isinstance(load_model(config, weights, embedding, torch.bfloat16, CPU, 16), NativeLlama)
    for dtype, block_tokens in ((torch.float32, 16), (torch.bfloat16, 8)):
        model = load_model(config, weights, embedding, dtype, CPU, block_tokens)
        assert isinstance(model, Llama)
    assert not fits(dataclasses.replace(config, hidden=100), torch.bfloat16, CPU)
    monkeypatch.setenv(build.OFF, "off")
    build.load.cache_clear()
    assert not fits(config, torch.bfloat16, CPU)


@pytest.mark.usefixtures("_fresh_build")
def test_a_compiler_that_fails_leaves_torch_and_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "/bin/false")
    monkeypatch.setenv("PARLAY_CACHE", str(tmp_path))
    assert build.load() is None
    assert "kernels not compiled" in caplog.text


@pytest.mark.usefixtures("_fresh_build")
def test_a_spoilt_library_in_the_cache_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    real = shutil.which("cc") or shutil.which("gcc")
    assert real is not None
    spare = tmp_path / "spare.so"
    subprocess.run([real, "-O0", *build.FLAGS[1:], build.SOURCE, "-o", spare, "-lm"], check=True)
    whole = spare.read_bytes()
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp "$SPARE" "$2"\n')
    compiler.chmod(0o755)
    library = tmp_path
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("SPARE", str(spare))
    monkeypatch.setenv("PARLAY_CACHE", str(tmp_path))
    for spoil in (None, b"", whole[:9000], whole[:-1], Path("/proc/self/exe").read_bytes()):
        if spoil is not None:
            library.unlink()  # what is mapped must not be cut
            library.write_bytes(spoil)
        build.load.cache_clear()
        assert build.load() is not None
        (library,) = tmp_path.glob("kernels/llama-*.so")
        assert library.read_bytes() == whole
    # As it is now it is taken, and not without its checksum.
    monkeypatch.setenv("SPARE", "/nowhere")
    build.load.cache_clear()
    assert build.load() is not None
    assert not caplog.text
    library.with_suffix(".so.sha256").unlink()
    build.load.cache_clear()
    assert build.load() is None
    assert "kernels not compiled" in caplog.text


@pytest.mark.usefixtures("_fresh_build")
def test_a_library_without_our_functions_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "other.c"
    source.write_text("void parlay_pack(void) {}\n")
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setenv("PARLAY_CACHE", str(tmp_path))
    assert build.load() is None
    assert "lacks parlay_linear" in caplog.text
    assert not list(tmp_path.glob("kernels/*"))
