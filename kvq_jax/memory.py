"""What a cache holds, counted on its arrays."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kvq_jax.cache import Cache, init_cache
from kvq_jax.constants import specs
from kvq_jax.formats import view
from kvq_jax.schemes import Scheme
from kvq_jax.schemes import scheme as make_scheme


def stored(cache: Cache) -> dict[str, Array]:
    """Every array of the cache by name: `k_codes`, `k_scale`, `k_zero`, ... `[batch, kv_heads, tiles, ...]` (each
    quantizer documents its leaves), `k_sink`, `k_window`, `k_flushed`, the same for v, and `length`."""
    arrays: dict[str, Array] = {}
    for name, side in zip("kv", cache.sides, strict=True):
        arrays |= {f"{name}_{leaf}": view(value) for leaf, value in side.store.items()}
        arrays |= {f"{name}_sink": side.sink, f"{name}_window": side.window, f"{name}_flushed": side.flushed}
    return arrays | {"length": cache.length}


def nbytes(cache: Cache | Sequence[Cache]) -> dict[str, int]:
    """Bytes of every array by its name in `stored`, summed over layers. Works on shapes too (`jax.eval_shape`)."""
    total: dict[str, int] = {}
    for one in [cache] if isinstance(cache, Cache) else cache:
        for name, leaf in jax.eval_shape(stored, one).items():
            total[name] = total.get(name, 0) + leaf.size * jnp.dtype(leaf.dtype).itemsize
    return total


def bits_per_element(
    scheme: str | Scheme,
    *,
    head_dim: int,
    kv_heads: int = 1,
    tokens: int | None = None,
    dtype: DTypeLike = jnp.bfloat16,
) -> dict[str, float]:
    """Bits per stored number, counted on the arrays: `k` and `v` of the main store, `store` their mean; with `tokens`,
    `cache`: the whole cache of a row of that many tokens, with sink, window and bookkeeping. `kv_heads` matters where
    heads share what is stored (kvquant)."""
    policy = make_scheme(scheme)
    wanted = specs(policy, kv_heads, head_dim)

    def shape(capacity: int) -> Cache:
        def empty() -> Cache:
            constants = {name: jnp.zeros(spec.shape) for name, spec in wanted.items()} or None
            size = {"batch": 1, "kv_heads": kv_heads, "head_dim": head_dim, "capacity": capacity, "dtype": dtype}
            return init_cache(policy, constants=constants, **size)  # type: ignore[call-overload]

        return jax.eval_shape(empty)

    sides = policy.resolve(head_dim)
    enough = policy.sink + max(side.window.recent for side in sides) + math.lcm(*(side.window.group for side in sides))
    bits = {}
    for name, side in zip("kv", shape(enough).sides, strict=True):
        size = sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in side.store.values())
        bits[name] = 8 * size / (side.store_tokens * kv_heads * head_dim)
    bits["store"] = (bits["k"] + bits["v"]) / 2
    if tokens is not None:
        bits["cache"] = 8 * sum(nbytes(shape(tokens)).values()) / (2 * tokens * kv_heads * head_dim)
    return bits
