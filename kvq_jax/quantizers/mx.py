"""MXFP4 and MXINT4 (OCP Microscaling Formats v1.0) and NVFP4, of a cache's K and V."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvq_jax.block_formats import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_SMALLEST_NORMAL,
    ROUNDINGS,
    e2m1,
    e2m1_codes,
    e4m3,
    is_finite,
    largest,
    log2_rounded,
    power_of_two,
)
from kvq_jax.formats import store, widen
from kvq_jax.quantizers.base import ConstantSpec, Leaves
from kvq_jax.quantizers.blocks import Blocks
from kvq_jax.schemes import Scheme, Side, Window, option, register

MX_NAN = 255
RULES = ("floor", "even", "rceil", "ceil")


@dataclass(frozen=True)
class _MX(Blocks):
    """x̂ = element · 2^(byte − 127), byte − 127 = floor(log2 max|x|) − 2, which is where both grids have their largest
    power of two, 4, and one more from the mantissa on that the rule says; at least −127.

    Byte 255 is NaN, of a block with NaN or infinity in it. Elements saturate.
    """

    rule: str

    @property
    @abc.abstractmethod
    def rounds_up_from(self) -> int:
        """The mantissa of `rule`, as in `ROUNDINGS`."""

    @abc.abstractmethod
    def elements(self, blocks: Array, byte: Array) -> Array:
        """Codes of blocks/2^(byte − 127)."""

    def round_blocks(self, blocks: Array, constants: Leaves) -> tuple[Array, Array]:
        most = largest(blocks)
        exponent, _ = log2_rounded(most, 0.25, self.rounds_up_from)
        byte = jnp.where(is_finite(most), jnp.clip(exponent + 127, 0, MX_NAN - 1), MX_NAN)
        return self.elements(blocks, byte[..., None]), byte.astype(jnp.uint8)

    def scale(self, leaf: Array, constants: Leaves) -> Array:
        """Of values that come halved: twice the scale, because 2^(0 − 127) would be a denormal."""
        return jnp.where(leaf == MX_NAN, jnp.nan, power_of_two(leaf.astype(jnp.int32) + 1))


@dataclass(frozen=True)
class MXFP4Blocks(_MX):
    """Elements E2M1, ties to even."""

    @property
    def rounds_up_from(self) -> int:
        return {**ROUNDINGS, "rceil": 0x400001}[self.rule]  # above 1.5 = 6/4

    def elements(self, blocks: Array, byte: Array) -> Array:
        return e2m1_codes(blocks, byte, ties_to_even=True)

    def values(self, codes: Array, constants: Leaves) -> Array:
        return e2m1(codes) * 0.5


@dataclass(frozen=True)
class MXINT4Blocks(_MX):
    """Elements −7 … 7 in two's complement, ties to even."""

    @property
    def rounds_up_from(self) -> int:
        return {**ROUNDINGS, "even": 0x700000, "rceil": 0x600001}[self.rule]  # 1.875 = 7.5/4, above 1.75 = 7/4

    def elements(self, blocks: Array, byte: Array) -> Array:
        half = byte >> 1  # divide twice: 2^(byte − 127) itself may be a denormal
        levels = blocks / power_of_two(half + 64) / power_of_two(byte - half + 63)
        levels = jnp.where(jnp.isfinite(levels), levels, 0)  # of a NaN block, which has no elements
        return jnp.clip(jnp.round(levels), -7, 7).astype(jnp.int32).astype(jnp.uint8) & 15

    def values(self, codes: Array, constants: Leaves) -> Array:
        return ((codes ^ 8) - 8).astype(jnp.float32) * 0.5


@dataclass(frozen=True)
class NVFP4Blocks(Blocks):
    """x̂ = element · s · t: E2M1 elements, ties to even; s = E4M3(max|x|/6/t), 2^−6 at least and 448 at most;
    t = amax/(448·6) of the tensor where `amax` is known, else 1. A block with NaN or infinity has s = NaN.
    """

    def constants(self, kv_heads: int) -> dict[str, ConstantSpec]:
        return {"amax": ConstantSpec((), positive=True)}

    def _tensor_scale(self, constants: Leaves) -> Array:
        return constants["amax"] / np.float32(E4M3_MAX * E2M1_MAX) if constants else jnp.float32(1)

    def round_blocks(self, blocks: Array, constants: Leaves) -> tuple[Array, Array]:
        tensor_scale, most = self._tensor_scale(constants), jnp.abs(blocks).max(-1)
        scale = e4m3(jnp.maximum(most / E2M1_MAX / tensor_scale, E4M3_SMALLEST_NORMAL))
        codes = e2m1_codes(blocks / (scale * tensor_scale)[..., None], jnp.uint8(127), ties_to_even=True)
        return codes, store(jnp.where(is_finite(largest(blocks)), scale, jnp.nan), jnp.float8_e4m3fn)

    def values(self, codes: Array, constants: Leaves) -> Array:
        return e2m1(codes)

    def scale(self, leaf: Array, constants: Leaves) -> Array:
        return widen(leaf) * self._tensor_scale(constants)


@dataclass(frozen=True, kw_only=True)
class _BlockScheme(Scheme):
    rotate: bool = option(False, about="K and V rotated")

    @abc.abstractmethod
    def quantizer(self, head_dim: int) -> Blocks: ...

    def sides(self, head_dim: int) -> tuple[Side, Side]:
        side = Side(self.quantizer(head_dim), Window(recent=0, group=1), self.rotate)
        return side, side


@register("mxfp4", "FP4 with a power-of-two scale per 32 channels (OCP)")
@dataclass(frozen=True, kw_only=True)
class MXFP4(_BlockScheme):
    """E2M1 elements, blocks of 32 channels of a token. `rule` says when the scale is rounded up from
    2^(floor(log2 max|x|) − 2): never (OCP), where the largest element would round up to the next power of two (even),
    where it would saturate (rceil), or unless it is a power of two (ceil).

    Bits a value, main store: 4.25.
    """

    rule: str = option("floor", allowed=RULES, about="rounding of the scale")

    def quantizer(self, head_dim: int) -> Blocks:
        return MXFP4Blocks(head_dim, 32, self.rule)


@register("mxint4", "4-bit integers with a power-of-two scale per 32 channels")
@dataclass(frozen=True, kw_only=True)
class MXINT4(_BlockScheme):
    """Integers −7 … 7, otherwise as MXFP4. Bits a value, main store: 4.25."""

    rule: str = option("floor", allowed=RULES, about="rounding of the scale")

    def quantizer(self, head_dim: int) -> Blocks:
        return MXINT4Blocks(head_dim, 32, self.rule)


@register("nvfp4", "FP4 with an E4M3 scale per 16 channels")
@dataclass(frozen=True, kw_only=True)
class NVFP4(_BlockScheme):
    """E2M1 elements, blocks of 16 channels of a token. The E4M3 scales reach from 2^−6 to 448: values far from 1 need
    the constants `k_amax` and `v_amax`, the largest magnitude of the layer, for the float32 scale of the tensor.

    Bits a value, main store: 4.5.
    """

    captures = ("k", "v")

    def quantizer(self, head_dim: int) -> Blocks:
        return NVFP4Blocks(head_dim, 16)

    def calibrate(self, samples: Mapping[str, Array]) -> dict[str, Array]:
        return {f"{side}_amax": jnp.abs(samples[side]).max() for side in "kv"}
