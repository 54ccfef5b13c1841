"""Codes of 1, 2, 3, 4 or 8 bits packed into bytes, least significant bits first.

Code j of a run occupies bits [j·b, (j+1)·b) of the little-endian byte string, which is also the layout of KIVI's
int32 words and of KVarN's tiles. For b in {1, 2, 4, 8} a byte holds 8/b codes; for b = 3 eight codes fill three bytes.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

BITS = (1, 2, 3, 4, 8)


def _unit(bits: int) -> tuple[int, int]:
    """(codes, bytes) of the smallest whole unit."""
    if bits not in BITS:
        raise ValueError(f"bits={bits!r} cannot be packed; allowed: {', '.join(map(str, BITS))}")
    return (8, 3) if bits == 3 else (8 // bits, 1)


def codes_in_word(bits: int) -> int:
    """Of `words`: 8/bits, and 8 of 3 bits."""
    return _unit(bits)[0]


def packed_size(count: int, bits: int) -> int:
    """Bytes that `count` codes take. Raises ValueError if they do not fill whole units."""
    codes, size = _unit(bits)
    if count % codes:
        raise ValueError(
            f"an axis of {count} codes of {bits} bits does not fill whole bytes; make it a multiple of {codes}"
        )
    return count // codes * size


def pack(codes: Array, bits: int, axis: int = -1) -> Array:
    """Integer codes in [0, 2^bits) -> uint8, along `axis`: `[..., n, ...]` -> `[..., packed_size(n, bits), ...]`."""
    per_unit, unit_bytes = _unit(bits)
    packed_size(codes.shape[axis], bits)
    x = jnp.moveaxis(codes, axis, -1)
    x = x.reshape(*x.shape[:-1], x.shape[-1] // per_unit, per_unit).astype(jnp.uint32)
    shifts = jnp.arange(per_unit, dtype=jnp.uint32) * bits
    word = jnp.sum(x << shifts, axis=-1, dtype=jnp.uint32)  # the fields do not overlap: the sum is their union
    units = word[..., None] >> (8 * jnp.arange(unit_bytes, dtype=jnp.uint32))
    return jnp.moveaxis(units.astype(jnp.uint8).reshape(*x.shape[:-2], x.shape[-2] * unit_bytes), -1, axis)


def unpack(packed: Array, bits: int, axis: int = -1, dtype: DTypeLike = jnp.uint8) -> Array:
    """Inverse of `pack`: uint8 bytes -> codes, in `dtype`."""
    per_unit, unit_bytes = _unit(bits)
    if packed.shape[axis] % unit_bytes:
        raise ValueError(
            f"{packed.shape[axis]} bytes do not hold whole units of {bits}-bit codes ({unit_bytes} bytes each)"
        )
    x = jnp.moveaxis(packed, axis, -1)
    if bits == 8:
        return packed.astype(dtype)
    codes = (words(x, bits)[..., None] >> (jnp.arange(per_unit) * bits)) & (2**bits - 1)
    return jnp.moveaxis(codes.astype(dtype).reshape(*codes.shape[:-2], codes.shape[-2] * per_unit), -1, axis)


def words(packed: Array, bits: int) -> Array:
    """The last axis as words of whole codes: code i of a word occupies its bits [i·b, (i+1)·b). They are int32, because
    no CPU shifts vectors of bytes, and the read path runs this on every tile."""
    _, unit_bytes = _unit(bits)
    if unit_bytes == 1:
        return packed.astype(jnp.int32)
    x = packed.reshape(*packed.shape[:-1], packed.shape[-1] // unit_bytes, unit_bytes).astype(jnp.int32)
    return jnp.sum(x << (8 * jnp.arange(unit_bytes)), axis=-1)


def planes(packed: Array, bits: int, dtype: DTypeLike = jnp.uint8) -> list[Array]:
    """The codes of the last axis, not interleaved: entry i holds codes i, i + P, i + 2P, …, for P codes in a word.

    `interleave` puts the entries, or what was computed from each, back in order. Unpacking like this is several times
    as fast on a CPU: neighbours come from neighbouring words, shifted alike.
    """
    word = words(packed, bits)
    return [((word >> (bits * i)) & (2**bits - 1)).astype(dtype) for i in range(codes_in_word(bits))]


def interleave(parts: list[Array]) -> Array:
    """`[..., n]` each -> `[..., n · len(parts)]`, element i of every part in turn."""
    joined = jnp.stack(parts, -1)
    return joined.reshape(*joined.shape[:-2], -1)
