"""A text through a cache, block by block, as `kvq.pseudo_decode` reads it: what went in, and what it holds."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import Partial
from jax.typing import DTypeLike

import kvq_jax as kvq
from kvq_jax.cache import Cache, to_stored_basis
from kvq_jax.layers import CachedAttention, Run, append_run, constants_of_runs, plan_layers

KV = tuple[Array, Array]


class Plan(NamedTuple):
    """The layers of a model under a scheme."""

    runs: tuple[Run, ...]
    constants: tuple[Mapping[str, Array] | None, ...]
    dtype: DTypeLike

    def empty(self, batch: int, capacity: int) -> tuple[Cache, ...]:
        """An empty cache for each run of layers."""
        caches = []
        for run, own in zip(self.runs, self.constants, strict=True):
            assert run.scheme is not None  # plan_layers gives every layer one
            caches.append(run.empty(run.scheme, batch, capacity, self.dtype, own))
        return tuple(caches)


def plan(
    forward: Partial, scheme: kvq.Scheme, constants: kvq.Constants | None, batch: int, block: int, dtype: DTypeLike
) -> Plan:
    """The model's layers under `scheme`, for blocks `[batch, block]`. Raises ValueError as `kvq.pseudo_decode` does."""
    runs = plan_layers(forward, scheme, batch, block, dtype)
    return Plan(runs, constants_of_runs(scheme, constants, runs), dtype)


@functools.partial(jax.jit, static_argnames=("runs", "implementation"))
def _block(
    forward: Partial, tokens: Array, first: Array, caches: tuple[Cache, ...], runs: tuple[Run, ...], implementation: str
) -> tuple[tuple[Cache, ...], list[KV]]:
    attention = CachedAttention(runs, caches, None, implementation)
    forward(tokens, jnp.broadcast_to(first + jnp.arange(tokens.shape[1]), tokens.shape), attention)
    return append(runs, caches, attention.new), attention.new


def append(runs: Sequence[Run], caches: Sequence[Cache], new: Sequence[KV]) -> tuple[Cache, ...]:
    """Append a block's K and V, one pair a run, to every run's cache."""
    return tuple(append_run(run, cache, *kv, None) for run, cache, kv in zip(runs, caches, new, strict=True))


def replay(
    forward: Partial,
    tokens: np.ndarray,
    of: Plan,
    *,
    block: int,
    implementation: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[KV], tuple[Cache, ...]]:
    """Read tokens `[batch, N]` through the plan's caches, in the accumulated regime.

    Returns K and V as the layers computed them, one pair a run, `[(layers,) batch, kv_heads, N, head_dim]`, and the
    caches that hold them.
    """
    batch, total = tokens.shape
    caches, parts = of.empty(batch, total), []
    for start in range(0, total, block):
        part = jnp.asarray(tokens[:, start : start + block])
        caches, new = _block(forward, part, jnp.int32(start), caches, of.runs, implementation)
        parts.append(jax.block_until_ready(new))
        progress(min(start + block, total), total)
    whole = [
        tuple(jnp.concatenate(side, axis=-2) for side in zip(*one, strict=True)) for one in zip(*parts, strict=True)
    ]
    return [(k, v) for k, v in whole], caches


def regrouped(kv: Sequence[KV], runs: Sequence[Run]) -> list[KV]:
    """K and V of the same layers, in these runs: protected layers split those of the unquantized model."""
    layers = [tuple(side[i] for side in one) if one[0].ndim == 5 else one for one in kv for i in range(_count(one))]
    found, first = [], 0
    for run in runs:
        own = layers[first : first + run.layers]
        first += run.layers
        k, v = own[0] if run.stacked is None else (jnp.stack(side) for side in zip(*own, strict=True))
        found.append((k, v))
    return found


def _count(one: KV) -> int:
    return one[0].shape[0] if one[0].ndim == 5 else 1


def filled(of: Plan, kv: Sequence[KV], capacity: int | None = None) -> tuple[Cache, ...]:
    """The plan's caches, holding K and V that another run computed: the static regime. capacity: default, no more."""
    kv = regrouped(kv, of.runs)
    batch, _, total, _ = kv[0][0].shape[-4:]
    empty = of.empty(batch, capacity or total)
    return tuple(_filled(run, cache, *one) for run, cache, one in zip(of.runs, empty, kv, strict=True))


@functools.partial(jax.jit, static_argnames="run")
def _filled(run: Run, cache: Cache, k: Array, v: Array) -> Cache:
    return append_run(run, cache, k, v, None)


def quantized(kv: Sequence[KV], caches: Sequence[Cache]) -> list[dict[str, KV]]:
    """What the main store of each layer that quantizes holds, beside what it should: (x, x̂) by side, `k` and `v`.

    kv: the exact K and V, as `replay` gives them. Both are float32 `[batch, kv_heads, stored tokens, head_dim]` in the
    basis that is stored; all rows hold equally many tokens.
    """
    found = []
    for one, cache in zip(kv, caches, strict=True):
        if not cache.scheme.quantizes:
            continue
        stacked = one[0].ndim == 5
        pairs = lax.map(_pairs, (one, cache)) if stacked else _pairs((one, cache))
        flushed = [int(np.ravel(side.flushed)[0]) for side in cache.sides]
        for layer in range(one[0].shape[0] if stacked else 1):
            own = jax.tree.map(lambda x, i=layer: x[i], pairs) if stacked else pairs
            found.append(
                {
                    side: (x[:, :, :count], y[:, :, :count])
                    for side, (x, y), count in zip("kv", own, flushed, strict=True)
                }
            )
    return found


@jax.jit
def _pairs(one: tuple[KV, Cache]) -> tuple[KV, KV]:
    kv, cache = one
    sink, found = cache.scheme.sink, []
    for x, side in zip(kv, cache.sides, strict=True):
        x = x[:, :, sink : sink + side.store_tokens].astype(jnp.float32)
        position = sink + jnp.arange(x.shape[2])[None]
        found.append((to_stored_basis(side.side, x, jnp.float32, cache.rope, position), side.tokens(side.store)))
    return found[0], found[1]


def relative_errors(kv: Sequence[KV], caches: Sequence[Cache]) -> dict[str, np.ndarray]:
    """Σ‖x − x̂‖² / Σ‖x‖² over what is stored of each row `[batch]`, mean over layers, for keys and values."""
    of_layers = quantized(kv, caches)

    def relative(x: Array, x_hat: Array) -> Array:
        return jnp.sum(jnp.square(x - x_hat), (1, 2, 3)) / jnp.sum(jnp.square(x), (1, 2, 3))

    names = {"k": "key_relative_mse", "v": "value_relative_mse"}
    return {name: np.mean([relative(*one[side]) for one in of_layers], 0) for side, name in names.items()}
