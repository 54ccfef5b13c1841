"""Lloyd–Max codebooks: the levels that minimize E[(x − nearest level)²] (Lloyd 1982; Max 1960).

At the optimum each level is the mean of its cell, and cells end midway between levels; both functions iterate this.
NumPy float64: books are made once, outside of any trace.
"""

import functools
import math
from statistics import NormalDist
from typing import Any

import numpy as np


@functools.cache
def gaussian_levels(bits: int) -> tuple[float, ...]:
    """The 2^bits levels of N(0, 1), ascending and exactly symmetric; multiply by the deviation of what is rounded.

    bits=0 gives the mean. A cell [a, b] has the mean (φ(a) − φ(b))/(Φ(b) − Φ(a)). Raises ValueError outside of 0 to 6.
    """
    if bits not in range(7):
        raise ValueError(f"bits={bits!r} has no Lloyd–Max book here; allowed: 0 to 6")
    if bits == 0:
        return (0.0,)
    # The negative half, whose cells end at 0: there Φ is accurate far into the tail. The levels of many bits have the
    # density of N(0, 3) (Panter and Dite), which is where to start.
    half, wide = 2 ** (bits - 1), NormalDist(sigma=math.sqrt(3))
    levels, moved = np.array([wide.inv_cdf((i + 0.5) / (2 * half)) for i in range(half)]), 1.0
    while moved > 1e-14:
        edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [0.0]])
        below = np.array([math.erfc(-edge / math.sqrt(2)) / 2 for edge in edges])
        density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
        means = -np.diff(density) / np.diff(below)
        moved, levels = np.abs(means - levels).max(), means
    return (*levels.tolist(), *(-levels[::-1]).tolist())


def fit_levels(samples: Any, levels: Any, weights: Any = None, iterations: int = 10_000) -> np.ndarray:
    """The levels that minimize Σ w (x − nearest level)² over samples, float64 ascending, started from `levels`.

    A sample midway between two levels belongs to the upper one. A level whose cell is empty stays where it is. Sorting
    and prefix sums make an iteration O(levels · log samples); it ends when no sample changes its level. Raises
    ValueError for no samples, samples that are not finite, and weights that are not as many and none negative.
    """
    x, levels = np.ravel(np.asarray(samples, np.float64)), np.sort(np.asarray(levels, np.float64))
    w = np.ones_like(x) if weights is None else np.ravel(np.asarray(weights, np.float64))
    if not x.size or not np.isfinite(x).all():
        raise ValueError(f"{x.size} samples, {np.isfinite(x).sum()} of them finite, have no book; give finite samples")
    if w.shape != x.shape or not (w >= 0).all():
        raise ValueError(f"{w.size} weights for {x.size} samples; give one a sample, none negative")
    order = np.argsort(x)
    x, w = x[order], w[order]
    mass, moment = (np.concatenate([[0.0], np.cumsum(total)]) for total in (w, w * x))
    before = None
    for _ in range(iterations):
        cuts = np.searchsorted(x, (levels[1:] + levels[:-1]) / 2)
        if before is not None and (cuts == before).all():
            break
        before, edges = cuts, np.concatenate([[0], cuts, [x.size]])
        weight, total = np.diff(mass[edges]), np.diff(moment[edges])
        levels = np.where(weight > 0, total / np.where(weight > 0, weight, 1.0), levels)
    return levels
