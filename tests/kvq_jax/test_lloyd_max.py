"""Lloyd–Max books: of the normal distribution against the literature, of samples against an exhaustive search."""

import itertools
import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

from kvq_jax.lloyd_max import fit_levels, gaussian_levels

# The positive half and the distortion (Max 1960, table I, to more digits).
BOOKS = {
    1: ([0.797885], 0.363380),
    2: ([0.452780, 1.510418], 0.117482),
    3: ([0.245094, 0.756005, 1.343909, 2.151946], 0.034548),
    4: ([0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590], 0.009501),
}


@pytest.mark.parametrize("bits", BOOKS)
def test_the_normal_book_and_its_distortion(bits: int) -> None:
    half, mse = BOOKS[bits]
    levels = np.array(gaussian_levels(bits))
    np.testing.assert_allclose(levels, [-x for x in half[::-1]] + half, atol=6e-7)
    np.testing.assert_array_equal(levels, -levels[::-1])
    # At the optimum E[x²] = E[level²] + MSE.
    edges = [-math.inf, *((levels[1:] + levels[:-1]) / 2), math.inf]
    mass = np.diff([math.erf(edge / math.sqrt(2)) / 2 for edge in edges])
    assert math.isclose(mass.sum(), 1)
    assert math.isclose(1 - np.sum(mass * levels**2), mse, abs_tol=6e-7)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_normal_book_to_every_digit_of_an_independent_solution(bits: int) -> None:
    with np.load(Path(__file__).parents[1] / "data" / "golden" / "tq_codebooks.npz") as golden:
        np.testing.assert_allclose(gaussian_levels(bits), golden[f"exact_n01_b{bits}"], rtol=0, atol=1e-11)


def test_many_bits_have_the_high_resolution_distortion_and_other_bits_are_refused() -> None:
    assert gaussian_levels(0) == (0.0,)
    levels = np.array(gaussian_levels(6))
    assert len(levels) == 64
    assert (np.diff(levels) > 0).all()
    x = np.random.default_rng(0).standard_normal(200_000)
    mse = np.mean((x - levels[np.abs(x[:, None] - levels).argmin(1)]) ** 2)
    assert math.isclose(mse, math.sqrt(3) * math.pi / 2 / 64**2, rel_tol=0.05)  # Panter and Dite
    for bits in (7, -1, 2.5):
        with pytest.raises(ValueError, match=r"bits=.* allowed: 0 to 6"):
            gaussian_levels(bits)


def cost(x: np.ndarray, w: np.ndarray, levels: np.ndarray) -> float:
    return float(np.sum(w * np.square(x[:, None] - levels).min(1)))


@pytest.mark.parametrize("weighted", [False, True])
def test_a_fit_is_a_fixed_point_and_near_the_best_of_all_partitions(weighted: bool) -> None:
    # A few random samples have many fixed points, evenly spread ones good ones only.
    x = 0.5 + np.array([NormalDist().inv_cdf((i + 0.5) / 32) for i in range(32)])
    w = np.exp(0.3 * x) if weighted else np.ones(32)
    order = np.random.default_rng(3).permutation(32)
    levels = fit_levels(x[order], gaussian_levels(2), w[order])
    np.testing.assert_allclose(fit_levels(x, levels, w), levels, rtol=1e-12)
    nearest = np.abs(x[:, None] - levels).argmin(1)
    means = [np.average(x[nearest == i], weights=w[nearest == i]) for i in range(4)]
    np.testing.assert_allclose(levels, means, rtol=1e-12)

    def best_of(cuts: tuple[int, ...]) -> float:
        parts = zip((0, *cuts), (*cuts, 32), strict=True)
        return cost(x, w, np.array([np.average(x[a:b], weights=w[a:b]) for a, b in parts]))

    best = min(best_of(cuts) for cuts in itertools.combinations(range(1, 32), 3))
    assert best <= cost(x, w, levels) * (1 + 1e-9)
    assert cost(x, w, levels) < 1.12 * best < cost(x, w, np.array(gaussian_levels(2)))


def test_a_fit_of_normal_samples_is_the_normal_book() -> None:
    x = np.random.default_rng(1).standard_normal(400_000)
    for bits, off in ((2, 0.01), (4, 0.05)):
        start = np.linspace(-2, 2, 2**bits)  # far from the solution
        np.testing.assert_allclose(fit_levels(x, start), gaussian_levels(bits), atol=off)


def test_a_weight_is_as_many_samples() -> None:
    x = np.array([-2.0, -1.0, 0.5, 3.0])
    w = np.array([1, 3, 2, 1])
    np.testing.assert_allclose(fit_levels(x, [-1, 1], w), fit_levels(np.repeat(x, w), [-1, 1]))


def test_an_empty_cell_keeps_its_level_and_a_sample_midway_goes_up() -> None:
    np.testing.assert_array_equal(fit_levels([1.0, 1.0], [-3, 0, 1]), [-3, 0, 1])
    np.testing.assert_array_equal(fit_levels([0.0, 1.0], [-1, 1]), [-1, 0.5])  # 0 is midway: upper


@pytest.mark.parametrize(
    ("samples", "weights", "says"),
    [([], None, "0 samples"), ([1, np.nan], None, "1 of them finite"), ([1, 2], [1], "1 weights"), ([1], [-1], "neg")],
)
def test_what_cannot_be_fitted_is_refused(samples, weights, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fit_levels(samples, [0, 1], weights)
