"""Rates of right answers: intervals of one rate, and paired comparisons of two methods on the same questions."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

Z = 1.959963984540054  # of 95 %
FEW = 8  # units


class Interval(NamedTuple):
    """An estimate with its 95 % interval; NaN where there is too little."""

    value: float
    low: float
    high: float


def wilson(right: int, of: int) -> Interval:
    """A rate with Wilson's score interval (JASA 22:209, 1927): it holds for few questions, and at 0 and 1."""
    if not 0 <= right <= of or of < 1:
        raise ValueError(f"right={right} of={of}: one question at least, and no more right answers than questions")
    rate, weight = right / of, Z * Z / of
    centre = (rate + weight / 2) / (1 + weight)
    half = Z * math.sqrt(rate * (1 - rate) / of + weight / (4 * of)) / (1 + weight)
    return Interval(rate, 0.0 if right == 0 else centre - half, 1.0 if right == of else centre + half)


def paired_difference(
    a: ArrayLike, b: ArrayLike, *, seed: int, resamples: int = 2000, within: bool = False
) -> Interval:
    """mean a − mean b by a bootstrap over the first axis `[units, ...]` (texts, problems): one draw of units serves
    both. What a unit holds is drawn with it, or `within` also drawn anew (`[units, seeds]`). Raises ValueError for
    shapes that are not equal.

    Where nothing differs, resamples say nothing: of right and wrong answers (0, 1) the interval is then what Wilson's
    leaves for a change of none of the units, to both sides; of other values NaN."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"a {a.shape} and b {b.shape} are not paired")
    if np.array_equal(a, b):
        most = wilson(0, len(a)).high if np.isin(a, (0, 1)).all() else float("nan")
        return Interval(0.0, -most, most)
    return bootstrap(a - b, seed=seed, resamples=resamples, within=within)


def bootstrap(x: ArrayLike, *, seed: int, resamples: int = 2000, within: bool = False) -> Interval:
    """The mean of x `[units, ...]`, with the percentile interval of resamples of its units; `within`: and of what each
    unit that was drawn holds. Of fewer than 8 units Student's t interval of their means: resamples of so few are too
    much alike."""
    x = np.asarray(x, np.float64)
    x = x.reshape(len(x), -1)
    units, size = x.shape
    if units < 2:
        return Interval(float(x.mean()), float("nan"), float("nan"))
    if units < FEW:
        of_units = x.mean(axis=1)
        half = stats.t.ppf(0.975, units - 1) * of_units.std(ddof=1) / math.sqrt(units)
        return Interval(float(x.mean()), float(x.mean() - half), float(x.mean() + half))
    generator = np.random.default_rng(seed)
    drawn = generator.integers(units, size=(resamples, units))
    if within:
        inner = generator.integers(size, size=(resamples, units, size))
        means = x[drawn[..., None], inner].mean(axis=(1, 2))
    else:
        means = x.mean(axis=1)[drawn].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(x.mean()), float(low), float(high))


def mean(x: ArrayLike, *, seed: int) -> Interval:
    """The mean of x `[units]`: Wilson's interval where all are 0 or 1, whose resamples may all be alike; else the
    bootstrap's."""
    x = np.asarray(x, np.float64)
    return wilson(int(x.sum()), x.size) if np.isin(x, (0, 1)).all() else bootstrap(x, seed=seed)


def spearman(x: ArrayLike, y: ArrayLike, *, seed: int, resamples: int = 1000) -> Interval:
    """Spearman's rank correlation of x and y `[units, ...]`, of all their entries; the interval draws units. NaN where
    either is constant."""
    x, y = (np.asarray(one, np.float64).reshape(len(np.asarray(one)), -1) for one in (x, y))

    def of(index: np.ndarray) -> float:
        a, b = stats.rankdata(x[index].ravel()), stats.rankdata(y[index].ravel())
        return float(np.corrcoef(a, b)[0, 1]) if np.ptp(a) > 0 and np.ptp(b) > 0 else float("nan")

    value, units = of(np.arange(len(x))), len(x)
    if units < 2 or math.isnan(value):
        return Interval(value, float("nan"), float("nan"))
    generator = np.random.default_rng(seed)
    drawn = np.array([of(generator.integers(units, size=units)) for _ in range(resamples)])
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return Interval(value, float(low), float(high))


def percent(interval: Interval) -> str:
    """`75 % [41, 93]`."""
    if math.isnan(interval.low):
        return f"{interval.value:.0%}".replace("%", " %")
    return f"{100 * interval.value:.0f} % [{100 * interval.low:.0f}, {100 * interval.high:.0f}]"
