"""bf16, fp16, fp32: no quantization; the cache that every other scheme is compared with."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from kvq_jax.formats import store, widen
from kvq_jax.quantizers.base import Leaves, Quantizer
from kvq_jax.schemes import Scheme, Side, Window, register

DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32, "fp8": jnp.float8_e4m3fn}


@dataclass(frozen=True)
class Identity(Quantizer):
    """Stores x in `dtype`, saturating. Leaf: values `[tiles, 1, head_dim]`."""

    dtype: str

    def encode(self, tiles: Array, constants: Leaves) -> Leaves:
        return {"values": store(tiles, DTYPES[self.dtype])}

    def decode(self, leaves: Leaves, constants: Leaves) -> Array:
        return widen(leaves["values"])


class _Unquantized(Scheme):
    quantizes = False

    def sides(self, head_dim: int) -> tuple[Side, Side]:
        side = Side(Identity(head_dim, self.name), Window(recent=0, group=1))
        return side, side


@register("bf16", "no quantization, bfloat16")
@dataclass(frozen=True, kw_only=True)
class BFloat16(_Unquantized):
    """K and V stored in bfloat16."""


@register("fp16", "no quantization, float16")
@dataclass(frozen=True, kw_only=True)
class Float16(_Unquantized):
    """K and V stored in float16."""


@register("fp32", "no quantization, float32")
@dataclass(frozen=True, kw_only=True)
class Float32(_Unquantized):
    """K and V stored in float32."""
