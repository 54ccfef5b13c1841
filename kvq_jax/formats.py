"""Number formats of what is stored beside the codes, and uniform rounding."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

# name in a spec string -> dtype of (scales, zeros). FP8 has no sign-symmetric use for a zero, which stays float16
# (KVarN: two FP8 scales and an FP16 zero).
SCALE_DTYPES: dict[str, tuple[DTypeLike, DTypeLike]] = {
    "f16": (jnp.float16, jnp.float16),
    "bf16": (jnp.bfloat16, jnp.bfloat16),
    "f32": (jnp.float32, jnp.float32),
    "fp8": (jnp.float8_e4m3fn, jnp.float16),
}


def saturate(x: Array, dtype: DTypeLike) -> Array:
    """Round to `dtype`; what is finite stays finite, at most the largest number; NaN and infinity stay what they are.

    Saturation matters: a scale of 1e30 is infinite in float16, and infinity times a code of 0 is NaN.
    """
    if jnp.finfo(dtype).max >= jnp.finfo(x.dtype).max:
        return x.astype(dtype)  # nothing to saturate, and min and max would take a denormal for zero on some backends
    largest = np.float32(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x).astype(dtype)


def store(x: Array, dtype: DTypeLike) -> Array:
    """`saturate`, as a leaf of a cache: bfloat16 is kept as its bits in uint16, everything else as it is.

    XLA:CPU widens a whole bfloat16 array before it slices a tile out of it; of integers it reads the slice.
    `widen` reads a leaf, `view` gives it its type back.
    """
    x = saturate(x, dtype)
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def widen(leaf: Array) -> Array:
    """A leaf made by `store` as float32."""
    if leaf.dtype == jnp.uint16:
        return lax.bitcast_convert_type(leaf.astype(jnp.uint32) << 16, jnp.float32)
    return leaf.astype(jnp.float32)


def view(leaf: Array) -> Array:
    """A leaf in the type it stands for."""
    return lax.bitcast_convert_type(leaf, jnp.bfloat16) if leaf.dtype == jnp.uint16 else leaf


def store_scale(x: Array, dtype: DTypeLike) -> Array:
    """`store` for FP8 scales, which additionally must not vanish: at least the smallest positive number."""
    if jnp.finfo(dtype).bits == 8:
        x = jnp.maximum(x, np.float32(jnp.finfo(dtype).smallest_subnormal))
    return store(x, dtype)


def uniform_codes(x: Array, scale: Array, zero: Array, bits: int) -> Array:
    """clip(round_half_even((x − zero)/scale), 0, 2^bits − 1) as uint8; code 0 where scale is 0."""
    levels = (x - zero) / jnp.where(scale == 0, 1.0, scale)
    return jnp.clip(jnp.round(levels), 0, 2**bits - 1).astype(jnp.uint8)
