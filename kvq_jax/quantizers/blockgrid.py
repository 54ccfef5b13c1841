"""Blocks of channels, two scales, four grids: which part of a 4-bit format does the work? (arXiv:2606.20474, ablations)

    y = x/s, code = the nearest of 16 levels (the upper one of two), x̂ = s · level

    s        l2: ‖x‖ of the block, of N(0, 1) values near sqrt(block);  absmax: max |x| of the block
    uniform  ±1, ±3, … ±15 times half a step
    fp4      E2M1: 0, ±0.5, ±1, ±1.5, ±2, ±3, ±4, ±6 times a step (15 values: code 15 is not used)
    lloyd    Lloyd–Max levels of y where x is N(0, 1)
    refit    Lloyd–Max levels of the model's own y

The step of uniform and fp4: with absmax the largest level is the block's maximum; with l2, whose y has no maximum worth
the name, the step has the least MSE for N(0, 1).
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvq_jax.calibration.kmeans import weighted_kmeans
from kvq_jax.formats import divide, store, widen
from kvq_jax.lloyd_max import gaussian_levels
from kvq_jax.quantizers.base import ConstantSpec, Leaves
from kvq_jax.quantizers.blocks import BLOCKS, Blocks
from kvq_jax.quantizers.identity import Identity
from kvq_jax.quantizers.scaled import largest_magnitude
from kvq_jax.quantizers.turboquant import normalized
from kvq_jax.schemes import Scheme, Side, Window, option, register

LEVELS = 16
UNIFORM = tuple(range(-15, 16, 2))
E2M1 = (-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6)
POINTS = 4001  # of a density; moments of a cell are then right to 1e-6


def normal_density(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.square(x) / 2) / math.sqrt(2 * math.pi)


@functools.cache
def best_step(grid: tuple[float, ...]) -> float:
    """t of the least E[(x − t·nearest(x/t))²] for N(0, 1), to 1e-5, by a search that narrows down."""
    x = np.linspace(-7, 7, POINTS)
    density, levels = normal_density(x), np.array(grid)
    middles = (levels[1:] + levels[:-1]) / 2

    def mse(t: float) -> float:
        return float(density @ np.square(x - t * levels[np.searchsorted(middles, x / t)]))

    low, high = 1 / levels.max(), 6 / levels.max()
    while high - low > 1e-5:
        tried = np.linspace(low, high, 21)
        i = int(np.argmin([mse(t) for t in tried]))
        low, high = tried[max(i - 1, 0)], tried[min(i + 1, 20)]
    return (low + high) / 2


@functools.cache
def absmax_density(block: int) -> tuple[np.ndarray, np.ndarray]:
    """y in [−1, 1] and its weights, which add up to 1, for `block` values of N(0, 1) over their largest magnitude.

    Given the maximum m the others are N(0, 1) cut at ±m, and m has the density 2·block·φ(m)·(2Φ(m) − 1)^(block−1). One
    value in `block` is the maximum itself: ±1.
    """
    y, m = np.linspace(-1, 1, POINTS), np.linspace(7 / 700, 7, 700)
    inside = np.array([math.erf(one / math.sqrt(2)) for one in m])  # 2Φ(m) − 1
    of_m = normal_density(m) * inside ** (block - 1)
    others = (of_m / of_m.sum() * m / inside) @ normal_density(m[:, None] * y)
    weights = others / others.sum() * (1 - 1 / block)
    weights[[0, -1]] += 0.5 / block
    return y, weights


@functools.cache
def levels(scale: str, grid: str, block: int) -> tuple[float, ...]:
    """The levels of y, ascending and symmetric."""
    if grid == "lloyd":
        if scale == "l2":
            return tuple(level / math.sqrt(block) for level in gaussian_levels(4))
        centers = weighted_kmeans(*absmax_density(block), LEVELS)
        return tuple((centers - centers[::-1]) / 2)
    found = UNIFORM if grid == "uniform" else E2M1
    step = 1 / max(found) if scale == "absmax" else best_step(found) / math.sqrt(block)
    return tuple(level * step for level in found)


@dataclass(frozen=True)
class Grid(Blocks):
    """One scale, one book. Leaves: codes uint8 `[tiles, 1, head_dim/2]`, the index of the level; scale float16
    `[tiles, 1, head_dim/block]`; codes come from the scale before it is rounded. Constant `book` of refit: `[16]`."""

    by: str
    grid: str

    def constants(self, kv_heads: int) -> dict[str, ConstantSpec]:
        return {"book": ConstantSpec((LEVELS,), ascending=True)} if self.grid == "refit" else {}

    def book(self, constants: Leaves) -> Array:
        return constants["book"] if constants else jnp.asarray(levels(self.by, self.grid, self.block), jnp.float32)

    def normalize(self, blocks: Array) -> tuple[Array, Array]:
        """y, and the scale `[...]` of each block along the last axis."""
        if self.by == "l2":
            y, norm = normalized(blocks)
            return y, norm[..., 0]
        scale = largest_magnitude(blocks)
        return divide(blocks, jnp.where(scale == 0, 1.0, scale)[..., None]), scale

    def round_blocks(self, blocks: Array, constants: Leaves) -> tuple[Array, Array]:
        y, scale = self.normalize(blocks)
        book = self.book(constants)
        middles = (book[1:] + book[:-1]) / 2
        codes = sum(((y >= middle).astype(jnp.uint8) for middle in middles), jnp.zeros(y.shape, jnp.uint8))
        return codes, store(scale, jnp.float16)

    def values(self, codes: Array, constants: Leaves) -> Array:
        return self.book(constants)[codes]

    def scale(self, leaf: Array, constants: Leaves) -> Array:
        return widen(leaf)

    def fitted(self, samples: Array) -> Array:
        """The book of samples `[..., head_dim]`."""
        y, _ = self.normalize(self._split(samples))
        return jnp.asarray(weighted_kmeans(np.asarray(y), np.ones(y.shape), LEVELS), jnp.float32)


@register("blockgrid", "4 bits, one part at a time: rotation, scale, block, grid")
@dataclass(frozen=True, kw_only=True)
class BlockGrid(Scheme):
    """For ablations: K and V, or K alone with V in bfloat16, in 16 levels with a float16 scale for `block` channels of
    a token (default: one for all). TurboQuant's K is `rotate=true,scale=l2,grid=lloyd` without its norm correction.

    `grid=refit` needs the constants `k_book` and `v_book` `[16]`: levels of y. Calibration fits them to samples.

    Bits a value, main store: 4 + 16/block.
    """

    rotate: bool = option(True, about="what is quantized is rotated first")
    scale: str = option("absmax", allowed=("l2", "absmax"), about="what a block is divided by")
    block: int | None = option(None, kind=int, allowed=BLOCKS, about="channels that share a scale; default: all")
    grid: str = option("lloyd", allowed=("uniform", "lloyd", "fp4", "refit"), about="the levels")
    values: str = option("grid", allowed=("grid", "bf16"), about="how V is stored")

    @property
    def needs_constants(self) -> bool:  # type: ignore[override]
        return self.grid == "refit"

    @property
    def captures(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("k", "v")[: 2 if self.values == "grid" else 1] if self.needs_constants else ()

    def sides(self, head_dim: int) -> tuple[Side, Side]:
        window = Window(recent=0, group=1)
        side = Side(self.quantizer(head_dim), window, self.rotate)
        return side, side if self.values == "grid" else Side(Identity(head_dim, "bf16"), window)

    def quantizer(self, head_dim: int) -> Grid:
        return Grid(head_dim, self.block or head_dim, self.scale, self.grid)

    def calibrate(self, samples: Mapping[str, Array]) -> dict[str, Array]:
        if not self.needs_constants:
            return super().calibrate(samples)
        return {f"{side}_book": self.quantizer(x.shape[-1]).fitted(x) for side, x in samples.items()}
