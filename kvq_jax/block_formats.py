"""Number formats of 4-bit blocks: E2M1 elements, UE8M0 scales, E4M3 rounding.

    E2M1   sign<<3 | index of {0, 0.5, 1, 1.5, 2, 3, 4, 6}; no infinity, no NaN
    UE8M0  2^(byte − 127), a power of two in a byte

Everything that decides a stored bit is integer arithmetic on the bits of float32: logarithms and divisions round
differently from one backend to the next, and XLA:CPU takes denormals for zero. What is stored is then the same
everywhere. (OCP Microscaling Formats v1.0.)
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

E2M1_MAX = 6.0
E4M3_MAX, E4M3_SMALLEST_NORMAL = 448.0, 2.0**-6
_INFINITY = 0x7F800000
_HIDDEN = 1 << 23  # the leading one of a mantissa

# The smallest mantissa (its 23 bits) that rounds up to the next power of two.
ROUNDINGS = {
    "nearest": 0x3504F4,  # above sqrt 2: nearest in log2
    "even": 0x600000,  # 1.75, which E2M1 would round to 2
    "floor": _HIDDEN,
    "ceil": 1,
}


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def magnitude(x: Array) -> Array:
    """The bits of |x|, uint32: ordered as |x| is, infinity above everything finite, NaN above infinity."""
    return _bits(x) & 0x7FFFFFFF


def largest(x: Array) -> Array:
    """Bits of the largest |x| over the last axis, uint32 (see `magnitude`); what is not finite wins."""
    return magnitude(x).astype(jnp.int32).max(-1).astype(jnp.uint32)  # CPUs have no fast maximum of unsigned numbers


def is_finite(bits: Array) -> Array:
    return bits < _INFINITY


def log2_rounded(bits: Array, factor: Array | float, rounds_up_from: int) -> tuple[Array, Array]:
    """log2(factor·x) rounded to an integer, int32, and whether float32's factor·x is zero; bits: those of x >= 0.

    factor·x is one float32 product of mantissas, with the exponents kept apart: nothing can overflow or underflow, and
    denormals count. Which way it rounds is a comparison of the product's mantissa (see `ROUNDINGS`).
    """
    top = 31 - lax.clz(bits.astype(jnp.int32))  # of a denormal: bits·2^−149 = 1.… · 2^(top − 149)
    denormal = bits < _HIDDEN
    exponent = jnp.where(denormal, top - 149, (bits >> 23).astype(jnp.int32) - 127)
    mantissa = jnp.where(denormal, bits << jnp.clip(23 - top, 0, 31).astype(jnp.uint32), bits) & (_HIDDEN - 1)
    product = _bits(lax.bitcast_convert_type(mantissa | (127 << 23), jnp.float32) * jnp.asarray(factor, jnp.float32))
    exponent += (product >> 23).astype(jnp.int32) - 127
    mantissa = product & (_HIDDEN - 1)
    vanishes = (bits == 0) | (exponent < -150) | ((exponent == -150) & (mantissa == 0))  # half of the least, to even
    return exponent + (mantissa >= rounds_up_from), vanishes


def _midpoints(byte: Array) -> list[Array]:
    """Bits of the seven midpoints of E2M1's grid times 2^(byte − 127); beyond float32's range they exceed infinity."""
    found = []
    for bits in np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32).view(np.uint32):
        exponent, mantissa = divmod(int(bits), _HIDDEN)
        field = byte.astype(jnp.int32) + (exponent - 127)
        normal = field.astype(jnp.uint32) << 23 | mantissa
        denormal = (_HIDDEN | mantissa) >> jnp.clip(1 - field, 0, 31).astype(jnp.uint32)  # exact: few bits are set
        found.append(jnp.where(field > 0, normal, denormal))
    return found


def e2m1_codes(x: Array, byte: Array, *, ties_to_even: bool) -> Array:
    """The nearest E2M1 code of x/2^(byte − 127), uint8 in [0, 16), saturating at ±6; byte broadcasts against x.

    A tie goes to the even code, and a negative number that rounds to zero keeps its sign (IEEE, OCP); or, with
    `ties_to_even` False, to the lower, more negative value, and zero has no sign (UltraQuant).
    """
    size, negative = magnitude(x), _bits(x) >> 31
    index = jnp.zeros_like(size)
    for i, midpoint in enumerate(_midpoints(byte)):
        goes_up_at_a_tie = np.uint32(i % 2) if ties_to_even else negative
        index += size + goes_up_at_a_tie > midpoint
    signed = negative if ties_to_even else negative & (index > 0)
    return (signed << 3 | index).astype(jnp.uint8)


def e2m1(codes: Array) -> Array:
    """Codes, int32 in [0, 16) -> float32.

    Sign and index, moved to the top of a float16, are the value times 2^−14: half the work of integer arithmetic, and
    no gather, which is slow on CPUs. (In float32 the bits of 0.5 would be a denormal, which XLA:CPU takes for zero.)
    """
    half = ((codes & 8) << 12 | (codes & 7) << 9).astype(jnp.uint16)
    return lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) * np.float32(2**14)


def power_of_two(byte: Array) -> Array:
    """2^(byte − 127), float32, for bytes 1 … 254; byte 0 gives zero, 255 infinity."""
    return lax.bitcast_convert_type(byte.astype(jnp.uint32) << 23, jnp.float32)


@jax.custom_jvp
def e4m3(x: Array) -> Array:
    """x rounded to E4M3FN, nearest even, saturating at ±448 (infinity too; NaN stays), as float32.

    Its derivative is taken to be 1: JAX would round the gradient to E4M3 too, and most of it to zero.
    """
    return jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn).astype(jnp.float32)


e4m3.defjvp(lambda primals, tangents: (e4m3(*primals), tangents[0]))
