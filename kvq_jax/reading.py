"""Reading a cache back, dequantized: for looking at, and for checking. Attention reads the packed cache."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvq_jax.cache import (
    Cache,
    SideCache,
    append,
    from_stored_basis,
    init_cache,
    is_concrete,
    pad_tokens,
    put_tokens,
    to_stored_basis,
    tokens_where,
)
from kvq_jax.constants import Given
from kvq_jax.formats import widen
from kvq_jax.measures import VectorErrors
from kvq_jax.rope import Rope
from kvq_jax.schemes import Scheme

READ_TOKENS = 512  # tokens of a read tile: large enough to keep a matrix product busy, small enough for a CPU's cache


def _read_side(side: SideCache, length: Array, capacity: int, rope: Rope | None) -> Array:
    sink, window = side.sink.astype(jnp.float32), side.window.astype(jnp.float32)
    stored = side.tokens(side.store)
    # sink | stored, then the window over what follows the flushed tokens, then zeros beyond the row's length
    x = pad_tokens(jnp.concatenate([sink, stored], axis=2), capacity + window.shape[2])
    x = put_tokens(x, window, sink.shape[2] + side.flushed)[:, :, :capacity]
    x = tokens_where(jnp.arange(capacity) < length[:, None], x)
    return from_stored_basis(side.side, x, rope, jnp.arange(capacity)[None])


@jax.jit
def _read(cache: Cache) -> tuple[Array, Array]:
    k, v = (_read_side(side, cache.length, cache.capacity, cache.rope) for side in cache.sides)
    return k, v


def read(cache: Cache) -> tuple[Array, Array]:
    """Dequantized K and V in the original basis, float32 `[batch, kv_heads, tokens, head_dim]`.

    Outside of a trace `tokens` is the longest row's length; inside it is the capacity. Beyond a row's length: zeros.
    For looking at; attention reads the packed cache.
    """
    k, v = _read(cache)
    longest = cache.length.max()
    tokens = int(longest) if is_concrete(longest) else cache.capacity
    return k[:, :, :tokens], v[:, :, :tokens]


def roundtrip(
    scheme: str | Scheme,
    k: Array,
    v: Array,
    *,
    constants: Given = None,
    rope: Rope | None = None,
) -> tuple[Array, Array]:
    """What attention would see of k and v `[batch, kv_heads, tokens, head_dim]` after all have been appended.

    The window and what is quantized are in k's dtype. Tokens that the scheme keeps in full precision come back as
    they are (up to the rotation's rounding). `constants` and `rope` as in `init_cache`; without `rope` a scheme that
    stores keys before RoPE takes k to be just that.
    """
    batch, kv_heads, tokens, head_dim = k.shape
    cache = init_cache(
        scheme,
        batch=batch,
        kv_heads=kv_heads,
        head_dim=head_dim,
        capacity=tokens,
        dtype=k.dtype,
        constants=constants,
        rope=rope,
    )
    return read(append(cache, k, v))


def cache_errors(caches: tuple[Cache, Cache], rows: slice) -> tuple[VectorErrors, VectorErrors]:
    """The main store against the reference's keys and values, tile by tile.

    caches: the reference's and the quantized one. rows: of the quantized one, those of one regime.
    """
    reference, cache = caches

    def side_errors(name: str) -> VectorErrors:
        exact, side = getattr(reference, name), getattr(cache, name)
        tile = side.tile_tokens
        size = max(READ_TOKENS // tile, 1) * tile
        flushed = side.flushed[rows]
        steps = -(-side.store_tokens // size)

        def step(total: VectorErrors, i: Array) -> tuple[VectorErrors, None]:
            first = jnp.minimum(i * size, max(side.store_tokens - size, 0))
            token = first + jnp.arange(min(size, side.store_tokens))
            leaves = {
                leaf: lax.dynamic_slice_in_dim(x[rows], first // tile, len(token) // tile, axis=2)
                for leaf, x in side.store.items()
            }
            x_hat = side.tokens(leaves)
            x = lax.dynamic_slice_in_dim(exact.store["values"], cache.scheme.sink + first, len(token), axis=2)
            x = widen(x[:, :, :, 0])
            x = to_stored_basis(side.side, x, jnp.float32, cache.rope, cache.scheme.sink + token[None])
            exists = (token >= i * size) & (token < flushed[:, None])
            now = VectorErrors.of(x, x_hat, jnp.broadcast_to(exists[:, None], x.shape[:3]))
            return jax.tree.map(jnp.add, total, now), None

        start = VectorErrors(*[jnp.float32(0)] * 5)
        return lax.scan(step, start, jnp.arange(steps))[0] if side.store_tokens else start

    return side_errors("k"), side_errors("v")
