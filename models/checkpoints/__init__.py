"""Readers of the publishers' file formats: each gives a config, named weight arrays and a tokenizer."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from models.config import ModelConfig
from models.tokenizer import Tokenizer


class Checkpoint(Protocol):
    """An opened checkpoint: checked against its config, read one tensor at a time."""

    config: ModelConfig
    files: tuple[Path, ...]  # what the digest covers

    def tensor(self, name: str) -> np.ndarray:
        """The tensor of that name in `weight_shapes`, in the layout of Hugging Face's Llama."""
        ...

    def tokenizer(self) -> Tokenizer:
        """Reads the tokenizer; `ValueError` or `FileNotFoundError` when there is none that is supported."""
        ...


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight of the decoder with its shape; matrices are `[out, in]`. Names are Hugging Face's, less `model.`."""
    width, ffn = config.hidden_size, config.intermediate_size
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, width), "norm.weight": (width,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    for i in range(config.num_hidden_layers):
        layer = f"layers.{i}."
        shapes[layer + "input_layernorm.weight"] = shapes[layer + "post_attention_layernorm.weight"] = (width,)
        for name, out, into, bias in (
            ("self_attn.q_proj", q, width, config.qkv_bias),
            ("self_attn.k_proj", kv, width, config.qkv_bias),
            ("self_attn.v_proj", kv, width, config.qkv_bias),
            ("self_attn.o_proj", width, q, config.o_bias),
            ("mlp.gate_proj", ffn, width, config.mlp_bias),
            ("mlp.up_proj", ffn, width, config.mlp_bias),
            ("mlp.down_proj", width, ffn, config.mlp_bias),
        ):
            shapes[layer + name + ".weight"] = (out, into)
            if bias:
                shapes[layer + name + ".bias"] = (out,)
        if config.qk_norm:
            for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
                shapes[layer + name] = (config.head_dim,)
    return shapes


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], *, where: str, config: str
) -> None:
    """Names and shapes in the files against what the config asks for; both ways, before anything is read."""

    def some(names: Iterator[str]) -> str:
        listed = sorted(names)
        return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")

    if missing := some(name for name in expected if name not in found):
        raise ValueError(f"{where}: tensor {missing} is missing, but {config} asks for it; get the whole checkpoint")
    if extra := some(name for name in found if name not in expected):
        raise ValueError(
            f"{where}: tensor {extra} has no place in the model that {config} describes; correct the config or use the "
            "checkpoint that belongs to it"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(
                f"{where}: tensor {name} has shape {list(found[name])}, but {config} asks for {list(shape)}; correct "
                "the config or use the checkpoint that belongs to it"
            )
