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


def rounded(x: Array, dtype: DTypeLike) -> Array:
    """Float32 x as `dtype` holds it, saturating, still float32; sums, products and quotients of 16-bit numbers are thus
    those of `dtype`'s own arithmetic (rounding to 24 bits first does no harm to one of 11).

    XLA may leave out a cast to a short type and back, but not this. And compilers fuse a product into the sum that it
    enters, unrounded, in one program and not in the next; not through this comparison, even with float32: what is
    stored must not depend on the program.
    """
    kind = jnp.finfo(dtype)
    largest = np.float32(kind.max)
    clipped = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
    normal = lax.reduce_precision(clipped, kind.nexp, kind.nmant)  # flushes subnormals
    if kind.nexp == 8:
        return normal
    smallest = np.float32(kind.smallest_subnormal)
    return jnp.where(jnp.abs(x) < kind.smallest_normal, jnp.round(x / smallest) * smallest, normal)


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


def divide(x: Array, y: Array | float) -> Array:
    """x / y, rounded once. XLA multiplies by 1/y where y is one number broadcast, a constant or the scale of the only
    token there is, so that this token alone would not be rounded as in a batch; a select hides that it is one."""
    return x / jnp.where(jnp.isnan(x), jnp.nan, y)


def uniform_codes(x: Array, scale: Array, zero: Array, bits: int) -> Array:
    """clip(round_half_even((x − zero)/scale), 0, 2^bits − 1) as uint8; code 0 where scale is 0."""
    levels = (x - zero) / jnp.where(scale == 0, 1.0, scale)
    return jnp.clip(jnp.round(levels), 0, 2**bits - 1).astype(jnp.uint8)
