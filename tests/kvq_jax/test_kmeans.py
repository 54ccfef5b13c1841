"""Weighted k-means on a line against brute force and dense grids."""

import itertools
import time

import numpy as np
import pytest

from kvq_jax.calibration.kmeans import inertia, weighted_kmeans


def best_of_all_splits(x: np.ndarray, w: np.ndarray, clusters: int) -> float:
    """The least inertia of any way to cut the sorted values into runs."""
    order = np.argsort(x)
    x, w = x[order], w[order]

    def cost(a: int, b: int) -> float:
        mean = np.average(x[a:b], weights=w[a:b])
        return float((w[a:b] * (x[a:b] - mean) ** 2).sum())

    cuts = itertools.combinations(range(1, len(x)), clusters - 1)
    return min(sum(cost(a, b) for a, b in itertools.pairwise((0, *cut, len(x)))) for cut in cuts)


@pytest.mark.parametrize("clusters", [2, 3, 4])
def test_small_cases_reach_the_optimum(clusters: int) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x, w = rng.standard_t(3, 16), rng.gamma(0.5, size=16) + 1e-3
        centers = weighted_kmeans(x, w, clusters)
        assert (np.diff(centers) >= 0).all()
        assert inertia(x, w, centers) == pytest.approx(best_of_all_splits(x, w, clusters), rel=1e-9)
    centers = weighted_kmeans(np.r_[np.zeros(5), np.full(5, 7.0), np.full(5, -3.0)], np.ones(15), 3)
    np.testing.assert_array_equal(centers, [-3, 0, 7])


def test_the_weights_decide_where_the_centers_are() -> None:
    x = np.linspace(-1, 1, 1001)
    even = weighted_kmeans(x, np.ones(1001), 4)
    np.testing.assert_allclose(even, [-0.75, -0.25, 0.25, 0.75], atol=5e-3)
    weights = np.where(x > 0, 8.0, 1.0)
    heavy_right = weighted_kmeans(x, weights, 4)
    assert (heavy_right > 0.1).sum() == 3
    assert inertia(x, weights, heavy_right) < 0.8 * inertia(x, weights, even)
    where_it_weighs = weighted_kmeans(x, np.where(x > 0, 1.0, 0.0), 4)
    np.testing.assert_allclose(where_it_weighs, [0.125, 0.375, 0.625, 0.875], atol=5e-3)


def test_every_center_is_the_weighted_mean_of_what_is_nearest_to_it() -> None:
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal(20_000) + 1e4, rng.gamma(0.3, size=20_000)  # far from zero: no digits are lost
    centers = weighted_kmeans(x, w, 8)
    nearest = np.abs(x[:, None] - centers).argmin(1)
    means = [np.average(x[nearest == i], weights=w[nearest == i]) for i in range(8)]
    np.testing.assert_allclose(centers, means, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(centers, weighted_kmeans(x[::-1], w[::-1], 8))  # whatever the order


def test_fewer_values_than_clusters_and_equal_values() -> None:
    for x in ([2.5], [2.5, 2.5, 2.5], [1.0, 4.0]):
        centers = weighted_kmeans(np.array(x), np.ones(len(x)), 4)
        assert inertia(np.array(x), np.ones(len(x)), centers) == 0
        assert centers.shape == (4,)
        assert np.isfinite(centers).all()


def test_a_million_values_take_seconds() -> None:
    x = np.random.default_rng(4).standard_t(4, 1_000_000)
    start = time.perf_counter()
    weighted_kmeans(x, np.abs(x), 16)
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize(
    ("x", "w", "says"),
    [
        ([], [], "0 values and 0 weights"),
        ([1.0], [1.0, 2.0], "1 values and 2 weights"),
        ([np.nan], [1.0], "not finite"),
        ([1.0], [np.inf], "not finite"),
        ([1.0, 2.0], [0.0, 0.0], "nor all zero"),
        ([1.0, 2.0], [-1.0, 1.0], "must not be negative"),
    ],
)
def test_what_cannot_be_clustered_is_named(x, w, says) -> None:
    with pytest.raises(ValueError, match=says):
        weighted_kmeans(np.array(x), np.array(w), 2)
