"""The contract of a quantizer: how one side (K or V) of one layer is stored and read.

A *tile* is the smallest run of consecutive tokens that shares a statistic: `tile_tokens` tokens of one KV head. A
quantizer with `tile_tokens = 1` has no statistic across tokens. Leaves carry the axes `[..., tiles]` in front, so that
one array holds a whole store `[batch, kv_heads, tiles, ...]`.
"""

import abc
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

Leaves = dict[str, Array]


def dot(x: Array, y: Array) -> Array:
    """Batched x·y, float32 throughout: `[..., m, k]`, `[..., k, n]` -> `[..., m, n]`."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)  # accelerators would multiply in a shorter format


@dataclass(frozen=True)
class Quantizer(abc.ABC):
    """Frozen and hashable. The read path here decodes the tiles it is given, never more, and is right for every
    quantizer; subclasses override `scores` and `weighted_sum` where scales can be folded instead.
    """

    head_dim: int

    @property
    def tile_tokens(self) -> int:
        return 1

    @abc.abstractmethod
    def encode(self, tiles: Array) -> Leaves:
        """float32 `[..., tiles, tile_tokens, head_dim]` -> stored leaves `[..., tiles, ...]`."""

    @abc.abstractmethod
    def decode(self, leaves: Leaves) -> Array:
        """Stored leaves -> float32 `[..., tiles, tile_tokens, head_dim]`, in the basis that was encoded."""

    def tokens(self, leaves: Leaves) -> Array:
        """Decoded `[..., tiles · tile_tokens, head_dim]`."""
        x = self.decode(leaves)
        return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])

    def scores(self, q: Array, leaves: Leaves) -> Array:
        """q·K̂ᵀ: `[..., queries, head_dim]` -> `[..., queries, tiles · tile_tokens]`."""
        return dot(q, jnp.swapaxes(self.tokens(leaves), -1, -2))

    def weighted_sum(self, p: Array, leaves: Leaves) -> Array:
        """p·V̂: `[..., queries, tiles · tile_tokens]` -> `[..., queries, head_dim]`."""
        return dot(p, self.tokens(leaves))
