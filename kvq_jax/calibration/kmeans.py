"""Weighted k-means of numbers on a line, on sorted values.

On a line a cluster is a run of sorted values, so that one of Lloyd's iterations is k binary searches and k differences
of prefix sums: its cost does not depend on how many values there are. The start is the best clustering of a few
hundred short runs of values, by dynamic programming; for as many values or less that is the optimum. Host code in
float64; the sort is what takes time.
"""

from typing import NamedTuple

import numpy as np

ITERATIONS = 300  # from this start tens suffice
RUNS = 512  # as many of equal width, and as many of equal count


class _Sums(NamedTuple):
    """Prefix sums over the sorted values, each with a zero in front."""

    weight: np.ndarray
    first: np.ndarray  # of weight · value
    second: np.ndarray  # of weight · value²

    def of_runs(self, ends: np.ndarray) -> "_Sums":
        return _Sums(*(np.diff(total[np.concatenate([[0], ends, [len(total) - 1]])]) for total in self))


def inertia(values: np.ndarray, weights: np.ndarray, centers: np.ndarray) -> float:
    """Σ_i w_i · min_c (x_i − c)², in float64."""
    centers = np.sort(np.asarray(centers, np.float64))
    x = np.asarray(values, np.float64)
    nearest = centers[np.searchsorted((centers[1:] + centers[:-1]) / 2, x)]
    return float(np.sum(np.asarray(weights, np.float64) * (x - nearest) ** 2))


def weighted_kmeans(values: np.ndarray, weights: np.ndarray, clusters: int) -> np.ndarray:
    """Centers of the weighted clusters of `values` `[n]`, ascending, float64 `[clusters]`.

    Minimizes Σ_i w_i · min_c (x_i − c)² by Lloyd's iterations until nothing moves, from the best clustering of runs.
    Deterministic. Fewer distinct values than clusters: some centers are equal.

    Raises ValueError for no values, values or weights that are not finite, and weights that are negative or all zero.
    """
    x, w = (np.asarray(a, np.float64).ravel() for a in (values, weights))
    if x.shape != w.shape or not x.size:
        raise ValueError(f"{x.size} values and {w.size} weights; k-means needs as many weights as values, and some")
    if not (np.isfinite(x).all() and np.isfinite(w).all()):
        raise ValueError("values or weights are not finite; check what was captured")
    if w.min() < 0 or w.max() == 0:
        raise ValueError(f"weights lie in {w.min():g} … {w.max():g}; they must not be negative, nor all zero")
    order = np.argsort(x)
    middle = x[order[len(order) // 2]]
    x, w = x[order] - middle, w[order] / w.max()  # centered: the squares then lose no digits

    def prefix(terms: np.ndarray) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(terms)])

    sums = _Sums(prefix(w), prefix(w * x), prefix(w * x * x))
    centers = _lloyd(x, sums, _best_of_runs(x, sums, clusters))
    return centers + middle


def _best_of_runs(x: np.ndarray, sums: _Sums, clusters: int) -> np.ndarray:
    """Centers of the optimal clustering of short runs of x that are not cut: with cost(i, j) of the runs i … j − 1,
    least(c, j) = min_i least(c − 1, i) + cost(i, j)."""
    by_count = np.linspace(0, len(x), RUNS + 1).astype(np.intp)
    by_width = np.searchsorted(x, np.linspace(x[0], x[-1], RUNS + 1)[:-1])
    edges = np.unique(np.concatenate([by_count, by_width]))
    weight, first, second = (total[edges] - total[edges][:, None] for total in sums)  # [i, j]
    mean = first / np.where(weight > 0, weight, 1.0)
    cost = np.where(edges >= edges[:, None], np.maximum(second - first * mean, 0), np.inf)
    least, cuts = cost[0], []
    for _ in range(clusters - 1):
        total = least[:, None] + cost
        cuts.append(total.argmin(0))
        least = total.min(0)
    centers, end = [], len(edges) - 1
    for cut in [*reversed(cuts), np.zeros_like(edges)]:
        start = cut[end]
        centers.append(mean[start, end] if start < end else x[0])
        end = start
    return np.sort(np.array(centers))


def _lloyd(x: np.ndarray, sums: _Sums, centers: np.ndarray) -> np.ndarray:
    """Where the iterations end. A cluster without weight keeps its center."""
    ends = np.zeros(0, np.intp)
    for _ in range(ITERATIONS):
        new = np.searchsorted(x, (centers[1:] + centers[:-1]) / 2)
        if np.array_equal(new, ends):
            break
        ends = new
        weight, first, _ = sums.of_runs(ends)
        centers = np.sort(np.where(weight > 0, first / np.where(weight > 0, weight, 1.0), centers))
    return centers
