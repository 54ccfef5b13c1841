"""QuaRot's cache against numbers made by running the original implementation; see tests/data/golden/README.md."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from scheme_cases import empty

import kvq_jax as kvq
from kvq_jax.packing import unpack
from kvq_jax.quantizers.base import Leaves, Quantizer

pytestmark = pytest.mark.compiled

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
D = 64


@functools.cache
def load(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as file:
        return dict(file)


def close(x, want, of_range: float = 1e-6) -> None:
    np.testing.assert_allclose(x, want, rtol=0, atol=of_range * np.ptp(np.asarray(want, np.float64)))


@functools.partial(jax.jit, static_argnums=0)
def run(quantizer: Quantizer, tiles: jax.Array) -> tuple[Leaves, jax.Array]:
    leaves = quantizer.encode(tiles, {})
    return leaves, quantizer.tokens(leaves, {})


def encoded(spec: str, rotated: np.ndarray, side: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(leaves, values) of rotated `[batch, heads, tokens, head_dim]`, one tile a token."""
    quantizer = kvq.scheme(spec).resolve(rotated.shape[-1])[side].quantizer
    leaves, y = run(quantizer, rotated[..., None, :].astype(np.float32))
    return {name: np.asarray(leaf).squeeze(-2) for name, leaf in leaves.items()}, np.asarray(y)


@pytest.mark.parametrize("clip", ["1.0", "0.95"])
def test_keys_rotated_rounded_and_rotated_back(clip: str) -> None:
    golden = load("quarot_k4")
    spec = f"quarot:bits=4,scales=f32,clip={clip}"
    leaves, y = encoded(spec, golden["k_rot"])
    close(y, golden[f"k_rot_q_clip{clip}"])
    if clip == "1.0":
        np.testing.assert_array_equal(leaves["zero"][..., 0], golden["zero"])
        np.testing.assert_allclose(leaves["scale"][..., 0], golden["scale"], rtol=1e-6)
    k, _ = kvq.roundtrip(spec, golden["k"], golden["k"])
    back = golden["k_back"] if clip == "1.0" else np.asarray(kvq.hadamard(golden["k_rot_q_clip0.95"]))
    # Where the two rotations round apart at a boundary, a code of one rotated channel flips, and a token changes.
    off = (np.abs(k - back) > 1e-5 * np.ptp(back)).any(-1)
    assert off.sum() <= 2


def test_values_whose_range_need_not_hold_zero() -> None:
    golden = load("quarot_v4")
    rotated, want = (np.moveaxis(golden[name].reshape(1, 256, -1, D), 1, 2) for name in ("v_rot", "y"))
    leaves, y = encoded("quarot:bits=4,scales=f32", rotated, side=1)
    close(y, want)
    assert np.array_equal(leaves["zero"], np.round(leaves["zero"]))
    _, v = kvq.roundtrip("quarot:bits=4,scales=f32", *[np.asarray(kvq.hadamard(rotated))] * 2)
    off = (np.abs(kvq.hadamard(v) - want) > 1e-5 * np.ptp(want)).any(-1)
    assert off.sum() <= 2


def test_bytes_of_the_4_bit_cache() -> None:
    golden = load("quarot_real_i4_big_f16")
    leaves, y = encoded("quarot:bits=4,zero=float", golden["k_rot"])
    codes, want = (np.asarray(unpack(x, 4)).astype(int) for x in (leaves["codes"], golden["packed"]))
    off = np.abs(codes - want)
    np.testing.assert_array_equal(leaves["zero"], -golden["zero"])
    np.testing.assert_allclose(leaves["scale"].astype(np.float32), golden["scale"].astype(np.float32), rtol=2**-10)
    assert off.max() <= 1
    step = golden["scale"].astype(np.float32)
    levels = (golden["k_rot"].astype(np.float32) + golden["zero"].astype(np.float32)) / step
    to_boundary = np.abs(levels - np.floor(levels) - 0.5)
    assert to_boundary[off > 0].max() < 0.01  # the original's quotient is a float16
    assert (off > 0).mean() < 5e-3
    assert (np.abs(y - golden["y"].astype(np.float32)) / step).max() < 1.05


@pytest.mark.parametrize("zero", ["integer", "float"])
@pytest.mark.parametrize("scales", ["f16", "f32"])
@pytest.mark.parametrize("side", [0, 1])
def test_narrow_rows_far_from_zero_and_constant_ones_come_back(zero: str, scales: str, side: int) -> None:
    # The original divides by 0 where a row of values is constant, and its zero point leaves float16 where it is narrow.
    rng = np.random.default_rng(0)
    rows = [np.full(D, 3.7), np.full(D, -0.02), np.full(D, 900.0), 5 + 1e-4 * rng.standard_normal(D), np.zeros(D)]
    rows += [-7 - 1e-2 * rng.random(D), np.eye(D)[3]]
    x = np.array(rows, np.float32)[None, None]
    _, y = encoded(f"quarot:bits=4,zero={zero},scales={scales}", x, side)
    largest, span = np.abs(x).max(-1), np.ptp(x, axis=-1)
    if side == 0 and zero == "integer":
        span = np.maximum(x.max(-1), 0) - np.minimum(x.min(-1), 0)
    np.testing.assert_array_less(np.abs(y - x).max(-1), span / 15 * 0.51 + largest * 2**-10 + 1e-5)
    if zero == "integer" or side == 1:
        np.testing.assert_array_equal(y[0, 0, 4], 0)


def test_zero_is_a_code_of_every_key_whatever_the_scale_is_rounded_to() -> None:
    x = np.random.default_rng(1).standard_normal((1, 2, 50, D)).astype(np.float32)
    x[..., ::3] = 0
    _, y = encoded("quarot:bits=3,scales=f16", x)
    np.testing.assert_array_equal(y[x == 0], 0)


@pytest.mark.parametrize(("zero", "scales"), [("integer", "f16"), ("integer", "f32"), ("float", "f16")])
def test_folded_values_equal_decoded_ones(zero: str, scales: str) -> None:
    rng = np.random.default_rng(2)
    x, p = rng.standard_normal((1, 2, 40, D)) + 1, rng.random((1, 2, 3, 40))
    quantizer = kvq.scheme(f"quarot:bits=4,zero={zero},scales={scales}").resolve(D)[1].quantizer
    leaves, y = run(quantizer, x[..., None, :].astype(np.float32))
    close(jax.jit(quantizer.weighted_sum)(p, leaves, {}), p @ np.asarray(y))


def test_every_token_is_stored_at_once_and_the_zero_point_is_an_integer() -> None:
    x = load("quarot_k4")["k"]
    cache = kvq.append(empty("quarot:", x), x, x)
    assert int(cache.k.flushed[0]) == int(cache.v.flushed[0]) == 256
    stored = kvq.stored(cache)
    for side in "kv":
        zero = np.asarray(stored[f"{side}_zero"])
        assert zero.dtype == np.float16
        np.testing.assert_array_equal(zero, np.round(zero))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("quarot:clip=0", "clip=0 leaves no range"),
        ("quarot:clip=1.5", "clip=1.5"),
        ("quarot:zero=none", "integer, flo"),
    ],
)
def test_a_wrong_field_is_an_error(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kvq.scheme(spec)


@pytest.mark.parametrize("spec", ["quarot:bits=8", "hadamard:bits=8"])
def test_an_odd_head_dim_cannot_be_rotated(spec: str) -> None:
    with pytest.raises(ValueError, match="head_dim=65 is odd"):
        kvq.init_cache(spec, batch=1, kv_heads=1, head_dim=65, capacity=8)


@pytest.mark.parametrize("zero", ["integer", "float"])
def test_clipped_rows_have_the_same_bytes_compiled_or_one_operation_after_the_other(zero: str) -> None:
    x = load("quarot_k4")["k_rot"]
    quantizer = kvq.scheme(f"quarot:bits=4,clip=0.9,scales=f32,zero={zero}").resolve(D)[0].quantizer
    compiled, _ = run(quantizer, x[..., None, :])
    with jax.disable_jit():
        for name, leaf in quantizer.encode(jax.numpy.asarray(x[..., None, :]), {}).items():
            np.testing.assert_array_equal(leaf, compiled[name])


@pytest.mark.parametrize("spec", ["quarot:bits=4", "quarot:bits=2,zero=float"])
@pytest.mark.parametrize("queries", [1, 64])  # folded, and decoded
def test_few_and_many_queries_read_what_decoding_gives(spec: str, queries: int) -> None:
    d, tokens, rng = 64, 40, np.random.default_rng(0)
    for side in kvq.scheme(spec).resolve(d):
        quantizer = side.quantizer
        leaves = quantizer.encode(rng.standard_normal((1, 2, tokens, 1, d)).astype(np.float32) + 0.3, {})
        x = np.asarray(quantizer.tokens(leaves, {}))
        q, p = rng.standard_normal((1, 2, queries, d)), rng.random((1, 2, queries, tokens))
        scores, out = (
            quantizer.scores(q.astype(np.float32), leaves, {}),
            quantizer.weighted_sum(p.astype(np.float32), leaves, {}),
        )
        np.testing.assert_allclose(scores, q @ x.swapaxes(-1, -2), atol=1e-4)
        np.testing.assert_allclose(out, p @ x, atol=1e-4)
