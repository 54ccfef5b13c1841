"""A softmax that sees its keys in parts, of any order: one pass, and sums in float32."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

MASKED = -3e38  # finite, and so is NOTHING: a row that sees nothing must not turn into NaN
NOTHING = -1e38  # the largest score before any key; a masked key then weighs exp(−2e38) = 0 whatever was seen


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Softmax:
    """A softmax in progress over keys seen so far; rows are `queries` = q_heads/kv_heads · tokens of a KV head."""

    largest: Array  # [batch, kv_heads, queries]
    total: Array  # sum of exp(score − largest)
    weighted: Array  # [batch, kv_heads, queries, head_dim]: sum of exp(score − largest) · value

    @staticmethod
    def start(batch: int, kv_heads: int, queries: int, head_dim: int) -> "Softmax":
        rows = jnp.zeros((batch, kv_heads, queries), jnp.float32)
        return Softmax(rows + NOTHING, rows, jnp.zeros((*rows.shape, head_dim), jnp.float32))

    def see(self, scores: Array, mask: Array, weighted_sum: Callable[[Array], Array]) -> "Softmax":
        """Add keys: scores `[batch, kv_heads, queries, keys]`, mask broadcastable to it, p -> p·V."""

        def hide(scores: Array) -> Array:
            return jnp.where(mask, scores, MASKED)

        # Most tiles are full, and a mask costs as much as the exponential: ask first where asking is cheap.
        one_for_all = mask.shape[-2] == 1
        scores = lax.cond(mask.all(), lambda scores: scores, hide, scores) if one_for_all else hide(scores)
        largest = jnp.maximum(self.largest, scores.max(-1))
        p = jnp.exp(scores - largest[..., None])
        decay = jnp.exp(self.largest - largest)
        weighted = self.weighted * decay[..., None] + weighted_sum(p)
        return Softmax(largest, self.total * decay + p.sum(-1), weighted)

    def merge(self, other: "Softmax") -> "Softmax":
        """Both sets of keys."""
        largest = jnp.maximum(self.largest, other.largest)
        a, b = jnp.exp(self.largest - largest), jnp.exp(other.largest - largest)
        weighted = self.weighted * a[..., None] + other.weighted * b[..., None]
        return Softmax(largest, self.total * a + other.total * b, weighted)

    def output(self) -> Array:
        """weighted / total; zero for a row that saw nothing."""
        return self.weighted / jnp.where(self.total > 0, self.total, 1.0)[..., None]
