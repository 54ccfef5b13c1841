"""Kernels that write the store: what XLA does in several passes over memory, in one.

`store_ultraquant` rotates, scales, rounds and packs tokens as they come; `store_kvarn` balances, rounds and packs whole
tiles. Both run the library's own functions on what they have loaded, so that there is one definition of every bit.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kvq_jax.balance import normalize_tile
from kvq_jax.formats import SCALE_DTYPES
from kvq_jax.quantizers.base import Leaves
from kvq_jax.quantizers.kvarn import SMALLEST_STEP, BalancedChannelRows, BalancedTokenRows
from kvq_jax.quantizers.ultraquant import UltraBlocks
from kvq_jax.rotation import RADIX, block_size

Ref = Any  # a memory reference inside of a kernel

_SMALLEST_NORMAL = np.float32(np.finfo(np.float32).tiny)


def rotated(x: Array) -> Array:
    """`rotation.hadamard` of `[rows, 2^n]`, float32, by the same additions in the same order: equal to the last bit.

    Triton can neither stack eight arrays nor slice one: butterflies of two, by splitting a last axis of two.
    """
    rows, size = x.shape
    done = 1
    while done < size:
        radix = min(RADIX, size // done)
        stride = radix * done // 2
        while stride >= done:
            pairs = x.reshape(rows, size // (2 * stride), 2, stride).transpose(0, 1, 3, 2)
            first, second = jnp.unstack(pairs, axis=-1)
            pairs = jnp.stack([first + second, first - second], axis=-1)
            x = pairs.transpose(0, 1, 3, 2).reshape(rows, size)
            stride //= 2
        done *= radix
    return x * np.float32(1 / np.sqrt(size))


def packed(codes: Array, bits: int) -> Array:
    """`packing.pack` of int32 codes along the last axis, for bits that divide a byte; uint8."""
    while bits < 8:
        low, high = jnp.unstack(codes.reshape(*codes.shape[:-1], -1, 2), axis=-1)
        codes, bits = low | high << bits, 2 * bits
    return codes.astype(jnp.uint8)


def _ultraquant(
    x_ref: Ref, c_ref: Ref, codes_ref: Ref, scale_ref: Ref, *, quantizer: UltraBlocks, rotate: bool, per_head: int
) -> None:
    rows, heads = codes_ref.shape[0], c_ref.shape[0]
    total, size = x_ref.shape
    row = pl.program_id(0) * rows + lax.iota(jnp.int32, rows)
    there = row < total
    channels = lax.iota(jnp.int32, size)
    x = plgpu.load(x_ref.at[row[:, None], channels[None, :]], mask=there[:, None], other=0.0).astype(jnp.float32)
    c = plgpu.load(c_ref.at[row // per_head % heads], mask=there, other=1.0)
    if rotate:
        x = rotated(x)
        x = jnp.where(jnp.abs(x) < _SMALLEST_NORMAL, 0.0, x)  # as `formats.rounded` does
    # Each row is a head of its own: round_blocks takes [heads, tiles, tokens, blocks, block].
    blocks = x.reshape(rows, 1, 1, size // quantizer.block, quantizer.block)
    codes, scale = quantizer.round_blocks(blocks, {"c": c})
    codes_ref[...] = packed(codes.reshape(rows, size).astype(jnp.int32), 4)
    scale_ref[...] = scale.reshape(rows, size // quantizer.block)


def store_ultraquant(
    quantizer: UltraBlocks,
    x: Array,
    constants: Leaves | None = None,
    *,
    rotate: bool,
    rows: int = 16,
    warps: int = 4,
    interpret: bool = False,
) -> Leaves:
    """The leaves of tokens x `[batch, kv_heads, tokens, head_dim]`: codes uint8 `[batch, kv_heads, tokens, 1,
    head_dim/2]` and scale uint8 `[..., head_dim/block]`, 17 bytes for 32 values, equal to what
    `quantizer.encode(formats.rounded(hadamard(x), float32), constants)` stores (without the rotation: of x); but a CPU
    takes denormals for zero, so that tokens whose rotation passes through them, near 1e-38, may differ from it.

    A program takes `rows` rows of as many channels as are rotated together (head_dim's largest power of two).
    """
    batch, kv_heads, tokens, head_dim = x.shape
    if head_dim != quantizer.head_dim:
        raise ValueError(f"x has head_dim={head_dim}; the quantizer has {quantizer.head_dim}")
    size = block_size(head_dim)
    per_head = tokens * (head_dim // size)
    total = batch * kv_heads * per_head
    c = jnp.broadcast_to(jnp.asarray((constants or {}).get("c", quantizer.c), jnp.float32), (kv_heads,))
    padded = -(-total // rows) * rows  # what lies beyond is written by the last program and cut off
    blocks = size // quantizer.block
    codes, scale = pl.pallas_call(
        functools.partial(_ultraquant, quantizer=quantizer, rotate=rotate, per_head=per_head),
        grid=(padded // rows,),
        out_specs=[pl.BlockSpec((rows, size // 2), lambda i: (i, 0)), pl.BlockSpec((rows, blocks), lambda i: (i, 0))],
        out_shape=[jax.ShapeDtypeStruct((padded, n), jnp.uint8) for n in (size // 2, blocks)],
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="store_ultraquant",
    )(x.reshape(total, size), c)
    shape = (batch, kv_heads, tokens, 1)
    return {"codes": codes[:total].reshape(*shape, -1), "scale": scale[:total].reshape(*shape, -1)}


def _nearest(x: Array) -> Array:
    """x >= 0 to the nearest integer, half to even, int32. (Triton has no rounding; XLA takes x + 2^23 − 2^23 for x.)"""
    whole = x.astype(jnp.int32)
    rest = x - whole.astype(jnp.float32)
    return whole + jnp.where((rest > 0.5) | ((rest == 0.5) & (whole & 1 == 1)), 1, 0)


def _as_stored(x: Array, dtype: Any) -> Array:
    """`formats.saturate`, whose isfinite Triton has not."""
    if dtype == jnp.float32:
        return x
    largest = np.float32(jnp.finfo(dtype).max)
    return jnp.where(jnp.abs(x) < jnp.inf, jnp.clip(x, -largest, largest), x).astype(dtype)


def _kvarn(
    x_ref: Ref, codes_ref: Ref, scale_ref: Ref, zero_ref: Ref, column_ref: Ref, *, quantizer: Any, channels: bool
) -> None:
    def read() -> Array:
        """The tile, again for every candidate: volatile, or the compiler would keep it in registers, and spill."""
        tile = plgpu.load(x_ref, volatile=True).astype(jnp.float32)
        return tile.T if channels else tile

    equivariant = quantizer.normalize == "equivariant"
    balanced, row_scale, column_scale = normalize_tile(read, iters=quantizer.iters, equivariant=equivariant)
    low, high = jnp.min(balanced, axis=1), jnp.max(balanced, axis=1)
    levels = 2**quantizer.bits - 1
    step = jnp.maximum((high - low) / levels, SMALLEST_STEP)
    unknown = jnp.max(jnp.where(balanced == balanced, 0, 1), axis=1) > 0  # NaN in the row: Triton's maximum loses it
    low, step = jnp.where(unknown, jnp.nan, low), jnp.where(unknown, jnp.nan, step)
    level = jnp.clip((balanced - low[:, None]) / step[:, None], 0, levels)
    level = jnp.where(level == level, level, 0.0)
    codes_ref[...] = packed(_nearest(level), quantizer.bits)
    for ref, value in ((scale_ref, row_scale * step), (zero_ref, row_scale * low), (column_ref, column_scale)):
        ref[...] = _as_stored(value, ref.dtype)


def store_kvarn(
    quantizer: BalancedChannelRows | BalancedTokenRows, tiles: Array, *, warps: int = 16, interpret: bool = False
) -> Leaves:
    """The leaves of `tiles` `[batch, kv_heads, tiles, tokens, head_dim]`, in the stored basis, as `quantizer.encode`
    has them: codes, scale, zero and token_scale (K) or channel_scale (V).

    Sums have another order than XLA's, so that scales differ in their last bits, and a code where a value lies within
    float32's error of the middle of two levels. A row with NaN has a scale of NaN; the others of its tile are balanced
    as if it were finite, because Triton's maximum passes over NaN (`quantizer.encode` leaves such a tile as it is).

    Raises ValueError for what the kernel has not: a tile whose tokens or channels are no power of two, 3 bits (which
    fill no byte) and FP8 scales.
    """
    *lead, tokens, head_dim = tiles.shape
    channels = isinstance(quantizer, BalancedChannelRows)
    for name, value in (("head_dim", head_dim), ("tokens of a tile", tokens)):
        if value & (value - 1):
            raise ValueError(f"{name}={value}: the kernel needs a power of two; use quantizer.encode")
    if 8 % quantizer.bits or quantizer.scales == "fp8":
        raise ValueError(
            f"bits={quantizer.bits}, scales={quantizer.scales}: the kernel has 1, 2, 4 and 8 bits with f16 or f32 "
            "scales; use quantizer.encode"
        )
    count = int(np.prod(lead))
    rows, columns = (head_dim, tokens) if channels else (tokens, head_dim)
    width = columns * quantizer.bits // 8
    dtypes = SCALE_DTYPES[quantizer.scales]

    def of_tile(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda i: (i, *(0,) * len(shape)))

    out = [((rows, width), jnp.uint8), ((rows,), dtypes[0]), ((rows,), dtypes[1]), ((columns,), dtypes[0])]
    codes, scale, zero, column = pl.pallas_call(
        functools.partial(_kvarn, quantizer=quantizer, channels=channels),
        grid=(count,),
        in_specs=[of_tile(tokens, head_dim)],
        out_specs=[of_tile(*shape) for shape, _ in out],
        out_shape=[jax.ShapeDtypeStruct((count, *shape), dtype) for shape, dtype in out],
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="store_kvarn",
    )(tiles.reshape(count, tokens, head_dim))
    codes, column = codes.reshape(*lead, rows, width), column.reshape(*lead, columns)
    by_row = (*lead, rows) if channels else (*lead, rows, 1)
    leaves = {"codes": codes, "scale": scale.reshape(by_row), "zero": zero.reshape(by_row)}
    return leaves | {"token_scale" if channels else "channel_scale": column}
