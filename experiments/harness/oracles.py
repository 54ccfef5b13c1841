"""Schemes that no cache could have, to ask what would be if: they know the token that was rounded.

An oracle wraps a scheme. Where a group leaves the window it rounds as that scheme does, looks at what the rounding did,
and stores what it makes of both, dense in float32. Windows, bases and regimes are the scheme's own. Nothing is packed
(`packed` is False), and no spec string builds one.
"""

import abc
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import kvq_jax as kvq
import models
from kvq_jax.quantizers.base import ConstantSpec, Leaves, Quantizer, sum_by_halves
from kvq_jax.schemes import COMMON_FIELDS, Scheme, Side

BY = ("token", "element", "magnitude")
EVERYTHING = (0.0, 3.4e38)  # of the errors that are finite
NOTHING = (3.4e38, 3.4e38)


@dataclass(frozen=True)
class _Oracle(Quantizer):
    """Leaf: values float32 `[tiles, tile_tokens, head_dim]`, as `remake` makes them."""

    inner: Quantizer

    @property
    def tile_tokens(self) -> int:
        return self.inner.tile_tokens

    def constants(self, kv_heads: int) -> dict[str, ConstantSpec]:
        return self.inner.constants(kv_heads)

    def query(self, q: Array) -> Array:
        return self.inner.query(q)

    def encode(self, tiles: Array, constants: Leaves) -> Leaves:
        own = {name: constants[name] for name in self.inner.constants(tiles.shape[1]) if name in constants}
        return {"values": self.remake(tiles, self.inner.decode(self.inner.encode(tiles, own), own), constants)}

    def decode(self, leaves: Leaves, constants: Leaves) -> Array:
        return leaves["values"]

    @abc.abstractmethod
    def remake(self, x: Array, x_hat: Array, constants: Leaves) -> Array:
        """What is stored of x `[..., head_dim]`, which the scheme would read back as x_hat."""


def _norm(x: Array) -> Array:
    return jnp.sqrt(sum_by_halves(jnp.square(x), -1))[..., None]


@dataclass(frozen=True)
class _Restored(_Oracle):
    """x where low ≤ (x − x̂)² < high, x̂ elsewhere; for tokens with ‖x − x̂‖², for magnitudes x̂·‖x‖/‖x̂‖ of these."""

    by: str

    def constants(self, kv_heads: int) -> dict[str, ConstantSpec]:
        return self.inner.constants(kv_heads) | {"low": ConstantSpec(()), "high": ConstantSpec(())}

    def remake(self, x: Array, x_hat: Array, constants: Leaves) -> Array:
        error = jnp.square(x - x_hat)
        if self.by != "element":
            error = sum_by_halves(error, -1)[..., None]
        chosen = (constants["low"] <= error) & (error < constants["high"])
        if self.by == "magnitude":
            norm = _norm(x_hat)
            x = jnp.where(norm > 0, x_hat * (_norm(x) / jnp.where(norm > 0, norm, 1.0)), x_hat)
        return jnp.where(chosen, x, x_hat)


@dataclass(frozen=True)
class _ScaleNoise(_Oracle):
    """x · (1 ± ‖x − x̂‖/‖x‖): every token has the error energy of its rounding, all of it in its scale. A coin says
    which sign; it is + where − would turn the token around."""

    seed: int

    def remake(self, x: Array, x_hat: Array, constants: Leaves) -> Array:
        norm = _norm(x)
        size = _norm(x - x_hat) / jnp.where(norm > 0, norm, 1.0)
        # The token itself tosses the coin, so that it falls alike however the tokens come. Of a token that differs
        # in the last bits, as two compiled programs may make it, 8 bits of mantissa are mostly the same.
        bits = lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
        odd = jnp.asarray(np.random.default_rng(0).integers(2**31, size=x.shape[-1], dtype=np.uint32) * 2 + 1)
        name = jnp.sum(bits * odd, axis=-1, dtype=jnp.uint32)
        key = jax.random.key(self.seed)
        coin = jax.vmap(lambda one: jax.random.bits(jax.random.fold_in(key, one)) >> 31)(name.ravel())
        minus = (coin.reshape(size.shape) == 1) & (size < 1)
        return x * (1 + jnp.where(minus, -size, size))


_INNER: Any = {"kind": Scheme, "optional": False, "allowed": (), "minimum": None, "maximum": None, "about": "wrapped"}
_BY: Any = {
    "kind": str,
    "optional": False,
    "allowed": BY,
    "minimum": None,
    "maximum": None,
    "about": "what is restored",
}
_SEED: Any = {"kind": int, "optional": False, "allowed": (), "minimum": 0, "maximum": None, "about": "of the signs"}


@dataclass(frozen=True, kw_only=True)
class OracleScheme(Scheme):
    """A scheme whose sides an oracle wraps."""

    packed: ClassVar[bool] = False

    inner: Scheme = dataclasses.field(metadata=_INNER)

    @classmethod
    def of(cls, scheme: Scheme, **fields: Any) -> Self:
        """The oracle of `scheme`, in its windows and layers."""
        common = {name: getattr(scheme, name) for name in COMMON_FIELDS}
        own = {field.name: field.default for field in dataclasses.fields(scheme)}
        # where a scheme has a default of its own, as KVarN's group, the field says how it rounds, too
        inherited: dict[str, Any] = {n: one.default for n, one in COMMON_FIELDS.items() if own[n] == one.default}
        return cls(inner=dataclasses.replace(scheme, **inherited), **common, **fields)

    def sides(self, head_dim: int) -> tuple[Side, Side]:
        k, v = (dataclasses.replace(side, quantizer=self.wrap(side.quantizer)) for side in self.inner.sides(head_dim))
        return k, v

    @abc.abstractmethod
    def wrap(self, quantizer: Quantizer) -> Quantizer:
        """The oracle over one side."""


@dataclass(frozen=True, kw_only=True)
class Restored(OracleScheme):
    """Full precision for what was rounded worst, or for everything else: whole tokens, single elements (both in the
    stored basis), or of whole tokens only the norm. The constants `k_low`, `k_high`, `v_low`, `v_high` of a layer say
    which squared errors are restored, low ≤ error < high; `EVERYTHING` and `NOTHING` are such pairs."""

    name: ClassVar[str] = "restored"
    needs_constants: ClassVar[bool] = True

    by: str = dataclasses.field(metadata=_BY)

    def wrap(self, quantizer: Quantizer) -> Quantizer:
        return _Restored(quantizer.head_dim, quantizer, self.by)


@dataclass(frozen=True, kw_only=True)
class ScaleNoise(OracleScheme):
    """Random scales in place of rounding: each token's squared error is what the scheme's would be, and is all norm."""

    name: ClassVar[str] = "scale_noise"

    seed: int = dataclasses.field(metadata=_SEED)

    def wrap(self, quantizer: Quantizer) -> Quantizer:
        return _ScaleNoise(quantizer.head_dim, quantizer, self.seed)


def check_rounds(methods: Mapping[str, Scheme]) -> None:
    """Raise ValueError for a method, by its spec, that has no error for an oracle to look at."""
    for spec, scheme in methods.items():
        if not scheme.quantizes:
            raise ValueError(f"--method={spec} rounds nothing, so it has no errors; pass a method that quantizes")


def constants(
    scheme: OracleScheme, own: Mapping[str, Any], inner: kvq.Constants | None, model: models.Model
) -> kvq.Constants | None:
    """The oracle's own arrays `[layers]` and those of the scheme that it wraps; None where there are none."""
    arrays = dict(own) | ({} if inner is None else inner.arrays)
    config = model.config
    sizes: dict[str, Any] = {"kv_heads": config.num_key_value_heads, "head_dim": config.head_dim}
    return kvq.Constants(arrays, scheme=scheme.calibrated(), model_digest=model.digest, **sizes) if arrays else None
