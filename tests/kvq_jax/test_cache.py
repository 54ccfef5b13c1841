"""The cache as an object: bytes, capacity, trim, rows, and that it passes through JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from scheme_cases import SMALL, assert_same, compiles, empty, pinned

import kvq_jax as kvq

K, V = (pinned(2, 40, head_dim=32, seed=seed) for seed in (4, 5))
SPEC = "kivi:bits=2,subgroup=8,residual=16,sink=3"


def leaves(cache: kvq.Cache) -> dict[str, tuple]:
    return {name: (x.dtype.name, x.shape) for name, x in kvq.stored(cache).items()}


# --- bytes


def test_stored_leaves_have_the_documented_names_shapes_and_dtypes() -> None:
    x = np.zeros((2, 3, 300, 64), np.float32)
    assert leaves(empty("kvarn:k_bits=4,v_bits=2,sink=4", x)) == {
        "k_codes": ("uint8", (2, 3, 2, 64, 64)),  # [batch, kv_heads, tiles, head_dim, group·bits/8]
        "k_scale": ("float16", (2, 3, 2, 64)),
        "k_zero": ("float16", (2, 3, 2, 64)),
        "k_token_scale": ("float16", (2, 3, 2, 128)),
        "k_sink": ("float32", (2, 3, 4, 64)),
        "k_window": ("float32", (2, 3, 127, 64)),
        "k_flushed": ("int32", (2,)),
        "v_codes": ("uint8", (2, 3, 2, 128, 16)),  # [batch, kv_heads, tiles, tokens, head_dim·bits/8]
        "v_scale": ("float16", (2, 3, 2, 128, 1)),
        "v_zero": ("float16", (2, 3, 2, 128, 1)),
        "v_channel_scale": ("float16", (2, 3, 2, 64)),
        "v_sink": ("float32", (2, 3, 4, 64)),
        "v_window": ("float32", (2, 3, 127, 64)),
        "v_flushed": ("int32", (2,)),
        "length": ("int32", (2,)),
    }
    kivi = leaves(empty("kivi:bits=4,scales=f32", x, dtype=jnp.bfloat16))
    assert kivi["k_codes"] == ("uint8", (2, 3, 8, 64, 16))  # 2 residuals of 4 groups of 32 tokens
    assert kivi["k_scale"] == ("float32", (2, 3, 8, 64))
    assert kivi["v_codes"] == ("uint8", (2, 3, 172, 1, 32))
    assert kivi["v_scale"] == ("float32", (2, 3, 172, 1, 2))
    assert kivi["v_window"] == ("bfloat16", (2, 3, 128, 64))
    assert leaves(empty("kvarn:scales=fp8", x))["k_scale"] == ("float8_e4m3fn", (2, 3, 2, 64))


@pytest.mark.parametrize("spec", SMALL)
def test_requirements_5_and_6_nbytes_are_the_bytes_of_the_real_leaves(spec: str) -> None:
    cache = empty(spec, K)
    total = kvq.nbytes(cache)
    assert total == {name: np.asarray(x).nbytes for name, x in kvq.stored(cache).items()}
    assert sum(total.values()) == sum(np.asarray(x).nbytes for x in jax.tree.leaves(cache))
    assert kvq.nbytes([cache, cache]) == {name: 2 * size for name, size in total.items()}
    assert kvq.nbytes(jax.eval_shape(lambda: empty(spec, K))) == total


def test_requirement_6_bits_of_the_whole_cache_count_sink_window_and_bookkeeping() -> None:
    bits = kvq.bits_per_element("kvarn:bits=2,sink=4", head_dim=128, tokens=4 + 256, dtype=jnp.bfloat16)
    store = 2 * 9728  # bytes of two tiles of K and V, from the paper's table
    raw, bookkeeping = 2 * (4 + 127) * 128 * 2, 3 * 4
    assert bits["store"] == 2.375
    assert bits["cache"] == pytest.approx(8 * (store + raw + bookkeeping) / (2 * 260 * 128))
    short = kvq.bits_per_element("kvarn:bits=2", head_dim=128, tokens=64)
    assert short["cache"] > 16  # nothing is ever quantized: the window alone is longer than the text


# --- capacity


def test_over_capacity_is_an_error_that_names_the_row_outside_of_a_trace() -> None:
    cache = kvq.append(empty(SPEC, K), K, V, valid=jnp.arange(40) < jnp.array([[30], [40]]))
    with pytest.raises(ValueError, match="row 1 would hold 41 tokens; the cache's capacity is 40"):
        kvq.append(cache, K[:, :, :1], V[:, :, :1])


def test_over_capacity_inside_jit_leaves_the_row_and_checkify_reports_it() -> None:
    cache = kvq.append(empty(SPEC, K), K, V, valid=jnp.arange(40) < jnp.array([[30], [31]]))
    one = jax.jit(kvq.append)(cache, K[:, :, :10], V[:, :, :10])
    np.testing.assert_array_equal(one.length, [40, 31])
    assert_same(kvq.select_rows(one, jnp.array([1])), kvq.select_rows(cache, jnp.array([1])))
    checked = jax.jit(checkify.checkify(kvq.append, errors=checkify.user_checks))
    error, _ = checked(cache, K[:, :, :10], V[:, :, :10])
    with pytest.raises(checkify.JaxRuntimeError, match="exceeds the cache's capacity of 40 tokens"):
        error.throw()
    error, same = checked(cache, K[:, :, :9], V[:, :, :9])
    error.throw()
    np.testing.assert_array_equal(same.length, [39, 40])


def test_padding_beyond_the_capacity_is_not_counted() -> None:
    full = kvq.append(empty(SPEC, K), K, V)
    same = kvq.append(full, K, V, valid=jnp.zeros((2, 40), bool))
    assert_same(same, full)


# --- trim and rows


def test_trim_inside_the_window_then_append_is_as_if_the_rest_had_never_come() -> None:
    spec = "kivi:bits=2,subgroup=8,residual=16,recent=9,group=8"
    valid = jnp.arange(40)[None] < jnp.array([[26], [31]])
    cache = kvq.append(empty(spec, K), K, V, valid=valid)
    for tokens in (jnp.array([25, 26]), jnp.array([26, 31])):
        expected = kvq.append(empty(spec, K), K, V, valid=jnp.arange(40) < tokens[:, None])
        trimmed = kvq.trim(cache, tokens)
        assert_same(trimmed, expected)
        assert_same(jax.jit(kvq.trim)(cache, tokens), expected)
        again = [kvq.append(c, K[:, :, :9], V[:, :, :9]) for c in (trimmed, expected)]
        assert_same(*again)


def test_trim_further_back_keeps_the_flushed_tiles_and_the_same_tokens_again_give_the_same_bytes() -> None:
    spec = "kivi:bits=2,subgroup=8,residual=16,recent=9,group=8"
    cache = kvq.append(empty(spec, K), K[:, :, :26], V[:, :, :26])
    trimmed = kvq.trim(cache, 20)  # 16 have been flushed; 4 are left in full precision, less than `recent`
    np.testing.assert_array_equal(trimmed.k.flushed, [16, 16])
    np.testing.assert_array_equal(np.asarray(kvq.read(trimmed)[0])[:, :, 16:], K[:, :, 16:20])
    assert_same(kvq.append(trimmed, K[:, :, 20:], V[:, :, 20:]), kvq.append(empty(spec, K), K, V))


def test_trim_beyond_the_row_and_to_zero() -> None:
    cache = kvq.append(empty(SPEC, K), K, V)
    assert_same(kvq.trim(cache, 99), cache)
    assert_same(kvq.trim(cache, 0), empty(SPEC, K))
    assert_same(kvq.trim(cache, 2), kvq.append(empty(SPEC, K), K[:, :, :2], V[:, :, :2]))  # inside the sink


def test_trim_between_tiles_keeps_the_tiles_before() -> None:
    cache = kvq.append(empty("kvarn:bits=2,group=16,sink=3", K), K, V)
    trimmed = kvq.trim(cache, 3 + 16)
    np.testing.assert_array_equal(trimmed.length, [19, 19])
    for before, after in zip(kvq.read(cache), kvq.read(trimmed), strict=True):
        np.testing.assert_array_equal(np.asarray(before)[:, :, :19], after)
    again = kvq.append(trimmed, K[:, :, 19:], V[:, :, 19:])
    assert_same(again, cache)


def test_trim_through_a_tile_is_an_error_and_no_change_inside_jit() -> None:
    cache = kvq.append(empty("kvarn:bits=2,group=16,sink=3", K), K, V)
    with pytest.raises(
        ValueError, match="trim to 30 tokens cuts through a quantized tile of row 0; go to 3 plus a mult"
    ):
        kvq.trim(cache, 30)
    with pytest.raises(ValueError, match="tokens=-1 is negative"):
        kvq.trim(cache, -1)
    with pytest.raises(ValueError, match="trim takes an int"):
        kvq.trim(cache, 30.5)
    with pytest.raises(ValueError, match=r"index \[5\] names rows that do not exist; this cache has 2"):
        kvq.select_rows(cache, jnp.array([5]))
    assert_same(jax.jit(kvq.trim)(cache, jnp.array([30, 40])), cache)
    checked = jax.jit(checkify.checkify(kvq.trim, errors=checkify.user_checks))
    with pytest.raises(checkify.JaxRuntimeError, match="cuts through a quantized tile"):
        checked(cache, jnp.array([30, 40]))[0].throw()


def test_select_rows_repeats_and_reorders_and_the_copies_are_independent() -> None:
    cache = kvq.append(empty(SPEC, K), K, V, valid=jnp.arange(40) < jnp.array([[20], [31]]))
    picked = kvq.select_rows(cache, jnp.array([1, 0, 1]))
    np.testing.assert_array_equal(kvq.lengths(picked), [31, 20, 31])
    new = np.concatenate([K[:, :, :9], K[:1, :, 9:18]])
    picked = kvq.append(picked, new, new)
    for row, source in enumerate((1, 0, 1)):
        alone = kvq.append(kvq.select_rows(cache, jnp.array([source])), new[row : row + 1], new[row : row + 1])
        assert_same(kvq.select_rows(picked, jnp.array([row])), alone)


# --- JAX's transformations


def test_vmap_over_layers_equals_a_loop() -> None:
    ks = np.stack([K, V, K + V])
    caches = [empty(SPEC, K) for _ in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *caches)
    one = jax.jit(jax.vmap(kvq.append))(stacked, ks, ks)
    for i in range(3):
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], one), kvq.append(caches[i], ks[i], ks[i]))


def test_donated_buffers_are_reused() -> None:
    step = jax.jit(kvq.append, donate_argnums=0)
    cache = empty(SPEC, K, 80)
    codes = cache.k.store["codes"].unsafe_buffer_pointer()
    after = step(cache, K[:, :, :1], V[:, :, :1])
    assert after.k.store["codes"].unsafe_buffer_pointer() == codes
    assert cache.k.store["codes"].is_deleted()


def test_requirement_19_one_trace_for_every_length_of_the_cache() -> None:
    traces = []

    @jax.jit
    def step(cache, k, v, q):
        traces.append(None)
        cache = kvq.append(cache, k, v)
        return cache, kvq.attend(q, cache)

    cache = empty(SPEC, K)
    for i in range(40):
        cache, _ = step(cache, K[:, :, i : i + 1], V[:, :, i : i + 1], K[:, :, i : i + 1])
    assert len(traces) == 1
    np.testing.assert_array_equal(cache.length, 40)


CALLS = {
    "append": lambda cache: kvq.append(cache, K[:, :, :2], V[:, :, :2], valid=jnp.ones((2, 2), bool)),
    "attend": lambda cache: kvq.attend(K[:, :, :2], cache, K[:, :, :2], V[:, :, :2]),
    "read": kvq.read,
    "trim": lambda cache: kvq.trim(cache, 0),
    "select_rows": lambda cache: kvq.select_rows(cache, jnp.array([1, 0])),
    "hadamard": lambda _: kvq.hadamard(K),
    "variance_normalize": lambda _: kvq.variance_normalize(K[0, 0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_requirement_19_a_second_call_with_the_same_shapes_compiles_nothing(name: str) -> None:
    cache = kvq.append(empty(SPEC, K), K[:, :, :20], V[:, :, :20])
    CALLS[name](cache)
    with compiles() as count:
        CALLS[name](cache)
    assert count == []


def test_an_empty_block_changes_nothing() -> None:
    cache = kvq.append(empty(SPEC, K), K[:, :, :20], V[:, :, :20])
    assert_same(kvq.append(cache, K[:, :, :0], V[:, :, :0]), cache)


# --- what is refused


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"batch": 0}, "batch=0 is not positive"),
        ({"capacity": 0}, "capacity=0 is not positive"),
        ({"dtype": jnp.int8}, "dtype=int8 is not a cache dtype; allowed: bfloat16, float16, float32"),
        ({"constants": {}}, "takes no constants"),
        ({"scheme": "kvarm:"}, "unknown scheme"),
    ],
)
def test_requirement_20_init_refuses_by_name(changed, says) -> None:
    arguments = {"scheme": SPEC, "batch": 1, "kv_heads": 1, "head_dim": 32, "capacity": 8} | changed
    with pytest.raises(ValueError, match=says):
        kvq.init_cache(**arguments)


def test_requirement_20_append_refuses_shapes_that_do_not_fit() -> None:
    cache = empty(SPEC, K)
    for k, v, valid, says in [
        (K[:1], V[:1], None, r"k has shape \(1, 2, 40, 32\); this cache takes \[2, 2, tokens, 32\]"),
        (K, V[:, :1], None, "v has shape"),
        (K, V[:, :, :3], None, "k has 40 tokens and v has 3"),
        (K[0], V[0], None, "k has shape"),
        (K, V, jnp.ones((2, 3), bool), r"valid has shape \(2, 3\); this block needs \[2, 40\]"),
    ]:
        with pytest.raises(ValueError, match=says):
            kvq.append(cache, k, v, valid=valid)
