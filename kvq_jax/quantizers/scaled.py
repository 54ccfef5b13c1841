"""One scale a token and head, and no zero: x̂ = scale · level, in whatever format the levels are stored."""

import abc
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from kvq_jax.formats import SCALE_DTYPES, store_scale, widen
from kvq_jax.quantizers.affine import row_range
from kvq_jax.quantizers.base import Leaves, Quantizer, dot


def largest_magnitude(rows: Array) -> Array:
    """max |x| over the last axis; NaN where there is one."""
    low, high = row_range(rows)
    return jnp.maximum(-low, high)


@dataclass(frozen=True)
class ScaledTokens(Quantizer):
    """scale = max |x| / largest over the channels of a token, levels = x/scale, rounded by the format.

    Levels come from the unrounded scale. A scale below float32's normal numbers is 0, and its token comes back as 0.
    With K the scale multiplies the score, with V the probability: no tile is dequantized for few or for many queries.

    Leaves: codes uint8 `[tiles, 1, head_dim·bits/8]`; scale `[tiles, 1]`.
    """

    scales: str

    @property
    @abc.abstractmethod
    def largest(self) -> int:
        """The largest level."""

    @abc.abstractmethod
    def to_codes(self, levels: Array) -> Array:
        """Float32 levels in ±largest (NaN where x is not finite) -> codes, along the last axis."""

    @abc.abstractmethod
    def to_levels(self, codes: Array) -> Array:
        """Codes -> float32 levels."""

    def new_scale(self, tiles: Array, constants: Leaves) -> Array:
        """Unrounded scales, broadcastable to `[..., tiles, 1]`."""
        scale = largest_magnitude(tiles) / self.largest
        return jnp.where(scale < jnp.finfo(jnp.float32).tiny, 0.0, scale)

    def stored_scale(self, leaves: Leaves, constants: Leaves) -> Array:
        """What levels are multiplied with, broadcastable to `[..., tiles, 1]`."""
        return widen(leaves["scale"])

    def encode(self, tiles: Array, constants: Leaves) -> Leaves:
        scale = self.new_scale(tiles, constants)
        levels = tiles / jnp.where(scale == 0, 1.0, scale)[..., None]
        levels = jnp.where(jnp.isfinite(tiles), jnp.clip(levels, -self.largest, self.largest), jnp.nan)
        return {"codes": self.to_codes(levels), "scale": store_scale(scale, SCALE_DTYPES[self.scales][0])}

    def decode(self, leaves: Leaves, constants: Leaves) -> Array:
        return self.to_levels(leaves["codes"]) * self.stored_scale(leaves, constants)[..., None]

    def _flat(self, leaves: Leaves, constants: Leaves) -> tuple[Array, Array]:
        """Levels `[..., tokens, head_dim]` and scales, broadcastable to `[..., 1, tokens]`."""
        levels, scale = self.to_levels(leaves["codes"])[..., 0, :], self.stored_scale(leaves, constants)
        return levels, jnp.swapaxes(scale, -1, -2) if scale.ndim else scale

    def scores(self, q: Array, leaves: Leaves, constants: Leaves) -> Array:
        levels, scale = self._flat(leaves, constants)
        return dot(q, jnp.swapaxes(levels, -1, -2)) * scale

    def weighted_sum(self, p: Array, leaves: Leaves, constants: Leaves) -> Array:
        levels, scale = self._flat(leaves, constants)
        return dot(p * scale, levels)
