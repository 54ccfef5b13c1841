"""One decoder for Llama, Mistral, Qwen2, Qwen3, Phi-3 and Phi-4: the weights, then the forward, in order.

    x = E[token]
    for each layer:  x = x + Wo attend(rope(norm(Wq n)), rope(norm(Wk n)), Wv n)      n = rms(x)
                     x = x + Wdown (silu(Wgate m) · Wup m)                            m = rms(x)
    logits = E' rms(x)

(norm of q and k: Qwen3 only; biases: Qwen2, or where the config asks.) Matrices are kept in the model's dtype, matmuls
accumulate in float32, and RMSNorm, RoPE and the logits are float32. The decoder holds no KV cache: `attend` does
(`kvq_jax.protocol`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from kvq_jax.protocol import Attend, LazyLogits
from models.config import ModelConfig
from models.placement import ALL_LAYERS, MODEL_AXIS
from models.rope import rotary_tables, rotate

# `take(name, spec)` gives the named weight as a device array, laid out over the mesh by `spec`.
Take = Callable[[str, P], Array]

# float32 stays float32 on accelerators, whose default for it is a shorter format.
_PRECISION = jax.lax.Precision.HIGHEST


class Linear(nnx.Module):
    """y = x W + b; `weight` `[in, out]`, the transpose of the published matrix, `bias` float32 `[out]` or None."""

    def __init__(self, take: Take, name: str, bias: bool, spec: P) -> None:
        self.weight = nnx.Param(take(name + ".weight", spec))
        self.bias = nnx.Param(take(name + ".bias", P(*spec[1:]))) if bias else None

    def __call__(self, x: Array) -> Array:
        y = jnp.einsum("bti,io->bto", x, self.weight[...], precision=_PRECISION, preferred_element_type=jnp.float32)
        if self.bias is not None:
            y = y + self.bias[...]
        return y.astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x²) + ε) · w over the last axis, in float32 (arXiv:1910.07467)."""

    def __init__(self, take: Take, name: str, epsilon: float) -> None:
        self.weight = nnx.Param(take(name + ".weight", P()))
        self.epsilon = epsilon

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * scale * self.weight[...]).astype(x.dtype)


class Block(nnx.Module):
    """One layer, or with `prefix` `ALL_LAYERS` the weights of all layers on a leading axis, for a scan."""

    def __init__(self, config: ModelConfig, take: Take, prefix: str) -> None:
        self.config = config
        columns, rows = P(None, MODEL_AXIS), P(MODEL_AXIS, None)  # of `[in, out]`: heads or ffn over the devices
        eps = config.rms_norm_eps
        self.input_norm = RMSNorm(take, prefix + "input_layernorm", eps)
        self.q = Linear(take, prefix + "self_attn.q_proj", config.qkv_bias, columns)
        self.k = Linear(take, prefix + "self_attn.k_proj", config.qkv_bias, columns)
        self.v = Linear(take, prefix + "self_attn.v_proj", config.qkv_bias, columns)
        self.q_norm = RMSNorm(take, prefix + "self_attn.q_norm", eps) if config.qk_norm else None
        self.k_norm = RMSNorm(take, prefix + "self_attn.k_norm", eps) if config.qk_norm else None
        self.o = Linear(take, prefix + "self_attn.o_proj", config.o_bias, rows)
        self.mlp_norm = RMSNorm(take, prefix + "post_attention_layernorm", eps)
        self.gate = Linear(take, prefix + "mlp.gate_proj", config.mlp_bias, columns)
        self.up = Linear(take, prefix + "mlp.up_proj", config.mlp_bias, columns)
        self.down = Linear(take, prefix + "mlp.down_proj", config.mlp_bias, rows)

    def __call__(self, x: Array, cos: Array, sin: Array, attend: Attend, window: int | None) -> Array:
        """x `[batch, tokens, width]`; cos and sin `[batch, 1, tokens, rotary_dim / 2]`."""
        normed = self.input_norm(x)
        q, k, v = self._heads(self.q(normed)), self._heads(self.k(normed)), self._heads(self.v(normed))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        rope = self.config.rope.applied()
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, sliding_window=window, rope=rope)
        batch, heads, tokens, head_dim = out.shape
        x = x + self.o(out.swapaxes(1, 2).reshape(batch, tokens, heads * head_dim))
        normed = self.mlp_norm(x)
        return x + self.down(jax.nn.silu(self.gate(normed)) * self.up(normed))

    def _heads(self, x: Array) -> Array:
        """`[batch, tokens, heads · head_dim]` to `[batch, heads, tokens, head_dim]`."""
        batch, tokens, _ = x.shape
        return x.reshape(batch, tokens, -1, self.config.head_dim).swapaxes(1, 2)


class Decoder(nnx.Module):
    """The whole model. Layers are unrolled, or scanned over stacked weights where `scan_layers`."""

    def __init__(self, config: ModelConfig, take: Take, *, scan_layers: bool = False) -> None:
        if scan_layers and len(windows := set(config.sliding_windows)) > 1:
            raise ValueError(
                f"scan_layers=True needs one sliding window for all layers, this model has {windows}; load with "
                "scan_layers=False"
            )
        self.config = config
        self.embedding = nnx.Param(take("embed_tokens.weight", P(MODEL_AXIS, None)))
        self.stacked = Block(config, take, ALL_LAYERS) if scan_layers else None
        unrolled = 0 if scan_layers else config.num_hidden_layers
        self.layers = nnx.List([Block(config, take, f"layers.{i}.") for i in range(unrolled)])
        self.norm = RMSNorm(take, "norm", config.rms_norm_eps)
        self.head = None if config.tie_word_embeddings else nnx.Param(take("lm_head.weight", P(MODEL_AXIS, None)))

    def __call__(self, tokens: Array, positions: Array, attend: Attend) -> LazyLogits:
        """tokens, positions int32 `[batch, tokens]`; an id outside the vocabulary makes its row NaN."""
        x = self.embedding[...].at[tokens].get(mode="fill", fill_value=jnp.nan)
        cos, sin = rotary_tables(self.config.rope, positions)
        if self.stacked is not None:
            graph, weights = nnx.split(self.stacked)
            window = self.config.sliding_windows[0]

            def layer(x: Array, layer_weights: Any, attend: Attend) -> Array:
                return nnx.merge(graph, layer_weights)(x, cos, sin, attend, window)

            x = attend.scan(layer, x, weights)
        for block, window in zip(self.layers, self.config.sliding_windows, strict=False):
            x = block(x, cos, sin, attend, window)
        unembedding = self.embedding if self.head is None else self.head
        return LazyLogits(self.norm(x), Partial(unembed, unembedding[...]))


def unembed(unembedding: Array, hidden: Array) -> Array:
    """Float32 logits `[batch, tokens, vocab]` of `hidden` `[batch, tokens, width]`; `unembedding` `[vocab, width]`."""
    return jnp.einsum("btd,vd->btv", hidden, unembedding, precision=_PRECISION, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class _Apply:
    """The decoder without its weights, compared by what determines it: equal models share one compiled program.

    The weights are a flat list, because `jit` takes its arguments apart at every call, and a list is 20 times faster
    to take apart than an NNX state.
    """

    config: ModelConfig
    scan_layers: bool
    graph: Any = field(compare=False)
    tree: Any = field(compare=False)

    def __call__(self, weights: list[Array], tokens: Array, positions: Array, attend: Attend) -> LazyLogits:
        decoder = nnx.merge(self.graph, jax.tree.unflatten(self.tree, weights))
        return decoder(tokens, positions, attend)


def as_forward(decoder: Decoder) -> Partial:
    """The decoder as a `kvq_jax.protocol.Forward`, whose weights are arguments of whatever is jitted around it."""
    graph, state = nnx.split(decoder)
    weights, tree = jax.tree.flatten(state)
    return Partial(_Apply(decoder.config, decoder.stacked is not None, graph, tree), weights)
