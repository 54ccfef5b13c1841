"""The cache of one layer: sink | quantized tiles | window, for K and for V, rows of any length.

Tokens of a row keep their order and their place: the first `sink` stay in full precision for good; the rest wait in the
window and leave it `group` at a time, oldest first. A tile that has been written is never written again (but by a
window that `rewrites`, which is there to show what that costs). All rows share the arrays but no statistic: tiles are
per row and KV head, and padding never enters them.
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import checkify
from jax.typing import DTypeLike

from kvq_jax.constants import Given, of_one_layer, per_layer
from kvq_jax.formats import rounded, saturate
from kvq_jax.quantizers.base import Leaves, Quantizer
from kvq_jax.rope import Rope
from kvq_jax.rotation import hadamard
from kvq_jax.schemes import Scheme, Side, full_precision, layer_schemes
from kvq_jax.schemes import scheme as make_scheme


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SideCache:
    """K or V. Everything is in the basis that is stored (rotated where the side rotates)."""

    side: Side = dataclasses.field(metadata={"static": True})
    sink: Array  # [batch, kv_heads, sink, head_dim]
    window: Array  # [batch, kv_heads, window.size, head_dim], oldest first, zero beyond what is filled
    store: Leaves  # each [batch, kv_heads or 1, tiles, ...]
    constants: Leaves  # what calibration found for this layer; no batch axis
    flushed: Array  # int32 [batch]: tokens in the store

    @property
    def tile_tokens(self) -> int:
        return self.side.quantizer.tile_tokens

    @property
    def kv_heads(self) -> int:
        return int(self.window.shape[-3])

    @property
    def store_tokens(self) -> int:
        """Tokens that the store has room for."""
        tiles = next(iter(self.store.values())).shape[self.window.ndim - 2]  # one axis more where layers are stacked
        return int(tiles) * self.tile_tokens

    def encode(self, tiles: Array) -> Leaves:
        return self.side.quantizer.encode(tiles, self.constants)

    def tokens(self, leaves: Leaves) -> Array:
        """Decoded `[batch, kv_heads, tokens, head_dim]`, in the stored basis."""
        return self.side.quantizer.tokens(leaves, self.constants)

    def scores(self, q: Array, leaves: Leaves) -> Array:
        return self.side.quantizer.scores(q, leaves, self.constants)

    def weighted_sum(self, p: Array, leaves: Leaves) -> Array:
        return self.side.quantizer.weighted_sum(p, leaves, self.constants)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """One layer's cache. Functional: `append`, `trim` and `select_rows` return another one."""

    scheme: Scheme = dataclasses.field(metadata={"static": True})
    capacity: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})  # of sink and window, and what is quantized
    k: SideCache
    v: SideCache
    length: Array  # int32 [batch]: tokens of each row
    rope: Rope | None = dataclasses.field(default=None, metadata={"static": True})  # of the keys, as they are given

    @property
    def sides(self) -> tuple[SideCache, SideCache]:
        return self.k, self.v


@functools.lru_cache(maxsize=256)
def _stored_shapes(
    quantizer: Quantizer, tiles: tuple[int, ...], has_constants: bool
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of what `encode` makes of `tiles`; remembered, because every layer asks and tracing is slow."""
    specs = quantizer.constants(tiles[1]) if has_constants else {}
    constants = {name: jax.ShapeDtypeStruct(spec.shape, jnp.float32) for name, spec in specs.items()}
    return dict(jax.eval_shape(quantizer.encode, jax.ShapeDtypeStruct(tiles, jnp.float32), constants))


def _init_side(
    side: Side, constants: Leaves, sink: int, batch: int, kv_heads: int, capacity: int, dtype: DTypeLike
) -> SideCache:
    quantizer, window = side.quantizer, side.window
    tokens = (window.room(capacity - sink) // quantizer.tile_tokens, quantizer.tile_tokens)
    leaves = _stored_shapes(quantizer, (batch, kv_heads, *tokens, quantizer.head_dim), bool(constants))

    def raw(tokens: int) -> Array:
        return jnp.zeros((batch, kv_heads, tokens, quantizer.head_dim), dtype)

    store = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    return SideCache(side, raw(sink), raw(window.size), store, constants, jnp.zeros(batch, jnp.int32))


@overload
def init_cache(
    scheme: str | Scheme,
    *,
    batch: int,
    kv_heads: int,
    head_dim: int,
    capacity: int,
    dtype: DTypeLike = ...,
    layers: None = None,
    constants: Given = None,
    rope: Rope | None = None,
) -> Cache: ...
@overload
def init_cache(
    scheme: str | Scheme,
    *,
    batch: int,
    kv_heads: int,
    head_dim: int,
    capacity: int,
    dtype: DTypeLike = ...,
    layers: int,
    constants: Given = None,
    rope: Rope | None = None,
) -> tuple[Cache, ...]: ...
def init_cache(
    scheme: str | Scheme,
    *,
    batch: int,
    kv_heads: int,
    head_dim: int,
    capacity: int,
    dtype: DTypeLike = jnp.bfloat16,
    layers: int | None = None,
    constants: Given = None,
    rope: Rope | None = None,
) -> Cache | tuple[Cache, ...]:
    """An empty cache for rows of up to `capacity` tokens; with `layers`, one a layer, by the scheme's layer policy.

    Sink and window are kept in `dtype`, and the values that get quantized are those of `dtype` (rotated ones
    too, unless no token ever waits in the window: then the rotation is not rounded again). Memory is allocated
    once, here. `constants` are what calibration found: `Constants`, or a mapping of arrays (`k_lut`, `v_c`, ...), with
    a leading axis of layers where `layers` is given. `rope` is what has been applied to the keys that will come; a
    scheme that stores keys before RoPE takes it back, and applies it again when they are read.

    Raises ValueError for sizes that are not positive, a dtype that is not a float of 16 or 32 bits, a head_dim that the
    scheme cannot store, and constants that are missing, of another scheme, or not of these layers and heads.
    """
    policy = make_scheme(scheme)
    for name, value in {"batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "capacity": capacity}.items():
        if not isinstance(value, numbers.Integral) or value < 1:
            raise ValueError(f"{name}={value!r} is not positive; it must be a whole number of 1 or more")
    full_precision(dtype)  # raises for a dtype that no cache has
    size = (batch, kv_heads, head_dim, capacity, jnp.dtype(dtype))
    if layers is None:
        return _init_layer(policy, *size, constants, rope)
    if layers < 1:
        raise ValueError(f"layers={layers} is not positive; use the model's number, or None for a single cache")
    of_layers = per_layer(policy, constants, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    return tuple(
        _init_layer(one, *size, own if one.quantizes else None, rope)
        for one, own in zip(layer_schemes(policy, layers, dtype), of_layers, strict=True)
    )


def _init_layer(
    scheme: Scheme,
    batch: int,
    kv_heads: int,
    head_dim: int,
    capacity: int,
    dtype: DTypeLike,
    constants: Given,
    rope: Rope | None,
) -> Cache:
    own = of_one_layer(scheme, constants, kv_heads=kv_heads, head_dim=head_dim)
    k, v = (
        _init_side(side, arrays, scheme.sink, batch, kv_heads, capacity, dtype)
        for side, arrays in zip(scheme.resolve(head_dim), own, strict=True)
    )
    rope = rope if k.side.pre_rope else None  # who does not need it does not differ by it
    return Cache(scheme, capacity, dtype, k, v, jnp.zeros(batch, jnp.int32), rope)


def per_row(fn: Callable[..., Array], *args: Array) -> Array:
    """vmap over the batch, but a single row runs unbatched: batched, a dynamic slice becomes a slower gather."""
    if args[0].shape[0] == 1:
        return fn(*(a[0] for a in args))[None]
    return jax.vmap(fn)(*args)


def take_tokens(x: Array, start: Array, size: int) -> Array:
    """`[batch, heads, tokens, ...]`, row starts `[batch]` -> `size` consecutive tokens of every row."""
    return per_row(lambda row, at: lax.dynamic_slice_in_dim(row, at, size, axis=1), x, start)


def put_tokens(x: Array, new: Array, start: Array) -> Array:
    return per_row(lambda row, part, at: lax.dynamic_update_slice_in_dim(row, part, at, axis=1), x, new, start)


def pad_tokens(x: Array, tokens: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, 0), (0, tokens)] + [(0, 0)] * (x.ndim - 3))


def tokens_where(keep: Array, x: Array) -> Array:
    """x `[batch, heads, tokens, head_dim]` with the tokens outside `keep` `[batch, tokens]` set to zero."""
    return jnp.where(keep[:, None, :, None], x, jnp.zeros((), x.dtype))


def _write_tiles(leaf: Array, new: Array, first: Array, count: Array) -> Array:
    """Write the first `count` of `new`'s tiles at tile `first` of each row; the store has room for them.

    A slice is read, merged and written back, because that happens in place; a scatter of tiles makes XLA:CPU copy the
    whole store into another layout at every append.
    """
    size = min(new.shape[2], leaf.shape[2])
    first_read = jnp.minimum(first, leaf.shape[2] - size)
    offset = jnp.arange(size) - (first - first_read)[:, None]  # of each tile of the slice, in `new`
    take = (offset >= 0) & (offset < count[:, None])
    twice = jnp.concatenate([new[:, :, :size]] * 2, axis=2)  # a slice of it is `new` moved to its place
    moved = take_tokens(twice, size - (first - first_read), size)

    def write(leaf: Array, row: Array | int) -> Array:
        at = (row, 0, first_read[row], *[0] * (leaf.ndim - 3))
        old = lax.dynamic_slice(leaf, at, (1, leaf.shape[1], size, *leaf.shape[3:]))
        keep = take[row].reshape(1, 1, size, *[1] * (leaf.ndim - 3))
        return lax.dynamic_update_slice(leaf, jnp.where(keep, moved[row][None], old), at)

    return (
        lax.fori_loop(0, leaf.shape[0], lambda row, leaf: write(leaf, row), leaf) if len(leaf) > 1 else write(leaf, 0)
    )


def _rewritten(cache: SideCache, rows: Array) -> Leaves:
    """The store with what `rows` `[batch]` have written decoded to the cache's dtype and encoded again."""
    again = cache.encode(rounded(cache.side.quantizer.decode(cache.store, cache.constants), cache.window.dtype))
    tiles = jnp.arange(cache.store_tokens // cache.tile_tokens)
    written = rows[:, None] & (tiles < cache.flushed[:, None] // cache.tile_tokens)

    def merge(new: Array, old: Array) -> Array:
        return jnp.where(written[:, None].reshape(len(rows), 1, -1, *[1] * (old.ndim - 3)), new, old)

    return {name: merge(again[name], old) for name, old in cache.store.items()}


def _append_side(cache: SideCache, x: Array, sink: int, length: Array, count: Array) -> SideCache:
    """Append the first `count` tokens of x `[batch, kv_heads, n, head_dim]` (`_as_quantized`) to each row."""
    window, quantizer, n = cache.side.window, cache.side.quantizer, x.shape[2]
    x = tokens_where(jnp.arange(n) < count[:, None], x)
    sink_tokens = cache.sink
    waiting = jnp.maximum(length - sink, 0) - cache.flushed
    if sink:
        # Tokens that find the sink full land beyond it, in the part that is cut off again.
        kept = saturate(x, sink_tokens.dtype)
        sink_tokens = put_tokens(pad_tokens(sink_tokens, n), kept, jnp.minimum(length, sink))[:, :, :sink]
        into_sink = jnp.clip(sink - length, 0, n)
        x = take_tokens(pad_tokens(x, n), into_sink, n)
        count = jnp.maximum(count - into_sink, 0)
    old = cache.window.astype(x.dtype)
    waiting_tokens = put_tokens(pad_tokens(old, n + window.size), x, waiting)  # room to slice off what is left
    waiting = waiting + count
    store, flushed = cache.store, window.flushes(waiting, length)
    most = window.most(n)  # tokens that one append can flush
    if most and cache.store_tokens:
        tile = quantizer.tile_tokens
        tiles = waiting_tokens[:, :, :most].astype(jnp.float32).reshape(*x.shape[:2], -1, tile, x.shape[3])
        if n >= window.group:
            leaves = cache.encode(tiles)
        else:  # most appends complete no group; a conditional that returns the few new tiles leaves the store in place
            shapes = _stored_shapes(quantizer, tiles.shape, bool(cache.constants))
            nothing = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
            leaves = lax.cond(jnp.any(flushed > 0), cache.encode, lambda _: nothing, tiles)
        if window.rewrites:
            store = lax.cond(jnp.any(flushed > 0), lambda: _rewritten(cache, flushed > 0), lambda: cache.store)
        store = {
            name: _write_tiles(leaf, leaves[name], cache.flushed // tile, flushed // tile)
            for name, leaf in store.items()
        }
    left = take_tokens(waiting_tokens, flushed, window.size)
    left = tokens_where(jnp.arange(window.size) < (waiting - flushed)[:, None], left).astype(cache.window.dtype)
    return dataclasses.replace(cache, sink=sink_tokens, window=left, store=store, flushed=cache.flushed + flushed)


def to_stored_basis(side: Side, x: Array, dtype: DTypeLike, rope: Rope | None, position: Array) -> Array:
    """Take RoPE back (keys at `position` `[batch or 1, tokens]`) or rotate, in float32, as the side wants it; then
    round to the cache's dtype, saturating."""
    if side.pre_rope and rope is not None:
        x = rope.apply(x, position, inverse=True)
    return saturate(rounded(hadamard(x), jnp.float32) if side.rotate else x, dtype)


def from_stored_basis(side: Side, x: Array, rope: Rope | None, position: Array) -> Array:
    """The other way of `to_stored_basis`, float32."""
    x = hadamard(x) if side.rotate else x
    return rope.apply(x, position) if side.pre_rope and rope is not None else x


def _as_quantized(cache: Cache, side: Side, x: Array) -> Array:
    """The new tokens x as they will be quantized: in the stored basis, as the window holds them. Where no token ever
    waits there is nothing to round the rotated token for: it is that of `dtype`, rotated in float32."""
    position = cache.length[:, None] + jnp.arange(x.shape[2])
    if side.window.size:
        return to_stored_basis(side, x, cache.dtype, cache.rope, position)
    return to_stored_basis(side, saturate(x, cache.dtype), jnp.float32, cache.rope, position)


def without_constants(cache: Cache) -> Cache:
    """The cache less its constants, so that every leaf has a batch axis."""
    k, v = (dataclasses.replace(side, constants={}) for side in cache.sides)
    return dataclasses.replace(cache, k=k, v=v)


def is_concrete(x: Array) -> bool:
    """Whether x has a value now, that is, outside of a trace."""
    return not isinstance(x, jax.core.Tracer)


def block_mask(valid: Array | None, batch: int, tokens: int) -> Array:
    """`valid` as bool `[batch, tokens]`, all True for None. Raises ValueError for another shape."""
    if valid is None:
        return jnp.ones((batch, tokens), bool)
    valid = jnp.asarray(valid, bool)
    if valid.shape != (batch, tokens):
        raise ValueError(f"valid has shape {valid.shape}; this block needs [{batch}, {tokens}]")
    return valid


def check_block(cache: Cache, name: str, x: Array, head_dim: int) -> None:
    """Raise ValueError unless x is `[batch, kv_heads, tokens, head_dim]` of this cache."""
    batch, kv_heads = cache.k.window.shape[:2]
    if x.ndim != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (batch, kv_heads, head_dim):
        raise ValueError(f"{name} has shape {x.shape}; this cache takes [{batch}, {kv_heads}, tokens, {head_dim}]")


def append(cache: Cache, k: Array, v: Array, *, valid: Array | None = None) -> Cache:
    """Append a block of K and V `[batch, kv_heads, tokens, head_dim]`; full groups leave the window.

    `valid` `[batch, tokens]` bool marks the tokens that exist; the others (padding, on any side) are skipped, so that
    each row holds what it would hold alone. Any split of the same tokens into appends gives the same stored bytes
    (but where a window `rewrites`).

    Safe under jit, scan, vmap and donation. Over capacity: outside of a trace a ValueError; inside, the row is left as
    it was, and `checkify.checkify(..., errors=checkify.user_checks)` reports it.
    """
    for name, x, side in (("k", k, cache.k), ("v", v, cache.v)):
        check_block(cache, name, x, side.side.quantizer.head_dim)
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"k has {k.shape[2]} tokens and v has {v.shape[2]}; a block has the same number of both")
    batch, n = k.shape[0], k.shape[2]
    count = jnp.full(batch, n, jnp.int32)
    if valid is not None:
        valid = block_mask(valid, batch, n)
        count = jnp.sum(valid, axis=1, dtype=jnp.int32)
        order = jnp.argsort(~valid, axis=1, stable=True)[:, None, :, None]  # valid tokens first, in their order
        k, v = (jnp.take_along_axis(x, order, axis=2) for x in (k, v))
    fits = cache.length + count <= cache.capacity
    if is_concrete(fits) and not bool(fits.all()):
        row = int(jnp.argmin(fits))
        raise ValueError(
            f"row {row} would hold {int(cache.length[row]) + int(count[row])} tokens; the cache's capacity is "
            f"{cache.capacity}: make it larger in init_cache, or trim"
        )
    checkify.debug_check(
        jnp.all(fits), "append exceeds the cache's capacity of {capacity} tokens", capacity=jnp.int32(cache.capacity)
    )
    return _append(cache, k, v, jnp.where(fits, count, 0))


@jax.jit
def _append(cache: Cache, k: Array, v: Array, count: Array) -> Cache:
    sides = []
    for side, x in ((cache.k, k), (cache.v, v)):
        x = _as_quantized(cache, side.side, x)
        sides.append(_append_side(side, x, cache.scheme.sink, cache.length, count))
    return dataclasses.replace(cache, k=sides[0], v=sides[1], length=cache.length + count)


def lengths(cache: Cache | Sequence[Cache]) -> Array:
    """Tokens of each row, int32 `[batch]`."""
    return cache.length if isinstance(cache, Cache) else cache[0].length
