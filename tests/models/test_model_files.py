"""Hugging Face directories as publishers lay them out, and what is said about damaged ones."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_checkpoints import DATA, FOLDERS, TOLERANCE, assert_golden, golden, old_layout, oracle_logits, read, write

import models


@pytest.mark.parametrize("folder", FOLDERS)
def test_sharded_checkpoint_in_the_layout_of_2024_loads(folder: str, tmp_path) -> None:
    config, tensors = read(folder)
    model = models.load(write(tmp_path / "m", old_layout(config), tensors, shards=3))
    assert model.config == models.load(DATA / folder).config
    assert_golden(model, folder)


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16])
def test_bfloat16_and_float16_files_load_to_exactly_the_stored_numbers(stored, tmp_path) -> None:
    config, tensors = read("qwen3_tiny")
    short = {name: value.astype(stored) for name, value in tensors.items()}
    wide = {name: value.astype(np.float32) for name, value in short.items()}
    tokens = golden("qwen3_tiny")["tokens"][:, :20]
    a = models.load(write(tmp_path / "short", config, short, shards=2)).logits(tokens)
    b = models.load(write(tmp_path / "wide", config, wide)).logits(tokens)
    np.testing.assert_array_equal(a, b)


def test_head_dim_may_be_absent_where_it_is_hidden_over_heads(tmp_path) -> None:
    config, tensors = read("llama31_tiny")
    del config["head_dim"]
    assert_golden(models.load(write(tmp_path / "m", config, tensors)), "llama31_tiny")


def test_split_phi3_weights_load_like_fused_ones(tmp_path) -> None:
    config, tensors = read("phi3_tiny")
    split = {}
    for name, value in tensors.items():
        if "qkv_proj" in name:
            for part, rows in zip("qkv", np.split(value, [128, 192]), strict=True):
                split[name.replace("qkv", part)] = rows
        elif "gate_up" in name:
            for part, rows in zip(("gate", "up"), np.split(value, 2), strict=True):
                split[name.replace("gate_up", part)] = rows
        else:
            split[name] = value
    assert_golden(models.load(write(tmp_path / "m", config, split)), "phi3_tiny")


def test_head_stored_beside_a_tied_embedding_must_equal_it(tmp_path) -> None:
    config, tensors = read("qwen2_tiny")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    assert_golden(models.load(write(tmp_path / "same", config, tensors)), "qwen2_tiny")
    tensors["lm_head.weight"][3, 4] += 1
    with pytest.raises(ValueError, match=r"lm_head\.weight .* ties them"):
        models.load(write(tmp_path / "other", config, tensors))


def test_rotary_buffers_of_old_llama_checkpoints_are_ignored(tmp_path) -> None:
    config, tensors = read("llama31_tiny")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)
    assert_golden(models.load(write(tmp_path / "m", config, tensors)), "llama31_tiny")


@pytest.mark.parametrize("scan_layers", [False, True])
def test_attention_and_mlp_biases_of_llama(tmp_path, scan_layers: bool) -> None:
    config, tensors = read("llama31_tiny")
    config |= {"attention_bias": True, "mlp_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    rng = np.random.default_rng(0)
    for name in [n for n in tensors if "_proj.weight" in n]:
        bias = rng.standard_normal(tensors[name].shape[0]).astype(np.float32)
        tensors[name.replace("weight", "bias")] = bias
    tokens = golden("llama31_tiny")["tokens"][:, :24]
    got = models.load(write(tmp_path / "m", config, tensors), scan_layers=scan_layers).logits(tokens)
    want = oracle_logits(config, tensors, tokens, 1e4 ** (-np.arange(16) / 16))
    assert np.abs(got - want).max() < TOLERANCE * want.std()


def test_qwen3_without_head_dim_means_128(tmp_path) -> None:
    config, tensors = read("qwen3_tiny")
    del config["head_dim"]
    with pytest.raises(ValueError, match=r"shape .* asks for"):  # hidden / heads would be 16, the file has 32
        models.load(write(tmp_path / "m", config, tensors))


def damage(path, what: str) -> None:
    """One defect in a checkpoint of two shards."""
    first = path / "model-00001-of-00002.safetensors"
    if what == "no config":
        (path / "config.json").unlink()
    elif what == "config is not JSON":
        (path / "config.json").write_text("{")
    elif what == "config is a list":
        (path / "config.json").write_text("[]")
    elif what == "missing shard":
        first.unlink()
    elif what == "truncated shard":
        first.write_bytes(first.read_bytes()[:-100])
    elif what == "truncated header":
        first.write_bytes(first.read_bytes()[:20])
    elif what == "empty shard":
        first.write_bytes(b"")
    elif what == "not safetensors":
        first.write_bytes(b"version https://git-lfs.example/spec/v1\n" * 4)
    elif what == "index is not JSON":
        (path / "model.safetensors.index.json").write_text("nope")
    elif what == "index without a map":
        (path / "model.safetensors.index.json").write_text("{}")
    elif what == "index with an empty map":
        (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    elif what == "index outside the directory":
        (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    elif what == "index promises more":
        index = json.loads((path / "model.safetensors.index.json").read_text())
        index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = first.name
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    elif what == "no weights":
        for file in path.glob("model*"):
            file.unlink()
        (path / "pytorch_model.bin").write_bytes(b"x")


@pytest.mark.parametrize(
    ("what", "kind", "named"),
    [
        ("no config", FileNotFoundError, "config.json"),
        ("config is not JSON", ValueError, "config.json"),
        ("config is a list", ValueError, "JSON object"),
        ("missing shard", FileNotFoundError, "model-00001-of-00002.safetensors"),
        ("truncated shard", ValueError, "model-00001-of-00002.safetensors"),
        ("truncated header", ValueError, "model-00001-of-00002.safetensors"),
        ("empty shard", ValueError, "model-00001-of-00002.safetensors"),
        ("not safetensors", ValueError, "model-00001-of-00002.safetensors"),
        ("index is not JSON", ValueError, "index.json"),
        ("index without a map", ValueError, "weight_map"),
        ("index with an empty map", ValueError, "empty"),
        ("index outside the directory", ValueError, "outside"),
        ("index promises more", ValueError, r"layers\.9\.mlp\.up_proj"),
        ("no weights", FileNotFoundError, r"pytorch_model\.bin"),
    ],
)
def test_damaged_directory_is_one_line_that_names_the_file(what: str, kind, named: str, tmp_path) -> None:
    path = write(tmp_path / "m", *read("qwen2_tiny"), shards=2)
    damage(path, what)
    with pytest.raises(kind, match=named) as error:
        models.load(path)
    assert "\n" not in str(error.value)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path) -> None:
    config, tensors = read("qwen2_tiny")
    name = "model.layers.1.mlp.up_proj.weight"
    without = {n: v for n, v in tensors.items() if n != name}
    with pytest.raises(ValueError, match=r"up_proj\.weight is missing"):
        models.load(write(tmp_path / "missing", config, without))
    bias = {"model.layers.0.self_attn.o_proj.bias": np.zeros(64, np.float32)}
    with pytest.raises(ValueError, match=r"o_proj\.bias has no place"):
        models.load(write(tmp_path / "extra", config, tensors | bias))
    with pytest.raises(ValueError, match=r"up_proj\.weight has shape \[64, 128\].* asks for \[128, 64\]"):
        models.load(write(tmp_path / "shape", config, tensors | {name: tensors[name].T}))
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing"):
        models.load(write(tmp_path / "untied", config | {"tie_word_embeddings": False}, tensors))
    fused, fused_tensors = read("phi3_tiny")
    fused_tensors["model.layers.0.self_attn.qkv_proj.weight"] = np.zeros((255, 128), np.float32)
    with pytest.raises(ValueError, match=r"qkv_proj\.weight has shape \[255, 128\].* asks for \[256, 128\]"):
        models.load(write(tmp_path / "fused", fused, fused_tensors))


def test_a_tensor_in_two_shards_is_refused(tmp_path) -> None:
    path = write(tmp_path / "m", *read("qwen2_tiny"), shards=2)
    second = path / "model-00002-of-00002.safetensors"
    _, tensors = read("qwen2_tiny")
    save_file(tensors, second)
    with pytest.raises(ValueError, match="is also in"):
        models.load(path)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.int8, np.float64])
def test_unsupported_tensor_dtype_is_named(dtype, tmp_path) -> None:
    config, tensors = read("qwen2_tiny")
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(ValueError, match=r"down_proj\.weight has dtype .* supported are F32, F16, BF16"):
        models.load(write(tmp_path / "m", config, tensors | {name: tensors[name].astype(dtype)}))


def test_weights_beyond_float16_are_refused_in_float16(tmp_path) -> None:
    config, tensors = read("qwen2_tiny")
    tensors["model.layers.0.mlp.down_proj.weight"] = tensors["model.layers.0.mlp.down_proj.weight"] + np.float32(1e5)
    path = write(tmp_path / "m", config, tensors)
    with pytest.raises(ValueError, match=r"down_proj\.weight .* 65504"):
        models.load(path, dtype="float16")
    models.load(path, dtype="bfloat16")


def test_load_arguments_are_checked(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"dtype = 'int4' .* float32, bfloat16, float16"):
        models.load(DATA / "qwen2_tiny", dtype="int4")
    with pytest.raises(FileNotFoundError, match="smollm2-135m"):
        models.load("no-such-model")
    with pytest.raises(ValueError, match="context = '8'"):
        models.load(DATA / "qwen2_tiny", context="8")
    with pytest.raises(ValueError, match="context = 9999"):
        models.load(DATA / "qwen2_tiny", context=9999)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"weights\.bin is neither"):
        models.load(tmp_path / "weights.bin")


def test_a_directory_without_tokenizer_runs_and_says_so_when_asked(tmp_path) -> None:
    shutil.copytree(DATA / "qwen2_tiny", tmp_path / "m")
    model = models.load(tmp_path / "m")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        _ = model.tokenizer
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        _ = models.load(tmp_path / "m").tokenizer
