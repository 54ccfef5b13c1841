"""Means, standard errors, buckets and intervals against scipy."""

import numpy as np
import pytest
import scipy.stats

from experiments.harness import statistics as st

RNG = np.random.default_rng(0)
X = RNG.gamma(2.0, size=(5, 40))
ALL = np.ones(X.shape, bool)


def test_one_sequence_is_measured_over_its_positions() -> None:
    found = st.estimate(X[:1], ALL[:1])
    assert found.over == "positions"
    assert found.mean == pytest.approx(X[0].mean())
    assert found.sem == pytest.approx(scipy.stats.sem(X[0]))


def test_several_sequences_are_measured_over_sequences() -> None:
    found = st.estimate(X, ALL)
    assert found.over == "sequences"
    assert found.mean == pytest.approx(X.mean())
    assert found.sem == pytest.approx(scipy.stats.sem(X.mean(axis=1)))


def test_masked_values_are_not_seen_even_where_they_are_nan() -> None:
    mask = RNG.random(X.shape) < 0.5
    mask[3] = False
    holes = np.where(mask, X, np.nan)
    rows = [X[i][mask[i]].mean() for i in (0, 1, 2, 4)]
    found = st.estimate(holes, mask)
    assert found.mean == pytest.approx(np.mean(rows))
    assert found.sem == pytest.approx(scipy.stats.sem(rows))


def test_an_error_needs_two_samples() -> None:
    assert np.isnan(st.sem([1.0]))
    assert np.isnan(st.estimate(X[:1], np.zeros((1, 40), bool)).mean)
    assert np.isnan(st.bootstrap_interval([1.0], seed=0)).all()


def test_buckets_start_at_zero_and_the_last_may_be_short() -> None:
    found = st.by_bucket(X, ALL, 16)
    assert [b.mean for b in found] == pytest.approx([X[:, :16].mean(), X[:, 16:32].mean(), X[:, 32:].mean()])


def test_bootstrap_interval_is_scipys_percentile_interval() -> None:
    x = RNG.normal(size=60)
    expected = scipy.stats.bootstrap((x,), np.mean, method="percentile", n_resamples=4000, rng=1).confidence_interval
    assert st.bootstrap_interval(x, seed=0, resamples=4000) == pytest.approx(tuple(expected), abs=0.03)
    assert st.bootstrap_interval(x, seed=0) == st.bootstrap_interval(x, seed=0)


def test_an_interval_of_one_sequence_allows_for_neighbours_that_move_together() -> None:
    rng = np.random.default_rng(0)
    inside = {"alone": 0, "together": 0}
    for trial in range(100):
        noise = {"alone": rng.standard_normal(2048), "together": np.repeat(rng.standard_normal(2048 // 32), 32)}
        for name, x in noise.items():
            low, high = st.interval(x[None], np.ones((1, x.size), bool), seed=trial, resamples=200)
            inside[name] += low <= 0 <= high
    assert 85 <= inside["alone"] <= 99
    assert 80 <= inside["together"] <= 99  # an interval over single positions would hold 0 about 30 times


def test_an_interval_of_several_sequences_is_students() -> None:
    means = np.array([1.0, 2.0, 4.0])
    low, high = st.interval(np.repeat(means[:, None], 5, axis=1), np.ones((3, 5), bool), seed=0)
    half = 4.302652729749464 * means.std(ddof=1) / np.sqrt(3)  # t(2) at 97.5 %
    np.testing.assert_allclose([low, high], [means.mean() - half, means.mean() + half])
    assert np.isnan(st.interval(np.ones((1, 100)), np.ones((1, 100), bool), seed=0)).all()
