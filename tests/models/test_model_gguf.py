"""GGUF files written from the tiny checkpoints as llama.cpp's converter would write them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny_checkpoints import DATA, TOLERANCE, assert_golden, golden, read

import models

NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row i of a head's first half beside row i of its second half: what the rotation of llama.cpp wants."""
    per_head = np.split(rows, heads)
    return np.concatenate([np.stack(np.split(head, 2), axis=1).reshape(head.shape) for head in per_head])


def llama3_divisors(rope: Mapping[str, float], head_dim: int) -> np.ndarray:
    """The frequencies' divisors, spelled out case by case."""
    out = []
    for i in range(head_dim // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * i / head_dim)
        ratio = rope["original_max_position_embeddings"] / wavelength
        if ratio > rope["high_freq_factor"]:
            out.append(1.0)
        elif ratio < rope["low_freq_factor"]:
            out.append(rope["factor"])
        else:
            blend = (ratio - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            out.append(1 / ((1 - blend) / rope["factor"] + blend))
    return np.asarray(out, np.float32)


def write_gguf(
    path: Path,
    folder: str,
    *,
    extra: Mapping[str, Any] | None = None,
    without: str | None = None,
    quantize: gguf.GGMLQuantizationType | None = None,
    architecture: str | None = None,
    rope_factors: bool = True,
) -> Path:
    """One .gguf of a tiny checkpoint; `extra` metadata lies below the architecture's prefix."""
    config, tensors = read(folder)
    kind = architecture or config["model_type"]
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    for key, value in (extra or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{kind}.{key}", value)
    if config["rope_parameters"]["rope_type"] == "llama3" and rope_factors:
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config["rope_parameters"], head_dim))
    for name, value in tensors.items():
        if config["model_type"] == "llama":
            heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
            for part, count in heads.items():
                if part in name:
                    value = interleaved(value, count)
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if name == without:
            continue
        if quantize is not None and value.ndim == 2:
            writer.add_tensor(name, gguf.quantize(value, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("folder", ["llama31_tiny", "qwen2_tiny", "qwen3_tiny"])
def test_gguf_gives_the_logits_of_transformers(folder: str, tmp_path) -> None:
    model = models.load(write_gguf(tmp_path / "m.gguf", folder))
    assert_golden(model, folder)
    assert model.config.tie_word_embeddings == (folder != "llama31_tiny")


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16])
def test_quantized_tensors_are_dequantized(kind, tmp_path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama31_tiny", quantize=kind)
    model, want = models.load(path), golden("llama31_tiny")
    error = np.asarray(model.logits(want["tokens"]))[:, want["logit_positions"]] - want["logits"]
    assert np.sqrt((error**2).mean()) < 0.02 * want["logits"].std()


def test_linear_scaling_in_metadata(tmp_path) -> None:
    extra = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    model = models.load(write_gguf(tmp_path / "m.gguf", "qwen2_tiny", extra=extra))
    plain = models.load(DATA / "qwen2_tiny").config.rope.inv_freq
    np.testing.assert_allclose(model.config.rope.inv_freq, np.asarray(plain) / 4, rtol=1e-6)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_permutation_is_of_llama_only(scan_layers: bool, tmp_path) -> None:
    model = models.load(write_gguf(tmp_path / "m.gguf", "llama31_tiny", rope_factors=False), scan_layers=scan_layers)
    want = golden("llama31_tiny")
    # Without the factors' tensor the model is another one, and the difference must show.
    error = np.asarray(model.logits(want["tokens"]))[:, want["logit_positions"]] - want["logits"]
    assert np.abs(error).max() > 10 * TOLERANCE * want["logits"].std()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gemma3"}, "'gemma3' is not supported; supported are llama, qwen2, qwen3"),
        ({"extra": {"expert_count": 8.0}}, r"expert_count' = 8\.0"),
        ({"extra": {"attn_logit_softcapping": 50.0}}, "attn_logit_softcapping"),
        ({"extra": {"rope.scaling.type": "yarn"}}, r"rope\.scaling\.type = 'yarn'"),
        ({"extra": {"rope.scaling.type": "linear"}}, "factor"),
        ({"extra": {"rope.dimension_count": 16.0}}, "dimension_count"),
        ({"without": "blk.1.ffn_up.weight"}, r"blk\.1\.ffn_up\.weight is missing"),
        ({"without": "token_embd.weight"}, r"token_embd\.weight is missing"),
    ],
)
def test_what_is_not_supported_or_missing_is_named(options, message: str, tmp_path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen2_tiny", **options)
    with pytest.raises(ValueError, match=message) as error:
        models.load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.004, 0.02, 0.5, 0.999])
def test_truncated_file_is_one_line_that_names_it(share: float, tmp_path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama31_tiny")
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"m\.gguf: is not a whole GGUF file .* copy the file again") as error:
        models.load(path)
    assert "\n" not in str(error.value)


def test_a_file_of_another_kind_is_refused(tmp_path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"this is not a model" * 100)
    with pytest.raises(ValueError, match="is not a whole GGUF file"):
        models.load(tmp_path / "m.gguf")


def test_a_file_without_tokenizer_runs_and_says_so_when_asked(tmp_path) -> None:
    model = models.load(write_gguf(tmp_path / "m.gguf", "qwen2_tiny"))
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.model = None"):
        _ = model.tokenizer
