"""Taking tokens or rows back out of a cache."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import checkify

from kvq_jax.cache import Cache, SideCache, is_concrete, tokens_where, without_constants


def _flushed_after_trim(side: SideCache, tokens: Array, sink: int) -> tuple[Array, Array]:
    """(flushed tokens after the trim, whether the trim cuts through no tile)"""
    kept = jnp.minimum(side.flushed, jnp.maximum(tokens - sink, 0))
    return kept, kept % side.tile_tokens == 0


def trim(cache: Cache, tokens: int | Array) -> Cache:
    """Forget all but the first `tokens` tokens (int, or `[batch]`) of each row; longer than the row changes nothing.

    Free inside the window, which is what rejected speculative tokens need (keep `recent` at least the draft's length).
    Further back it works where it falls between tiles: a quantized tile is immutable, so the newest tokens then are
    quantized ones. Elsewhere a ValueError outside of a trace; inside, the row is left as it was and `checkify` reports.
    """
    wanted = jnp.asarray(tokens)
    if not jnp.issubdtype(wanted.dtype, jnp.integer) or wanted.shape not in ((), cache.length.shape):
        raise ValueError(f"tokens is {wanted.dtype} {wanted.shape}; trim takes an int, or ints [{len(cache.length)}]")
    if is_concrete(wanted) and int(wanted.min()) < 0:
        raise ValueError(f"tokens={int(wanted.min())} is negative; 0 empties a row")
    target = jnp.minimum(wanted.astype(jnp.int32), cache.length)
    trimmed = [_flushed_after_trim(side, target, cache.scheme.sink) for side in cache.sides]
    whole = trimmed[0][1] & trimmed[1][1] & (target >= 0)
    if is_concrete(whole) and not bool(whole.all()):
        row = int(jnp.argmin(whole))
        tile = math.lcm(cache.k.tile_tokens, cache.v.tile_tokens)
        raise ValueError(
            f"trim to {int(target[row])} tokens cuts through a quantized tile of row {row}; go to {cache.scheme.sink} "
            f"plus a multiple of {tile}, or keep more recent tokens in full precision "
            f"(recent={cache.k.side.window.recent})"
        )
    checkify.debug_check(jnp.all(whole), "trim cuts through a quantized tile")
    target = jnp.where(whole, target, cache.length)
    sides = []
    for side, (flushed, _) in zip(cache.sides, trimmed, strict=True):
        flushed = jnp.where(whole, flushed, side.flushed)
        in_sink = jnp.arange(side.sink.shape[2]) < target[:, None]
        waiting = jnp.where(flushed < side.flushed, 0, target - cache.scheme.sink - flushed)
        in_window = jnp.arange(side.window.shape[2]) < waiting[:, None]
        at_tile = jnp.arange(side.store_tokens // side.tile_tokens) < (flushed // side.tile_tokens)[:, None]

        def keep_tiles(leaf: Array, at_tile: Array = at_tile) -> Array:
            mask = at_tile[:, None, :].reshape(at_tile.shape[0], 1, -1, *[1] * (leaf.ndim - 3))
            return jnp.where(mask, leaf, jnp.zeros((), leaf.dtype))

        sides.append(
            dataclasses.replace(
                side,
                sink=tokens_where(in_sink, side.sink),
                window=tokens_where(in_window, side.window),
                store={name: keep_tiles(leaf) for name, leaf in side.store.items()},
                flushed=flushed,
            )
        )
    return dataclasses.replace(cache, k=sides[0], v=sides[1], length=target)


def select_rows(cache: Cache, index: Array) -> Cache:
    """The cache with rows `index` `[new_batch]` of the batch, for beams and for batches that change.

    Raises ValueError for rows that do not exist (inside a trace they are clamped, as in all of JAX).
    """
    index = jnp.atleast_1d(jnp.asarray(index))
    count = len(cache.length)
    if is_concrete(index) and not bool(((index >= 0) & (index < count)).all()):
        raise ValueError(f"index {index.tolist()} names rows that do not exist; this cache has {count}")
    rows = jax.tree.map(lambda leaf: leaf[index], without_constants(cache))
    k, v = (dataclasses.replace(new, constants=old.constants) for new, old in zip(rows.sides, cache.sides, strict=True))
    return dataclasses.replace(rows, k=k, v=v)
