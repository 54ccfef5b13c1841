"""blockgrid: codes and values against NumPy, the books against samples and the literature, what refit fits."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from scheme_cases import empty, pinned

import kvq_jax as kvq
from kvq_jax.block_formats import e2m1
from kvq_jax.quantizers.blockgrid import E2M1, absmax_density, best_step, levels

D, NAMES = 64, ("k_codes", "k_scale")
GRIDS = ("uniform", "lloyd", "fp4")
SETTINGS = [(scale, block, grid) for scale in ("l2", "absmax") for block in (None, 16) for grid in GRIDS]


def nearest(y: np.ndarray, book: np.ndarray) -> np.ndarray:
    """Index of the nearest level, and how far y is from where that changes."""
    distance = np.abs(y[..., None] - book)
    return distance.argmin(-1), np.abs(np.diff(np.sort(distance, -1)[..., :2], axis=-1))[..., 0]


def scaled(x: np.ndarray, scale: str, block: int) -> tuple[np.ndarray, np.ndarray]:
    """float64 blocks over their scale, and the scales."""
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, block)
    s = np.linalg.norm(blocks, axis=-1) if scale == "l2" else np.abs(blocks).max(-1)
    return blocks / s[..., None], s


@pytest.mark.parametrize(("scale", "block", "grid"), SETTINGS)
def test_codes_scales_and_values(scale: str, block: int | None, grid: str) -> None:
    rotate = (grid == "lloyd") != (block is None)
    x = pinned(1, 40, head_dim=D, seed=3)
    spec = f"blockgrid:scale={scale},grid={grid}" + (f",block={block}" if block else "")
    cache = kvq.append(empty(kvq.scheme(spec, rotate=rotate), x), x, x)
    basis = np.asarray(kvq.hadamard(x)) if rotate else x
    y, s = scaled(basis, scale, block or D)
    book = np.array(levels(scale, grid, block or D))
    codes, margin = nearest(y, book)
    stored = {name: np.asarray(leaf)[..., 0, :] for name, leaf in kvq.stored(cache).items() if name in NAMES}
    packed = stored["k_codes"]
    own = np.stack([packed & 15, packed >> 4], axis=-1).reshape(y.shape)
    clear = margin > 1e-5
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(own[clear], codes[clear])
    assert stored["k_scale"].dtype == np.float16
    np.testing.assert_allclose(stored["k_scale"].astype(float), s, rtol=2**-11 * 1.01)
    want = (book[own] * stored["k_scale"].astype(float)[..., None]).reshape(x.shape)
    back = np.asarray(kvq.read(cache)[0])
    np.testing.assert_allclose(np.asarray(kvq.hadamard(back)) if rotate else back, want, rtol=1e-5, atol=2e-6)


def test_fp4_is_e2m1_and_zero_between_two_levels_goes_up() -> None:
    np.testing.assert_array_equal(np.unique(np.asarray(e2m1(jnp.arange(16)))), E2M1)
    x = np.array([6, 5.1, -4.9, 0.26, -0.24, 3.6, 2.4, 0] * 2, np.float32).reshape(1, 1, 1, 16)
    k, v = kvq.roundtrip("blockgrid:rotate=false,block=16,grid=fp4,group=1", x, x)
    np.testing.assert_allclose(k[0, 0, 0, :8], [6, 6, -4, 0.5, 0, 4, 2, 0], rtol=1e-6)
    np.testing.assert_array_equal(k, v)
    k, _ = kvq.roundtrip("blockgrid:rotate=false,block=16,grid=uniform", x * 2.5, x)
    np.testing.assert_allclose(k[0, 0, 0, [0, 1, 2, 3, 4, 5, 7]], [15, 13, -13, 1, -1, 9, 1], rtol=1e-6)


def test_the_steps_for_normal_values_are_those_of_the_literature() -> None:
    assert math.isclose(best_step(tuple(range(-15, 16, 2))) * 2, 0.3352, abs_tol=5e-5)  # Max 1960, table II
    x = np.random.default_rng(0).standard_normal(200_000)
    book = np.array(E2M1)

    def mse(step: float) -> float:
        return float(np.square(x - step * book[nearest(x / step, book)[0]]).mean())

    least = best_step(E2M1)
    assert mse(least) < 1.002 * min(mse(step) for step in np.linspace(0.3, 0.7, 41))


@pytest.mark.parametrize("block", [16, 64])
def test_absmax_books_fit_normal_blocks_over_their_maximum(block: int) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2_000_000 // block, block))
    y = x / np.abs(x).max(-1, keepdims=True)
    points, weights = absmax_density(block)
    assert math.isclose(weights.sum(), 1)
    for power in (2, 4):
        assert math.isclose(weights @ points**power, np.mean(y**power), rel_tol=0.01)
    y = y[: 200_000 // block]
    book = np.array(levels("absmax", "lloyd", block))
    np.testing.assert_allclose(book, -book[::-1], atol=1e-12)
    at, _ = nearest(y, book)
    means = [y[at == i].mean() for i in range(16)]
    np.testing.assert_allclose(book, means, atol=0.004)  # each level is the mean of its cell
    for other in ("uniform", "fp4"):
        far = np.array(levels("absmax", other, block))
        assert np.square(y - book[at]).mean() < 0.9 * np.square(y - far[nearest(y, far)[0]]).mean()


def test_l2_of_a_token_is_turboquants_key_without_norm_correction() -> None:
    x = pinned(1, 30, head_dim=D, seed=4)
    ours = kvq.roundtrip("blockgrid:scale=l2,grid=lloyd", x, x)[0]
    np.testing.assert_array_equal(ours, kvq.roundtrip("turboquant:bits=4,norm_correction=false", x, x)[0])


def test_refit_is_the_book_of_the_samples_and_beats_the_normal_one() -> None:
    x = pinned(2, 200, head_dim=D, seed=5)
    scheme = kvq.scheme("blockgrid:rotate=false,scale=absmax,block=32,grid=refit")
    assert (scheme.needs_constants, scheme.captures) == (True, ("k", "v"))
    found = scheme.calibrate({"k": jnp.asarray(x), "v": jnp.asarray(x * 3)})
    np.testing.assert_allclose(found["k_book"], found["v_book"], atol=1e-6)  # y does not know of a factor
    y, _ = scaled(x, "absmax", 32)
    at, _ = nearest(y, np.asarray(found["k_book"]))
    np.testing.assert_allclose(found["k_book"], [y[at == i].mean() for i in range(16)], atol=1e-4)
    with pytest.raises(ValueError, match="blockgrid needs constants"):
        kvq.roundtrip(scheme, x, x)
    cache = kvq.init_cache(scheme, batch=2, kv_heads=2, head_dim=D, capacity=200, dtype=jnp.float32, constants=found)
    back = np.asarray(kvq.read(kvq.append(cache, x, x))[0])
    normal = np.asarray(kvq.roundtrip("blockgrid:rotate=false,block=32,grid=lloyd", x, x)[0])
    assert np.square(back - x).sum() < np.square(normal - x).sum()


def test_k_alone_and_what_is_refused() -> None:
    x = pinned(1, 20, head_dim=D, seed=6)
    alone = kvq.scheme("blockgrid:grid=refit,values=bf16")
    assert alone.captures == ("k",)
    assert set(alone.calibrate({"k": jnp.asarray(x)})) == {"k_book"}
    k, v = kvq.roundtrip("blockgrid:values=bf16,block=32", x, x)
    np.testing.assert_array_equal(k, kvq.roundtrip("blockgrid:block=32", x, x)[0])
    np.testing.assert_array_equal(v, kvq.roundtrip("bf16", x, x)[1])
    with pytest.raises(ValueError, match=r"head_dim=64 is not a multiple of block=128.*16, 32, 64"):
        kvq.scheme("blockgrid:block=128").resolve(64)
    with pytest.raises(ValueError, match="block=8 is out of range; allowed: 16, 32, 64, 128"):
        kvq.scheme("blockgrid:block=8")
    with pytest.raises(ValueError, match="takes no constants"):
        kvq.scheme("blockgrid:grid=lloyd").calibrate({"k": jnp.asarray(x)})
