"""When tokens leave the full-precision window, and that the stored bytes depend on the tokens alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scheme_cases import APPEND_ONLY, SMALL, assert_same, empty, pinned

import kvq_jax as kvq
from kvq_jax.cache import to_stored_basis

TOKENS, CAPACITY, BLOCK = 72, 77, 24
K, V = (pinned(1, TOKENS, head_dim=32, seed=seed) for seed in (2, 3))


@functools.cache
def one_shot(spec: str) -> kvq.Cache:
    return kvq.append(empty(spec, K, CAPACITY), K, V)


@functools.cache
def step_by_step(spec: str) -> kvq.Cache:
    """The caches after 1, 2, ... tokens, stacked in front: one token at a time in a compiled scan."""

    @jax.jit
    def run(cache: kvq.Cache) -> kvq.Cache:
        def step(cache, kv):
            cache = kvq.append(cache, *(x[:, :, None] for x in kv))
            return cache, cache

        return jax.lax.scan(step, cache, (jnp.moveaxis(K, 2, 0), jnp.moveaxis(V, 2, 0)))[1]

    return jax.tree.map(np.asarray, run(empty(spec, K, CAPACITY)))


def at(states: kvq.Cache, tokens: int) -> kvq.Cache:
    return jax.tree.map(lambda leaf: leaf[tokens - 1], states)


@functools.cache
def raw(spec: str) -> tuple[np.ndarray, np.ndarray]:
    """K and V of every token as they are kept in sink and window."""
    sides = one_shot(spec).sides
    return tuple(
        np.asarray(to_stored_basis(s.side, x, jnp.float32, None, jnp.zeros(0)))
        for s, x in zip(sides, (K, V), strict=True)
    )


def expected_flushed(post_sink: int, recent: int, group: int) -> int:
    return max(0, (post_sink - recent) // group * group) if post_sink >= recent + group else 0


def append_in_blocks(spec: str, sizes: list[int]) -> kvq.Cache:
    """Appends of `sizes` tokens, each padded to one shape with huge numbers that must not enter anything."""
    cache, start = empty(spec, K, CAPACITY), 0
    for size in sizes:
        k, v = (np.full((1, 2, BLOCK, 32), 1e20, np.float32) for _ in "kv")
        k[:, :, :size], v[:, :, :size] = (x[:, :, start : start + size] for x in (K, V))
        cache = kvq.append(cache, k, v, valid=jnp.arange(BLOCK)[None] < size)
        start += size
    assert start == TOKENS
    return cache


@pytest.mark.compiled
@pytest.mark.parametrize("spec", APPEND_ONLY)
def test_requirement_3_one_token_at_a_time_in_a_compiled_scan_equals_one_shot(spec: str) -> None:
    assert_same(at(step_by_step(spec), TOKENS), one_shot(spec))


@pytest.mark.parametrize("spec", APPEND_ONLY)
@pytest.mark.parametrize(
    "sizes", [[24, 24, 24], [1, 0, 23, 17, 7, 0, 24], [16, 16, 15, 2, 15, 8], [5] * 14 + [2]], ids=str
)
def test_requirement_3_any_split_with_padding_equals_one_shot(spec: str, sizes: list[int]) -> None:
    assert_same(append_in_blocks(spec, sizes), one_shot(spec))


@pytest.mark.parametrize("spec", APPEND_ONLY)
def test_requirement_3_groups_are_flushed_by_absolute_position(spec: str) -> None:
    states = step_by_step(spec)
    np.testing.assert_array_equal(states.length[:, 0], np.arange(1, TOKENS + 1))
    for side in states.sides:
        window = side.side.window
        expected = [
            expected_flushed(max(0, n - states.scheme.sink), window.recent, window.group) for n in range(1, TOKENS + 1)
        ]
        assert expected[-1] > 0
        np.testing.assert_array_equal(side.flushed[:, 0], expected)


@pytest.mark.parametrize("spec", SMALL)
def test_requirement_1_sink_and_the_newest_tokens_are_exact_at_all_times(spec: str) -> None:
    states, sink = step_by_step(spec), kvq.scheme(spec).sink
    for side, x in zip(states.sides, raw(spec), strict=True):
        recent = side.side.window.recent
        for n in range(1, TOKENS + 1):
            flushed = int(side.flushed[n - 1, 0])
            waiting = max(0, n - sink) - flushed
            assert waiting >= min(recent, max(0, n - sink))
            window, kept = side.window[n - 1], min(n, sink)
            np.testing.assert_array_equal(window[:, :, :waiting], x[:, :, sink + flushed : sink + flushed + waiting])
            assert not window[:, :, waiting:].any()
            np.testing.assert_array_equal(side.sink[n - 1][:, :, :kept], x[:, :, :kept])
            assert not side.sink[n - 1][:, :, kept:].any()


@pytest.mark.parametrize("spec", APPEND_ONLY)
def test_requirement_2_a_written_tile_never_changes(spec: str) -> None:
    for side in step_by_step(spec).sides:
        for name, leaf in side.store.items():
            for n in range(1, TOKENS + 1):
                tiles = int(side.flushed[n - 1, 0]) // side.side.quantizer.tile_tokens
                np.testing.assert_array_equal(leaf[n - 1][:, :, :tiles], leaf[-1][:, :, :tiles], err_msg=name)
                assert not leaf[n - 1][:, :, tiles:].astype(np.float32).any()


@pytest.mark.parametrize("spec", SMALL)
def test_tiles_hold_exactly_the_encoding_of_their_own_tokens(spec: str) -> None:
    cache = one_shot(spec)
    for side, x in zip(cache.sides, raw(spec), strict=True):
        quantizer, sink, flushed = side.side.quantizer, cache.scheme.sink, int(side.flushed[0])
        tiles = x[:, :, sink : sink + flushed].reshape(1, 2, -1, quantizer.tile_tokens, 32)
        for name, leaf in jax.jit(quantizer.encode)(tiles, side.constants).items():
            np.testing.assert_array_equal(side.store[name][:, :, : tiles.shape[2]], leaf, err_msg=name)


R = 16  # KIVI's residual length


@pytest.mark.parametrize("n", [R - 1, R, R + 1, 2 * R, 3 * R - 1, 4 * R])
def test_requirement_1_kivi_keys_wait_in_a_residual_and_values_in_a_sliding_window(n: int) -> None:
    cache = at(step_by_step("kivi:bits=2,subgroup=8,residual=16"), n)
    assert int(cache.k.flushed[0]) == n // R * R  # at n = kR every key is quantized, the newest too
    assert int(cache.v.flushed[0]) == max(0, n - R)  # the newest R values never are
    k, v = (np.asarray(x) for x in kvq.read(cache))
    for x, y, flushed in ((K, k, n // R * R), (V, v, max(0, n - R))):
        np.testing.assert_array_equal(y[:, :, flushed:], x[:, :, flushed:n])
        if flushed:
            assert (np.abs(y - x[:, :, :n])[:, :, :flushed].max(-1) > 1e-3).mean() > 0.9


@pytest.mark.parametrize(
    ("spec", "capacity"),
    [
        ("fp32:sink=9,recent=2,group=4", 5),  # shorter than the sink
        ("kivi:subgroup=8,residual=16,scales=f32", 10),  # shorter than a group: nothing can ever be stored
        ("fp32:recent=40,group=4", 30),  # shorter than the window
        ("kivi:subgroup=8,residual=16,scales=f32,sink=3", 36),  # two groups of keys and a part
    ],
)
def test_a_cache_can_be_filled_to_the_last_token_of_any_capacity(spec: str, capacity: int) -> None:
    cache = kvq.append(empty(spec, K, capacity), K[:, :, :capacity], V[:, :, :capacity])
    assert int(kvq.lengths(cache)[0]) == capacity
    for x, y, side in zip((K, V), kvq.read(cache), cache.sides, strict=True):
        flushed, sink = int(side.flushed[0]), cache.scheme.sink
        assert flushed <= side.store_tokens
        exact = np.r_[: min(sink, capacity), min(sink, capacity) + flushed : capacity]
        np.testing.assert_array_equal(np.asarray(y)[:, :, exact], x[:, :, exact])
