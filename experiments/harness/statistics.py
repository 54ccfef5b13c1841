"""Means with their uncertainty. Values and masks are `[sequences, positions]`."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats


class Estimate(NamedTuple):
    """A mean, its standard error, and what the error is over."""

    mean: float
    sem: float
    over: str  # "sequences" or "positions"


def samples(values: ArrayLike, mask: ArrayLike) -> tuple[np.ndarray, str]:
    """The independent samples: each sequence's mean, or of a single sequence its positions.

    Positions of one text are correlated, so that an error over them is too small; several sequences are better.
    """
    values, mask = np.asarray(values, np.float64), np.asarray(mask, bool)
    if len(values) == 1:
        return values[0][mask[0]], "positions"
    rows = mask.any(axis=1)
    total = np.where(mask, values, 0.0).sum(axis=1)[rows]
    return total / mask.sum(axis=1)[rows], "sequences"


def sem(x: ArrayLike) -> float:
    """Standard error of the mean; NaN for fewer than two samples."""
    x = np.asarray(x, np.float64)
    return float(x.std(ddof=1) / np.sqrt(x.size)) if x.size > 1 else float("nan")


def estimate(values: ArrayLike, mask: ArrayLike) -> Estimate:
    """Mean over the masked positions, every sequence with the same weight."""
    x, over = samples(values, mask)
    return Estimate(float(x.mean()) if x.size else float("nan"), sem(x), over)


BLOCK = 64  # positions: errors of neighbours are correlated, those a block apart hardly


def interval(values: ArrayLike, mask: ArrayLike, *, seed: int, resamples: int = 2000) -> tuple[float, float]:
    """95 % interval of the mean over the masked positions, every sequence with the same weight.

    Several sequences: Student's t over their means. One sequence: a bootstrap of blocks of BLOCK consecutive positions,
    because neighbours are correlated. NaN where there is too little of either.
    """
    x, over = samples(values, mask)
    if over == "sequences":
        half = float(stats.t.ppf(0.975, x.size - 1)) * sem(x) if x.size > 1 else float("nan")
        return float(x.mean()) - half, float(x.mean()) + half
    if x.size < 2 * BLOCK:
        return float("nan"), float("nan")
    sums = np.concatenate([[0.0], np.cumsum(x)])
    blocks = sums[BLOCK:] - sums[:-BLOCK]
    drawn = np.random.default_rng(seed).integers(blocks.size, size=(resamples, x.size // BLOCK))
    low, high = np.quantile(blocks[drawn].mean(axis=1) / BLOCK, [0.025, 0.975])
    return float(low), float(high)


def by_bucket(values: ArrayLike, mask: ArrayLike, width: int) -> list[Estimate]:
    """An estimate for each `width` consecutive positions, from position 0; the last bucket may be shorter."""
    values, mask = np.asarray(values), np.asarray(mask)
    starts = range(0, values.shape[1], width)
    return [estimate(values[:, i : i + width], mask[:, i : i + width]) for i in starts]


def bootstrap_interval(
    x: ArrayLike,
    statistic: Callable[[np.ndarray], np.ndarray] = lambda rows: rows.mean(axis=-1),
    *,
    seed: int,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> tuple[float, float]:
    """Percentile bootstrap of `statistic`, which maps `[draws, samples]` to `[draws]`; NaN below two samples."""
    x = np.asarray(x, np.float64)
    if x.size < 2:
        return float("nan"), float("nan")
    generator = np.random.default_rng(seed)
    # One resample at a time: all of a long text at once would take gigabytes.
    drawn = [statistic(x[generator.integers(x.size, size=x.size)][None])[0] for _ in range(resamples)]
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
