"""KVarN's tile with better rounding at its bytes: mean-free rows of unit variance on a grid, then every token's norm.

A tile is rotated and balanced over both axes as KVarN's is (arXiv:2606.03458). Its rows are then nearly Gaussian, for
which min/max rounding has twice the error of the best levels, and 2.6 times that of a trellis of the same bits; and the
scale that a token stores anyway is refit after rounding, which costs nothing. docs/tile.md derives and measures it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvq_jax.balance import variance_normalize
from kvq_jax.formats import SCALE_DTYPES, rounded, store, store_scale, widen
from kvq_jax.grids import BITS, GRIDS, grid_codes, grid_planes, grid_table_values
from kvq_jax.packing import interleave, pack
from kvq_jax.quantizers.affine import Affine, ChannelRows, TokenRows, row_range
from kvq_jax.quantizers.base import Leaves, dot
from kvq_jax.schemes import Bits, Side, Window, option, register

_TINY = float(jnp.finfo(jnp.float32).tiny)  # what is smaller is 0 to a CPU


def each_tile(function: Callable[..., Any], *arrays: Array, axes: int = 2) -> Any:
    """`function` of tiles whose first array has `axes` axes, over all axes before.

    On a CPU one tile after the other: no sum is reordered by how many tiles come along, so that the same tile gets the
    same bytes alone and in any batch.
    """
    lead = arrays[0].shape[:-axes]
    flat = [x.reshape(-1, *x.shape[len(lead) :]) for x in arrays]

    def one(xs: list[Array]) -> Any:
        return function(*xs)

    out = lax.platform_dependent(flat, cpu=lambda xs: lax.map(one, xs), default=jax.vmap(one))
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), out)


def product(x: Array, y: Array) -> Array:
    """x·y, not fused into the sum that follows: the bytes must not depend on how a program is compiled."""
    return rounded(x * y, jnp.float32)


def positive(x: Array) -> Array:
    """x, and 1 where it is nothing to divide by; NaN stays."""
    return jnp.where(x < _TINY, 1.0, x)


def refit_factor(refit: str, x: Array, y: Array, axis: int, mean: Array | None = None) -> Array:
    """What the vectors y along `axis` are multiplied by to stand for x beside a mean that is kept as it is.

    norm: the f with ‖f·y + mean‖ = ‖x + mean‖; ‖x‖/‖y‖ without a mean, and where f is not within a quarter of that,
          as for a token that is short beside the mean
    lsq:  x·y/‖y‖²
    none: 1, and 0 for x = 0
    """
    if refit == "none":
        return jnp.where((x == 0).all(axis), 0.0, 1.0)
    unit = positive(jnp.maximum(jnp.max(jnp.abs(x)), jnp.max(jnp.abs(y))))  # squares of 1e30 overflow
    x, y, kept = x / unit, y / unit, jnp.zeros(()) if mean is None else mean / unit
    squared = jnp.sum(product(y, y), axis)
    if refit == "lsq":
        factor = jnp.maximum(jnp.sum(product(x, y), axis), 0) / positive(squared)
    else:
        of_x = jnp.sum(product(x, x), axis)
        along, wanted = jnp.sum(product(y, kept), axis), of_x + 2 * jnp.sum(product(x, kept), axis)
        root = jnp.sqrt(jnp.maximum(product(along, along) + product(squared, wanted), 0))
        factor, own = (root - along) / positive(squared), jnp.sqrt(of_x / positive(squared))
        factor = jnp.where(jnp.abs(factor - own) <= own / 4, factor, own)
    return jnp.where(squared < _TINY, 1.0, factor)


@dataclass(frozen=True)
class _Gridded(Affine):
    """What both orientations share: how rows are rounded, and what codes mean. Rows are `[R, C]`, as in KVarN."""

    grid: str = "trellis"
    refit: str = "norm"
    normalize: str = "equivariant"
    iters: int = 4

    def _codes(self, leaves: Leaves) -> Array:
        return interleave(self._planes(leaves, None))

    def _planes(self, leaves: Leaves, second_scale: Array | None) -> list[Array]:
        return grid_planes(
            leaves["codes"], self.bits, self.grid, None if second_scale is None else second_scale[..., None, :]
        )

    def balance(self, rows: Array) -> Array:
        """The column scales `[C]` of one tile."""
        if self.normalize == "none":
            return jnp.ones_like(rows[0])
        return variance_normalize(rows, iters=self.iters, normalize=self.normalize).column_scale

    def spread(self, rows: Array, centred: bool = True) -> tuple[Array, Array]:
        """(scale, zero) `[R]`: root mean square about the mean, and the mean; of `uniform`, half the range, and its
        middle. Not centred, zero is 0."""
        low, high = row_range(rows)
        largest = positive(jnp.maximum(-low, high))
        unit = rows / largest[:, None]  # squares neither overflow nor vanish
        if self.grid == "uniform":
            zero = low / 2 + high / 2 if centred else jnp.zeros_like(low)
            return jnp.maximum(high - zero, zero - low), zero
        zero = unit.mean(-1) if centred else jnp.zeros_like(low)
        centred_unit = unit - zero[:, None]
        return largest * jnp.sqrt(jnp.mean(product(centred_unit, centred_unit), -1)), largest * zero


@dataclass(frozen=True)
class TileKeys(_Gridded, ChannelRows):
    """K: `[head_dim, group]` tiles. Leaves as ChannelRows' with a token_scale, which takes the refit:

    T̂_ij = (g(code_ij)·scale_i + zero_i)·token_scale_j; codes come from the stored scale and zero.
    """

    def encode(self, tiles: Array, constants: Leaves) -> Leaves:
        rows = jnp.swapaxes(tiles, -1, -2)
        x, column, scale, zero = each_tile(self._prepare, rows)
        codes = grid_codes(x, self.bits, self.grid)
        token_scale = each_tile(self._refit, rows, codes, column, scale, zero)
        return {"codes": pack(codes, self.bits), "scale": scale, "zero": zero, "token_scale": token_scale}

    def _prepare(self, rows: Array) -> tuple[Array, ...]:
        scale_dtype, zero_dtype = SCALE_DTYPES[self.scales]
        column = self.balance(rows)
        rows = rows / column
        scale, zero = self.spread(rows)
        scale, zero = store_scale(scale, scale_dtype), store(zero, zero_dtype)
        return (rows - widen(zero)[:, None]) / positive(widen(scale))[:, None], column, scale, zero

    def _refit(self, rows: Array, codes: Array, column: Array, scale: Array, zero: Array) -> Array:
        y = product(grid_table_values(codes, self.bits, self.grid), widen(scale)[:, None]) + widen(zero)[:, None]
        factor = refit_factor(self.refit, rows, y, 0)
        return store(column * factor if self.refit == "none" else factor, SCALE_DTYPES[self.scales][1])


@dataclass(frozen=True)
class TileValues(_Gridded, TokenRows):
    """V: `[tokens_per_tile, head_dim]` tiles. T̂_ij is one of

    (g(code_ij)·scale_i + zero_i)·channel_scale_j               mean = token: as KVarN's; the refit multiplies both
    g(code_ij)·scale_i·channel_scale_j + channel_mean_j         mean = channel
    g(code_ij)·scale_i·channel_scale_j                          mean = none

    Leaves: codes uint8 `[tiles, tile_tokens, head_dim·bits/8]`; scale, zero `[tiles, tile_tokens, 1]`; channel_scale,
    channel_mean `[tiles, head_dim]`. Codes come from the stored channel_scale and channel_mean.
    """

    mean: str = "channel"

    def encode(self, tiles: Array, constants: Leaves) -> Leaves:
        x, deviation, scale, zero, column, mean = each_tile(self._prepare, tiles)
        codes = grid_codes(x, self.bits, self.grid)
        scale, zero = each_tile(self._refit, deviation, codes, scale, zero, column, mean)
        leaves = {"codes": pack(codes, self.bits), "scale": scale[..., None], "channel_scale": column}
        extra = {"token": {"zero": zero[..., None]}, "channel": {"channel_mean": mean}, "none": {}}
        return leaves | extra[self.mean]

    def _prepare(self, rows: Array) -> tuple[Array, ...]:
        scale_dtype, zero_dtype = SCALE_DTYPES[self.scales]
        mean = store(rows.mean(0) if self.mean == "channel" else jnp.zeros_like(rows[0]), zero_dtype)
        rows = rows - widen(mean)
        column = store_scale(self.balance(rows), scale_dtype)
        balanced = rows / positive(widen(column))
        scale, zero = self.spread(balanced, centred=self.mean == "token")
        return (balanced - zero[:, None]) / positive(scale)[:, None], rows, scale, zero, column, mean

    def _refit(
        self, rows: Array, codes: Array, scale: Array, zero: Array, column: Array, mean: Array
    ) -> tuple[Array, Array]:
        y = product(grid_table_values(codes, self.bits, self.grid), scale[:, None]) + zero[:, None]
        factor = refit_factor(self.refit, rows, y * widen(column), 1, widen(mean))
        dtype = SCALE_DTYPES[self.scales][1]
        return store(scale * factor, dtype), store(zero * factor, dtype)

    def decode(self, leaves: Leaves, constants: Leaves) -> Array:
        x = self._codes(leaves) * widen(leaves["scale"])
        if self.mean == "token":
            x += widen(leaves["zero"])
        x *= widen(leaves["channel_scale"])[..., None, :]
        return x + widen(leaves["channel_mean"])[..., None, :] if self.mean == "channel" else x

    def weighted_sum(self, p: Array, leaves: Leaves, constants: Leaves) -> Array:
        if self.mean == "token" or not self.folds(p.shape[-2]):
            return super().weighted_sum(p, leaves, constants)
        # Σ_j (p_j scale_j)·(g(codes_j) ∘ channel_scale) + Σ_tiles channel_mean·Σ_j p_j, over the tokens j of all tiles
        scale = widen(leaves["scale"])
        tiles, tokens = scale.shape[-3:-1]
        weights = p * scale.reshape(*scale.shape[:-3], 1, -1)
        levels = self._planes(leaves, widen(leaves["channel_scale"]))
        out = interleave([dot(weights, x.reshape(*x.shape[:-3], tiles * tokens, -1)) for x in levels])
        if self.mean == "channel":
            out += dot(p.reshape(*p.shape[:-1], tiles, tokens).sum(-1), widen(leaves["channel_mean"]))
        return out


@register("tile", "KVarN's balanced tile, rounded by a trellis of Gaussian levels, every token's norm restored")
@dataclass(frozen=True, kw_only=True)
class Tile(Bits):
    """K and V are rotated; tiles of `group` tokens are balanced over both axes, and their rows, of unit variance, are
    rounded to a grid: per channel (K), per token (V). Then each token's scale is refit. No calibration.

    Bits a value, main store, f16: K bits + 16(2/group + 1/head_dim), V bits + 16(1/head_dim + 2/group) for
    `v_mean=channel`, 16/group less for `none`, KVarN's for `token`. `scales=fp8` stores what belongs to channels and is
    a scale in E4M3: 8/group less.
    """

    bits: int | None = option(2, optional=True, allowed=BITS)
    k_bits: int | None = option(None, kind=int, allowed=BITS)
    v_bits: int | None = option(None, kind=int, allowed=BITS)
    grid: str = option("trellis", allowed=GRIDS, about="what a code stands for")
    refit: str = option("norm", allowed=("norm", "lsq", "none"), about="what a token's scale is refit to")
    normalize: str = option("equivariant", allowed=("none", "published", "equivariant"))
    iters: int = option(4, minimum=0, maximum=1000, about="normalization iterations")
    v_mean: str = option("channel", allowed=("token", "channel", "none"), about="which mean of V is stored")
    scales: str = option("f16", allowed=("f16", "fp8", "f32"))
    group: int = option(128, minimum=2, about="tokens of a tile, and of a flush")

    def sides(self, head_dim: int) -> tuple[Side, Side]:
        how: dict[str, Any] = {name: getattr(self, name) for name in ("scales", "grid", "refit", "normalize", "iters")}
        k = TileKeys(head_dim, bits=self.key_bits, group=self.group, **how)
        v = TileValues(
            head_dim, bits=self.value_bits, group=head_dim, tokens_per_tile=self.group, mean=self.v_mean, **how
        )
        window = Window(recent=0, group=self.group)
        return Side(k, window, rotate=True), Side(v, window, rotate=True)
