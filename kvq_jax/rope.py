"""Rotary position embedding, for caches that store keys before it and apply it when they are read (KVQuant).

Channel pair (x_i, x_{i + d/2}) of token t turns by the angle t · f_i; channels from d on stay as they are
(arXiv:2104.09864, half-split order). The turn is orthogonal up to `factor`, so a key that a model hands over after
RoPE is taken back exactly, whatever model it is.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvq_jax.formats import rounded


@dataclass(frozen=True)
class Rope:
    """What was applied to q and k: `inv_freq` in radians a token, d/2 of them; `factor` multiplies cos and sin."""

    inv_freq: tuple[float, ...]
    factor: float = 1.0

    def apply(self, x: Array, position: Array, inverse: bool = False) -> Array:
        """Turn x `[batch, heads, tokens, head_dim]` to `position` int32 `[batch or 1, tokens]`, float32; or back."""
        angle = position.astype(jnp.float32)[:, None, :, None] * np.asarray(self.inv_freq, np.float32)
        scale = 1 / self.factor if inverse else self.factor
        cos, sin = jnp.cos(angle) * scale, jnp.sin(angle) * (-scale if inverse else scale)
        half = len(self.inv_freq)
        first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)

        def product(x: Array, y: Array) -> Array:  # what is stored must not depend on how a program fuses it
            return rounded(x * y, jnp.float32) if inverse else x * y

        turned = [product(first, cos) - product(second, sin), product(second, cos) + product(first, sin)]
        return jnp.concatenate([*turned, rest], axis=-1)
