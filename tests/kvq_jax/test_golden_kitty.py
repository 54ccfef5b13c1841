"""Kitty against numbers made by running the original implementation; see tests/data/golden/README.md."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scheme_cases import empty, pinned

import kvq_jax as kvq
from kvq_jax.packing import unpack

pytestmark = pytest.mark.compiled

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
ALL_QUANTIZED = "kitty:boost=0.125,group=128,sink=0,recent=0"


@functools.cache
def load(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as file:
        return dict(file)


def stored(spec: str, x: np.ndarray) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(leaf) for name, leaf in kvq.stored(kvq.append(empty(spec, x, dtype=x.dtype), x, x)).items()
    }


def promoted(leaves: dict[str, np.ndarray]) -> np.ndarray:
    return leaves["k_index"] < leaves["k_high"].shape[-2]


def codes(low: np.ndarray, high: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Planes as they are stored -> codes [..., head_dim, tokens], the long way round."""
    low, high = (np.array(unpack(jnp.asarray(x), 2)) for x in (low, high))
    out = low.copy()
    for at in np.ndindex(index.shape):
        if index[at] < high.shape[-2]:
            out[at] |= high[(*at[:-1], index[at])] << 2
    return out


@pytest.mark.parametrize(("name", "rank"), [("kitty_k_r0125_g128", "magnitude"), ("kitty_k_r0125_var", "variance")])
def test_promoted_channels_and_values_of_the_simulation(name: str, rank: str) -> None:
    golden = load(name)
    x, spec = golden["x"], f"{ALL_QUANTIZED},rank={rank},scales=f32"
    np.testing.assert_array_equal(promoted(stored(spec, x)), golden["mask"])
    k, _ = kvq.roundtrip(spec, x, x)
    np.testing.assert_allclose(k, golden["y"], rtol=0, atol=1e-6 * np.ptp(golden["y"]))


def test_promoted_channels_of_the_float16_simulation_and_values_within_one_code() -> None:
    golden = load("kitty_k_r0125_g128_f16")
    x = golden["x"]
    leaves = stored(ALL_QUANTIZED, x)
    np.testing.assert_array_equal(promoted(leaves), golden["mask"])
    k, _ = kvq.roundtrip(ALL_QUANTIZED, x, x)
    step = np.repeat(leaves["k_scale"].astype(np.float32), 128, axis=-2).reshape(1, 2, 2, 128, 64)
    off = np.abs(np.asarray(k) - golden["y"].astype(np.float32)).reshape(step.shape) / step
    assert off.max() < 1.02
    assert (off > 0.5).mean() < 2e-3


def test_prefill_of_300_and_84_decoded_tokens() -> None:
    inputs, golden = load("kitty_stream_inputs"), load("kitty_stream_p300_d84_big")
    k, v = inputs["k"], inputs["v"]
    spec = "kitty:boost=0.125,group=128,sink=32,scales=f32"
    cache = kvq.append(empty(spec, k), k[:, :, :300], v[:, :, :300])
    assert (int(cache.k.flushed[0]), int(cache.v.flushed[0])) == (256, 140)  # K [32, 288), V [32, 172)
    for t in range(300, 384):
        cache = kvq.append(cache, k[:, :, t : t + 1], v[:, :, t : t + 1])
    assert (int(cache.k.flushed[0]), int(cache.v.flushed[0])) == (256, 224)  # K [32, 288), V [32, 256)
    for y, want, x, end in zip(kvq.read(cache), (golden["y_k"], golden["y_v"]), (k, v), (288, 256), strict=True):
        np.testing.assert_allclose(y, want, rtol=0, atol=1e-6 * np.ptp(want))
        np.testing.assert_array_equal(np.asarray(y)[:, :, :32], x[:, :, :32])
        np.testing.assert_array_equal(np.asarray(y)[:, :, end:], x[:, :, end:])


def test_when_pages_and_values_leave_the_window_one_token_at_a_time() -> None:
    x = pinned(1, 290, head_dim=16, kv_heads=1)
    cache = kvq.append(empty("kitty:", x), x[:, :, :40], x[:, :, :40])
    flushed = {}
    for t in range(40, 290):
        cache = kvq.append(cache, x[:, :, t : t + 1], x[:, :, t : t + 1])
        flushed[t + 1] = (int(cache.k.flushed[0]), int(cache.v.flushed[0]))
    assert flushed[160] == (0, 0)
    assert flushed[161] == (128, 1)
    assert flushed[288] == (128, 128)
    assert flushed[289] == (256, 129)


@pytest.mark.parametrize("name", ["kitty_pack_k_d64_db8", "kitty_pack_k_d128_db16_i32fix"])
def test_bytes_of_the_systems_page(name: str) -> None:
    # All but a few codes: the packer works in float16 and rounds halves up.
    golden = load(name)
    x, slots = golden["x"], int(golden["d_boost"])
    heads, dim = x.shape[1], x.shape[3]
    leaves = stored(f"{ALL_QUANTIZED.replace('0.125', str(slots / dim))},scales=f16", x)
    pages = golden["cache"].reshape(len(golden["cache"]), heads, -1).swapaxes(0, 1)[None]  # [1, heads, pages, bytes]
    low, high, index = np.split(pages, np.cumsum([dim * 32, slots * 32]), axis=-1)
    low, high = low.reshape(*low.shape[:3], dim, 32), high.reshape(*high.shape[:3], slots, 32)
    np.testing.assert_array_equal(promoted(leaves), index < slots)
    np.testing.assert_array_equal(leaves["k_index"], index)
    meta = golden["meta"].swapaxes(0, 1)[None].astype(np.float32)  # scale, min
    np.testing.assert_array_equal(leaves["k_zero"], meta[..., 1])
    np.testing.assert_allclose(leaves["k_scale"].astype(np.float32), meta[..., 0], rtol=2**-10)
    off = np.abs(codes(leaves["k_low"], leaves["k_high"], leaves["k_index"]).astype(int) - codes(low, high, index))
    assert off.max() <= 1
    assert (off > 0).mean() < 1e-4
    assert (leaves["k_low"] != low).mean() < 5e-4
    assert (leaves["k_high"] != high).mean() < 1e-3


def test_bytes_of_the_systems_values() -> None:
    golden = load("kitty_pack_v")
    x = golden["x"]
    leaves = stored(ALL_QUANTIZED, x)
    packed = golden["cache"].reshape(3, 2, 128, 32).swapaxes(0, 1).reshape(1, 2, 384, 1, 32)
    meta = golden["meta"].swapaxes(0, 1).reshape(1, 2, 384, 1, 1, 2).astype(np.float32)
    np.testing.assert_array_equal(leaves["v_zero"], meta[..., 1])
    np.testing.assert_allclose(leaves["v_scale"].astype(np.float32), meta[..., 0], rtol=2**-10)
    off = np.abs(np.asarray(unpack(leaves["v_codes"], 2)).astype(int) - np.asarray(unpack(jnp.asarray(packed), 2)))
    assert off.max() <= 1
    assert (off > 0).mean() < 1e-4


def test_a_plane_of_more_than_eight_promoted_channels_holds_each_of_them() -> None:
    # The original's slot index wraps in a byte at the ninth; here the nearest code of every element is stored.
    x = pinned(1, 16, head_dim=256, kv_heads=1)
    spec = "kitty:boost=0.5,group=16,sink=0,recent=0,scales=f32"
    leaves = stored(spec, x)
    is_promoted = promoted(leaves)[0, 0, 0]
    assert is_promoted.sum() == 128
    k, _ = kvq.roundtrip(spec, x, x)
    error, span = np.abs(k - x)[0, 0].max(0), np.ptp(x[0, 0], axis=0)
    np.testing.assert_array_less(error, span / np.where(is_promoted, 15, 3) * 0.501)
    order = np.argsort(leaves["k_index"][0, 0, 0], kind="stable")[:128]
    means = np.abs(x[0, 0]).mean(0)
    assert (np.diff(means[order]) <= 0).all()
    assert means[order[-1]] >= means[~is_promoted].max()


def test_channels_that_tie_are_promoted_from_the_lowest_and_never_too_many() -> None:
    leaves = stored("kitty:boost=0.25,group=8,sink=0,recent=0", np.ones((1, 1, 8, 16), np.float32))
    np.testing.assert_array_equal(leaves["k_index"][0, 0, 0], [0, 1, 2, 3] + [4] * 12)


@pytest.mark.parametrize(
    ("spec", "head_dim", "says"),
    [
        ("kitty:boost=0.01", 64, "boost=0.01 gives 0 of head_dim=64 channels"),
        ("kitty:boost=0.999", 256, None),
        ("kitty:boost=0.999", 512, "boost=0.999 gives 511 of head_dim=512 channels 4 bits; an index of one byte"),
        ("kitty:boost=1.0", 64, "boost=1 gives 128 of head_dim=128"),
        ("kitty:group=30", 64, "30 codes of 2 bits"),
    ],
)
def test_what_cannot_be_stored_is_an_error(spec: str, head_dim: int, says: str | None) -> None:
    if says is None:
        kvq.scheme(spec).resolve(head_dim)
        return
    with pytest.raises(ValueError, match=says):
        kvq.scheme(spec).resolve(head_dim)


def test_group_is_the_page_of_keys_alone_and_recent_is_of_both() -> None:
    def windows(spec: str) -> list[tuple[int, int]]:
        return [(side.window.recent, side.window.group) for side in kvq.scheme(spec).resolve(64)]

    assert windows("kitty:") == [(1, 128), (128, 1)]
    assert windows("kitty:group=64,recent=16") == [(16, 64), (16, 1)]


@pytest.mark.parametrize("rank", ["magnitude", "variance"])
def test_ranks_that_hang_on_rounding_are_the_same_in_any_batch_and_program(rank: str) -> None:
    # Every channel has the same values in another order: equal means, but for the order of the additions.
    rng = np.random.default_rng(3)
    values = 1 + rng.standard_normal(96).astype(np.float32)
    tiles = np.stack([rng.permutation(values) for _ in range(2 * 5 * 64)], axis=-1).reshape(96, 2, 5, 64)
    tiles = jnp.asarray(np.moveaxis(tiles, 0, 2)[None])  # [1, 2, 5, 96, 64]
    quantizer = kvq.scheme(f"kitty:group=96,rank={rank}").resolve(64)[0].quantizer
    encode = jax.jit(lambda x: quantizer.encode(x, {})["index"])
    want = encode(tiles)
    for i in range(5):
        one = tiles[:, :, i : i + 1]
        np.testing.assert_array_equal(encode(one), want[:, :, i : i + 1])
        np.testing.assert_array_equal(encode(one[:, :1]), want[:, :1, i : i + 1])
    other_layout = jax.jit(lambda x: quantizer.encode(jnp.swapaxes(x, -1, -2), {})["index"])
    np.testing.assert_array_equal(other_layout(jnp.swapaxes(tiles, -1, -2).copy()), want)
    with jax.disable_jit():  # one operation after the other, so that none are fused
        np.testing.assert_array_equal(quantizer.encode(tiles, {})["index"], want)
    assert len({bytes(row) for row in np.asarray(want).reshape(10, 64)}) == 10


@pytest.mark.parametrize("queries", [3, 64])
def test_folded_scores_equal_decoded_ones(queries: int) -> None:
    x = pinned(1, 64, head_dim=64)
    q = pinned(1, queries, head_dim=64, seed=1)
    quantizer = kvq.scheme("kitty:boost=0.3,group=16").resolve(64)[0].quantizer

    @jax.jit
    def both(x: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
        leaves = quantizer.encode(x.reshape(1, 2, 4, 16, 64), {})
        return quantizer.scores(q, leaves, {}), q @ jnp.swapaxes(quantizer.tokens(leaves, {}), -1, -2)

    folded, dense = map(np.asarray, both(x, q))
    np.testing.assert_allclose(folded, dense, rtol=0, atol=1e-5 * np.abs(dense).max())
