"""KVarN's two-axis variance normalization (arXiv:2606.03458; the released reference implementation).

A tile T `[..., R, C]` is written as B · s_r · s_c with rows and columns of B near unit standard deviation. Rows are the
rounding axis. Standard deviations subtract the mean, are unbiased (ddof = 1) and two-pass in float32.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

LOG_FLOOR_PUBLISHED = -0.3  # no row or column is amplified by more than e^0.3 = 1.35
LOG_FLOOR_EQUIVARIANT = -10.0
LOG_CEILING = 10.0


class Balanced(NamedTuple):
    """tile = balanced · row_scale[..., :, None] · column_scale[..., None, :]."""

    balanced: Array  # [..., R, C]
    row_scale: Array  # [..., R]
    column_scale: Array  # [..., C]


def _std(x: Array, axis: int) -> Array:
    return jnp.std(x, axis=axis, ddof=1)


def imbalance(tile: Array) -> Array:
    """Imb(X) = max std_col / min std_col + max std_row / min std_row, minima at least 1e-8; 2 when balanced. `[...]`"""
    column, row = _std(tile, -2), _std(tile, -1)
    return column.max(-1) / jnp.maximum(column.min(-1), 1e-8) + row.max(-1) / jnp.maximum(row.min(-1), 1e-8)


@functools.partial(jax.jit, static_argnames=("iters", "normalize"))
def variance_normalize(tile: Array, *, iters: int = 8, normalize: str = "published") -> Balanced:
    """Alternate full steps on the columns' and the rows' standard deviation; keep the least imbalanced iterate.

        l_c <- clip(l_c + ln clip(std_col(B), 1e-3, 1e3), floor, 10),   B = T / e^{l_c} / e^{l_r}, always from T
        l_r <- clip(l_r + ln clip(std_row(B), 1e-3, 1e3), floor, 10)
        keep (l_c, l_r) if Imb(B) <= the best so far; the identity is the first candidate

    `normalize="published"` has floor −0.3, so a tile whose deviations are far below e^−0.3 stays as it is.
    `"equivariant"` divides T by its overall standard deviation first, folds that into the row scale, and has floor −10:
    B(αT) = B(T) for every α > 0.

    Args: tile `[..., R, C]`, any float dtype, at least 2 rows and 2 columns; iters >= 0.
    Raises: ValueError for another `normalize`, a negative `iters` or a tile with fewer than 2 rows or columns.
    """
    if normalize not in ("published", "equivariant"):
        raise ValueError(f"normalize={normalize!r} is unknown; allowed: published, equivariant")
    if iters < 0:
        raise ValueError(f"iters={iters} is negative; allowed: 0 (no normalization) or more")
    if tile.ndim < 2 or min(tile.shape[-2:]) < 2:
        raise ValueError(
            f"a tile of shape {tile.shape} has no unbiased deviation on both axes; it needs 2 rows and 2 columns"
        )

    def normalize_one(tile: Array) -> Balanced:
        return normalize_tile(lambda: tile, iters=iters, equivariant=normalize == "equivariant")

    tiles = tile.astype(jnp.float32).reshape(-1, *tile.shape[-2:])
    # On a CPU one tile after the other: the temporaries stay in cache, and a sum is not reordered by what it is batched
    # with, so that the same tile gets the same bytes alone and in any batch.
    result = lax.platform_dependent(tiles, cpu=lambda t: lax.map(normalize_one, t), default=jax.vmap(normalize_one))
    return Balanced(*(x.reshape(*tile.shape[:-2], *x.shape[1:]) for x in result))


def normalize_tile(read: Callable[[], Array], *, iters: int, equivariant: bool) -> Balanced:
    """`variance_normalize` of the one tile `[R, C]`, float32, that `read` gives; a kernel that cannot keep the tile in
    registers reads it again for every candidate."""
    tile = read()
    whole = jnp.ones((), jnp.float32)
    floor = LOG_FLOOR_PUBLISHED
    if equivariant:
        floor = LOG_FLOOR_EQUIVARIANT
        # Two steps, so that squares neither overflow (1e30) nor vanish (1e-38): by the largest magnitude, then the std.
        largest = jnp.max(jnp.abs(tile))
        largest = jnp.where(largest > 0, largest, 1.0)
        std = jnp.std(tile / largest, ddof=1)
        whole = largest * jnp.where(std > 0, std, 1.0)
        whole = jnp.where(whole >= jnp.finfo(jnp.float32).tiny, whole, 1.0)  # a CPU flushes what is smaller to 0
        tile = tile / whole

    def scaled(log_c: Array, log_r: Array) -> Array:
        tile = read() / whole if equivariant else read()
        return tile / jnp.exp(log_c) / jnp.exp(log_r)[:, None]

    def step(log_scale: Array, std: Array) -> Array:
        return jnp.clip(log_scale + jnp.log(jnp.clip(std, 1e-3, 1e3)), floor, LOG_CEILING)

    def iterate(carry: tuple[Array, Array, Array, Array, Array], _: None) -> tuple[Any, None]:
        log_c, log_r, best_c, best_r, best = carry
        log_c = step(log_c, _std(scaled(log_c, log_r), -2))
        log_r = step(log_r, _std(scaled(log_c, log_r), -1))
        now = imbalance(scaled(log_c, log_r))
        better = now <= best
        best_c, best_r = jnp.where(better, log_c, best_c), jnp.where(better, log_r, best_r)
        return (log_c, log_r, best_c, best_r, jnp.where(better, now, best)), None

    zero_c, zero_r = jnp.zeros_like(tile[0]), jnp.zeros_like(tile[:, 0])
    (_, _, log_c, log_r, _), _ = lax.scan(iterate, (zero_c, zero_r, zero_c, zero_r, imbalance(tile)), length=iters)
    return Balanced(scaled(log_c, log_r), jnp.exp(log_r) * whole, jnp.exp(log_c))
