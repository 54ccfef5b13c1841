"""Attention over a packed cache and the current block.

    out = softmax(scale · q·[K_sink | K̂_tiles | K_window | K_block]ᵀ + mask) · [V_sink | V̂_tiles | V_window | V_block]

One online softmax (float32) runs over all parts, so nothing is concatenated and no more than one read tile is ever
decoded. The cached parts are read in the basis they are stored in: q is rotated once, the output rotated back once.

`reference` reads the whole cache and computes the formula as it stands, in float32 but for the rounding of the query
that a scheme may ask for (`Quantizer.query`); `xla` is the tiled path and the default on a CPU; with `pallas_triton` a
kernel (`pallas_kernels`) reads the tiles, and the rest, which is short and dense, is merged on XLA.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvq_jax.cache import Cache, SideCache, append, block_mask, check_block, pad_tokens, take_tokens
from kvq_jax.implementations import kernel_for, resolve_implementation
from kvq_jax.online_softmax import Softmax
from kvq_jax.order import zero_after
from kvq_jax.protocol import Attend
from kvq_jax.quantizers.base import Leaves, dot
from kvq_jax.reading import READ_TOKENS, read
from kvq_jax.rope import Rope
from kvq_jax.rotation import hadamard

FEW_QUERIES = 32  # rows of a KV head: decoding, as against a block
X = TypeVar("X")


@dataclass(frozen=True)
class _Queries:
    """The queries' positions, for the masks. Positions count a row's own tokens, without padding."""

    position: Array  # int32 [batch, tokens]
    heads_per_kv: int
    sliding_window: int | None

    def mask(self, key_position: Array, exists: Array, causal: bool) -> Array:
        """Which keys `[batch, keys]` each query sees, broadcastable to `[batch, 1, queries, keys]`."""
        seen = exists[:, None, :]
        distance = self.position[:, :, None] - key_position[:, None, :]
        if causal:
            seen = seen & (distance >= 0)
        if self.sliding_window is not None:
            seen = seen & (distance < self.sliding_window)
        return jnp.tile(seen, (1, self.heads_per_kv, 1))[:, None] if seen.shape[1] > 1 else seen[:, None]

    def interval(self, first: int, count: Array, causal: bool) -> tuple[Array, Array]:
        """Of `count` `[batch]` keys that begin at position `first`, the ones [low, high) that each query sees, int32
        `[batch, queries]`."""
        relative = self.position - first
        high = jnp.minimum(relative + 1, count[:, None]) if causal else jnp.broadcast_to(count[:, None], relative.shape)
        low = jnp.zeros_like(high) if self.sliding_window is None else relative - self.sliding_window + 1
        high = jnp.maximum(high, 0)
        low, high = (jnp.tile(x.astype(jnp.int32), (1, self.heads_per_kv)) for x in (jnp.clip(low, 0, high), high))
        return low, high


def _loop(body: Callable[[Array, X], X], steps: Array, most: int, start: X, dynamic: bool) -> X:
    """body(i, x) for i < steps <= most. `dynamic` costs what steps costs; the other form can be differentiated."""
    if dynamic:
        return lax.fori_loop(0, steps, body, start)

    def step(x: X, i: Array) -> tuple[X, None]:
        return lax.cond(i < steps, body, lambda _, x: x, i, x), None

    return lax.scan(step, start, jnp.arange(most))[0]


def _tail(side: SideCache, start: Array, size: int, reaches_store: bool) -> Array:
    """Post-sink tokens [start, start + size) of every row, float32, from the window and, where the other side's window
    is longer than this one's, from the last tiles of the store."""
    window = side.window.astype(jnp.float32)
    if not reaches_store or not side.store_tokens:
        return pad_tokens(window, size)[:, :, :size]
    tile = side.tile_tokens
    tiles = min(-(-size // tile), side.store_tokens // tile)
    # The last `tiles` tiles of each row; for rows that have fewer, tile 0 again, which the offset below never reaches.
    index = side.flushed[:, None] // tile - tiles + jnp.arange(tiles)
    index = jnp.maximum(index, 0)

    def last(leaf: Array) -> Array:
        return jnp.take_along_axis(leaf, index.reshape(index.shape[0], 1, tiles, *[1] * (leaf.ndim - 3)), axis=2)

    recent = side.tokens({name: last(leaf) for name, leaf in side.store.items()})
    both = pad_tokens(jnp.concatenate([recent, window], axis=2), size)
    return take_tokens(both, tiles * tile - (side.flushed - start), size)


def _over_cache(
    q: Array, scale: float, queries: _Queries, cache: Cache, causal: bool, dynamic: bool, kernel: Any
) -> Softmax:
    """Everything cached. q: in K's stored basis, not scaled `[batch, kv_heads, queries, head_dim]`."""
    k, v, sink = cache.k, cache.v, cache.scheme.sink
    rope = cache.rope  # only where keys are stored before it
    batch, kv_heads, rows, _ = q.shape
    state = Softmax.start(batch, kv_heads, rows, v.side.quantizer.head_dim)
    rounded = k.side.quantizer.query(q)
    q *= scale

    # Whole read tiles that both sides have flushed are read from the store; what is left is short, and dense.
    block = math.lcm(k.tile_tokens, v.tile_tokens)
    room = min(k.store_tokens, v.store_tokens) // block * block
    same = k.side.window == v.side.window
    both = k.flushed if same else jnp.minimum(jnp.minimum(k.flushed, v.flushed) // block * block, room)

    if room and kernel is not None:
        from pallas_kernels import dispatch

        interval = queries.interval(sink, both, causal)
        windowed = queries.sliding_window is not None
        state = dispatch.over_store(kernel, rounded, *interval, cache, scale=scale, windowed=windowed)
    elif room:
        rounded *= scale
        # Few queries make small products, and a long store can afford to read some tokens that no row has yet.
        longer = 2 if rows <= FEW_QUERIES and room >= 32 * READ_TOKENS else 1
        size = min(max(longer * READ_TOKENS // block, 1) * block, room)

        def tiles(side: SideCache, first: Array) -> Leaves:
            count, at = size // side.tile_tokens, first // side.tile_tokens
            return {name: lax.dynamic_slice_in_dim(leaf, at, count, axis=2) for name, leaf in side.store.items()}

        def see_tile(i: Array, state: Softmax) -> Softmax:
            first = jnp.minimum(i * size, room - size)  # the last tile reaches back instead of beyond the end
            token = first + jnp.arange(size)
            exists = (token >= i * size) & (token < both[:, None])
            mask = queries.mask(jnp.broadcast_to(sink + token, exists.shape), exists, causal)
            leaves = tiles(k, first)
            if rope is None:
                scores = k.scores(rounded, leaves)
            else:
                scores = dot(rounded, jnp.swapaxes(rope.apply(k.tokens(leaves), sink + token[None]), -1, -2))
            # V's tile is unpacked once K's is done with, into the same memory.
            return state.see(scores, mask, lambda p: v.weighted_sum(p, tiles(v, first + zero_after(p))))

        steps = (jnp.max(both) + size - 1) // size
        state = _loop(see_tile, steps, -(-room // size), state, dynamic)

    size = max(k.side.window.size, v.side.window.size) + (0 if same else block - 1)
    if sink + size == 0:
        return state
    dense_k, dense_v = (
        jnp.concatenate([side.sink.astype(jnp.float32), _tail(side, both, size, not same)], axis=2) for side in (k, v)
    )
    token = jnp.concatenate(
        [jnp.broadcast_to(jnp.arange(sink), (batch, sink)), sink + both[:, None] + jnp.arange(size)], axis=1
    )
    if rope is not None:
        dense_k = rope.apply(dense_k, token)
    mask = queries.mask(token, token < cache.length[:, None], causal)
    return state.see(dot(q, jnp.swapaxes(dense_k, -1, -2)), mask, lambda p: dot(p, dense_v))


def _over_block(q: Array, queries: _Queries, k: Array, v: Array, exists: Array, dynamic: bool) -> Softmax:
    """Causal attention of a block over itself, in tiles of keys. q scaled, `[batch, kv_heads, queries, head_dim]`."""
    batch, kv_heads, rows, _ = q.shape
    state, n = Softmax.start(batch, kv_heads, rows, v.shape[3]), k.shape[2]
    size = min(n, READ_TOKENS)
    v = jnp.where(exists[:, None, :, None], v, jnp.zeros((), v.dtype))  # 0 · NaN in padding would be NaN
    k, v = (pad_tokens(x, -n % size) for x in (k, v))
    position, exists = (jnp.pad(x, ((0, 0), (0, -n % size))) for x in (queries.position, exists))

    def see(i: Array, state: Softmax) -> Softmax:
        part_k, part_v = (lax.dynamic_slice_in_dim(x, i * size, size, axis=2) for x in (k, v))
        at, here = (lax.dynamic_slice_in_dim(x, i * size, size, axis=1) for x in (position, exists))
        scores = dot(q, jnp.swapaxes(part_k, -1, -2))
        return state.see(scores, queries.mask(at, here, causal=True), lambda p: dot(p, part_v))

    if n <= size:
        return see(jnp.int32(0), state)
    return _loop(see, jnp.int32(-(-n // size)), -(-n // size), state, dynamic)


def _to_rows(q: Array, kv_heads: int) -> Array:
    """`[batch, q_heads, tokens, D]` -> `[batch, kv_heads, (q_heads/kv_heads)·tokens, D]`, float32."""
    batch, _, _, head_dim = q.shape
    return q.astype(jnp.float32).reshape(batch, kv_heads, -1, head_dim)


@dataclass(frozen=True)
class _Call:
    """The static part of a call."""

    scale: float
    sliding_window: int | None
    heads_per_kv: int
    kernel: Any = None  # `pallas_kernels.dispatch.Kernel`


def _tiled(
    call: _Call,
    dynamic: bool,
    q: Array,
    sinks: Array | None,
    cache: Cache | None,
    block: tuple[Array, Array] | None,
    position: Array,
    valid: Array,
) -> Array:
    kv_heads = q.shape[1] // call.heads_per_kv
    queries = _Queries(position, call.heads_per_kv, call.sliding_window)
    rows = _to_rows(q, kv_heads)
    state = None
    if cache is not None:
        rotated = hadamard(rows) if cache.k.side.rotate else rows
        kernel = call.kernel if dynamic else None  # kernels have no gradient
        state = _over_cache(rotated, call.scale, queries, cache, block is None, dynamic, kernel)
        if cache.v.side.rotate:
            state = dataclasses.replace(state, weighted=hadamard(state.weighted))
    if block is not None:
        own = _over_block(rows * call.scale, queries, *block, valid, dynamic)
        state = own if state is None else state.merge(own)
    assert state is not None
    if sinks is not None:
        # An extra key whose value is zero: one more term in the total.
        logit = jnp.repeat(sinks.astype(jnp.float32), q.shape[2]).reshape(1, kv_heads, -1)
        logit = jnp.broadcast_to(logit, state.largest.shape)
        state = state.merge(Softmax(logit, jnp.ones_like(logit), jnp.zeros_like(state.weighted)))
    return state.output().reshape(*q.shape[:3], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled_differentiable(call: _Call, q: Array, sinks: Array | None, *rest: Any) -> Array:
    return _tiled(call, True, q, sinks, *rest)


def _forward(call: _Call, q: Array, sinks: Array | None, *rest: Any) -> tuple[Array, tuple[Any, ...]]:
    return _tiled(call, True, q, sinks, *rest), (q, sinks, *rest)


def _backward(call: _Call, saved: tuple[Any, ...], cotangent: Array) -> tuple[Any, ...]:
    q, sinks, cache, block, *rest = saved
    # A loop whose length is data cannot be transposed: differentiate the form that runs over the whole capacity.
    _, vjp = jax.vjp(lambda q, sinks, block: _tiled(call, False, q, sinks, cache, block, *rest), q, sinks, block)
    dq, dsinks, dblock = vjp(cotangent)
    return dq, dsinks, None, dblock, *[None] * len(rest)


_tiled_differentiable.defvjp(_forward, _backward)
_tiled_compiled = jax.jit(_tiled_differentiable, static_argnums=0)


def _query_of_store(cache: Cache, q: Array) -> Array:
    """q as the store's keys meet it, in the original basis: q itself where nothing rounds it."""
    side = cache.k.side
    basis = hadamard if side.rotate else lambda x: x.astype(jnp.float32)
    rotated = basis(q)
    rounded = side.quantizer.query(rotated)
    return q if rounded is rotated else basis(rounded)


def _reference(
    call: _Call,
    q: Array,
    sinks: Array | None,
    cache: Cache | None,
    block: tuple[Array, Array] | None,
    position: Array,
    valid: Array,
) -> Array:
    """The formula, dense: every key and value in the original basis, one softmax."""
    batch = q.shape[0]
    keys: list[Array] = []
    values: list[Array] = []
    at: list[Array] = []
    exists: list[Array] = []
    if cache is not None:
        k, v = read(cache)
        keys, values = [k], [v]
        at = [jnp.broadcast_to(jnp.arange(k.shape[2]), (batch, k.shape[2]))]
        exists = [at[0] < cache.length[:, None]]
    if block is not None:
        keys, values = ([*known, x.astype(jnp.float32)] for known, x in zip((keys, values), block, strict=True))
        at, exists = [*at, position], [*exists, valid]
    k, v = jnp.concatenate(keys, 2), jnp.concatenate(values, 2)
    k, v = (jnp.repeat(x, call.heads_per_kv, axis=1) for x in (k, v))
    distance = position[:, :, None] - jnp.concatenate(at, 1)[:, None, :]
    seen = jnp.concatenate(exists, 1)[:, None, :] & (distance >= 0)
    if call.sliding_window is not None:
        seen &= distance < call.sliding_window
    scores = dot(q, jnp.swapaxes(k, -1, -2))
    rounded = q if cache is None else _query_of_store(cache, q)
    if cache is not None and rounded is not q:
        after_sink = jnp.arange(k.shape[2]) - cache.scheme.sink
        stored = (after_sink >= 0) & (after_sink < cache.k.flushed[:, None])
        scores = jnp.where(stored[:, None, None], dot(rounded, jnp.swapaxes(k, -1, -2)), scores)
    scores = jnp.where(seen[:, None], scores * call.scale, -jnp.inf)
    extra = jnp.full((batch, q.shape[1], q.shape[2], 1), -jnp.inf)
    if sinks is not None:
        extra = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None, None], extra.shape)
    scores = jnp.concatenate([scores, extra], -1)
    anything = jnp.ones_like(extra, bool) if sinks is not None else seen.any(-1)[:, None, :, None]
    p = jnp.where(anything, jax.nn.softmax(jnp.where(anything, scores, 0.0), axis=-1), 0.0)
    return dot(p[..., :-1], v)


def attend(
    q: Array,
    cache: Cache | None,
    k: Array | None = None,
    v: Array | None = None,
    *,
    scale: float | None = None,
    valid: Array | None = None,
    sinks: Array | None = None,
    sliding_window: int | None = None,
    implementation: str | None = None,
) -> Array:
    """Attention of q `[batch, q_heads, tokens, head_dim]` over the cache and the current block.

    With k and v `[batch, kv_heads, tokens, head_dim]`: the block is read in full precision, causally, after everything
    cached (a scheme with `reads_own=quantized` reads it as the cache would hold it). Without: the queries are those of
    the cache's newest tokens (they were appended first), each sees up to itself. Query head h reads KV head
    h // (q_heads/kv_heads).

    Args:
      scale: of the scores, a Python number; default 1/sqrt(head_dim).
      valid: bool `[batch, tokens]`; the block's tokens that exist. Output at the others means nothing (it is finite).
      sinks: `[q_heads]`, an extra logit a head whose value is zero.
      sliding_window: a query sees itself and the sliding_window − 1 tokens before it.
      implementation: "xla" (tiled), "reference" (dense), "pallas_triton" (a GPU kernel reads the tiles), or None, which
        picks: see `resolve_implementation`, which also says what it will be.

    Returns q's shape and dtype; softmax and sums in float32. Reverse-mode differentiable in q, k, v and sinks; cached
    leaves are constants. Raises ValueError for shapes that do not fit, NotImplementedError for an implementation that
    does not cover the case.
    """
    implementation = resolve_implementation(implementation)
    if q.ndim != 4 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q has shape {q.shape}, {q.dtype}; it must be [batch, q_heads, tokens, head_dim], a float")
    batch, q_heads, n, head_dim = q.shape
    if sliding_window is not None and (not isinstance(sliding_window, int) or sliding_window < 1):
        raise ValueError(f"sliding_window={sliding_window!r} is not a number of tokens; use 1 or more, or None")
    if (k is None) != (v is None) or (k is None and cache is None):
        raise ValueError("give a cache, or k and v of a block, or all three")
    if cache is not None:
        check_block(cache, "q", q[:, : cache.k.window.shape[1]], cache.k.side.quantizer.head_dim)
    block = None
    if k is not None and v is not None:
        if cache is not None:
            check_block(cache, "k", k, cache.k.side.quantizer.head_dim)
            check_block(cache, "v", v, cache.v.side.quantizer.head_dim)
        if k.ndim != 4 or k.shape[:3] != v.shape[:3] or (k.shape[0], k.shape[2], k.shape[3]) != (batch, n, head_dim):
            raise ValueError(f"q {q.shape}, k {k.shape} and v {v.shape} are not one block")
        block = (k, v)
        if cache is not None and cache.scheme.reads_own == "quantized":
            cache, block = append(cache, k, v, valid=valid), None
    kv_heads = k.shape[1] if k is not None else cache.k.window.shape[1]  # type: ignore[union-attr]
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads do not divide into groups over {kv_heads} KV heads")
    exists = block_mask(valid, batch, n)
    if n == 0:
        return q
    if sinks is not None and sinks.shape != (q_heads,):
        raise ValueError(f"sinks has shape {sinks.shape}; it must be [{q_heads}]")
    scale = 1 / math.sqrt(head_dim) if scale is None else float(scale)
    call = _Call(scale, sliding_window, q_heads // kv_heads, kernel_for(implementation, cache, q))
    rank = jnp.cumsum(exists, axis=1, dtype=jnp.int32)
    first = jnp.zeros(batch, jnp.int32) if cache is None else cache.length - (0 if block is not None else rank[:, -1])
    rest = (q, sinks, cache, block, first[:, None] + rank - 1, exists)
    out = _reference(call, *rest) if implementation == "reference" else _tiled_compiled(call, *rest)
    return out.astype(q.dtype)


@dataclass(frozen=True)
class CausalAttention:
    """The `Attend` of a plain forward: the block is the whole sequence, there is no cache."""

    valid: Array | None = None  # bool [batch, tokens]
    implementation: str | None = None

    def __call__(self, q: Array, k: Array, v: Array, *, rope: Rope | None = None, **options: Any) -> Array:
        return attend(q, None, k, v, valid=self.valid, implementation=self.implementation, **options)

    def scan(self, layer: Callable[[X, Any, Attend], X], x: X, layers: Any) -> X:
        return lax.scan(lambda x, one: (layer(x, one, self), None), x, layers)[0]
