"""KVarN (arXiv:2606.03458 and its released implementation): rotation, variance normalization on two axes, rounding."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from kvq_jax.balance import variance_normalize
from kvq_jax.formats import SCALE_DTYPES, store, store_scale, uniform_codes, widen
from kvq_jax.quantizers.affine import Affine, ChannelRows, RoundedRows, TokenRows, row_range
from kvq_jax.schemes import Bits, Side, Window, option, register

SMALLEST_STEP = 1e-10


@dataclass(frozen=True)
class _Balanced(Affine):
    """Rows of the balanced tile B = T/s_c/s_r are rounded between their extremes:

    step = max((max B − min B)/(2^bits − 1), 1e-10), code = clip(rint((B − min B)/step), 0, 2^bits − 1)
    scale = s_r·step, zero = s_r·min B, column scale = s_c.

    With float scales the codes come from the unrounded scales, as in the reference; with FP8 scales from what is
    stored, because an FP8 scale is off by up to 6 %.
    """

    iters: int = 8
    normalize: str = "published"

    def round_rows(self, rows: Array) -> RoundedRows:
        balanced, row_scale, column_scale = variance_normalize(rows, iters=self.iters, normalize=self.normalize)
        low, high = row_range(balanced)
        step = jnp.maximum((high - low) / (2**self.bits - 1), SMALLEST_STEP)
        scale_dtype, zero_dtype = SCALE_DTYPES[self.scales]
        scale, zero = store_scale(row_scale * step, scale_dtype), store(row_scale * low, zero_dtype)
        column = store_scale(column_scale, scale_dtype)
        if self.scales == "fp8":
            wide_scale, wide_zero, wide_column = (widen(x) for x in (scale, zero, column))
            codes = uniform_codes(
                rows / wide_column[..., None, :], wide_scale[..., None], wide_zero[..., None], self.bits
            )
        else:
            codes = uniform_codes(balanced, step[..., None], low[..., None], self.bits)
        return RoundedRows(codes, scale, zero, column)


@dataclass(frozen=True)
class BalancedChannelRows(_Balanced, ChannelRows):
    """K: `[head_dim, group]` tiles, a scale and a zero per channel, a second scale per token."""


@dataclass(frozen=True)
class BalancedTokenRows(_Balanced, TokenRows):
    """V: `[tokens_per_tile, head_dim]` tiles, a scale and a zero per token, a second scale per channel."""


@register("kvarn", "rotation, two-axis variance normalization, min/max")
@dataclass(frozen=True, kw_only=True)
class KVarN(Bits):
    """K and V are rotated; tiles of `group` tokens are balanced over both axes and rounded per channel (K) or per token
    (V). `normalize=published` is the reference (log-scale floor −0.3); `equivariant` does not depend on the tile's
    magnitude. `scales=fp8` stores both scales in E4M3 and the zero in float16 (the paper's 2.25 bits).

    Bits a value, main store, f16: K bits + 16(2/group + 1/head_dim), V bits + 16(1/group + 2/head_dim).
    """

    iters: int = option(8, minimum=0, maximum=1000, about="normalization iterations")
    normalize: str = option("published", allowed=("published", "equivariant"))
    scales: str = option("f16", allowed=("f16", "fp8", "f32"))
    group: int = option(128, minimum=2, about="tokens of a tile, and of a flush")

    def sides(self, head_dim: int) -> tuple[Side, Side]:
        how: dict[str, Any] = {"scales": self.scales, "iters": self.iters, "normalize": self.normalize}
        k = BalancedChannelRows(head_dim, bits=self.key_bits, group=self.group, **how)
        v = BalancedTokenRows(head_dim, bits=self.value_bits, group=head_dim, tokens_per_tile=self.group, **how)
        window = Window(recent=0, group=self.group)
        return Side(k, window, rotate=True), Side(v, window, rotate=True)
