"""hf_quantized_cache: what the QuantizedCache of transformers does (quanto backend). A counter-example."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from kvq_jax.formats import SCALE_DTYPES, rounded, store, widen
from kvq_jax.quantizers.affine import RoundedRows, TokenRows, row_range
from kvq_jax.quantizers.base import Leaves
from kvq_jax.quantizers.kivi import largest_divisor
from kvq_jax.schemes import Scheme, Side, Window, option, register


@dataclass(frozen=True)
class RewritingWindow(Window):
    """A row's first append leaves at once. Later tokens wait until there are `residual`, and then all of them leave,
    and everything stored is encoded anew with them."""

    rewrites: ClassVar[bool] = True
    residual: int = 128

    def __post_init__(self) -> None:
        if self.recent or self.group != 1:
            raise ValueError(
                f"hf_quantized_cache: recent={self.recent}, group={self.group} cannot be: it keeps no recent window "
                "and flushes all that waits (recent=0, group=1); leave both out and set residual, or use kivi"
            )

    @property
    def size(self) -> int:
        return self.residual - 1

    def flushes(self, waiting: Array, length: Array) -> Array:
        return jnp.where((length == 0) | (waiting >= self.residual), waiting, 0)

    def most(self, tokens: int) -> int:
        return self.size + tokens


@dataclass(frozen=True)
class QuantoRows(TokenRows):
    """Min/max rounding of groups of channels in which every result is rounded to the format of the scales, as it is
    where tensors of the model's dtype are computed with:

    scale = (max − min)/(2^bits − 1), code = clip(rint((x − min)/scale), 0, 2^bits − 1), x̂ = code·scale + min.

    A constant group has scale 0 and code 0. Nothing is folded, because x̂ is rounded.
    """

    def _rounded(self, x: Array) -> Array:
        return rounded(x, SCALE_DTYPES[self.scales][0])

    def folds(self, queries: int) -> bool:
        return False

    def round_rows(self, rows: Array) -> RoundedRows:
        rows = self._rounded(rows)
        low, high = row_range(rows)
        scale = self._rounded(self._rounded(high - low) / (2**self.bits - 1))
        levels = self._rounded(self._rounded(rows - low[..., None]) / jnp.where(scale == 0, 1.0, scale)[..., None])
        codes = jnp.clip(jnp.round(levels), 0, 2**self.bits - 1).astype(jnp.uint8)
        return RoundedRows(codes, *(store(x, SCALE_DTYPES[self.scales][0]) for x in (scale, low)))

    def decode(self, leaves: Leaves, constants: Leaves) -> Array:
        scale, low = (jnp.repeat(widen(leaves[name]), self.group, axis=-1) for name in ("scale", "zero"))
        return self._rounded(self._rounded(self._codes(leaves) * scale) + low)


@register("hf_quantized_cache", "counter-example: prefill quantized whole, history re-quantized at every flush")
@dataclass(frozen=True, kw_only=True)
class HFQuantizedCache(Scheme):
    """Transformers' QuantizedCache with quanto, which is often taken for KIVI. It is here to be measured, not used:

    - K is rounded like V, in groups of `channels` consecutive channels of one token (min/max, a float zero), so that
      a group of K meets all of its outlier channels. KIVI rounds K per channel.
    - The first append (the prompt) is quantized at once, its newest tokens too: nothing of it stays exact.
    - When `residual` tokens wait, the *whole* history is dequantized to the cache's dtype, joined with them and
      quantized again. Stored bytes depend on how tokens were split into appends, old tokens drift (little: min/max
      rounding nearly keeps what it made), each flush takes time proportional to the length, and after it no token is
      exact.

    So neither of what every other scheme holds is true of it: that streamed equals one-shot, and that a written group
    never changes.

    What differs from transformers: it flushes if r ≥ 1 tokens wait and r + 1 ≥ residual, counting the new block as one
    token whatever its length; here a block counts what it has, which is the same for one token at a time (and needs
    residual ≥ 2). quanto's groups are runs of the flattened tensor, which cross tokens where `channels` does not divide
    head_dim; here a group is then the largest divisor of head_dim that is not larger. `scales` should be the cache's
    dtype, which quanto computes in.

    Bits a value: bits + 2·bits(scales)/channels.
    """

    bits: int = option(4, allowed=(2, 4))
    channels: int = option(64, minimum=2, about="channels of a group (q_group_size)")
    residual: int = option(128, minimum=2, about="tokens that wait before everything is quantized again")
    scales: str = option(
        "bf16", allowed=("bf16", "f16", "f32"), about="format of scale and zero, and of the arithmetic"
    )

    def sides(self, head_dim: int) -> tuple[Side, Side]:
        quantizer = QuantoRows(head_dim, self.bits, largest_divisor(head_dim, self.channels), self.scales)
        side = Side(quantizer, RewritingWindow(recent=0, group=1, residual=self.residual))
        return side, side
