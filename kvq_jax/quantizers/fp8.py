"""fp8: E4M3 codes, with a scale a token and head, or one calibrated scale a layer and side."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from kvq_jax.quantizers.base import ConstantSpec, Leaves
from kvq_jax.quantizers.scaled import ScaledTokens, largest_magnitude
from kvq_jax.schemes import Scheme, Side, Window, option, register

LARGEST = 448  # of E4M3FN, which has no infinity


@dataclass(frozen=True)
class Fp8Tokens(ScaledTokens):
    """Codes are the bits of float8_e4m3fn as uint8 `[tiles, 1, head_dim]`, rounded half to even, saturating at ±448;
    what is not finite becomes the format's NaN. (XLA:CPU widens a whole float8 array before it slices a tile out of
    it; of integers it reads the slice.)"""

    @property
    def largest(self) -> int:
        return LARGEST

    def to_codes(self, levels: Array) -> Array:
        return lax.bitcast_convert_type(levels.astype(jnp.float8_e4m3fn), jnp.uint8)

    def to_levels(self, codes: Array) -> Array:
        return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


@dataclass(frozen=True)
class Fp8Tensor(Fp8Tokens):
    """One calibrated float32 scale for every token and head; what exceeds 448·scale saturates. Leaf: codes."""

    def constants(self, kv_heads: int) -> dict[str, ConstantSpec]:
        return {"scale": ConstantSpec((), positive=True)}

    def new_scale(self, tiles: Array, constants: Leaves) -> Array:
        return constants["scale"]

    def stored_scale(self, leaves: Leaves, constants: Leaves) -> Array:
        return constants["scale"]

    def encode(self, tiles: Array, constants: Leaves) -> Leaves:
        return {"codes": super().encode(tiles, constants)["codes"]}


@register("fp8", "E4M3, a scale per token and head, or one calibrated")
@dataclass(frozen=True, kw_only=True)
class Fp8(Scheme):
    """`scaling=token`: scale = max |x| / 448 of each token and head, stored in `scales`. `scaling=tensor`: one static
    scale a layer and side, max |x| / 448 over a calibration text, as serving engines load it from a checkpoint; it has
    no default, because a scale of 1 is silently wrong. Every token is stored as it comes; no sink.

    Bits a value: 8 + bits(scales)/head_dim (token), 8 (tensor).
    """

    scaling: str = option("token", allowed=("token", "tensor"), about="what shares a scale")
    scales: str = option("f32", allowed=("f32", "f16"), about="format of a token's scale; a calibrated one is f32")

    @property
    def needs_constants(self) -> bool:  # type: ignore[override]
        return self.scaling == "tensor"

    @property
    def captures(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("k", "v") if self.needs_constants else ()

    def sides(self, head_dim: int) -> tuple[Side, Side]:
        side = Side((Fp8Tensor if self.scaling == "tensor" else Fp8Tokens)(head_dim, self.scales), Window(0, 1))
        return side, side

    def calibrate(self, samples: Mapping[str, Array]) -> dict[str, Array]:
        """k_scale and v_scale, each max |x| / 448 over all heads and tokens: NaN where a sample is, 0 where all are 0,
        which no cache accepts. Raises ValueError for `scaling=token`."""
        if not self.needs_constants:
            return super().calibrate(samples)
        return {f"{side}_scale": largest_magnitude(samples[side].reshape(-1)) / LARGEST for side in "kv"}
