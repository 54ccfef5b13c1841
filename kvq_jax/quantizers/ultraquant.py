"""UltraQuant (arXiv:2606.20474 and its released kernels): FP4 with a power-of-two scale for each block of channels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
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

PUBLISHED = 0.156  # for all models, layers and heads, K and V
LENGTHS = (512, 1024, 2048, 4096, 8192)  # tokens of a sequence at which calibration looks at its own convergence


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
    constants `k_c` and `v_c` `[kv_heads]` replace it. (With `rounding=nearest` the published constant is far from the
    best, which is near 0.195: the paper solved it for a scale that is not rounded. See `calibration.clipping`.)

    The query is rounded to E4M3 (±448) before it meets K̂ (`query=fp8`); probabilities and sums are float32, as in the
    released reference. The released kernels round the probabilities to bfloat16 before V̂ too: `p=bf16`, of the tiled
    path (`attend(implementation="reference")` never does).

    **A block with NaN or infinity in it is stored, and read back, as zero**: the released format has no other way to
    say it, and its bytes are kept. Check your keys and values if you must know. (With rotation: all blocks of a token.)

    Bits a value, main store: 4 + 8/block.
    """

    shows_nan = False
    captures: ClassVar[tuple[str, ...]] = ("k", "v")
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "granularity": ("layer", "global", "head"),  # what shares a constant; K and V never do
        "objective": ("mse", "scores", "attention"),  # of K; V's is always the squared error
    }

    c: float = option(PUBLISHED, minimum=1e-6, maximum=1e6, about="scale over the block's largest magnitude")
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

    def captured(self, **chosen: str) -> tuple[str, ...]:
        return self.captures if chosen["objective"] == "mse" else (*self.captures, "q")

    def calibrate(
        self, samples: Mapping[str, Array], *, granularity: str = "layer", objective: str = "mse"
    ) -> dict[str, Array]:
        """`k_c` and `v_c`, solved through the rounding rule, from `c` (see `kvq.solve_clipping_constant`).

        Besides, for `compare_layers` and for reports: `lengths` `[n]`, the LENGTHS that the sequences exceed and their
        own; `grid`, constants around `c`; of so many first tokens the error at each of them, `k_curve` and `v_curve`
        `[n, heads, grid]`, and what makes it relative, `k_norm` and `v_norm` `[n, heads]`.
        """
        from kvq_jax.calibration import clipping  # which reads this module

        tokens = samples["k"].shape[2]
        lengths = [*(length for length in LENGTHS if length < tokens), tokens]
        found = {"lengths": jnp.array(lengths), "grid": jnp.asarray(clipping.grid(self.c))}
        for side in "kv":
            how: dict[str, Any] = {"rounding": self.rounding, "block": self.block}
            queries = samples["q"] if side == "k" and objective != "mse" else None
            how["objective"] = "mse" if queries is None else objective
            pool = (0,) if granularity == "head" else (0, 1)
            solved = clipping.solve_clipping_constant(samples[side], start=self.c, pool=pool, queries=queries, **how)
            found[f"{side}_c"] = jnp.broadcast_to(solved.c, samples[side].shape[1])
            parts = []
            for n in lengths:
                of_first = None if queries is None else queries[:, :, :n]
                parts.append(clipping.clipping_curve(samples[side][:, :, :n], found["grid"], queries=of_first, **how))
            for name, part in zip(("curve", "norm"), zip(*parts, strict=True), strict=True):
                found[f"{side}_{name}"] = jnp.stack([x.sum(0) for x in part])
        return found

    def compare_layers(
        self, found: dict[str, Array], *, granularity: str = "layer", objective: str = "mse"
    ) -> dict[str, Array]:
        """`k_c` and `v_c` of all layers; `global`: where the sum of all layers' and heads' curves is lowest."""
        from kvq_jax.calibration.clipping import lowest

        constants = {name: found[name] for name in ("k_c", "v_c")}
        if granularity == "global":
            for side in "kv":
                total = np.asarray(found[f"{side}_curve"], np.float64)[:, -1].sum((0, 1))
                constants[f"{side}_c"] = jnp.full_like(found[f"{side}_c"], lowest(np.asarray(found["grid"])[0], total))
        return constants


def slots(stored: Mapping[str, Array]) -> Array:
    """The bytes that the released kernels keep for a token and head, uint8 `[batch, kv_heads, tokens, bytes]`, of
    `kvq.stored(cache)`: K codes (head_dim/2), K scales (head_dim/block), V codes, V scales. The tokens are those that
    both stores have room for, from the one after the sink.
    """
    parts = [stored[name][..., 0, :] for name in ("k_codes", "k_scale", "v_codes", "v_scale")]
    tokens = min(part.shape[2] for part in parts)
    return jnp.concatenate([part[:, :, :tokens] for part in parts], axis=-1)
