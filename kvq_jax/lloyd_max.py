"""Lloyd–Max codebooks: the levels that minimize E[(x − nearest level)²] (Lloyd 1982; Max 1960).

At the optimum each level is the mean of its cell, and cells end midway between levels. For a book of samples instead of
a distribution see `calibration.kmeans`, which is the same problem.
"""

import functools
import math
from statistics import NormalDist

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
