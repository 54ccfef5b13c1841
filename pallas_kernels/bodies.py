"""How the keys and the values of one store are read inside the decode kernel, from the bytes as they are stored.

Triton has no gather and slices no values. The two FP4 codes of a byte stay apart as *planes*: even and odd channels are
two operands of two products, the query is split likewise, and the output is put together only when it is written. The
codes of affine tiles are too many planes for that: they are joined, pair by pair, into one operand.

Products are of bfloat16 with float32 sums. What is exact in bfloat16 (FP4 values, codes, a query rounded to E4M3) is
one operand; what is not is the sum of `terms` bfloat16 numbers, which leaves a relative error near 2^(−8·terms − 1).
"""

import abc
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._internals import GROUP, dot_scaled

Ref = Any  # a window of an operand: what Pallas hands to a kernel
SMALLEST = 16  # of any side of a matrix product
CHANNELS = 64  # of an affine tile of K in one product
MX_NAN = 255


def bf16_terms(x: Array, count: int) -> list[Array]:
    """float32 x as a sum of `count` bfloat16 numbers, largest first.

    The leading ones are rounded in integers: a compiler may take a cast to bfloat16 and back for nothing.
    """
    terms = []
    for _ in range(count - 1):
        bits = (lax.bitcast_convert_type(x, jnp.int32) + 0x8000) & np.int32(-0x10000)
        head = lax.bitcast_convert_type(bits, jnp.float32)
        terms.append(head.astype(jnp.bfloat16))
        x = x - head
    return [*terms, x.astype(jnp.bfloat16)]


def dot_terms(a: list[Array], b: list[Array], transposed: bool = False) -> Array:
    """Σ a_i·b_j, float32, over the pairs that are not smaller than what the terms leave out; b given as bᵀ if
    `transposed`."""
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    out = None
    for i, x in enumerate(a):
        for y in b[: max(len(a), len(b)) - i]:
            part = lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32)
            out = part if out is None else out + part
    assert out is not None
    return out


def load(ref: Ref, index: tuple[Any, ...], mask: Array | None) -> Array:
    """ref[index], 0 where the mask, broadcastable to it, is False: nothing is read there."""
    # Interpret mode takes no Python number as an index; a slice of one is as good.
    kept = [i for i in index if isinstance(i, (int, slice, pl.Slice))]
    fixed = [axis for axis, i in enumerate(kept) if isinstance(i, int)]
    index = tuple(pl.ds(i, 1) if isinstance(i, int) else i for i in index)
    if mask is None:
        out = plgpu.load(ref.at[index])
    else:
        out = plgpu.load(ref.at[index], mask=jnp.expand_dims(mask, fixed), other=0)
    return out.reshape([size for axis, size in enumerate(out.shape) if axis not in fixed])


def load_rows(ref: Ref, there: Array | None, channels: Any = slice(None)) -> Array:
    """Queries; rows beyond them are anything, and no other row ever sees them."""
    return plgpu.load(ref.at[:, channels], mask=None if there is None else there[:, None])


def widen(x: Array) -> Array:
    """A loaded scale or zero as float32: bfloat16 comes as uint16, E4M3 as uint8 (not every GPU converts it)."""
    if x.dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.int32) << 16, jnp.float32)
    if x.dtype == jnp.uint8:
        byte = x.astype(jnp.int32)  # in float16's place the value times 2^−8, denormals too
        half = ((byte & 0x80) << 8 | (byte & 0x7F) << 7).astype(jnp.uint16)
        value = lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) * np.float32(2**8)
        return jnp.where((byte & 0x7F) == 0x7F, jnp.nan, value)
    return x.astype(jnp.float32)


def as_bits(leaf: Array) -> Array:
    """E4M3 leaves as their bytes."""
    return lax.bitcast_convert_type(leaf, jnp.uint8) if leaf.dtype == jnp.float8_e4m3fn else leaf


def repeated(x: Array, times: int) -> Array:
    """`[rows, n]` -> `[rows, n·times]`, every column `times` times."""
    if times == 1:
        return x
    rows, n = x.shape
    return jnp.broadcast_to(x[:, :, None], (rows, n, times)).reshape(rows, n * times)


def planes(codes: Array, bits: int) -> list[Array]:
    """int32 bytes -> 8/bits arrays: plane i holds the codes i, i + 8/bits, … of what was packed."""
    return [codes >> (bits * i) & (2**bits - 1) for i in range(8 // bits)]


def unpacked(codes: Array, bits: int) -> Array:
    """uint8 bytes `[rows, n]` -> their codes in order, exact in bfloat16, `[rows, n·8/bits]`. Triton joins only pairs,
    on a new last axis."""
    parts = [plane.astype(jnp.bfloat16) for plane in planes(codes.astype(jnp.int32), bits)]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [jnp.stack([a, b], axis=-1) for a, b in zip(parts[:half], parts[half:], strict=True)]
    return parts[0].reshape(codes.shape[0], -1)


def e2m1(codes: Array) -> Array:
    """int32 codes -> float32 · 2^−14: sign and index moved to the top of a float16 (kvq_jax.block_formats)."""
    half = ((codes & 8) << 12 | (codes & 7) << 9).astype(jnp.uint16)
    return lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32)


class Part(NamedTuple):
    """Consecutive keys whose scores came out of one product, or whose probabilities go into one."""

    scores: Array  # [rows of q, size]
    first: Array  # int32: its first token
    tile: Array  # int32: the tile of K that it belongs to
    there: Array | None  # bool [size] or [1]: which are in the store; None: all

    @property
    def size(self) -> int:
        return self.scores.shape[1]

    @property
    def tokens(self) -> Array:
        return self.first + lax.iota(jnp.int32, self.size)


@dataclass(frozen=True)
class Keys(abc.ABC):
    """One layout of keys. `terms`: of bfloat16, that stand for a query."""

    head_dim: int
    terms: int

    @property
    def tile(self) -> int:
        """Tokens that share a statistic: steps are multiples of it."""
        return 1

    @abc.abstractmethod
    def operands(self, store: dict[str, Array]) -> list[Array]:
        """The kernel's operands `[batch, kv_heads, ...]`: views of the stored leaves, nothing moves."""

    def queries(self, q: Array) -> list[Array]:
        """float32 `[batch, kv_heads, rows, head_dim]` -> the kernel's operands `[batch, kv_heads, rows, ...]`."""
        return [q]

    def load_queries(self, refs: list[Ref], there: Array | None) -> Any:
        """What stays in registers for all steps. there `[rows]`: which rows are queries; None: all."""
        return load_rows(refs[0], there)

    @abc.abstractmethod
    def scores(self, q: Any, refs: list[Ref], first: Array, tokens: int, limit: Array) -> list[Part]:
        """q·K̂ᵀ, not scaled, of the tokens [first, first + tokens), from `limit` on nothing is read; a part for each
        tile, where there are any."""


@dataclass(frozen=True)
class Values(abc.ABC):
    """One layout of values. `terms`: of bfloat16, that stand for a probability."""

    head_dim: int
    terms: int

    @property
    def planes(self) -> int:
        """Channel planes·c + i of the output is column c of plane i."""
        return 1

    @abc.abstractmethod
    def operands(self, store: dict[str, Array]) -> list[Array]:
        """As `Keys.operands`."""

    @abc.abstractmethod
    def weighted(self, part: Part, refs: list[Ref]) -> list[Array]:
        """p·V̂ of a part whose scores are now probabilities; planes `[rows, head_dim/planes]`."""


def rows_of(part: Part) -> tuple[Any, Array | None]:
    """The tokens of a part as an index, and which of them are there, to go with more axes."""
    return pl.ds(part.first, part.size), None if part.there is None else part.there[:, None]


def of_tokens(leaf: Array) -> Array:
    """`[batch, kv_heads, tiles, tile tokens, n]` -> `[batch, kv_heads, tokens, n]`."""
    return leaf.reshape(*leaf.shape[:2], -1, *leaf.shape[4:])


def _fp4_planes(codes: Array, scale: Array, halved: bool) -> list[Array]:
    """uint8 codes `[tokens, head_dim/2]` and scale bytes `[tokens, blocks]` -> even and odd channels, bfloat16, exact.

    `halved`: the scale is 2^(byte − 127) with byte 0 too and 255 is NaN (OCP); else byte 0 is a zero block.
    """
    byte = scale.astype(jnp.int32)
    # Twice 2^(byte − 127) for half the value: 2^−127 would be a denormal.
    factor = lax.bitcast_convert_type((byte + 1 if halved else byte) << 23, jnp.float32)
    factor = jnp.where(byte == MX_NAN, jnp.nan, factor) if halved else factor
    factor = repeated(factor, codes.shape[1] // scale.shape[1])
    unit = np.float32(2**13 if halved else 2**14)
    return [(e2m1(part) * unit * factor).astype(jnp.bfloat16) for part in planes(codes.astype(jnp.int32), 4)]


@dataclass(frozen=True)
class BlockKeys(Keys):
    """FP4 with a power-of-two scale for each block of channels: UltraQuant, MXFP4. Bfloat16 products."""

    halved: bool

    def operands(self, store: dict[str, Array]) -> list[Array]:
        return [of_tokens(store[name]) for name in ("codes", "scale")]

    def queries(self, q: Array) -> list[Array]:
        pairs = q.reshape(*q.shape[:-1], -1, 2)
        dtype = jnp.bfloat16 if self.terms == 1 else jnp.float32
        return [pairs[..., i].astype(dtype) for i in (0, 1)]

    def load_queries(self, refs: list[Ref], there: Array | None) -> Any:
        loaded = [load_rows(ref, there) for ref in refs]
        return [bf16_terms(x, self.terms) if self.terms > 1 else [x] for x in loaded]

    def scores(self, q: Any, refs: list[Ref], first: Array, tokens: int, limit: Array) -> list[Part]:
        there = first + lax.iota(jnp.int32, tokens) < limit
        codes, scale = (load(ref, (pl.ds(first, tokens), slice(None)), there[:, None]) for ref in refs)
        even, odd = _fp4_planes(codes, scale, self.halved)
        scores = dot_terms(q[0], [even], transposed=True) + dot_terms(q[1], [odd], transposed=True)
        return [Part(scores, first, first, there)]


@dataclass(frozen=True)
class ScaledKeys(Keys):
    """As `BlockKeys`, blocks of 32 channels or more, for a query that is exact in E4M3: the scaled matrix instruction
    reads the packed bytes and their scales. swapped: keys are the M side of the product, as tcgen05 wants them."""

    swapped: bool

    def operands(self, store: dict[str, Array]) -> list[Array]:
        return [of_tokens(store[name]) for name in ("codes", "scale")]

    def queries(self, q: Array) -> list[Array]:
        return [q.astype(jnp.float8_e4m3fn)]

    def scores(self, q: Any, refs: list[Ref], first: Array, tokens: int, limit: Array) -> list[Part]:
        there = first + lax.iota(jnp.int32, tokens) < limit
        codes, scale = (load(ref, (pl.ds(first, tokens), slice(None)), there[:, None]) for ref in refs)
        scale = repeated(scale, self.head_dim // GROUP // scale.shape[1])
        if self.swapped:  # tcgen05 has no form with one scale: the query's is 2^0
            unit = jnp.full((q.shape[0], self.head_dim // GROUP), 127, jnp.uint8)
            scores = dot_scaled(codes, q.T, lhs_scale=scale, rhs_scale=unit).T
        else:
            scores = dot_scaled(q, codes.T, rhs_scale=scale)
        return [Part(scores, first, first, there)]


@dataclass(frozen=True)
class BlockValues(Values):
    """As `BlockKeys`. A scale belongs to channels, which a sum over tokens does not contract: no scaled product."""

    halved: bool

    @property
    def planes(self) -> int:
        return 2

    def operands(self, store: dict[str, Array]) -> list[Array]:
        return [of_tokens(store[name]) for name in ("codes", "scale")]

    def weighted(self, part: Part, refs: list[Ref]) -> list[Array]:
        rows, there = rows_of(part)
        codes, scale = (load(ref, (rows, slice(None)), there) for ref in refs)
        terms = bf16_terms(part.scores, self.terms)
        return [dot_terms(terms, [plane]) for plane in _fp4_planes(codes, scale, self.halved)]


@dataclass(frozen=True)
class AffineKeys(Keys):
    """Rows are channels (`quantizers.affine.ChannelRows`): codes `[tiles, head_dim, group·bits/8]` along tokens.

    token_scale_j · ((q ∘ scale)·codes_j + q·zero)

    The sum is taken over at most CHANNELS channels at a time: a query of many is an operand that fills the registers.
    """

    bits: int
    group: int
    token_scale: bool

    @property
    def tile(self) -> int:
        return self.group

    def operands(self, store: dict[str, Array]) -> list[Array]:
        names = ["codes", "scale", "zero"] + ["token_scale"] * self.token_scale
        return [as_bits(store[name]) for name in names]

    def scores(self, q: Any, refs: list[Ref], first: Array, tokens: int, limit: Array) -> list[Part]:
        return [
            # A step begins below the limit, and what was flushed was flushed by tiles: its first tile is there.
            self._tile(q, refs, first // self.group + i, first + i * self.group, limit if i else None)
            for i in range(tokens // self.group)
        ]

    def load_queries(self, refs: list[Ref], there: Array | None) -> Any:
        return [load_rows(refs[0], there, pl.ds(at, self._channels)) for at in range(0, self.head_dim, self._channels)]

    @property
    def _channels(self) -> int:
        return min(CHANNELS, self.head_dim // 2)

    def _tile(self, q: list[Array], refs: list[Ref], tile: Array, first: Array, limit: Array | None) -> Part:
        there = None if limit is None else (first < limit)[None]
        scores, offset = [], []
        for i, part in enumerate(q):
            channels = pl.ds(i * self._channels, self._channels)
            codes = load(refs[0], (tile, channels, slice(None)), None if there is None else there[:, None])
            scale, zero = (widen(load(ref, (tile, channels), there)) for ref in refs[1:3])
            offset.append(jnp.sum(part * zero[None, :], axis=1))
            scores.append(dot_terms(bf16_terms(part * scale[None, :], self.terms), [unpacked(codes, self.bits)]))
        total = functools.reduce(jnp.add, scores) + functools.reduce(jnp.add, offset)[:, None]
        if self.token_scale:
            total *= widen(load(refs[3], (tile, slice(None)), there))[None, :]
        return Part(total, first, tile, there)


@dataclass(frozen=True)
class AffineValues(Values):
    """Rows are tokens (`quantizers.affine.TokenRows`): codes `[tokens, head_dim·bits/8]` along channels.

    One scale a token is folded: channel_scale ∘ Σ_j p_j (scale_j·codes_j + zero_j). Where a token has several (KIVI),
    a channel's group decides which, and the values are decoded instead, into bfloat16 terms.
    """

    bits: int
    group: int  # channels
    channel_scale: bool

    def operands(self, store: dict[str, Array]) -> list[Array]:
        leaves = [of_tokens(as_bits(store[name])) for name in ("codes", "scale", "zero")]
        return [*leaves, as_bits(store["channel_scale"])] if self.channel_scale else leaves

    def weighted(self, part: Part, refs: list[Ref]) -> list[Array]:
        out = (self._decoded if self.group < self.head_dim else self._folded)(part, refs)
        if self.channel_scale:
            out = out * widen(load(refs[3], (part.tile, slice(None)), part.there))[None, :]
        return [out]

    def _decoded(self, part: Part, refs: list[Ref]) -> Array:
        rows, there = rows_of(part)
        codes, scale, zero = (load(ref, (rows, slice(None)), there) for ref in refs[:3])
        scale, zero = (repeated(widen(x), self.group) for x in (scale, zero))
        values = unpacked(codes, self.bits).astype(jnp.float32) * scale + zero
        return dot_terms(bf16_terms(part.scores, self.terms), bf16_terms(values, self.terms))

    def _folded(self, part: Part, refs: list[Ref]) -> Array:
        rows, there = rows_of(part)
        codes = load(refs[0], (rows, slice(None)), there)
        scale, zero = (widen(load(ref, (rows, 0), part.there)) for ref in refs[1:3])
        offset = jnp.sum(part.scores * zero[None, :], axis=1)[:, None]
        return dot_terms(bf16_terms(part.scores * scale[None, :], self.terms), [unpacked(codes, self.bits)]) + offset


@dataclass(frozen=True)
class DenseKeys(Keys):
    """No quantization: float32, float16, or bfloat16 as its bits."""

    exact: bool  # the keys in bfloat16

    def operands(self, store: dict[str, Array]) -> list[Array]:
        return [of_tokens(store["values"])]

    def load_queries(self, refs: list[Ref], there: Array | None) -> Any:
        return bf16_terms(load_rows(refs[0], there), self.terms)

    def scores(self, q: Any, refs: list[Ref], first: Array, tokens: int, limit: Array) -> list[Part]:
        there = first + lax.iota(jnp.int32, tokens) < limit
        keys = widen(load(refs[0], (pl.ds(first, tokens), slice(None)), there[:, None]))
        scores = dot_terms(q, bf16_terms(keys, 1 if self.exact else max(self.terms, 2)), transposed=True)
        return [Part(scores, first, first, there)]


@dataclass(frozen=True)
class DenseValues(Values):
    """As `DenseKeys`."""

    exact: bool

    def operands(self, store: dict[str, Array]) -> list[Array]:
        return [of_tokens(store["values"])]

    def weighted(self, part: Part, refs: list[Ref]) -> list[Array]:
        rows, there = rows_of(part)
        values = widen(load(refs[0], (rows, slice(None)), there))
        terms = bf16_terms(values, 1 if self.exact else self.terms)
        return [dot_terms(bf16_terms(part.scores, self.terms), terms)]
