"""TurboQuant (arXiv:2504.19874): a norm, a rotation, and the Lloyd–Max codebook of the normal distribution.

A coordinate of a rotated unit vector is nearly N(0, 1/head_dim) whatever the vector was, so one book serves all:

    n = ‖x‖,  y = x/(n + 1e-8),  code = the nearest level of y,  x̂ = n · ŷ.

What is stored is byte for byte what vLLM's `turboquant` cache stores, given its book (it integrates the book with 200
trapezoids; ours is exact). "Prod form", `qjl`: the last bit goes to a sketch of the residual, which makes q·x̂ unbiased.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvq_jax.formats import divide, rounded, store, widen
from kvq_jax.lloyd_max import gaussian_levels
from kvq_jax.packing import pack, packed_size, unpack
from kvq_jax.quantizers.affine import RoundedRows, TokenRows, row_range
from kvq_jax.quantizers.base import ConstantSpec, Leaves, Quantizer, dot, sum_by_halves
from kvq_jax.quantizers.identity import Identity
from kvq_jax.schemes import Bits, Side, Window, option, register

SMALLEST = 1e-8  # added to a norm; the smallest step of V
LARGEST_NORM = np.float32(jnp.finfo(jnp.float16).max)


def _length(x: Array) -> Array:
    """‖x‖ along the last axis, which stays."""
    return jnp.sqrt(sum_by_halves(rounded(x * x, jnp.float32), -1))[..., None]


def normalized(x: Array) -> tuple[Array, Array]:
    """(x/(‖x‖ + 1e-8), ‖x‖ `[..., 1]`, at most float16's largest) along the last axis, float32.

    Squares are taken of x over a power of two near its largest magnitude, so that none overflows.
    """
    exponent = lax.bitcast_convert_type(jnp.max(jnp.abs(x), axis=-1, keepdims=True), jnp.uint32) & np.uint32(0x7F800000)
    unit = jnp.maximum(lax.bitcast_convert_type(exponent, jnp.float32), np.float32(2**-100))
    x = x / unit
    norm = _length(x)
    return divide(x, norm + SMALLEST / unit), jnp.minimum(norm, LARGEST_NORM / unit) * unit


@dataclass(frozen=True)
class Codebook(Quantizer):
    """code = how many midpoints between the 2^bits levels are at most y: the nearest level, the upper one of two.

    The levels are those of N(0, 1) over sqrt(head_dim), or the constant `book` `[2^bits]`, in the same units (of y).
    `norm_correction`: the vector of levels is scaled to length 1 before it is multiplied by n.

    Leaves: codes uint8 `[tiles, 1, head_dim·bits/8]` packed along channels (none for bits = 0); norm float16
    `[tiles, 1, 1]`.
    """

    bits: int
    norm_correction: bool

    def __post_init__(self) -> None:
        if self.bits:
            packed_size(self.head_dim, self.bits)

    def constants(self, kv_heads: int) -> dict[str, ConstantSpec]:
        return {"book": ConstantSpec((2**self.bits,), ascending=True)}

    def levels(self, constants: Leaves) -> Array:
        """float32 `[2^bits]`, ascending."""
        if "book" in constants:
            return constants["book"]
        return jnp.asarray(np.array(gaussian_levels(self.bits)) / math.sqrt(self.head_dim), jnp.float32)

    def directions(self, codes: Array, constants: Leaves) -> Array:
        """ŷ: the levels of codes `[..., head_dim]`."""
        y = self.levels(constants)[codes]
        if not self.norm_correction:
            return y
        length = _length(y)
        return divide(y, jnp.where(length > 0, length, 1.0))

    def codes(self, leaves: Leaves) -> Array:
        if self.bits:
            return unpack(leaves["codes"], self.bits, dtype=jnp.int32)
        return jnp.zeros((*leaves["norm"].shape[:-1], self.head_dim), jnp.int32)

    def nearest(self, y: Array, constants: Leaves) -> Array:
        levels = self.levels(constants)
        middles = (levels[1:] + levels[:-1]) / 2
        return sum(((y >= middle).astype(jnp.int32) for middle in middles), jnp.zeros(y.shape, jnp.int32))

    def encode(self, tiles: Array, constants: Leaves) -> Leaves:
        y, norm = normalized(tiles)
        leaves = {"norm": store(norm, jnp.float16)}
        return leaves | ({"codes": pack(self.nearest(y, constants), self.bits)} if self.bits else {})

    def decode(self, leaves: Leaves, constants: Leaves) -> Array:
        return self.directions(self.codes(leaves), constants) * widen(leaves["norm"])


@functools.lru_cache
def gaussian_matrix(head_dim: int, seed: int) -> np.ndarray:
    """S of the sketch: NumPy's `default_rng(seed).standard_normal`, float32 `[head_dim, head_dim]`. Never stored."""
    return np.random.default_rng(seed).standard_normal((head_dim, head_dim), np.float32)


@dataclass(frozen=True)
class Sketched(Codebook):
    """The prod form: r = y − ŷ leaves sign(S r), S Gaussian `[head_dim, head_dim]`, and ‖r‖.

    x̂ = n (ŷ + ‖r‖ sqrt(π/2)/head_dim · Sᵀ sign(S r)), so q·x̂ has the mean n q·y over S (QJL, arXiv:2406.03482).

    Leaves: also signs uint8 `[tiles, 1, head_dim/8]`, 1 for S r ≥ 0; residual float16 `[tiles, 1, 1]`.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        packed_size(self.head_dim, 1)

    @property
    def matrix(self) -> Array:
        """S."""
        return jnp.asarray(gaussian_matrix(self.head_dim, self.seed))

    def encode(self, tiles: Array, constants: Leaves) -> Leaves:
        y, _ = normalized(tiles)
        residual = y - self.directions(self.nearest(y, constants), constants)

        def add(total: Array, column: tuple[Array, Array]) -> tuple[Array, None]:
            r, s = column
            return total + rounded(r[..., None] * s, jnp.float32), None

        # One channel after the other: a matrix product's order of summing depends on how many tokens there are.
        columns = (jnp.moveaxis(residual, -1, 0), self.matrix.T)
        sketch, _ = lax.scan(add, jnp.zeros_like(residual), columns)
        return super().encode(tiles, constants) | {
            "signs": pack(sketch >= 0, 1),
            "residual": store(_length(residual), jnp.float16),
        }

    def sketch(self, leaves: Leaves) -> tuple[Array, Array]:
        """(sign(S r), ‖r‖ sqrt(π/2)/head_dim)"""
        signs = 2 * unpack(leaves["signs"], 1, dtype=jnp.float32) - 1
        return signs, widen(leaves["residual"]) * np.float32(math.sqrt(math.pi / 2) / self.head_dim)

    def decode(self, leaves: Leaves, constants: Leaves) -> Array:
        signs, scale = self.sketch(leaves)
        residual = dot(signs, self.matrix) * scale
        return (self.directions(self.codes(leaves), constants) + residual) * widen(leaves["norm"])

    def scores(self, q: Array, leaves: Leaves, constants: Leaves) -> Array:
        # S q once a query instead of Sᵀ sign once a token
        signs, scale = self.sketch(leaves)
        y = self.directions(self.codes(leaves), constants)
        y, signs, scale, norm = (jnp.swapaxes(x[..., 0, :], -1, -2) for x in (y, signs, scale, widen(leaves["norm"])))
        return (dot(q, y) + dot(dot(q, self.matrix.T), signs) * scale) * norm


@dataclass(frozen=True)
class UniformRows(TokenRows):
    """V, as it is: zero = min, scale = max((max − min)/(2^bits − 1), 1e-8), code = ⌊(v − min)/scale + ½⌋."""

    def round_rows(self, rows: Array) -> RoundedRows:
        low, high = row_range(rows)
        top = 2**self.bits - 1
        scale = jnp.maximum(divide(high - low, top), SMALLEST)
        codes = jnp.clip(jnp.floor(divide(rows - low[..., None], scale[..., None]) + 0.5), 0, top)
        return RoundedRows(codes.astype(jnp.uint8), store(scale, jnp.float16), store(low, jnp.float16))


@register("turboquant", "rotation, norm and Lloyd–Max codes of K; V per token, min/max")
@dataclass(frozen=True, kw_only=True)
class TurboQuant(Bits):
    """K is rotated and stored as a norm and Lloyd–Max codes; V as it is, min/max, or (`values=lloyd`) like K. Both are
    flushed token by token. The paper's MSE form is `values=lloyd,norm_correction=false`; its prod form adds `qjl=true`,
    which concerns K: bits − 1 bits of codes and one of the sketch.

    vLLM's presets: 4bit_nc is `bits=4`, k3v4_nc `k_bits=3,v_bits=4`, 3bit_nc `bits=3`; k8v4 is `k_bits=8,v_bits=4`: 8
    bits of K are FP8 E4M3, saturating, neither rotated nor scaled. On dense models it adds `protect=2`. Another book
    than the exact one may be given as the constants `k_book` and (`values=lloyd`) `v_book` `[levels]`: levels of the
    normalized key or value, N(0, 1)'s over sqrt(head_dim).

    Bits a value: K bits + 16/head_dim (qjl: + 32/head_dim; 8 bits: 8), V bits + 32/head_dim (lloyd: + 16/head_dim).
    """

    bits: int | None = option(4, optional=True, allowed=(1, 2, 3, 4, 8))
    norm_correction: bool = option(True, about="codes are read as a vector of length 1")
    qjl: bool = option(False, about="the last bit of K is a sketch of the residual: unbiased scores")
    values: str = option("uniform", allowed=("uniform", "lloyd"), about="how V is rounded")
    seed: int = option(0, minimum=0, about="of the sketch's matrix")

    def calibrate(self, samples: Mapping[str, Array]) -> dict[str, Array]:
        raise ValueError(f"{self.name} has nothing to calibrate, its books are fixed; ultra_tq refits them")

    def sides(self, head_dim: int) -> tuple[Side, Side]:
        window = Window(recent=0, group=1)
        return self.key_side(head_dim, window), self.value_side(head_dim, window)

    def key_side(self, head_dim: int, window: Window) -> Side:
        bits = self.key_bits
        if bits == 8:
            if self.qjl:
                raise ValueError(f"{self.name}: qjl=true has no form of 8 bits, which are FP8; use k_bits of 1 to 4")
            return Side(Identity(head_dim, "fp8"), window)
        if self.qjl:
            return Side(Sketched(head_dim, bits - 1, self.norm_correction, self.seed), window, rotate=True)
        return Side(Codebook(head_dim, bits, self.norm_correction), window, rotate=True)

    def value_side(self, head_dim: int, window: Window) -> Side:
        bits = self.value_bits
        if self.values == "uniform":
            return Side(UniformRows(head_dim, bits, head_dim, "f16"), window)
        if bits == 8:
            raise ValueError(f"{self.name}: values=lloyd has no book of v_bits=8; use 1 to 4, or values=uniform")
        return Side(Codebook(head_dim, bits, self.norm_correction), window, rotate=True)
