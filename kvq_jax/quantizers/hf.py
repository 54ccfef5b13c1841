"""hf_quantized_cache: what the QuantizedCache of transformers does (quanto backend). A counter-example."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from kvq_jax.formats import widen
from kvq_jax.quantizers.affine import NarrowAffine, TokenRows
from kvq_jax.quantizers.base import Leaves
from kvq_jax.quantizers.kivi import largest_divisor
from kvq_jax.schemes import Scheme, Side, Window, option, register


@dataclass(frozen=True)
class RewritingWindow(Window):
    """A row's first append leaves at once, but for its newest `recent`. Later tokens wait until there are
    recent + group, then all but `recent` leave, and everything stored is encoded anew with them."""

    rewrites: ClassVar[bool] = True

    def flushes(self, waiting: Array, length: Array) -> Array:
        full = (length == 0) | (waiting >= self.recent + self.group)
        return jnp.where(full, jnp.maximum(waiting - self.recent, 0), 0)

    def room(self, tokens: int) -> int:
        return max(0, tokens - self.recent)

    def most(self, tokens: int) -> int:
        return self.size + tokens


@dataclass(frozen=True)
class QuantoRows(NarrowAffine, TokenRows):
    """Min/max rounding of groups of channels; x̂ = code·scale + min is rounded too, so that nothing is folded."""

    def folds(self, queries: int) -> bool:
        return False

    def decode(self, leaves: Leaves, constants: Leaves) -> Array:
        scale, low = (jnp.repeat(widen(leaves[name]), self.group, axis=-1) for name in ("scale", "zero"))
        return self.rounded(self.rounded(self._codes(leaves) * scale) + low)


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
    dtype, which quanto computes in. `group`, where given, replaces `residual`, and `recent`, which transformers does
    not have, keeps the newest tokens exact: what is left is the rewriting.

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
        side = Side(quantizer, RewritingWindow(recent=0, group=self.residual))
        return side, side
