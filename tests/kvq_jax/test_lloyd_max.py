"""Lloyd–Max books of the normal distribution against the literature and an independent solution."""

import math
from pathlib import Path

import numpy as np
import pytest

from kvq_jax.lloyd_max import gaussian_levels

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
