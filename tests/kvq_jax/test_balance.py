"""KVarN's variance normalization against a float64 transcription, and what the notes on the paper measured."""

import jax
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.balance import imbalance

normalize = jax.jit(kvq.variance_normalize, static_argnames=("iters", "normalize"))
encode = jax.jit(lambda quantizer, tiles: quantizer.encode(tiles, {}), static_argnums=0)


def lognormal_tile(scale: float = 1.0, seed: int = 0) -> np.ndarray:
    """The synthetic tile of the notes: Gaussian with log-normal spreads 0.5 over channels and 0.6 over tokens."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((128, 128)) * np.exp(0.5 * rng.standard_normal((128, 1)) + 0.6 * rng.standard_normal(128))
    return (scale * x).astype(np.float32)


def oracle(tile: np.ndarray, iters: int, floor: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[float]]:
    """(balanced, row scale, column scale, imbalance of every iterate), float64, as the paper's algorithm is written."""
    tile = tile.astype(np.float64)
    log_c, log_r = np.zeros(tile.shape[1]), np.zeros(tile.shape[0])

    def current() -> np.ndarray:
        return tile / np.exp(log_c) / np.exp(log_r)[:, None]

    def spread(x: np.ndarray) -> float:
        column, row = x.std(0, ddof=1), x.std(1, ddof=1)
        return column.max() / max(column.min(), 1e-8) + row.max() / max(row.min(), 1e-8)

    best, history = (log_c, log_r), [spread(tile)]
    for _ in range(iters):
        log_c = np.clip(log_c + np.log(np.clip(current().std(0, ddof=1), 1e-3, 1e3)), floor, 10)
        log_r = np.clip(log_r + np.log(np.clip(current().std(1, ddof=1), 1e-3, 1e3)), floor, 10)
        history.append(spread(current()))
        if history[-1] <= min(history):
            best = log_c, log_r
    log_c, log_r = best
    return current(), np.exp(log_r), np.exp(log_c), history


@pytest.mark.parametrize("iters", [0, 1, 8])
@pytest.mark.parametrize("scale", [0.3, 10.0])
def test_published_equals_a_float64_transcription(iters: int, scale: float) -> None:
    tile = lognormal_tile(scale)
    balanced, row, column, history = oracle(tile, iters, floor=-0.3)
    ours = normalize(tile, iters=iters)
    np.testing.assert_allclose(imbalance(ours.balanced), min(history), rtol=1e-5)
    np.testing.assert_allclose(ours.row_scale, row, rtol=1e-4)
    np.testing.assert_allclose(ours.column_scale, column, rtol=1e-4)
    np.testing.assert_allclose(ours.balanced, balanced, rtol=2e-4, atol=1e-6)


def test_equivariant_equals_the_transcription_on_the_tile_over_its_deviation() -> None:
    tile = lognormal_tile(0.03)
    std = tile.astype(np.float64).std(ddof=1)
    balanced, row, column, history = oracle(tile / std, 4, floor=-10)
    ours = normalize(tile, iters=4, normalize="equivariant")
    np.testing.assert_allclose(ours.row_scale, row * std, rtol=1e-4)
    np.testing.assert_allclose(ours.column_scale, column, rtol=1e-4)
    np.testing.assert_allclose(ours.balanced, balanced, rtol=2e-4, atol=1e-6)
    assert history[4] == pytest.approx(2.0, abs=5e-3)


@pytest.mark.parametrize("seed", range(3))
def test_equivariant_balances_a_lognormal_tile_within_four_iterations(seed: int) -> None:
    tile = lognormal_tile(seed=seed)
    assert float(imbalance(tile)) > 20
    assert float(imbalance(normalize(tile, iters=4, normalize="equivariant").balanced)) < 2.005


@pytest.mark.parametrize("alpha", [1e-3, 0.03, 1.0, 7.0, 1e3])
def test_equivariant_does_not_depend_on_the_magnitude(alpha: float) -> None:
    tile = lognormal_tile()
    one, other = (normalize(x, iters=4, normalize="equivariant") for x in (tile, tile * np.float32(alpha)))
    np.testing.assert_allclose(other.balanced, one.balanced, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(other.row_scale, alpha * np.asarray(one.row_scale), rtol=1e-4)
    np.testing.assert_allclose(other.column_scale, one.column_scale, rtol=1e-4)


def relative_mse(tile: np.ndarray, how: str, iters: int) -> float:
    quantizer = kvq.scheme("kvarn:bits=2,scales=f32", normalize=how, iters=iters).resolve(128)[0].quantizer
    error = quantizer.decode(encode(quantizer, tile.T[None]), {})[0].T - tile
    return float((error**2).sum() / (tile**2).sum())


def test_published_floor_makes_small_tiles_a_no_op_as_the_notes_measured() -> None:
    # scale of the tile: relative MSE at 2 bits, published. Plain rounding has 0.667 at every scale, equivariant 0.235.
    # The row of 10 is the notes'; their other rows are of other samples.
    for scale, published in {10: 0.237, 1: 0.233, 0.3: 0.316, 0.1: 0.591, 0.03: 0.667}.items():
        tile = lognormal_tile(scale)
        found = [relative_mse(tile, *how) for how in (("published", 0), ("published", 8), ("equivariant", 8))]
        np.testing.assert_allclose(found, [0.667, published, 0.235], rtol=0.01)
    tiny = normalize(lognormal_tile(0.03))
    assert np.ptp(tiny.row_scale) == 0  # all on the floor: a factor, no normalization
    assert np.ptp(tiny.column_scale) == 0


def test_a_tile_gets_the_same_scales_alone_and_in_any_batch() -> None:
    tiles = np.stack([lognormal_tile(seed=i) for i in range(6)]).reshape(2, 3, 128, 128)
    together = normalize(tiles)
    alone = normalize(tiles[1, 2])
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_array_equal(a, b[1, 2])


@pytest.mark.parametrize("how", ["published", "equivariant"])
@pytest.mark.parametrize("value", [0.0, 3.0, 1e30, 1e-38, -1e-38])
def test_degenerate_tiles_stay_finite(how: str, value: float) -> None:
    flat = np.full((16, 32), value, np.float32)
    one = flat * np.random.default_rng(0).standard_normal(flat.shape).astype(np.float32)
    for tile in (flat, one):
        balanced, row, column = normalize(tile, normalize=how)
        for part in (balanced, row, column):
            assert np.isfinite(part).all()
        np.testing.assert_allclose(
            balanced * row[:, None] * column, tile, rtol=1e-5, atol=1.2e-38
        )  # subnormal numbers are zero


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"normalize": "none"}, "normalize='none' is unknown; allowed: published, equivariant"),
        ({"iters": -1}, "iters=-1 is negative"),
    ],
)
def test_wrong_arguments_are_named(arguments, says) -> None:
    with pytest.raises(ValueError, match=says):
        kvq.variance_normalize(np.zeros((4, 4)), **arguments)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (4, 1)])
def test_a_tile_without_two_rows_and_columns_is_an_error(shape) -> None:
    with pytest.raises(ValueError, match="needs 2 rows and 2 columns"):
        kvq.variance_normalize(np.zeros(shape))
