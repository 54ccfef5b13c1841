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

from kvq_jax.grids import level_values, trellis_indices
from kvq_jax.packing import codes_in_word
from pallas_kernels._internals import GROUP, dot_scaled

Ref = Any  # a window of an operand: what Pallas hands to a kernel
SMALLEST = 16  # of any side of a matrix product
CHANNELS = 64  # of an affine tile of K in one product
MX_NAN = 255
OF_TILES = ("channel_scale", "channel_mean")  # leaves of V that the tokens of a tile share


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
    """int32 words of P codes -> P arrays: plane i holds the codes i, i + P, … of what was packed."""
    return [codes >> (bits * i) & (2**bits - 1) for i in range(codes_in_word(bits))]


class Block(NamedTuple):
    """`codes` codes from `first_code` on of `rows` rows from `first` on, of what `lead` leaves of an operand."""

    lead: tuple[Array, ...]
    first: Array | int
    rows: int
    first_code: Array | int
    codes: int


@dataclass(frozen=True)
class Codes:
    """Rows of codes, packed along an operand's last axis (`kvq_jax.packing`), as what they stand for.

    grid: of `kvq_jax.grids`; empty where a code is a number.
    """

    bits: int
    grid: str = ""

    def load(self, ref: Ref, at: Block, mask: Array | None, terms: int) -> list[Array]:
        """bfloat16 `[rows, codes]`: one array where that is exact, else as many terms. mask: as in `load`, two axes."""
        count = codes_in_word(self.bits)
        first, words = at.first_code // count, at.codes // count
        if self.bits == 3:  # eight codes in three bytes
            parts = [self._column(ref, at, mask, first, words, byte) for byte in range(3)]
            word = parts[0] | parts[1] << 8 | parts[2] << 16
        else:
            word = load(ref, (*at.lead, pl.ds(at.first, at.rows), pl.ds(first, words)), mask).astype(jnp.int32)
        if self.grid == "trellis":
            # A level depends on the last two codes of the byte before, too: it is read again, from a cache.
            before = self._column(ref, at, mask, first, words, -1) >> (8 - 2 * self.bits)
            indices = trellis_indices(word, before, self.bits)
        else:
            indices = planes(word, self.bits)
        joined = joined_planes([index.astype(jnp.bfloat16) for index in indices])
        if not self.grid:
            return [joined]
        return bf16_terms(level_values(joined.astype(jnp.int32), self.bits, self.grid), terms)

    def _column(self, ref: Ref, at: Block, mask: Array | None, first: Array | int, words: int, byte: int) -> Array:
        """int32: this byte of every word; −1: of the word before, 0 before the row."""
        size = 3 if self.bits == 3 else 1
        column = (first + lax.iota(jnp.int32, words)) * size + byte
        row = at.first + lax.iota(jnp.int32, at.rows)
        if byte < 0:
            inside = (column >= 0)[None, :]
            mask, column = inside if mask is None else mask & inside, jnp.maximum(column, 0)
        index = (*at.lead, row[:, None], column[None, :])
        return plgpu.load(ref.at[index], mask=mask, other=None if mask is None else 0).astype(jnp.int32)


def joined_planes(parts: list[Array]) -> Array:
    """`packing.interleave` of 2^n arrays `[rows, n]`. Triton joins only pairs, on a new last axis."""
    rows = parts[0].shape[0]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [jnp.stack([a, b], axis=-1) for a, b in zip(parts[:half], parts[half:], strict=True)]
    return parts[0].reshape(rows, -1)


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
    """One layout of keys. `terms`: of bfloat16, that stand for what is not exact in it."""

    head_dim: int
    terms: int

    @property
    def tile(self) -> int:
        """Tokens that share a statistic: steps are multiples of it, or divide it."""
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

    token_scale_j · ((q ∘ scale)·x_j + q·zero), x_j what the codes stand for

    The sum is taken over at most CHANNELS channels at a time: a query of many is an operand that fills the registers.
    """

    codes: Codes
    group: int
    leaves: tuple[str, ...]  # of the store: codes, scale, zero and perhaps token_scale

    @property
    def tile(self) -> int:
        return self.group

    def operands(self, store: dict[str, Array]) -> list[Array]:
        return [as_bits(store[name]) for name in self.leaves]

    @property
    def _channels(self) -> int:
        return min(CHANNELS, self.head_dim // 2)

    def load_queries(self, refs: list[Ref], there: Array | None) -> Any:
        return [load_rows(refs[0], there, pl.ds(at, self._channels)) for at in range(0, self.head_dim, self._channels)]

    def scores(self, q: Any, refs: list[Ref], first: Array, tokens: int, limit: Array) -> list[Part]:
        size = min(tokens, self.group)
        # A step begins below the limit, and what was flushed was flushed by tiles: its first tile is there.
        return [self._part(q, refs, first + i * size, size, limit if i else None) for i in range(tokens // size)]

    def _part(self, q: list[Array], refs: list[Ref], first: Array, tokens: int, limit: Array | None) -> Part:
        leaf = dict(zip(self.leaves, refs, strict=True))
        tile, start = first // self.group, first % self.group if tokens < self.group else 0
        there = None if limit is None else (first < limit)[None]
        of_both = None if there is None else there[:, None]
        scores, offset = [], []
        for i, part in enumerate(q):
            channels = pl.ds(i * self._channels, self._channels)
            scale, zero = (widen(load(leaf[name], (tile, channels), there)) for name in ("scale", "zero"))
            offset.append(jnp.sum(part * zero[None, :], axis=1))
            block = Block((tile,), i * self._channels, self._channels, start, tokens)
            x = self.codes.load(leaf["codes"], block, of_both, self.terms)
            scores.append(dot_terms(bf16_terms(part * scale[None, :], self.terms), x))
        total = functools.reduce(jnp.add, scores) + functools.reduce(jnp.add, offset)[:, None]
        if "token_scale" in leaf:
            total *= widen(load(leaf["token_scale"], (tile, pl.ds(start, tokens)), there))[None, :]
        return Part(total, first, tile, there)


@dataclass(frozen=True)
class AffineValues(Values):
    """Rows are tokens (`quantizers.affine.TokenRows`): codes `[tokens, head_dim·bits/8]` along channels.

    One scale a token is folded, x_j what the codes stand for:

    channel_scale ∘ Σ_j p_j (scale_j·x_j + zero_j) + channel_mean·Σ_j p_j

    Where a token has several (KIVI), a channel's group decides which, and the values are decoded instead, into bfloat16
    terms.
    """

    codes: Codes
    group: int  # channels
    leaves: tuple[str, ...]  # of the store: codes, scale and perhaps zero, channel_scale and channel_mean

    def operands(self, store: dict[str, Array]) -> list[Array]:
        leaves = [as_bits(store[name]) for name in self.leaves]
        return [x if name in OF_TILES else of_tokens(x) for name, x in zip(self.leaves, leaves, strict=True)]

    def weighted(self, part: Part, refs: list[Ref]) -> list[Array]:
        leaf = dict(zip(self.leaves, refs, strict=True))
        out = (self._decoded if self.group < self.head_dim else self._folded)(part, leaf)
        scale, mean = (
            widen(load(leaf[name], (part.tile, slice(None)), part.there))[None, :] if name in leaf else None
            for name in OF_TILES
        )
        out = out if scale is None else out * scale
        return [out if mean is None else out + jnp.sum(part.scores, axis=1)[:, None] * mean]

    def _codes(self, part: Part, leaf: dict[str, Ref]) -> list[Array]:
        block = Block((), part.first, part.size, 0, self.head_dim)
        return self.codes.load(leaf["codes"], block, rows_of(part)[1], self.terms)

    def _decoded(self, part: Part, leaf: dict[str, Ref]) -> Array:
        rows, there = rows_of(part)
        scale, zero = (load(leaf[name], (rows, slice(None)), there) for name in ("scale", "zero"))
        scale, zero = (repeated(widen(x), self.group) for x in (scale, zero))
        (codes,) = self._codes(part, leaf)
        values = codes.astype(jnp.float32) * scale + zero
        return dot_terms(bf16_terms(part.scores, self.terms), bf16_terms(values, self.terms))

    def _folded(self, part: Part, leaf: dict[str, Ref]) -> Array:
        # Zeros before codes: the other way round, two kernels spill on gfx942.
        of_tokens = (rows_of(part)[0], 0)
        scale = widen(load(leaf["scale"], of_tokens, part.there))[None, :]
        offset: Array | float = 0.0
        if "zero" in leaf:
            zero = widen(load(leaf["zero"], of_tokens, part.there))[None, :]
            offset = jnp.sum(part.scores * zero, axis=1)[:, None]
        return dot_terms(bf16_terms(part.scores * scale, self.terms), self._codes(part, leaf)) + offset


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
