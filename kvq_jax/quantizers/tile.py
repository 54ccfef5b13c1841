"""KVarN's tile with better rounding at its bytes: mean-free rows of unit variance on a grid, then every token's norm.

A tile is rotated and balanced over both axes as KVarN's is (arXiv:2606.03458). Its rows are then nearly Gaussian, for
which min/max rounding has twice the error of the best levels, and 2.6 times that of a trellis of the same bits; and the
scale that a token stores anyway is refit after rounding, which costs nothing. docs/tile.md derives and measures it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvq_jax.balance import variance_normalize
from kvq_jax.formats import SCALE_DTYPES, rounded, store, store_scale, widen
from kvq_jax.grids import BITS, GRIDS, grid_codes, grid_planes, grid_table_values
from kvq_jax.packing import interleave, pack
from kvq_jax.quantizers.affine import Affine, ChannelRows, TokenRows, row_range
from kvq_jax.quantizers.base import ConstantSpec, Leaves, dot
from kvq_jax.schemes import Bits, Side, Window, option, register

TOGETHER = 8  # channels that are rounded before their error goes to those that follow
DAMPING = 0.1  # of the queries' second moment, a share of its mean diagonal
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


def feedback_constants(moment: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(weight float32 `[D]`, F `[D, D]`) of H = E[q qᵀ] `[D, D]`, damped; how long queries are does not matter.

    The weight is H's diagonal over its mean: channels are rounded in its order, the largest first, TOGETHER of them at
    a time. Where those of S are off by e_S, each channel j of L, which are still to come, takes up Σ_i e_i·F_ij:
    F_SL = H_SL·H_LL⁻¹, the least that eᵀHe, the squared error of q·k̂, can then become. F is 0 elsewhere. (GPTQ,
    arXiv:2210.17323, with channels for its inputs and queries for its samples.)
    """
    size, mean = len(moment), float(np.diagonal(moment).astype(np.float64).mean())
    damped = moment.astype(np.float64) / (mean or 1.0) + DAMPING * np.eye(size)
    weight = np.diagonal(damped).astype(np.float32)
    order = np.argsort(-weight, kind="stable")  # of what is stored: the encoder sorts it again
    feedback, together = np.zeros((size, size)), math.gcd(size, TOGETHER)
    for first in range(0, size - together, together):
        now, later = order[first : first + together], order[first + together :]
        feedback[np.ix_(now, later)] = np.linalg.solve(damped[np.ix_(later, later)], damped[np.ix_(later, now)]).T
    return weight, feedback


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

    With `feedback` channels are rounded a few at a time, and those that follow take up the error where queries would
    see it, by the constants weight and feedback (`feedback_constants`) of every KV head.
    """

    feedback: bool = False

    def constants(self, kv_heads: int) -> dict[str, ConstantSpec]:
        if not self.feedback:
            return {}
        size = self.head_dim
        return {
            "weight": ConstantSpec((kv_heads, size), positive=True),
            "feedback": ConstantSpec((kv_heads, size, size)),
        }

    def encode(self, tiles: Array, constants: Leaves) -> Leaves:
        rows = jnp.swapaxes(tiles, -1, -2)
        if self.feedback:
            codes, column, scale, zero = self._fed_back(rows, constants)
        else:
            x, column, scale, zero = each_tile(self._prepare, rows)
            codes = grid_codes(x, self.bits, self.grid)
        token_scale = each_tile(self._refit, rows, codes, column, scale, zero)
        return {"codes": pack(codes, self.bits), "scale": scale, "zero": zero, "token_scale": token_scale}

    def _fed_back(self, rows: Array, constants: Leaves) -> tuple[Array, ...]:
        """(codes, column, scale, zero), a few rows at a time in the order of the constants."""
        heads, together = len(constants["weight"]), math.gcd(self.head_dim, TOGETHER)
        order = jnp.argsort(-constants["weight"], axis=-1)  # [kv_heads, head_dim]
        steps = jnp.moveaxis(order.reshape(1, heads, 1, -1, together, 1), 3, 0)
        column, balanced = each_tile(self._balance_tile, rows)

        def step(rest: Array, which: Array) -> tuple[Array, tuple[Array, ...]]:
            now = jnp.take_along_axis(rest, which, -2)
            x, scale, zero = each_tile(self._standardize, now)
            codes = grid_codes(x, self.bits, self.grid)
            error = now - self._decoded(codes, scale, zero)
            share = jnp.take_along_axis(constants["feedback"][None, :, None], which, -2)
            for i in range(together):  # sums in an order of their own, whatever the program
                rest = rest + product(share[..., i, :, None], error[..., i, None, :])
            return rest, (codes, scale, zero)

        _, found = lax.scan(step, balanced, steps)
        place = jnp.argsort(order, axis=-1)[None, :, None]
        codes, scale, zero = (jnp.moveaxis(x, 0, 3).reshape(*rows.shape[:-1], *x.shape[5:]) for x in found)
        codes = jnp.take_along_axis(codes, place[..., None], -2)
        return codes, column, *(jnp.take_along_axis(x, place, -1) for x in (scale, zero))

    def _balance_tile(self, rows: Array) -> tuple[Array, Array]:
        column = self.balance(rows)
        return column, rows / column

    def _prepare(self, rows: Array) -> tuple[Array, ...]:
        column, balanced = self._balance_tile(rows)
        x, scale, zero = self._standardize(balanced)
        return x, column, scale, zero

    def _standardize(self, rows: Array) -> tuple[Array, Array, Array]:
        """(what is rounded to the grid, scale, zero): the last two as they are stored."""
        scale_dtype, zero_dtype = SCALE_DTYPES[self.scales]
        scale, zero = self.spread(rows)
        scale, zero = store_scale(scale, scale_dtype), store(zero, zero_dtype)
        return (rows - widen(zero)[:, None]) / positive(widen(scale))[:, None], scale, zero

    def _decoded(self, codes: Array, scale: Array, zero: Array) -> Array:
        """Rows before the tokens' scales."""
        levels = grid_table_values(codes, self.bits, self.grid)
        return product(levels, widen(scale)[..., None]) + widen(zero)[..., None]

    def _refit(self, rows: Array, codes: Array, column: Array, scale: Array, zero: Array) -> Array:
        factor = refit_factor(self.refit, rows, self._decoded(codes, scale, zero), 0)
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

    `feedback=true` needs constants, from the model's queries: K's channels then make up for each other's error where
    queries see it.
    """

    bits: int | None = option(2, optional=True, allowed=BITS)
    k_bits: int | None = option(None, kind=int, allowed=BITS)
    v_bits: int | None = option(None, kind=int, allowed=BITS)
    grid: str = option("trellis", allowed=GRIDS, about="what a code stands for")
    refit: str = option("norm", allowed=("norm", "lsq", "none"), about="what a token's scale is refit to")
    normalize: str = option("equivariant", allowed=("none", "published", "equivariant"))
    iters: int = option(4, minimum=0, maximum=1000, about="normalization iterations")
    feedback: bool = option(False, about="K's error is moved to where queries do not see it; needs constants")
    v_mean: str = option("channel", allowed=("token", "channel", "none"), about="which mean of V is stored")
    scales: str = option("f16", allowed=("f16", "fp8", "f32"))
    group: int = option(128, minimum=2, about="tokens of a tile, and of a flush")

    @property
    def needs_constants(self) -> bool:  # type: ignore[override]
        return self.feedback

    @property
    def captures(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("k", "q") if self.feedback else ()

    def calibrate(self, samples: Mapping[str, Array]) -> dict[str, Array]:
        """k_weight and k_feedback of the mean of q·qᵀ over the queries of a KV head, in K's rotated basis. Raises
        ValueError for `feedback=false`."""
        if not self.feedback:
            return super().calibrate(samples)
        q, heads = np.asarray(samples["q"], np.float64), samples["k"].shape[1]
        q = np.moveaxis(q.reshape(len(q), heads, -1, q.shape[-1]), 1, 0).reshape(heads, -1, q.shape[-1])
        weight, feedback = zip(*(feedback_constants(x.T @ x / len(x)) for x in q), strict=True)
        return {"k_weight": jnp.asarray(weight, jnp.float32), "k_feedback": jnp.asarray(feedback, jnp.float32)}

    def sides(self, head_dim: int) -> tuple[Side, Side]:
        how: dict[str, Any] = {name: getattr(self, name) for name in ("scales", "grid", "refit", "normalize", "iters")}
        k = TileKeys(head_dim, bits=self.key_bits, group=self.group, feedback=self.feedback, **how)
        v = TileValues(
            head_dim, bits=self.value_bits, group=head_dim, tokens_per_tile=self.group, mean=self.v_mean, **how
        )
        window = Window(recent=0, group=self.group)
        return Side(k, window, rotate=True), Side(v, window, rotate=True)
