"""KIVI (arXiv:2402.02750): K per channel over tokens, V per token over channels, min/max rounding."""

from dataclasses import dataclass

from kvq_jax.quantizers.affine import ChannelRows, NarrowAffine, TokenRows
from kvq_jax.schemes import Bits, Side, Window, option, register


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of `number` that is at most `at_most`."""
    return next(d for d in range(min(number, at_most), 0, -1) if number % d == 0)


@dataclass(frozen=True)
class NarrowChannelRows(NarrowAffine, ChannelRows):
    """K in the arithmetic of its scales."""


@dataclass(frozen=True)
class NarrowTokenRows(NarrowAffine, TokenRows):
    """V in the arithmetic of its scales."""


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
            channel_rows, token_rows = NarrowChannelRows, NarrowTokenRows
        k = channel_rows(head_dim, self.key_bits, self.subgroup, self.scales)
        v = token_rows(head_dim, self.value_bits, largest_divisor(head_dim, self.subgroup), self.scales)
        return Side(k, Window(recent=0, group=self.residual)), Side(v, Window(recent=self.residual, group=1))
