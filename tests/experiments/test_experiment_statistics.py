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
