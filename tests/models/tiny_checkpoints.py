"""The tiny checkpoints of `tests/data/models`: read, rewritten, and an independent decoder in NumPy."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from safetensors.numpy import load_file, save_file

from kvq_jax.attention import CausalAttention
from kvq_jax.protocol import Forward
from models import Model

DATA = Path(__file__).parents[1] / "data" / "models"
FOLDERS = ("llama31_tiny", "phi3_tiny", "qwen2_tiny", "qwen3_tiny")
TOLERANCE = 2e-4  # of the logits' standard deviation, as the checkpoints' index asks

Tensors = dict[str, np.ndarray]


def read(folder: str) -> tuple[dict[str, Any], Tensors]:
    """config.json and the tensors."""
    return json.loads((DATA / folder / "config.json").read_text()), load_file(DATA / folder / "model.safetensors")


def golden(folder: str) -> dict[str, np.ndarray]:
    """What Hugging Face transformers computed."""
    with np.load(DATA / folder / "golden.npz") as arrays:
        return dict(arrays)


def write(path: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, shards: int = 1) -> Path:
    """A checkpoint directory; with shards > 1 split and indexed as publishers do."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::shards]}
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def old_layout(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same model as it would have been published in 2024–25."""
    config = dict(config)
    rope = config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype")
    config["rope_theta"] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
    config["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    config["transformers_version"] = "4.46.0"
    return config


def assert_golden(model: Model, folder: str) -> None:
    """The model's logits are those of transformers."""
    want = golden(folder)
    got = np.asarray(model.logits(want["tokens"]))[:, want["logit_positions"]]
    assert np.abs(got - want["logits"]).max() < TOLERANCE * want["logits"].std()


@jax.jit
def run(forward: Forward, tokens: Array, positions: Array, valid: Array | None = None) -> Array:
    """All logits of a plain causal forward at the given positions."""
    return forward(tokens, positions, CausalAttention(valid=valid)).all()


@dataclass
class Recording:
    """Plain causal attention that remembers the k and v and the window of each layer."""

    keys: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)

    def __call__(self, q: Array, k: Array, v: Array, **options: Any) -> Array:
        self.keys.append(k)
        self.values.append(v)
        self.windows.append(options.get("sliding_window"))
        return CausalAttention()(q, k, v, **options)


def oracle_logits(
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    tokens: np.ndarray,
    inv_freq: np.ndarray,
    *,
    attention_factor: float = 1.0,
    windows: tuple[int | None, ...] | None = None,
) -> np.ndarray:
    """A decoder in float64, one row and one head at a time; rotation as a product of complex numbers."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    d = config.get("head_dim") or config["hidden_size"] // heads
    t = {name: value.astype(np.float64) for name, value in tensors.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * t[name]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ t[name + ".weight"].T + t.get(name + ".bias", 0.0)

    def rotated(x: np.ndarray) -> np.ndarray:  # [tokens, head_dim]
        n = len(inv_freq)
        turn = attention_factor * np.exp(1j * np.arange(len(x))[:, None] * inv_freq)
        z = (x[:, :n] + 1j * x[:, n : 2 * n]) * turn
        return np.concatenate([z.real, z.imag, x[:, 2 * n :]], axis=1)

    def row(ids: np.ndarray) -> np.ndarray:
        x = t["model.embed_tokens.weight"][ids]
        distance = np.arange(len(ids))[:, None] - np.arange(len(ids))
        for i in range(config["num_hidden_layers"]):
            p = f"model.layers.{i}."
            n = norm(x, p + "input_layernorm.weight")
            if p + "self_attn.qkv_proj.weight" in t:
                q, k, v = np.split(linear(n, p + "self_attn.qkv_proj"), [heads * d, (heads + kv_heads) * d], axis=1)
            else:
                q, k, v = (linear(n, p + f"self_attn.{name}_proj") for name in "qkv")
            sees = distance >= 0
            if windows is not None and windows[i] is not None:
                sees &= distance < windows[i]
            outs = []
            for h in range(heads):
                g = h * kv_heads // heads
                qh, kh, vh = q[:, h * d : (h + 1) * d], k[:, g * d : (g + 1) * d], v[:, g * d : (g + 1) * d]
                if p + "self_attn.q_norm.weight" in t:
                    qh, kh = norm(qh, p + "self_attn.q_norm.weight"), norm(kh, p + "self_attn.k_norm.weight")
                scores = np.where(sees, rotated(qh) @ rotated(kh).T / np.sqrt(d), -np.inf)
                weights = np.exp(scores - scores.max(1, keepdims=True))
                outs.append(weights / weights.sum(1, keepdims=True) @ vh)
            x = x + linear(np.concatenate(outs, axis=1), p + "self_attn.o_proj")
            n = norm(x, p + "post_attention_layernorm.weight")
            if p + "mlp.gate_up_proj.weight" in t:
                gate, up = np.split(linear(n, p + "mlp.gate_up_proj"), 2, axis=1)
            else:
                gate, up = linear(n, p + "mlp.gate_proj"), linear(n, p + "mlp.up_proj")
            x = x + linear(gate / (1 + np.exp(-gate)) * up, p + "mlp.down_proj")
        return norm(x, "model.norm.weight") @ t.get("lm_head.weight", t["model.embed_tokens.weight"]).T

    return np.stack([row(ids) for ids in tokens])
