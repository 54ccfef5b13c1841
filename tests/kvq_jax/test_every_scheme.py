"""What every scheme must do under jit: an odd head_dim, groups of queries, one trace, the reference's gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scheme_cases import SMALL, compiles, empty, pinned

import kvq_jax as kvq

D, TOKENS = 96, 44  # three times a power of two: the rotation is by blocks
K, V = (pinned(1, TOKENS, head_dim=D, seed=seed) for seed in (30, 31))
Q = pinned(1, 1, head_dim=D, kv_heads=6, seed=32) * 2  # 3 queries a KV head
TARGET = pinned(1, 1, head_dim=D, kv_heads=6, seed=33)


@pytest.mark.parametrize("spec", SMALL)
def test_one_trace_and_the_references_gradient_at_head_dim_96(spec: str) -> None:
    append = jax.jit(kvq.append)

    @functools.partial(jax.jit, static_argnums=1)
    def loss(q, implementation, cache, k, v):
        out = kvq.attend(q, cache, k, v, implementation=implementation)
        return jnp.sum(jnp.square(out - TARGET))

    gradient = {name: jax.grad(functools.partial(loss), argnums=0) for name in ("xla", "reference")}
    cache = append(empty(spec, K), K[:, :, :21], V[:, :, :21])
    gradient["xla"](Q, "xla", cache, K[:, :, :1], V[:, :, :1])
    with compiles() as count:
        cache = append(cache, K[:, :, 21:42], V[:, :, 21:42])
        tiled = gradient["xla"](Q, "xla", cache, K[:, :, 42:43], V[:, :, 42:43])
    assert count == []
    assert int(cache.length[0]) == 42
    dense = gradient["reference"](Q, "reference", cache, K[:, :, 42:43], V[:, :, 42:43])
    scale = float(np.abs(dense).max())
    assert scale > 1e-4
    np.testing.assert_allclose(tiled, dense, rtol=0, atol=1e-4 * scale)
    k_hat, v_hat = kvq.read(cache)
    if kvq.scheme(spec).quantizes:
        assert float(jnp.abs(k_hat - K[:, :, :42]).max()) > 1e-4
        assert float(jnp.abs(v_hat - V[:, :, :42]).max()) > 1e-4


ALONE = [spec for spec in SMALL if any(s.quantizer.tile_tokens == 1 for s in kvq.scheme(spec).resolve(32))]


@pytest.mark.compiled
@pytest.mark.parametrize("spec", ALONE)
def test_a_token_that_is_all_there_is_gets_the_bytes_it_gets_among_thousands(spec: str) -> None:
    # One row, one head, one token: every scale is then a single number, by whose reciprocal a compiler may multiply.
    d, tokens = 32, 8192
    x = jnp.asarray(pinned(1, tokens, head_dim=d, kv_heads=1, seed=40))
    cache = empty(spec, x[:, :, :1])
    for side in cache.sides:
        if side.tile_tokens > 1:
            continue
        own = jax.jit(lambda x, side=side: jax.lax.map(lambda t: side.encode(t[None, None, None, None]), x))(x[0, 0])
        together = jax.jit(side.encode)(x[:, :, :, None])
        for name, leaf in together.items():
            alone = np.moveaxis(np.asarray(own[name])[:, 0, :, 0], 0, 1)[None]
            differs = (alone.view(np.uint8) != np.asarray(leaf).view(np.uint8)).reshape(tokens, -1).any(1)
            assert not differs.any(), f"{name}: {differs.sum()} of {tokens} tokens"
