"""Number formats of what is stored beside the codes, and uniform rounding."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

# name in a spec string -> dtype of (scales, zeros). FP8 has no sign-symmetric use for a zero, which stays float16
# (KVarN: two FP8 scales and an FP16 zero).
SCALE_DTYPES: dict[str, tuple[DTypeLike, DTypeLike]] = {
    "f16": (jnp.float16, jnp.float16),
    "bf16": (jnp.bfloat16, jnp.bfloat16),
    "f32": (jnp.float32, jnp.float32),
    "fp8": (jnp.float8_e4m3fn, jnp.float16),
}


def store(x: Array, dtype: DTypeLike) -> Array:
    """Round float32 to `dtype`, saturating at its largest finite value; NaN stays NaN.

    Saturation matters: a scale of 1e30 is infinite in float16, and infinity times a code of 0 is NaN.
    """
    largest = np.float32(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest).astype(dtype)


def store_scale(x: Array, dtype: DTypeLike) -> Array:
    """`store` for FP8 scales, which additionally must not vanish: at least the smallest positive number."""
    if jnp.finfo(dtype).bits == 8:
        x = jnp.maximum(x, np.float32(jnp.finfo(dtype).smallest_subnormal))
    return store(x, dtype)


def uniform_codes(x: Array, scale: Array, zero: Array, bits: int) -> Array:
    """clip(round_half_even((x − zero)/scale), 0, 2^bits − 1) as uint8; code 0 where scale is 0."""
    levels = (x - zero) / jnp.where(scale == 0, 1.0, scale)
    return jnp.clip(jnp.round(levels), 0, 2**bits - 1).astype(jnp.uint8)
