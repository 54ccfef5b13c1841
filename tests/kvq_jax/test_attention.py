"""The tiled path against the dense reference, and both against float64 attention over what the cache reads back."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scheme_cases import SMALL, empty, pinned

import kvq_jax as kvq

D, N, CAPACITY = 32, 5, 77  # head_dim, block, capacity: not a multiple of any group
K, V = (pinned(2, CAPACITY + N, head_dim=D, seed=seed) for seed in (6, 7))
Q = pinned(2, N, head_dim=D, kv_heads=6, seed=8) * 3  # 3 queries a KV head
BLOCK_K, BLOCK_V = K[:, :, CAPACITY:], V[:, :, CAPACITY:]
KIVI = "kivi:bits=2,subgroup=8,residual=16"  # K and V windows differ
KVARN = "kvarn:k_bits=4,v_bits=1,normalize=equivariant,group=16,sink=3,recent=5"


@functools.cache
def compiled(implementation: str, sliding_window: int | None = None, scale: float | None = None):
    return jax.jit(
        functools.partial(kvq.attend, implementation=implementation, sliding_window=sliding_window, scale=scale)
    )


def filled(spec: str, lengths: tuple[int, int], dtype=np.float32) -> kvq.Cache:
    cache = empty(spec, K, CAPACITY, dtype)
    valid = jnp.arange(CAPACITY) < jnp.array(lengths)[:, None]
    return kvq.append(cache, K[:, :, :CAPACITY], V[:, :, :CAPACITY], valid=valid)


def oracle(q, cache, k=None, v=None, valid=None, sinks=None, sliding_window=None, scale=None) -> np.ndarray:
    """Float64 attention, a row, a head and a query at a time."""
    read = [np.asarray(x, np.float64) for x in kvq.read(cache)] if cache is not None else None
    out = np.zeros(q.shape)
    for b, h in np.ndindex(q.shape[:2]):
        g = h // (q.shape[1] // (cache.k.kv_heads if cache is not None else k.shape[1]))
        length = int(cache.length[b]) if cache is not None else 0
        exists = np.ones(q.shape[2], bool) if valid is None else np.asarray(valid[b])
        keys, values = (x[b, g, :length] for x in read) if read else (np.zeros((0, D)), np.zeros((0, D)))
        start = length
        if k is not None:
            keys, values = (np.concatenate([x, y[b, g][exists]]) for x, y in ((keys, k), (values, v)))
        else:
            start -= exists.sum()
        for t in np.flatnonzero(exists):
            at = start + exists[:t].sum()
            first = 0 if sliding_window is None else max(0, at - sliding_window + 1)
            scores = keys[first : at + 1] @ q[b, h, t].astype(np.float64) * (D**-0.5 if scale is None else scale)
            extra = [] if sinks is None else [float(sinks[h])]
            p = np.exp(np.r_[scores, extra] - max([*scores, *extra]))
            out[b, h, t] = (p / p.sum())[: len(scores)] @ values[first : at + 1]
    return out


def close(out, expected: np.ndarray) -> None:
    np.testing.assert_allclose(out, expected, rtol=0, atol=5e-6 * max(1, np.abs(expected).max()))


LENGTHS = [(0, 2), (17, 32), (48, 77)]  # empty, inside the sink, at boundaries, full, ragged


@pytest.mark.parametrize("spec", SMALL)
def test_tiled_equals_reference_and_float64_over_what_is_read(spec: str) -> None:
    for lengths in LENGTHS:
        arguments = Q, filled(spec, lengths), BLOCK_K, BLOCK_V
        expected = oracle(*arguments)
        for implementation in ("xla", "reference"):
            close(compiled(implementation)(*arguments), expected)


@pytest.mark.parametrize("capacity", [3, 10, 17])
def test_a_cache_too_short_for_a_group_on_one_or_both_sides(capacity: int) -> None:
    cache = kvq.append(empty(KIVI, K, capacity), K[:, :, :capacity], V[:, :, :capacity])
    close(kvq.attend(Q, cache, BLOCK_K, BLOCK_V), oracle(Q, cache, BLOCK_K, BLOCK_V))


@pytest.mark.parametrize("spec", [KIVI, KVARN])
def test_appended_first_the_queries_see_themselves_quantized_and_causally(spec: str) -> None:
    valid = jnp.array([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]], bool)
    cache = kvq.append(filled(spec, (13, 72)), BLOCK_K, BLOCK_V, valid=valid)
    expected = oracle(Q, cache, valid=valid)
    for implementation in ("xla", "reference"):
        out = np.asarray(compiled(implementation)(Q, cache, valid=valid))
        close(np.where(valid[:, None, :, None], out, 0), expected)
        assert np.isfinite(out).all()


OPTIONS = {
    "a window inside the block": {"sliding_window": 3},
    "everything": {
        "sliding_window": 40,  # begins in the tiles
        "sinks": np.linspace(-2, 3, 6).astype(np.float32),
        "scale": 0.5,
        "valid": jnp.array([[0, 1, 1, 0, 1], [1, 1, 1, 0, 0]], bool),
    },
}


@pytest.mark.parametrize("spec", [KIVI, KVARN])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_requirement_11_windows_sinks_scales_and_masks(spec: str, options: dict) -> None:
    cache = filled(spec, (21, 77))
    static = {name: options.get(name) for name in ("sliding_window", "scale")}
    arrays = {name: x for name, x in options.items() if name not in static}
    expected = oracle(Q, cache, BLOCK_K, BLOCK_V, **options)
    valid = np.asarray(options.get("valid", np.ones((2, N), bool)))[:, None, :, None]
    for implementation in ("xla", "reference"):
        out = np.asarray(compiled(implementation, **static)(Q, cache, BLOCK_K, BLOCK_V, **arrays))
        close(np.where(valid, out, 0), expected)
        assert np.isfinite(out).all()


@pytest.mark.parametrize("spec", [KIVI, KVARN])
@pytest.mark.parametrize("lengths", [(1290, 0), (520, 1201)], ids=str)
def test_several_read_tiles_the_last_of_which_reaches_back(spec: str, lengths: tuple[int, int]) -> None:
    k, v = (pinned(2, 1290, head_dim=D, seed=seed) for seed in (9, 10))
    valid = jnp.arange(1290) < jnp.array(lengths)[:, None]
    cache = kvq.append(empty(spec, k, 1290), k, v, valid=valid)
    assert int(cache.k.flushed.max()) > 2 * 512
    arguments = Q, cache, BLOCK_K, BLOCK_V
    close(compiled("xla")(*arguments), oracle(*arguments))


def test_a_block_longer_than_a_read_tile_without_and_with_a_cache() -> None:
    q, k, v = (pinned(1, 600, head_dim=D, kv_heads=heads, seed=heads) for heads in (2, 1, 1))
    expected = oracle(q, None, k, v)
    close(kvq.attend(q, None, k, v), expected)
    close(kvq.CausalAttention()(q, k, v), expected)
    close(kvq.attend(q, empty("kvarn:group=16", k), k, v), expected)


WEIGHT = pinned(2, N, head_dim=D, kv_heads=6, seed=11)


@functools.cache
def gradient(implementation: str):
    def loss(q, k, v, sinks, cache, valid):
        out = kvq.attend(q, cache, k, v, sinks=sinks, valid=valid, implementation=implementation)
        return jnp.sum(out * WEIGHT * valid[:, None, :, None])

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))


def test_gradients_are_the_references_and_finite_differences() -> None:
    cache, sinks = filled(KIVI, (21, 77)), np.linspace(-1, 1, 6).astype(np.float32)
    arguments = Q, BLOCK_K, BLOCK_V, sinks, cache, jnp.ones((2, N), bool)
    gradients = {i: gradient(i)(*arguments) for i in ("xla", "reference")}
    for tiled, dense in zip(*gradients.values(), strict=True):
        assert np.abs(dense).max() > 1e-3
        close(tiled, np.asarray(dense))
    direction = pinned(2, N, head_dim=D, kv_heads=6, seed=12)
    step = 1e-2
    there, back = (
        (oracle(Q + sign * step * direction, cache, BLOCK_K, BLOCK_V, sinks=sinks) * WEIGHT).sum() for sign in (1, -1)
    )
    assert float(jnp.vdot(gradients["xla"][0], direction)) == pytest.approx((there - back) / (2 * step), rel=2e-3)


def test_a_query_that_sees_nothing_gives_zero_and_finite_gradients() -> None:
    cache, nobody, sinks = filled(KIVI, (0, 20)), jnp.zeros((2, N), bool), np.full(6, -np.inf, np.float32)
    out = kvq.attend(Q, cache, BLOCK_K, BLOCK_V, valid=nobody)
    np.testing.assert_array_equal(out[0], 0)
    assert np.isfinite(out).all()
    for part in gradient("xla")(Q, BLOCK_K, BLOCK_V, np.zeros_like(sinks), cache, nobody):
        np.testing.assert_array_equal(part, 0)


def test_padding_that_is_not_a_number_does_not_reach_the_tokens_that_exist() -> None:
    cache, valid = filled(KIVI, (3, 20)), jnp.array([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]], bool)
    outs = []
    for padding in (0.0, np.nan):
        q, k, v = (np.where(valid[:, None, :, None], x, np.float32(padding)) for x in (Q, BLOCK_K, BLOCK_V))
        out = kvq.attend(q, cache, k, v, valid=valid)
        outs.append(np.where(valid[:, None, :, None], out, 0))
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("queries", [1, 3, 4, 6, 8, 16])
def test_requirement_8_any_number_of_queries_a_kv_head(queries: int) -> None:
    cache, q = filled("kvarn:bits=2,group=16", (21, 77)), pinned(2, 1, head_dim=D, kv_heads=2 * queries)
    arguments = q, cache, BLOCK_K[:, :, :1], BLOCK_V[:, :, :1]
    close(kvq.attend(*arguments), oracle(*arguments))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_requirement_18_short_dtypes_are_summed_in_float32(dtype) -> None:
    cache = filled(KIVI, (21, 77), dtype)
    q, k, v = (jnp.asarray(x, dtype) for x in (Q, BLOCK_K, BLOCK_V))
    out = kvq.attend(q, cache, k, v)
    assert out.dtype == dtype
    q, k, v = (np.asarray(x, np.float32) for x in (q, k, v))
    expected = oracle(q, cache, k, v)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=float(jnp.finfo(dtype).eps) * 4)


@pytest.mark.parametrize("spec", ["kivi:bits=2", "kvarn:bits=2", "bf16:"])
def test_requirement_21_temporaries_do_not_grow_with_the_capacity(spec: str) -> None:
    def temporaries(capacity: int) -> int:
        def shape(*of: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(of, jnp.float32)

        cache = jax.eval_shape(
            lambda: kvq.init_cache(spec, batch=1, kv_heads=2, head_dim=64, capacity=capacity, dtype=jnp.float32)
        )
        block = shape(1, 2, 1, 64)
        run = jax.jit(kvq.attend).lower(shape(1, 8, 1, 64), cache, block, block).compile()
        return run.memory_analysis().temp_size_in_bytes

    short, long = temporaries(32768), temporaries(262144)  # where read tiles are as large as they get
    assert 0 < long <= short + 4096
    assert long < 2 * 16384 * 64 * 4  # less than one side in float32


def test_the_reference_runs_on_a_cache_that_a_compiled_function_closes_over() -> None:
    cache = filled(KIVI, (13, 72))
    for implementation in ("xla", "reference"):
        run = functools.partial(kvq.attend, cache=cache, implementation=implementation)
        out = jax.jit(lambda q, k, v, run=run: run(q, k=k, v=v))(Q, BLOCK_K, BLOCK_V)
        close(out, oracle(Q, cache, BLOCK_K, BLOCK_V))


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("pallas_triton", NotImplementedError, "it needs a GPU, and the platform here is 'cpu'; use 'xla' or None"),
        ("flash", ValueError, "implementation='flash' is unknown; allowed: None, reference, xla, pallas_triton"),
    ],
)
def test_requirement_20_an_implementation_that_cannot_run_is_an_error_and_no_fallback(name, error, says) -> None:
    with pytest.raises(error, match=says):
        kvq.attend(Q, filled(KIVI, (0, 0)), BLOCK_K, BLOCK_V, implementation=name)
    assert kvq.resolve_implementation(None) == "xla"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"q": Q[0]}, "q has shape"),
        ({"q": Q[:, :5]}, "5 query heads do not divide into groups over 2 KV heads"),
        ({"q": Q[:1]}, r"q has shape \(1, 2, 5, 32\); this cache takes \[2, 2, tokens, 32\]"),
        ({"k": BLOCK_K[:, :1]}, "k has shape"),
        ({"k": BLOCK_K[:, :, :3]}, "are not one block"),
        ({"v": None}, "give a cache, or k and v"),
        ({"cache": None, "k": None, "v": None}, "give a cache, or k and v"),
        ({"valid": jnp.ones((2, 3), bool)}, r"valid has shape \(2, 3\); this block needs \[2, 5\]"),
        ({"sinks": np.zeros(2)}, r"sinks has shape \(2,\); it must be \[6\]"),
    ],
)
def test_requirement_20_shapes_that_do_not_fit_are_named(changed, says) -> None:
    arguments = {"q": Q, "cache": filled(KIVI, (0, 0)), "k": BLOCK_K, "v": BLOCK_V} | changed
    with pytest.raises(ValueError, match=says):
        kvq.attend(**arguments)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_what_is_not_a_number_is_not_hidden_by_any_path(implementation: str) -> None:
    k = jnp.asarray(BLOCK_K).at[0, 0, 0, 0].set(jnp.nan)
    out = kvq.attend(Q, None, k, BLOCK_V, implementation=implementation)
    assert jnp.isnan(out[0, 0]).all()
    assert jnp.isfinite(out[1]).all(), "another row saw it"


def test_a_scheme_that_reads_its_own_block_quantized_reads_what_it_wrote() -> None:
    cache = filled("kivi:bits=2,subgroup=4,residual=4,reads_own=quantized", (0, 0))
    written = kvq.append(cache, BLOCK_K, BLOCK_V)
    out = kvq.attend(Q, cache, BLOCK_K, BLOCK_V)
    np.testing.assert_array_equal(out, kvq.attend(Q, written))
    raw = kvq.attend(Q, dataclasses.replace(cache, scheme=kvq.scheme(cache.scheme, reads_own="raw")), BLOCK_K, BLOCK_V)
    assert float(jnp.abs(out - raw).max()) > 1e-3
