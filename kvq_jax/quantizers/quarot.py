"""QuaRot's KV cache (arXiv:2404.00456 and its released implementation): rotation, then one group a token and head."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from kvq_jax.formats import SCALE_DTYPES, rounded, store, uniform_codes, widen
from kvq_jax.packing import BITS
from kvq_jax.quantizers.affine import RoundedRows, TokenRows, row_range
from kvq_jax.quantizers.base import Leaves
from kvq_jax.schemes import Bits, Side, Window, option, register

SMALLEST_RANGE = 1e-5


@dataclass(frozen=True)
class FloatZeroRows(TokenRows):
    """The 4-bit cache: scale = max(max − min, 1e-5)/N, zero = min, x̂ = code·scale + zero, N = 2^bits − 1."""

    clip: float = 1.0

    def round_rows(self, rows: Array) -> RoundedRows:
        low, high = (rounded(self.clip * x, jnp.float32) for x in row_range(rows))
        scale = jnp.maximum(high - low, SMALLEST_RANGE) / (2**self.bits - 1)
        scale_dtype, zero_dtype = SCALE_DTYPES[self.scales]
        codes = uniform_codes(rows, scale[..., None], low[..., None], self.bits)
        return RoundedRows(codes, store(scale, scale_dtype), store(low, zero_dtype))


@dataclass(frozen=True)
class IntegerZeroRows(TokenRows):
    """The accuracy rule, whose zero point is a code: with M, m = clip·max, clip·min, of the row and 0 for keys,

    scale = (M − m)/N, zero = rint(−m/scale), code = clip(rint(x/scale) + zero, 0, N), x̂ = scale·(code − zero).

    The zero point is an integer in a float leaf. A row of zeros has M, m = 1, −1, as in the reference. A row of values
    much narrower than their distance from 0 gets a scale of at least max |M|, |m| / 2^p, with p the significant bits of
    the leaf, so that its zero point is exact; the reference divides by 0 where a row is constant.
    """

    clip: float = 1.0
    with_zero: bool = False  # 0 is forced into the range

    def round_rows(self, rows: Array) -> RoundedRows:
        low, high = row_range(rows)
        if self.with_zero:
            low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
        low, high = rounded(self.clip * low, jnp.float32), rounded(self.clip * high, jnp.float32)
        empty = (low == 0) & (high == 0)
        low, high = jnp.where(empty, -1.0, low), jnp.where(empty, 1.0, high)
        scale_dtype, zero_dtype = SCALE_DTYPES[self.scales]
        exact = 2.0 ** (jnp.finfo(zero_dtype).nmant + 1)  # integers up to here
        scale = jnp.maximum((high - low) / (2**self.bits - 1), jnp.maximum(jnp.abs(low), jnp.abs(high)) / exact)
        divisor = jnp.where(scale == 0, 1.0, scale)
        zero = jnp.round(-low / divisor)
        codes = jnp.clip(jnp.round(rows / divisor[..., None]) + zero[..., None], 0, 2**self.bits - 1)
        return RoundedRows(codes.astype(jnp.uint8), store(scale, scale_dtype), store(zero, zero_dtype))

    def decode(self, leaves: Leaves, constants: Leaves) -> Array:
        return (self._codes(leaves) - widen(leaves["zero"])) * widen(leaves["scale"])  # exact where codes are

    def _added(self, leaves: Leaves) -> Array:
        return -widen(leaves["scale"]) * widen(leaves["zero"])


@register("quarot", "rotation, then K and V per token, min/max")
@dataclass(frozen=True, kw_only=True)
class Quarot(Bits):
    """K and V are rotated; a group is one token of one head. `zero=integer` is the rule that the published accuracies
    were measured with: 0 is in the range of every key, but not of every value. `zero=float` is that of the released
    4-bit cache. No token stays in full precision.

    Bits a value: bits + 2·bits(scales)/head_dim.
    """

    bits: int | None = option(4, optional=True, allowed=BITS)
    zero: str = option("integer", allowed=("integer", "float"), about="zero point")
    clip: float = option(1.0, minimum=0, maximum=1, about="factor of a row's minimum and maximum")
    scales: str = option("f16", allowed=("f16", "f32"))

    def sides(self, head_dim: int) -> tuple[Side, Side]:
        if not self.clip:
            raise ValueError(f"{self.name}: clip=0 leaves no range; allowed: more than 0 and at most 1 (no clipping)")
        window = Window(recent=0, group=1)
        sides = []
        for bits, is_key in ((self.key_bits, True), (self.value_bits, False)):
            rows = (head_dim, bits, head_dim, self.scales)
            quantizer = (
                IntegerZeroRows(*rows, clip=self.clip, with_zero=is_key)
                if self.zero == "integer"
                else FloatZeroRows(*rows, clip=self.clip)
            )
            sides.append(Side(quantizer, window, rotate=True))
        return sides[0], sides[1]
