"""Affine codes: x̂ = (code · scale + zero) · second scale, with rows along channels (K) or along tokens (V).

For few queries (decoding) a tile is read without dequantizing it: the scale of a row is folded into the query (K) or
into the probabilities (V), zeros are a product of their own, and what stays is a product with the codes, a plane (every
P-th code, for P in a byte) at a time. The second scale, where there is one, multiplies a plane as it is unpacked, which
is free: it turns V's many short products into one long one, and XLA:CPU compiles the unpacking to vectors only where
something as long as the plane's rows comes in. For many queries (a block) the tile, and no more than it, is decoded
first: that is cheaper.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from kvq_jax.formats import SCALE_DTYPES, rounded, store, store_scale, uniform_codes, widen
from kvq_jax.packing import interleave, pack, packed_size, planes, unpack
from kvq_jax.quantizers.base import Leaves, Quantizer, dot

SHORTEST_PLANE = 32  # bytes of a packed row


class RoundedRows(NamedTuple):
    """One rounding group a row: row = (codes · scale + zero) · column_scale."""

    codes: Array  # uint8 [..., R, C]
    scale: Array  # [..., R]
    zero: Array  # [..., R]
    column_scale: Array | None = None  # [..., C]


def row_range(rows: Array) -> tuple[Array, Array]:
    """Minimum and maximum over the last axis; NaN where there is one (XLA:CPU's reductions lose it at some shapes)."""
    unknown = jnp.isnan(rows).any(-1)
    return jnp.where(unknown, jnp.nan, rows.min(-1)), jnp.where(unknown, jnp.nan, rows.max(-1))


@dataclass(frozen=True)
class Affine(Quantizer):
    """What both orientations share. `round_rows` is KIVI's rounding; KVarN overrides it."""

    bits: int
    group: int  # elements of a row
    scales: str

    def round_rows(self, rows: Array) -> RoundedRows:
        """Min/max rounding:

        zero = min, scale = (max − min)/(2^bits − 1), code = clip(rint((x − zero)/scale), 0, 2^bits − 1).

        The codes come from the unrounded scale and zero: rounding these to 16 bits first costs accuracy. A constant row
        has scale 0 and code 0, and comes back as its zero.
        """
        low, high = row_range(rows)
        scale = (high - low) / (2**self.bits - 1)
        scale_dtype, zero_dtype = SCALE_DTYPES[self.scales]
        codes = uniform_codes(rows, scale[..., None], low[..., None], self.bits)
        return RoundedRows(codes, store_scale(scale, scale_dtype), store(low, zero_dtype))

    def folds(self, queries: int) -> bool:
        """Folding costs queries · tokens, decoding the tile head_dim · tokens: a block of many queries decodes."""
        return queries <= self.head_dim // 2

    def _codes(self, leaves: Leaves) -> Array:
        return unpack(leaves["codes"], self.bits, dtype=jnp.float32)

    def _planes(self, leaves: Leaves, second_scale: Array | None) -> list[Array]:
        """The codes, times the second scale `[..., C]` of a row's C elements, as `packing.planes`: one where rows are
        too short to gain by more."""
        if packed_size(self.group, self.bits) < SHORTEST_PLANE:
            codes = [self._codes(leaves)]
        else:
            codes = planes(leaves["codes"], self.bits, dtype=jnp.float32)
        if second_scale is None:
            return codes
        return [x * second_scale[..., None, i :: len(codes)] for i, x in enumerate(codes)]


@dataclass(frozen=True)
class NarrowAffine(Affine):
    """`Affine` computed in the format of the scales, as code over tensors of that dtype does: every difference and
    quotient is rounded to it, and the codes come from the scale that is stored."""

    def rounded(self, x: Array) -> Array:
        return rounded(x, SCALE_DTYPES[self.scales][0])

    def round_rows(self, rows: Array) -> RoundedRows:
        rows = self.rounded(rows)
        low, high = row_range(rows)
        scale = self.rounded(self.rounded(high - low) / (2**self.bits - 1))
        levels = self.rounded(self.rounded(rows - low[..., None]) / jnp.where(scale == 0, 1.0, scale)[..., None])
        codes = jnp.clip(jnp.round(levels), 0, 2**self.bits - 1).astype(jnp.uint8)
        return RoundedRows(codes, *(store(x, SCALE_DTYPES[self.scales][0]) for x in (scale, low)))


def _wide(leaves: Leaves, name: str) -> Array:
    return widen(leaves[name])


@dataclass(frozen=True)
class ChannelRows(Affine):
    """Rows are channels: one group is `group` consecutive tokens of one channel. A tile is `group` tokens.

    Leaves: codes uint8 `[tiles, head_dim, group·bits/8]` packed along tokens; scale, zero `[tiles, head_dim]`;
    token_scale `[tiles, group]` where there is a second scale.
    """

    def __post_init__(self) -> None:
        packed_size(self.group, self.bits)

    @property
    def tile_tokens(self) -> int:
        return self.group

    def encode(self, tiles: Array, constants: Leaves) -> Leaves:
        rounded = self.round_rows(jnp.swapaxes(tiles, -1, -2))
        leaves = {"codes": pack(rounded.codes, self.bits), "scale": rounded.scale, "zero": rounded.zero}
        return leaves if rounded.column_scale is None else leaves | {"token_scale": rounded.column_scale}

    def decode(self, leaves: Leaves, constants: Leaves) -> Array:
        rows = self._codes(leaves) * _wide(leaves, "scale")[..., None] + _wide(leaves, "zero")[..., None]
        if "token_scale" in leaves:
            rows *= _wide(leaves, "token_scale")[..., None, :]
        return jnp.swapaxes(rows, -1, -2)

    def scores(self, q: Array, leaves: Leaves, constants: Leaves) -> Array:
        if not self.folds(q.shape[-2]):
            return super().scores(q, leaves, constants)
        # (q ∘ scale)·(token_scale_j·codes_j) + token_scale_j (q·zero); q: [..., queries, D] -> [..., 1, queries, D]
        token_scale = _wide(leaves, "token_scale") if "token_scale" in leaves else None
        q = q[..., None, :, :]
        scaled = q * _wide(leaves, "scale")[..., None, :]
        zeros = dot(q, _wide(leaves, "zero")[..., None])
        if token_scale is not None:
            zeros *= token_scale[..., None, :]
        out = interleave([dot(scaled, codes) for codes in self._planes(leaves, token_scale)]) + zeros
        out = jnp.swapaxes(out, -2, -3)  # [..., queries, tiles, group]
        return out.reshape(*out.shape[:-2], -1)


@dataclass(frozen=True)
class TokenRows(Affine):
    """Rows are tokens: one group is `group` consecutive channels of one token, `head_dim/group` groups a token.

    Leaves: codes uint8 `[tiles, tile_tokens, head_dim·bits/8]` packed along channels; scale, zero
    `[tiles, tile_tokens, head_dim/group]`; channel_scale `[tiles, head_dim]` where there is a second scale, which
    makes a tile of `tile_tokens > 1` (and needs group = head_dim).
    """

    tokens_per_tile: int = 1

    def __post_init__(self) -> None:
        packed_size(self.head_dim, self.bits)
        if self.head_dim % self.group:
            raise ValueError(f"a group of {self.group} channels does not divide head_dim={self.head_dim}")

    @property
    def tile_tokens(self) -> int:
        return self.tokens_per_tile

    @property
    def _groups(self) -> int:
        return self.head_dim // self.group

    def encode(self, tiles: Array, constants: Leaves) -> Leaves:
        if self._groups == 1:
            rounded = self.round_rows(tiles)
            rounded = rounded._replace(scale=rounded.scale[..., None], zero=rounded.zero[..., None])
        else:
            rounded = self.round_rows(tiles.reshape(*tiles.shape[:-1], self._groups, self.group))
            rounded = rounded._replace(codes=rounded.codes.reshape(tiles.shape))
        leaves = {"codes": pack(rounded.codes, self.bits), "scale": rounded.scale, "zero": rounded.zero}
        return leaves if rounded.column_scale is None else leaves | {"channel_scale": rounded.column_scale}

    def _added(self, leaves: Leaves) -> Array:
        """What is added to code · scale: the zero, as it is stored."""
        return _wide(leaves, "zero")

    def decode(self, leaves: Leaves, constants: Leaves) -> Array:
        scale, zero = (jnp.repeat(x, self.group, axis=-1) for x in (_wide(leaves, "scale"), self._added(leaves)))
        x = self._codes(leaves) * scale + zero
        return x * _wide(leaves, "channel_scale")[..., None, :] if "channel_scale" in leaves else x

    def scores(self, q: Array, leaves: Leaves, constants: Leaves) -> Array:
        if not self.folds(q.shape[-2]) or "channel_scale" in leaves:
            return super().scores(q, leaves, constants)
        # Σ_g scale_jg (q_g·codes_jg) + zero_jg Σ q_g, over the groups g of token j's channels
        codes, scale, zero = self._codes(leaves), _wide(leaves, "scale"), self._added(leaves)
        codes, scale, zero = (
            jnp.swapaxes(x.reshape(*x.shape[:-3], -1, x.shape[-1]), -1, -2) for x in (codes, scale, zero)
        )
        by_group = q.reshape(*q.shape[:-1], self._groups, self.group)
        out = dot(by_group.sum(-1), zero)
        for g in range(self._groups):
            channels = slice(g * self.group, (g + 1) * self.group)
            out += dot(by_group[..., g, :], codes[..., channels, :]) * scale[..., g, None, :]
        return out

    def weighted_sum(self, p: Array, leaves: Leaves, constants: Leaves) -> Array:
        if not self.folds(p.shape[-2]):
            return super().weighted_sum(p, leaves, constants)
        # Σ_j (p_j scale_j)·(codes_j ∘ channel_scale) + channel_scale ∘ Σ_j p_j zero_j, over the tokens j of all tiles
        channel_scale = _wide(leaves, "channel_scale") if "channel_scale" in leaves else None
        scale, zero = _wide(leaves, "scale"), self._added(leaves)
        tiles, tokens = scale.shape[-3:-1]
        codes = self._planes(leaves, channel_scale)
        codes = [x.reshape(*x.shape[:-3], tiles * tokens, -1) for x in codes]
        weights = [p * scale[..., g].reshape(*scale.shape[:-3], 1, -1) for g in range(self._groups)]
        size = self.group // len(codes)

        def product(plane: Array) -> Array:
            groups = [dot(w, plane[..., g * size : (g + 1) * size]) for g, w in enumerate(weights)]
            return groups[0] if len(groups) == 1 else jnp.concatenate(groups, axis=-1)

        out = interleave([product(plane) for plane in codes])
        if channel_scale is None:
            zeros = dot(p, zero.reshape(*zero.shape[:-3], tiles * tokens, -1))  # [..., queries, groups]
            return out + jnp.repeat(zeros, self.group, axis=-1)
        by_tile = jnp.swapaxes(p.reshape(*p.shape[:-1], tiles, tokens), -2, -3)  # [..., tiles, queries, tokens]
        return out + dot(jnp.swapaxes(dot(by_tile, zero)[..., 0], -1, -2), channel_scale)
