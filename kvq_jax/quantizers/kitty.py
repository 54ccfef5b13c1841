"""Kitty (arXiv:2511.18643): two bits, and four for the keys' largest channels, chosen anew for every page."""

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from kvq_jax.formats import SCALE_DTYPES, rounded, store, widen
from kvq_jax.packing import pack, unpack
from kvq_jax.quantizers.affine import ChannelRows, TokenRows, row_range
from kvq_jax.quantizers.base import Leaves, dot, sum_by_halves
from kvq_jax.quantizers.kivi import largest_divisor
from kvq_jax.schemes import Scheme, Side, Window, option, register

SMALLEST_RANGE = 1e-6
MOST_PROMOTED = 255  # slots, and the mark of a channel without one, are bytes


@dataclass(frozen=True)
class PromotedChannelRows(ChannelRows):
    """A page of `group` tokens. Channels are ranked by the page's mean |x| (or its variance), lower channels first
    among equals, and the first `promoted` of them have N = 15 instead of N = 3:

    scale = max(max − min, 1e-6)/N, zero = min, code = clip(rint((x − zero)/scale), 0, N) = low + 4·high.

    Leaves: low uint8 `[tiles, head_dim, group/4]`, high uint8 `[tiles, promoted, group/4]` in the order of the ranks,
    index uint8 `[tiles, head_dim]` (a channel's row of `high`; `promoted` for none), scale, zero `[tiles, head_dim]`.
    """

    promoted: int
    rank: str

    def _score(self, tiles: Array) -> Array:
        if self.rank == "magnitude":
            return sum_by_halves(jnp.abs(tiles), -2)
        mean = rounded(sum_by_halves(tiles, -2) / tiles.shape[-2], jnp.float32)
        return sum_by_halves(rounded((tiles - mean[..., None, :]) ** 2, jnp.float32), -2)

    def encode(self, tiles: Array, constants: Leaves) -> Leaves:
        score = self._score(tiles)
        _, channels = lax.top_k(jnp.where(jnp.isnan(score), jnp.inf, score), self.promoted)  # equal: lower first
        slot = jnp.arange(self.promoted)
        at_slot = channels[..., None, :] == jnp.arange(self.head_dim)[:, None]  # [..., head_dim, promoted]
        index = self.promoted + jnp.sum(jnp.where(at_slot, slot - self.promoted, 0), axis=-1)

        rows = jnp.swapaxes(tiles, -1, -2)
        low, high = row_range(rows)
        steps = jnp.where(index < self.promoted, 15.0, 3.0)
        scale = jnp.maximum(high - low, SMALLEST_RANGE) / steps
        codes = jnp.clip(jnp.round((rows - low[..., None]) / scale[..., None]), 0, steps[..., None]).astype(jnp.uint8)
        scale_dtype, zero_dtype = SCALE_DTYPES[self.scales]
        return {
            "low": pack(codes & 3, 2),
            "high": pack(jnp.take_along_axis(codes >> 2, channels[..., None], axis=-2), 2),
            "index": index.astype(jnp.uint8),
            "scale": store(scale, scale_dtype),
            "zero": store(low, zero_dtype),
        }

    def _halves(self, leaves: Leaves) -> tuple[Array, Array, Array]:
        """low `[..., head_dim, group]`, high `[..., promoted, group]`, and 4 where a channel has a slot
        `[..., head_dim, promoted]`."""
        low, high = (unpack(leaves[name], 2, dtype=jnp.float32) for name in ("low", "high"))
        slot = jnp.arange(self.promoted, dtype=jnp.uint8)
        return low, high, jnp.where(leaves["index"][..., None] == slot, 4.0, 0.0)

    def _codes(self, leaves: Leaves) -> Array:
        low, high, slots = self._halves(leaves)
        return low + dot(slots, high)

    def scores(self, q: Array, leaves: Leaves, constants: Leaves) -> Array:
        if not self.folds(q.shape[-2]):
            return super().scores(q, leaves, constants)
        # (q ∘ scale)·low_j + 4·(q ∘ scale of the promoted)·high_j + q·zero
        low, high, slots = self._halves(leaves)
        q = q[..., None, :, :]
        scaled = q * widen(leaves["scale"])[..., None, :]
        out = dot(scaled, low) + dot(dot(scaled, slots), high) + dot(q, widen(leaves["zero"])[..., None])
        out = jnp.swapaxes(out, -2, -3)  # [..., queries, tiles, group]
        return out.reshape(*out.shape[:-2], -1)


@register("kitty", "K per channel with 4 bits for the largest, V per token, min/max")
@dataclass(frozen=True, kw_only=True)
class Kitty(Scheme):
    """K: pages of `group` tokens, 2 bits, floor(boost·head_dim) channels of every page and head at 4 bits; a page is
    flushed when the token after it comes. V: 2 bits, one group a token (the largest divisor of head_dim up to 128),
    flushed one token at a time, the newest `group` in full precision. `recent` replaces that of both sides; `group`
    is K's alone. Ranks are taken of the page, so nothing is calibrated.

    The published simulation quantizes a page that a prefill has just completed; here it waits for its next token, so
    that tokens are stored the same however they come.

    Bits a value, main store: K 2 + 2·promoted/head_dim + (8 + 2·bits(scales))/group, V 2 + 2·bits(scales)/head_dim.
    """

    boost: float = option(0.125, minimum=0, maximum=1, about="share of K's channels that get 4 bits")
    rank: str = option("magnitude", allowed=("magnitude", "variance"), about="what makes a channel of a page large")
    scales: str = option("f16", allowed=("f16", "f32"))
    sink: int = option(32, minimum=0, about="first tokens, in full precision for good")
    group: int = option(128, minimum=4, about="tokens of a page of K, and V's window")

    def sides(self, head_dim: int) -> tuple[Side, Side]:
        promoted = int(head_dim * self.boost + 1e-6)
        if not 0 < promoted < head_dim:
            raise ValueError(
                f"{self.name}: boost={self.boost:g} gives {promoted} of head_dim={head_dim} channels 4 bits; allowed: "
                f"at least {1 / head_dim:g} and less than 1 (for none or all of them use kivi)"
            )
        if promoted > MOST_PROMOTED:
            raise ValueError(
                f"{self.name}: boost={self.boost:g} gives {promoted} of head_dim={head_dim} channels 4 bits; an index "
                f"of one byte allows {MOST_PROMOTED}: use at most {MOST_PROMOTED / head_dim:g}"
            )
        k = PromotedChannelRows(head_dim, 2, self.group, self.scales, promoted, self.rank)
        v = TokenRows(head_dim, 2, largest_divisor(head_dim, 128), self.scales)
        return Side(k, Window(recent=1, group=self.group)), Side(v, Window(recent=self.group, group=1))

    def resolve(self, head_dim: int) -> tuple[Side, Side]:
        k, v = super().resolve(head_dim)
        return k, dataclasses.replace(v, window=dataclasses.replace(v.window, group=1))
