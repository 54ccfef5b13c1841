"""KIVI (arXiv:2402.02750): K per channel over tokens, V per token over channels, min/max rounding."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from kvq_jax.formats import half, store, uniform_codes
from kvq_jax.quantizers.affine import Affine, ChannelRows, RoundedRows, TokenRows, row_range
from kvq_jax.schemes import Bits, Side, Window, option, register


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` that is at most `at_most`."""
    return next(d for d in range(min(number, at_most), 0, -1) if number % d == 0)


@dataclass(frozen=True)
class _InHalf(Affine):
    """The rule of `Affine` with every operation rounded to float16, and the codes from the scale that is stored."""

    def round_rows(self, rows: Array) -> RoundedRows:
        rows = half(rows)
        low, high = row_range(rows)
        scale = half(half(high - low) / (2**self.bits - 1))
        levels = half(half(rows - low[..., None]) / jnp.where(scale == 0, 1.0, scale)[..., None])
        codes = uniform_codes(levels, jnp.ones(()), jnp.zeros(()), self.bits)
        return RoundedRows(codes, store(scale, jnp.float16), store(low, jnp.float16))


@dataclass(frozen=True)
class HalfChannelRows(_InHalf, ChannelRows):
    """K in float16 arithmetic."""


@dataclass(frozen=True)
class HalfTokenRows(_InHalf, TokenRows):
    """V in float16 arithmetic."""


@register("kivi", "K per channel, V per token, min/max")
@dataclass(frozen=True, kw_only=True)
class Kivi(Bits):
    """K: groups of `subgroup` tokens of one channel, flushed `residual` tokens at a time (no recent window). V: groups
    of `subgroup` channels of one token (the largest divisor of head_dim that is not larger), flushed one token at a
    time, the newest `residual` in full precision. No sink. `arithmetic=f16` rounds every operation to float16, as the
    released implementation does for a float16 model, to get its bytes; what overflows there saturates here.

    Bits a value, main store: bits + 2·bits(scales)/subgroup.
    """

    subgroup: int = option(32, minimum=2, about="tokens of a K group, channels of a V group")
    residual: int = option(128, minimum=1, about="K flush size; V window of full-precision tokens")
    scales: str = option("f16", allowed=("f16", "bf16", "f32"))
    arithmetic: str = option("f32", allowed=("f32", "f16"), about="what the codes are computed in")

    def sides(self, head_dim: int) -> tuple[Side, Side]:
        channel_rows, token_rows = ChannelRows, TokenRows
        if self.arithmetic == "f16":
            if self.scales != "f16":
                raise ValueError(
                    f"{self.name}: arithmetic=f16 makes f16 scales, not scales={self.scales}; use scales=f16"
                )
            channel_rows, token_rows = HalfChannelRows, HalfTokenRows
        k = channel_rows(head_dim, self.key_bits, self.subgroup, self.scales)
        v = token_rows(head_dim, self.value_bits, largest_divisor(head_dim, self.subgroup), self.scales)
        return Side(k, Window(recent=0, group=self.residual)), Side(v, Window(recent=self.residual, group=1))
