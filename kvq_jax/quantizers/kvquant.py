"""KVQuant (arXiv:2401.18079, nuqX-1%): codes of a calibrated table, outliers kept apart, keys before RoPE."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvq_jax.calibration.kmeans import weighted_kmeans
from kvq_jax.formats import SCALE_DTYPES, saturate, store, widen
from kvq_jax.packing import pack, packed_size, unpack
from kvq_jax.quantizers.base import ConstantSpec, Leaves, Quantizer
from kvq_jax.schemes import Bits, Side, Window, option, register

MOST_CHANNELS = 2**15  # of a token over all heads: an index is an int16
LARGEST_END = 65000  # of a calibrated range: float16 has numbers beyond it
SMALLEST_WIDTH = 2.0**-14  # of a calibrated range; float16's smallest normal number


def _as_rows(tiles: Array) -> Array:
    """`[batch, kv_heads, tokens, 1, head_dim]` -> `[batch, tokens, kv_heads · head_dim]`."""
    x = jnp.swapaxes(tiles[..., 0, :], 1, 2)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])


def _as_heads(rows: Array, kv_heads: int) -> Array:
    """Inverse of `_as_rows`."""
    return jnp.swapaxes(rows.reshape(*rows.shape[:2], kv_heads, rows.shape[2] // kv_heads), 1, 2)[..., None, :]


def _largest(keys: Array, count: int) -> tuple[Array, Array]:
    """The `count` largest of the last axis and where they are; of equals, the ones of the lowest index.

    Without the barriers XLA:CPU merges slices of the result into it, and then sorts whole rows, a hundred times slower;
    one barrier around both makes it crash where it splits the work over devices.
    """
    values, index = lax.top_k(keys, count)
    return lax.optimization_barrier(values), lax.optimization_barrier(index)


def _bounds(constants: Mapping[str, Array], steps: int = 0) -> tuple[Array, Array, Array, Array]:
    """K's (lower, upper, center, radius), float32 `[kv_heads, 1, 1, head_dim]`, in float16's arithmetic. steps: of a
    uniform grid, whose arithmetic is another one."""

    def half(x: Array) -> Array:
        return saturate(x, jnp.float16).astype(jnp.float32)

    low, high = (half(constants[name][:, None, None]) for name in ("lower", "upper"))
    if not steps:
        return low, high, half(high + low) / 2, half(high - low) / 2
    per_unit = half(half(1 / half(high - low)) * steps)  # (code + low · per_unit) / per_unit, as the uniform variant
    return low, high, (half(low * per_unit) + steps / 2) / per_unit, steps / 2 / per_unit


@dataclass(frozen=True)
class _TableCodes(Quantizer):
    """x̂ = table[code] · radius + center, code = argmin_i |(x − center)/radius − lut_i| (the first of equals), but an
    outlier is what the side store holds of it.

    The side store has the same number of entries for every token, chosen by rank over all C = kv_heads · head_dim
    channels. Leaves, tokens being tiles of one:

        codes            uint8 `[batch, kv_heads, tokens, head_dim · bits/8]` packed along channels
        outlier_values   float16 `[batch, 1, tokens, entries]`; an entry that is not used holds −0
        outlier_index    uint8 (C ≤ 256) or int16, the same shape: head · head_dim + channel

    Values beyond the table's end that find no entry have the end's code. Constants: `lut` `[2^bits]` in [−1, 1], in any
    order; with `qnorm` also `lut_out`, the table that is read, else that is `lut`. The uniform grid has neither: its
    table is −1, …, 1 in 2^bits − 1 equal steps.
    """

    bits: int
    outliers: float
    grid: str
    qnorm: bool

    def __post_init__(self) -> None:
        packed_size(self.head_dim, self.bits)

    def constants(self, kv_heads: int) -> dict[str, ConstantSpec]:
        if kv_heads * self.head_dim > MOST_CHANNELS:
            raise ValueError(
                f"kvquant: kv_heads={kv_heads} of head_dim={self.head_dim} are {kv_heads * self.head_dim} channels a "
                f"token; the index of an outlier reaches {MOST_CHANNELS}"
            )
        names = {"nuq": ("lut", "lut_out") if self.qnorm else ("lut",), "int": ()}[self.grid]
        return {name: ConstantSpec((2**self.bits,)) for name in names}

    def table(self, constants: Leaves, name: str = "lut") -> Array:
        return jnp.linspace(-1, 1, 2**self.bits) if self.grid == "int" else constants[name]

    def an_end(self, channels: int) -> int:
        """Outliers at each end of a token of C channels: ⌊outliers/2 · C⌋ + 1, as the deployed reference keeps."""
        return math.floor(self.outliers / 2 * channels) + 1 if self.outliers else 0

    def _code(self, x: Array, center: Array, radius: Array, lut: Array) -> Array:
        z = jnp.clip((x - center) / jnp.where(radius > 0, radius, 1.0), -1, 1)
        best, code = jnp.full(z.shape, jnp.inf), jnp.zeros(z.shape, jnp.uint8)
        for i in range(2**self.bits):  # no array of distances to every entry
            distance = jnp.abs(z - lut[i])
            best, code = jnp.minimum(best, distance), jnp.where(distance < best, jnp.uint8(i), code)
        return pack(code[..., 0, :], self.bits)

    def _side_store(self, rows: Array, index: Array, used: Array | None = None) -> Leaves:
        """The entries `index` `[batch, tokens, entries]` of rows `[batch, tokens, C]`."""
        if not index.shape[-1]:
            return {}
        values = jnp.take_along_axis(rows, index, axis=-1)
        values = jnp.where(values == 0, 0.0, values)  # −0 says that the entry is not used
        values = values if used is None else jnp.where(used, values, -0.0)
        dtype = jnp.uint8 if rows.shape[-1] <= 256 else jnp.int16
        values, index = saturate(values, jnp.float16), index.astype(dtype)
        return {"outlier_values": values[:, None], "outlier_index": index[:, None]}

    def _expand(self, leaves: Leaves, constants: Leaves, center: Array, radius: Array) -> Array:
        table = self.table(constants, "lut_out" if self.qnorm else "lut")
        codes = unpack(leaves["codes"], self.bits)
        x = (table[codes] * radius + center)[..., None, :]
        if "outlier_values" not in leaves:
            return x
        values, rows = leaves["outlier_values"][:, 0].astype(jnp.float32), _as_rows(x)
        unused = (values == 0) & jnp.signbit(values)
        index = jnp.where(unused, rows.shape[-1], leaves["outlier_index"][:, 0].astype(jnp.int32))  # dropped
        batch, token = jnp.arange(rows.shape[0])[:, None, None], jnp.arange(rows.shape[1])[:, None]
        return _as_heads(rows.at[batch, token, index].set(values, mode="drop"), x.shape[1])


@dataclass(frozen=True)
class StaticKeys(_TableCodes):
    """K: a calibrated range a channel, constants `lower` < `upper` `[kv_heads, head_dim]`, with which in float16
    arithmetic center = (upper + lower)/2, radius = (upper − lower)/2.

    The uniform grid (N steps) is that of r = 1/(upper − lower) · N: x̂ = (code + lower · r)/r.

    x is an outlier where x < lower or x > upper (or x is NaN). Of these the `2 · entries` with the largest
    |x − center|/radius of a token are stored (of equals, the one of the lowest index); the rest have an end's code. So
    of a token with more NaNs than entries, as many NaNs as there are entries come back.
    """

    entries: int | None = None  # a token and end; None: `an_end`

    def constants(self, kv_heads: int) -> dict[str, ConstantSpec]:
        shape = (kv_heads, self.head_dim)
        own = {"lower": ConstantSpec(shape), "upper": ConstantSpec(shape, above="lower")}
        return super().constants(kv_heads) | own

    def encode(self, tiles: Array, constants: Leaves) -> Leaves:
        low, high, center, radius = self._bounds(constants)
        leaves = {"codes": self._code(tiles, center, radius, self.table(constants))}
        rows = _as_rows(tiles)
        entries = 2 * (self.an_end(rows.shape[-1]) if self.entries is None else self.entries)
        is_outlier = _as_rows(~((tiles >= low) & (tiles <= high)))
        excess = _as_rows(jnp.abs(tiles - center) / radius)
        excess = jnp.where(jnp.isnan(excess), jnp.inf, excess)
        rank, index = _largest(jnp.where(is_outlier, excess, -1.0), min(entries, rows.shape[-1]))
        return leaves | self._side_store(rows, index, used=rank >= 0)

    def decode(self, leaves: Leaves, constants: Leaves) -> Array:
        _, _, center, radius = self._bounds(constants)
        return self._expand(leaves, constants, center[..., 0, :], radius[..., 0, :])

    def _bounds(self, constants: Leaves) -> tuple[Array, Array, Array, Array]:
        return _bounds(constants, 2**self.bits - 1 if self.grid == "int" else 0)


@dataclass(frozen=True)
class TokenValues(_TableCodes):
    """V: a range a token, over all its C channels. The `an_end` largest and as many smallest are outliers, in this
    order in the side store (of equals, the one of the lowest index first); of the rest

        center = (max + min)/2, radius = (max − min)/2.

    Leaves besides: center, radius `[batch, 1, tokens]` in `scales`; codes come from the unrounded ones.
    """

    scales: str

    def encode(self, tiles: Array, constants: Leaves) -> Leaves:
        rows = _as_rows(tiles)
        count = self.an_end(rows.shape[-1])
        known = jnp.where(jnp.isnan(rows), jnp.inf, rows)  # what is not a number is at the upper end
        upper, lower = _largest(known, count + 1)[1], _largest(-known, count + 1)[1]
        ends = (jnp.take_along_axis(rows, index[..., -1:], -1) for index in (upper, lower))  # the first no outliers
        high, low = (end[:, None, :, 0] for end in ends)
        center, radius = 0.5 * high + 0.5 * low, 0.5 * high - 0.5 * low  # halved first: no overflow
        leaves = {
            "codes": self._code(tiles, center[..., None, None], radius[..., None, None], self.table(constants)),
            "center": store(center, SCALE_DTYPES[self.scales][1]),
            "radius": store(radius, SCALE_DTYPES[self.scales][0]),
        }
        return leaves | self._side_store(rows, jnp.concatenate([upper[..., :-1], lower[..., :-1]], -1))

    def decode(self, leaves: Leaves, constants: Leaves) -> Array:
        center, radius = (widen(leaves[name])[..., None] for name in ("center", "radius"))
        return self._expand(leaves, constants, center, radius)


@register("kvquant", "codes of calibrated tables, outliers kept in float16, K before RoPE")
@dataclass(frozen=True, kw_only=True)
class KVQuant(Bits):
    """nuqX-1%: one table of 2^bits entries a layer and side, made by k-means weighted with the Fisher information. K
    has a calibrated range a channel and is stored before RoPE (after a key norm, where the model has one); V has a
    range a token. The ⌊outliers/2 · C⌋ + 1 largest values of a token of C = kv_heads · head_dim channels and as many
    smallest are kept in float16 (of K only what is out of range; `k_entries` instead of this number);
    `outliers=0` keeps none.

    Bits a value, main store, n outliers at an end: bits + 2n(16 + 8)/C, the index 16 bits where C > 256; V besides
    2 · bits(scales)/C.
    """

    needs_constants = True
    captures = ("k", "v", "k_fisher", "v_fisher")

    bits: int | None = option(3, optional=True, allowed=(2, 3, 4))
    k_bits: int | None = option(None, kind=int, allowed=(2, 3, 4))
    v_bits: int | None = option(None, kind=int, allowed=(2, 3, 4))
    outliers: float = option(0.01, minimum=0, maximum=0.5, about="part of the values outside the ranges")
    k_entries: int | None = option(None, kind=int, minimum=1, about="side-store entries of K, a token and end")
    grid: str = option("nuq", allowed=("nuq", "int"), about="calibrated tables, or equal steps without any")
    qnorm: bool = option(False, about="read with tables that restore mean and deviation (for 2 bits)")
    scales: str = option("f16", allowed=("f16", "bf16", "f32"), about="of V's ranges")
    sink: int = option(1, minimum=0, about="first tokens, in full precision for good, and not calibrated on")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.qnorm and self.grid == "int":
            raise ValueError("kvquant: qnorm=true with grid=int, which has no table to correct; drop one of them")
        if self.k_entries is not None and not self.outliers:
            raise ValueError(f"kvquant: k_entries={self.k_entries} with outliers=0, which keeps none; drop one of them")

    def sides(self, head_dim: int) -> tuple[Side, Side]:
        if head_dim < 8:
            raise ValueError(f"kvquant: head_dim={head_dim} is too short to have outliers; use 8 or more")
        k = StaticKeys(head_dim, self.key_bits, self.outliers, self.grid, self.qnorm, self.k_entries)
        v = TokenValues(head_dim, self.value_bits, self.outliers, self.grid, self.qnorm, self.scales)
        window = Window(recent=0, group=1)
        return Side(k, window, pre_rope=True), Side(v, window)

    def calibrate(self, samples: Mapping[str, Array]) -> dict[str, Array]:
        """K's range of a channel and V's of a token are the quantiles outliers/2 and 1 − outliers/2 (linear between
        values). The table is the weighted k-means of (x − center)/radius over what is in range and follows the first
        `sink` tokens of a sequence, weighted with the Fisher information. With `qnorm`, mean μ and deviation σ over the
        same values before (1) and after (2) rounding give lut_out = lut · σ₁/σ₂ + μ₁ − μ₂ · σ₁/σ₂.

        Raises ValueError for samples that are not finite, or of which nothing is left.
        """
        k, v, k_fisher, v_fisher = (np.asarray(samples[name], np.float32) for name in self.captures)
        for name, x in (("k", k), ("v", v)):
            if not np.isfinite(x).all():
                raise ValueError(f"kvquant: {name} has values that are not finite; check the model and the text")
        ends = (self.outliers / 2, 1 - self.outliers / 2)
        lower, upper = (x.astype(np.float32) for x in np.quantile(np.moveaxis(k, 1, 0), ends, axis=(1, 2)))
        lower, upper = (
            np.clip(x, -LARGEST_END, LARGEST_END).astype(np.float16).astype(np.float32) for x in (lower, upper)
        )
        width = np.maximum(np.abs(lower) * 2.0**-9, SMALLEST_WIDTH).astype(np.float32)
        upper = np.where(upper > lower, upper, lower + width)  # a channel that never moved
        bounds = {"lower": jnp.asarray(lower), "upper": jnp.asarray(upper)}
        ranges = {f"k_{name}": x for name, x in bounds.items()}
        if self.grid == "int":
            return ranges
        _, _, center, radius = (np.asarray(x)[None, :, 0] for x in _bounds(bounds))
        low, high = np.quantile(v, ends, axis=(1, 3), keepdims=True).astype(np.float32)
        tables = self._tables("k", (k - center) / radius, k_fisher, self.key_bits)
        tables |= self._tables("v", (v - (high + low) / 2) / _nonzero((high - low) / 2), v_fisher, self.value_bits)
        return ranges | tables

    def _tables(self, side: str, z: np.ndarray, fisher: np.ndarray, bits: int) -> dict[str, Array]:
        """`lut`, and `lut_out` with `qnorm`, of normalized values `[sequences, heads, tokens, head_dim]`."""
        z, fisher = z[:, :, self.sink :], fisher[:, :, self.sink :]
        kept = np.abs(z) <= 1
        z = z[kept].astype(np.float64)
        lut = weighted_kmeans(z, fisher[kept], 2**bits)
        tables = {f"{side}_lut": jnp.asarray(lut, jnp.float32)}
        if self.qnorm:
            rounded = lut[np.searchsorted((lut[1:] + lut[:-1]) / 2, z)]
            stretch = z.std() / _nonzero(rounded.std())
            tables[f"{side}_lut_out"] = jnp.asarray(lut * stretch + z.mean() - rounded.mean() * stretch, jnp.float32)
        return tables


def _nonzero(x: np.ndarray) -> np.ndarray:
    """x with 1 for 0: what is divided by it is 0 then."""
    return np.where(x == 0, 1, x)
