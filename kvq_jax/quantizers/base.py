"""The contract of a quantizer: how one side (K or V) of one layer is stored and read.

A *tile* is the smallest run of consecutive tokens that shares a statistic: `tile_tokens` tokens. A quantizer with
`tile_tokens = 1` has no statistic across tokens. Leaves carry the axes `[batch, kv_heads, tiles]` in front, so that one
array holds a whole store `[batch, kv_heads, tiles, ...]`; kv_heads is 1 where a statistic is shared by the heads.

*Constants* are what calibration found for the layer. They have no batch axis, and no head axis either but where their
spec says so.
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


def sum_by_halves(x: Array, axis: int) -> Array:
    """Sum along `axis`, halves added to halves: the same additions however many tokens or tiles come along. Products in
    x should be `formats.rounded`, or a compiler fuses them into the first addition in one program and not in another.
    """
    x = jnp.moveaxis(x, axis, -1)
    size = 1 << (x.shape[-1] - 1).bit_length()
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x[..., 0]


@dataclass(frozen=True)
class ConstantSpec:
    """One calibrated array of a layer and side: its shape, and what values make sense."""

    shape: tuple[int, ...]
    positive: bool = False
    above: str | None = None  # another constant that it must exceed everywhere
    ascending: bool = False  # along the last axis, as the levels of a codebook


@dataclass(frozen=True)
class Quantizer(abc.ABC):
    """Frozen and hashable. The read path here decodes the tiles it is given, never more, and is right for every
    quantizer; subclasses override `scores` and `weighted_sum` where scales can be folded instead.
    """

    head_dim: int

    @property
    def tile_tokens(self) -> int:
        return 1

    def constants(self, kv_heads: int) -> dict[str, ConstantSpec]:
        """The calibrated arrays that it reads, by name; none unless it says so."""
        return {}

    @abc.abstractmethod
    def encode(self, tiles: Array, constants: Leaves) -> Leaves:
        """float32 `[batch, kv_heads, tiles, tile_tokens, head_dim]` -> leaves `[batch, kv_heads, tiles, ...]`."""

    @abc.abstractmethod
    def decode(self, leaves: Leaves, constants: Leaves) -> Array:
        """Stored leaves -> float32 `[batch, kv_heads, tiles, tile_tokens, head_dim]`, in the basis that was encoded."""

    def tokens(self, leaves: Leaves, constants: Leaves) -> Array:
        """Decoded `[batch, kv_heads, tiles · tile_tokens, head_dim]`."""
        x = self.decode(leaves, constants)
        return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])

    def query(self, q: Array) -> Array:
        """What a query, in the stored basis and not yet scaled, is rounded to before it meets the store."""
        return q

    def scores(self, q: Array, leaves: Leaves, constants: Leaves) -> Array:
        """q·K̂ᵀ: `[batch, kv_heads, queries, head_dim]` -> `[batch, kv_heads, queries, tiles · tile_tokens]`."""
        return dot(q, jnp.swapaxes(self.tokens(leaves, constants), -1, -2))

    def weighted_sum(self, p: Array, leaves: Leaves, constants: Leaves) -> Array:
        """p·V̂: `[batch, kv_heads, queries, tiles · tile_tokens]` -> `[batch, kv_heads, queries, head_dim]`."""
        return dot(p, self.tokens(leaves, constants))
