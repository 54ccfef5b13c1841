"""What is measured between a reference and a quantized run."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


def kl_divergence(reference_logits: Array, logits: Array) -> Array:
    """KL(reference ‖ other) in nats over the last axis, float32.

    Σ p (ln p − ln q) = Σ p (a − b) − (lse a − lse b) for logits a and b: exactly 0 for equal logits.
    """
    a, b = reference_logits.astype(jnp.float32), logits.astype(jnp.float32)
    lse_a, lse_b = jax.nn.logsumexp(a, axis=-1), jax.nn.logsumexp(b, axis=-1)
    return jnp.sum(jnp.exp(a - lse_a[..., None]) * (a - b), axis=-1) - (lse_a - lse_b)


class MagnitudeDirection(NamedTuple):
    """‖x − x̂‖² = magnitude + direction, for every vector."""

    magnitude: Array  # (‖x‖ − ‖x̂‖)²
    direction: Array  # 2‖x‖‖x̂‖(1 − cos θ)


def magnitude_direction(x: Array, x_hat: Array) -> MagnitudeDirection:
    """The error of each vector `[..., head_dim]` split into the change of its norm and that of its direction."""
    x, x_hat = x.astype(jnp.float32), x_hat.astype(jnp.float32)
    norm, norm_hat = jnp.linalg.norm(x, axis=-1), jnp.linalg.norm(x_hat, axis=-1)
    magnitude = jnp.square(norm - norm_hat)
    # the remainder of the squared error, which needs no arc cosine and is right for zero vectors
    return MagnitudeDirection(magnitude, jnp.maximum(jnp.sum(jnp.square(x - x_hat), -1) - magnitude, 0.0))


class VectorErrors(NamedTuple):
    """Sums over vectors, so that parts of a cache can be added up."""

    vectors: Array
    squared_error: Array
    squared: Array
    ratio: Array  # ‖x̂‖/‖x‖ over vectors that are not zero
    ratio_squared: Array

    @staticmethod
    def of(x: Array, x_hat: Array, exists: Array) -> "VectorErrors":
        """x, x_hat `[..., head_dim]`; exists `[...]` bool."""
        norm, norm_hat = jnp.linalg.norm(x, axis=-1), jnp.linalg.norm(x_hat, axis=-1)
        exists &= norm > 0
        ratio = jnp.where(exists, norm_hat / jnp.where(norm > 0, norm, 1.0), 0.0)
        error = jnp.where(exists, jnp.sum(jnp.square(x - x_hat), axis=-1), 0.0)
        parts = (exists, error, jnp.where(exists, jnp.square(norm), 0.0), ratio, jnp.square(ratio))
        return VectorErrors(*(jnp.sum(part, dtype=jnp.float32) for part in parts))

    def relative_mse(self) -> Array:
        """Σ‖x − x̂‖² / Σ‖x‖²; NaN where nothing was counted."""
        return self.squared_error / self.squared

    def ratio_mean(self) -> Array:
        """Mean of ‖x̂‖/‖x‖."""
        return self.ratio / self.vectors

    def ratio_std(self) -> Array:
        """Standard deviation of ‖x̂‖/‖x‖ over vectors."""
        return jnp.sqrt(jnp.maximum(self.ratio_squared / self.vectors - jnp.square(self.ratio_mean()), 0.0))
