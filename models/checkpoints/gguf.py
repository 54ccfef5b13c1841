"""GGUF files: metadata to `ModelConfig`, any block format dequantized to float32, the tokenizer inside.

llama.cpp rotates neighbouring channels, Transformers rotates channel i with i + d/2; its converter therefore stores
the rows of `attn_q` and `attn_k` of the architecture `llama` interleaved within each head. `_half_split` puts them
back. The qwen architectures are stored as published.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

from models.checkpoints import check_tensors, weight_shapes
from models.config import ModelConfig, parse_config
from models.rope import base_frequencies
from models.tokenizer import Tokenizer, gguf_tokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"  # llama3's scaling as divisors of the frequencies

# Metadata below `<architecture>.` that is read; any other key that is not 0, false or empty is refused.
_READ = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
}  # fmt: skip


class GGUFCheckpoint:
    """An opened .gguf file."""

    def __init__(self, path: Path, *, context: int | None = None) -> None:
        self.files: tuple[Path, ...] = (path,)
        try:
            reader = GGUFReader(path)
            metadata = dict(reader.fields)
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
            architecture = metadata["general.architecture"].contents() if "general.architecture" in metadata else None
        except Exception as error:  # the parser fails in whatever way the bytes lead it to
            detail = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"{path}: is not a whole GGUF file ({detail}); copy the file again") from None
        self._path, self._metadata = path, metadata
        if (split := metadata.get("split.count")) is not None and split.contents() > 1:
            raise ValueError(
                f"{path}: is one of {split.contents()} parts; merge them into one file (gguf-split --merge)"
            )
        if architecture not in ARCHITECTURES:
            raise ValueError(
                f"{path}: GGUF architecture {architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
            )
        self.config = self._config(architecture, context)
        expected = {_published(name): shape for name, shape in weight_shapes(self.config).items()}
        found = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}
        found.pop(_ROPE_FACTORS, None)
        check_tensors(expected, found, where=str(path), config="the metadata")

    def tensor(self, name: str) -> np.ndarray:
        """The named tensor, float32, rows in Hugging Face's order."""
        values = self._dequantized(_published(name))
        if self.config.architecture == "llama":
            if ".q_proj." in name:
                return _half_split(values, self.config.num_attention_heads)
            if ".k_proj." in name:
                return _half_split(values, self.config.num_key_value_heads)
        return values

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the metadata."""
        fields = {k: f for k, f in self._metadata.items() if k.startswith("tokenizer.")}
        return gguf_tokenizer({key: field.contents() for key, field in fields.items()}, where=str(self._path))

    def _dequantized(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        try:
            # asarray: slicing a memory map row by row costs more than the arithmetic
            values = dequantize(np.asarray(tensor.data), tensor.tensor_type)
        except NotImplementedError:
            raise ValueError(
                f"{self._path}: tensor {name} has type {tensor.tensor_type.name}, which is not supported; "
                "convert the file to Q8_0, F16 or F32"
            ) from None
        return np.asarray(values, np.float32).reshape([int(n) for n in reversed(tensor.shape)])

    def _config(self, architecture: str, context: int | None) -> ModelConfig:
        where, prefix = str(self._path), architecture + "."
        meta: dict[str, Any] = {}
        for name, field in self._metadata.items():
            if name.startswith(prefix):
                key, value = name.removeprefix(prefix), field.contents()
                if key not in _READ and value not in (None, 0, False, "", []):
                    raise ValueError(
                        f"{where}: metadata key {name!r} = {value!r} may change the mathematics and is not supported; "
                        "only files without it are"
                    )
                meta[key] = value
        heads, width = meta.get("attention.head_count"), meta.get("embedding_length")
        head_dim = meta.get("attention.key_length")
        if meta.get("attention.value_length", head_dim) != head_dim:
            raise ValueError(
                f"{where}: attention.key_length = {head_dim!r} and attention.value_length = "
                f"{meta['attention.value_length']!r} differ; supported is equal"
            )
        if head_dim is None and isinstance(heads, int) and isinstance(width, int) and heads > 0:
            head_dim = width // heads
        rotary_dim = meta.get("rope.dimension_count", head_dim)
        if rotary_dim != head_dim:
            raise ValueError(
                f"{where}: rope.dimension_count = {rotary_dim!r} with head_dim {head_dim!r} is not supported in GGUF; "
                "supported is equal"
            )
        tokens = self._metadata.get("tokenizer.ggml.tokens")
        vocab = meta.get("vocab_size", len(tokens.data) if tokens is not None else None)
        if "token_embd.weight" in self._tensors:  # vocab_size counts without padding rows in some converters
            vocab = int(self._tensors["token_embd.weight"].shape[-1])
        config = parse_config(
            {
                "model_type": architecture,
                "hidden_act": "silu",  # the architectures above have no other
                "vocab_size": vocab,
                "hidden_size": width,
                "intermediate_size": meta.get("feed_forward_length"),
                "num_hidden_layers": meta.get("block_count"),
                "num_attention_heads": heads,
                "num_key_value_heads": meta.get("attention.head_count_kv", heads),
                "head_dim": head_dim,
                "rms_norm_eps": meta.get("attention.layer_norm_rms_epsilon"),
                "max_position_embeddings": meta.get("context_length"),
                "rope_theta": meta.get("rope.freq_base"),
                "rope_scaling": _rope_scaling(meta, where),
                "tie_word_embeddings": "output.weight" not in self._tensors,
                "attention_bias": "blk.0.attn_q.bias" in self._tensors,
                "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
            },
            where=where,
            context=context,
        )
        config = replace(config, o_bias="blk.0.attn_output.bias" in self._tensors)
        return self._with_rope_factors(config, meta, where)

    def _with_rope_factors(self, config: ModelConfig, meta: Mapping[str, Any], where: str) -> ModelConfig:
        if _ROPE_FACTORS not in self._tensors:
            return config
        if meta.get("rope.scaling.type") not in (None, "none"):
            raise ValueError(f"{where}: {_ROPE_FACTORS} beside rope.scaling.type is not supported; supported is one")
        factors = self._dequantized(_ROPE_FACTORS)
        if factors.shape != (config.head_dim // 2,) or not (np.isfinite(factors).all() and (factors > 0).all()):
            raise ValueError(
                f"{where}: tensor {_ROPE_FACTORS} must hold {config.head_dim // 2} finite positive numbers, got shape "
                f"{list(factors.shape)}"
            )
        theta = meta.get("rope.freq_base", 10000.0)
        scaled = (base_frequencies(theta, config.head_dim) / factors).astype(np.float32)
        return replace(config, rope=replace(config.rope, inv_freq=tuple(float(f) for f in scaled)))


def _rope_scaling(meta: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    kind = meta.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise ValueError(f"{where}: rope.scaling.type = {kind!r} is not supported; supported are 'none' and 'linear'")
    return {"rope_type": kind, "factor": meta.get("rope.scaling.factor")}


def _published(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, number, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    return f"blk.{number}.{_LAYER_NAMES[module]}.{kind}"


def _half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """`[heads · head_dim, …]`: within a head, rows (0, d/2, 1, d/2 + 1, …) become (0, 1, …, d − 1)."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
