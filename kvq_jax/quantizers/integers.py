"""int8, int4: integers with a scale per token and head, as inference engines store K and V."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from kvq_jax.packing import pack, packed_size, unpack
from kvq_jax.quantizers.affine import TokenRows
from kvq_jax.quantizers.base import Quantizer
from kvq_jax.quantizers.scaled import ScaledTokens
from kvq_jax.schemes import Scheme, Side, Window, option, register


@dataclass(frozen=True)
class IntTokens(ScaledTokens):
    """Levels in ±(2^(bits−1) − 1), rounded half to even; codes are offset binary (level + 2^(bits−1), which is two's
    complement with the sign bit flipped), packed along channels."""

    bits: int

    def __post_init__(self) -> None:
        packed_size(self.head_dim, self.bits)

    @property
    def largest(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    def to_codes(self, levels: Array) -> Array:
        return pack((jnp.round(levels) + 2 ** (self.bits - 1)).astype(jnp.uint8), self.bits)

    def to_levels(self, codes: Array) -> Array:
        return unpack(codes, self.bits, dtype=jnp.float32) - 2 ** (self.bits - 1)


@dataclass(frozen=True, kw_only=True)
class _Integers(Scheme):
    """`symmetric`: scale = max |x| / (2^(bits−1) − 1), x̂ = scale · level. Otherwise min/max rounding to 2^bits levels
    from zero = min, x̂ = scale · code + zero, which follows keys that are far from zero on one side. Every token is
    stored as it comes; no sink.

    MaxText's cache with `kv_quant_axis: dkv` is the symmetric one but for this: its largest level is 127.5 (7.5), so
    that the largest x of a token rounds to 128 (8), one beyond the integers; its scales are bfloat16; a zero token is
    NaN in it. Its default, `heads_and_dkv`, shares the scale among all heads of a token.

    Bits a value: bits + bits(scales)/head_dim, asymmetric bits + 2·bits(scales)/head_dim.
    """

    bits: ClassVar[int]

    symmetric: bool = option(True, about="a scale alone, or a scale and a zero")
    scales: str = option("f16", allowed=("f16", "f32", "bf16"))

    def sides(self, head_dim: int) -> tuple[Side, Side]:
        quantizer: Quantizer = TokenRows(head_dim, self.bits, head_dim, self.scales)
        if self.symmetric:
            quantizer = IntTokens(head_dim, self.scales, self.bits)
        side = Side(quantizer, Window(recent=0, group=1))
        return side, side


@register("int8", "8-bit integers, a scale per token and head")
@dataclass(frozen=True, kw_only=True)
class Int8(_Integers):
    __doc__ = _Integers.__doc__
    bits = 8


@register("int4", "4-bit integers, a scale per token and head")
@dataclass(frozen=True, kw_only=True)
class Int4(_Integers):
    __doc__ = _Integers.__doc__
    bits = 4
