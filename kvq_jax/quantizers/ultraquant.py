"""UltraQuant (arXiv:2606.20474 and its released kernels): FP4 with a power-of-two scale for each block of channels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from kvq_jax.block_formats import (
    ROUNDINGS,
    e2m1,
    e2m1_codes,
    e4m3,
    is_finite,
    largest,
    log2_rounded,
    power_of_two,
)
from kvq_jax.quantizers.base import ConstantSpec, Leaves
from kvq_jax.quantizers.blocks import BLOCKS, Blocks
from kvq_jax.schemes import Scheme, Side, Window, option, register


@dataclass(frozen=True)
class UltraBlocks(Blocks):
    """s = 2^E, E = round(log2(c·max|z|)) in [−126, 127], code = nearest E2M1 of z/s (a tie to the lower value).

    The scale byte is E + 127. Byte 0 is not a power of two but a zero block: all its codes are 0. 255 is never written.
    """

    c: float
    rounding: str
    rounds_query: bool
    rounds_p: bool

    def constants(self, kv_heads: int) -> dict[str, ConstantSpec]:
        return {"c": ConstantSpec((kv_heads,), positive=True)}

    def round_blocks(self, blocks: Array, constants: Leaves) -> tuple[Array, Array]:
        c = constants["c"][:, None, None, None] if constants else self.c
        most = largest(blocks)
        exponent, vanishes = log2_rounded(most, c, ROUNDINGS[self.rounding])
        byte = jnp.where(is_finite(most) & ~vanishes, jnp.clip(exponent + 127, 1, 254), 0)
        codes = e2m1_codes(blocks, byte[..., None], ties_to_even=False)
        codes &= jnp.where(byte > 0, 15, 0).astype(jnp.uint8)[..., None]
        return codes, byte.astype(jnp.uint8)

    def values(self, codes: Array, constants: Leaves) -> Array:
        return e2m1(codes)

    def scale(self, leaf: Array, constants: Leaves) -> Array:
        return power_of_two(leaf)

    def query(self, q: Array) -> Array:
        return e4m3(q) if self.rounds_query else q

    def weighted_sum(self, p: Array, leaves: Leaves, constants: Leaves) -> Array:
        p = lax.reduce_precision(p, exponent_bits=8, mantissa_bits=7) if self.rounds_p else p  # V̂ is exact in bfloat16
        return super().weighted_sum(p, leaves, constants)


@register("ultraquant", "K rotated, FP4 with a power-of-two scale per block of channels")
@dataclass(frozen=True, kw_only=True)
class UltraQuant(Scheme):
    """K is rotated after RoPE, V only with `rotate_v`; both are E2M1 codes with one scale byte for `block` channels of
    a token. Every token is quantized when it is written. `c` is the published constant for all layers and heads;
    constants `k_c` and `v_c` `[kv_heads]` replace it.

    The query is rounded to E4M3 (±448) before it meets K̂ (`query=fp8`); probabilities and sums are float32, as in the
    released reference. The released kernels round the probabilities to bfloat16 before V̂ too: `p=bf16`, of the tiled
    path (`attend(implementation="reference")` never does).

    **A block with NaN or infinity in it is stored, and read back, as zero**: the released format has no other way to
    say it, and its bytes are kept. Check your keys and values if you must know. (With rotation: all blocks of a token.)

    Bits a value, main store: 4 + 8/block.
    """

    shows_nan = False

    c: float = option(0.156, minimum=1e-6, maximum=1e6, about="scale over the block's largest magnitude")
    rounding: str = option(
        "nearest", allowed=tuple(ROUNDINGS), about="of log2(c·max) to an integer; even: up from 1.75"
    )
    rotate_v: bool = option(False, about="V rotated too; its output is rotated back")
    block: int = option(32, allowed=BLOCKS, about="channels that share a scale")
    query: str = option("fp8", allowed=("fp8", "f32"), about="what the query is rounded to")
    p: str = option("f32", allowed=("f32", "bf16"), about="what the probabilities are rounded to")

    def sides(self, head_dim: int) -> tuple[Side, Side]:
        how: dict[str, Any] = {"c": self.c, "rounding": self.rounding}
        how |= {"rounds_query": self.query == "fp8", "rounds_p": self.p == "bf16"}
        quantizer, window = UltraBlocks(head_dim, self.block, **how), Window(recent=0, group=1)
        return Side(quantizer, window, rotate=True), Side(quantizer, window, rotate=self.rotate_v)


def slots(stored: Mapping[str, Array]) -> Array:
    """The bytes that the released kernels keep for a token and head, uint8 `[batch, kv_heads, tokens, bytes]`, of
    `kvq.stored(cache)`: K codes (head_dim/2), K scales (head_dim/block), V codes, V scales. The tokens are those that
    both stores have room for, from the one after the sink.
    """
    parts = [stored[name][..., 0, :] for name in ("k_codes", "k_scale", "v_codes", "v_scale")]
    tokens = min(part.shape[2] for part in parts)
    return jnp.concatenate([part[:, :, :tokens] for part in parts], axis=-1)
