"""Measures against their formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.spatial
import scipy.special
import scipy.stats

import kvq_jax.measures as measures

RNG = np.random.default_rng(0)


def test_kl_is_scipys_and_exactly_zero_for_equal_logits() -> None:
    a, b = RNG.normal(size=(2, 5, 40)) * 4
    p, q = scipy.special.softmax(a, -1), scipy.special.softmax(b, -1)
    found = measures.kl_divergence(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
    np.testing.assert_allclose(found, scipy.stats.entropy(p, q, axis=-1), rtol=1e-5)
    assert not measures.kl_divergence(jnp.asarray(a), jnp.asarray(a)).any()


def test_magnitude_and_direction_add_up_to_the_squared_error() -> None:
    x = RNG.normal(size=(7, 16))
    x_hat = x * 1.3 + RNG.normal(size=x.shape) / 3
    x_hat[0] = 2 * x[0]  # magnitude alone
    x_hat[1] = np.roll(x[1], 1)  # direction alone
    parts = measures.magnitude_direction(jnp.asarray(x), jnp.asarray(x_hat))
    norm, norm_hat = np.linalg.norm(x, axis=-1), np.linalg.norm(x_hat, axis=-1)
    cosine = (x * x_hat).sum(-1) / norm / norm_hat
    np.testing.assert_allclose(parts.magnitude, (norm - norm_hat) ** 2, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(parts.direction, 2 * norm * norm_hat * (1 - cosine), rtol=1e-4, atol=1e-5)
    assert float(parts.direction[0]) == pytest.approx(0, abs=1e-5)
    assert float(parts.magnitude[1]) == pytest.approx(0, abs=1e-9)


def test_vector_errors_of_parts_add_up_and_skip_what_does_not_exist() -> None:
    x = RNG.normal(size=(10, 8)).astype(np.float32)
    x_hat = x + RNG.normal(size=x.shape).astype(np.float32) / 5
    exists = np.arange(10) < 7
    halves = [slice(0, 5), slice(5, 10)]
    parts = [measures.VectorErrors.of(*(jnp.asarray(a[half]) for a in (x, x_hat, exists))) for half in halves]
    total = measures.VectorErrors(*(a + b for a, b in zip(*parts, strict=True)))
    kept, kept_hat = x[:7], x_hat[:7]
    ratio = np.linalg.norm(kept_hat, axis=-1) / np.linalg.norm(kept, axis=-1)
    assert float(total.relative_mse()) == pytest.approx(((kept_hat - kept) ** 2).sum() / (kept**2).sum(), rel=1e-5)
    assert float(total.ratio_mean()) == pytest.approx(ratio.mean(), rel=1e-5)
    assert float(total.ratio_std()) == pytest.approx(ratio.std(), rel=1e-3)


def test_jensen_shannon_is_scipys_also_where_a_probability_is_zero() -> None:
    p, q = RNG.dirichlet(np.full(30, 0.1), size=(2, 6))
    p[0, :20], q[0, 20:] = 0, 0  # nothing in common
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    found = measures.jensen_shannon(jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32))
    np.testing.assert_allclose(found, scipy.spatial.distance.jensenshannon(p, q, axis=-1) ** 2, rtol=1e-5)
    assert float(found[0]) == pytest.approx(np.log(2), rel=1e-6)
    assert not measures.jensen_shannon(jnp.asarray(p), jnp.asarray(p)).any()


def test_attention_logits_are_a_masked_softmax_with_the_sink_as_a_last_key() -> None:
    scores, seen = RNG.normal(size=(2, 3, 1, 5)), np.array([True, True, False, True, False])
    p = jax.nn.softmax(measures.attention_logits(jnp.asarray(scores, jnp.float32), jnp.asarray(seen)))
    np.testing.assert_allclose(p, scipy.special.softmax(np.where(seen, scores, -np.inf), -1), rtol=1e-6)
    sinks = RNG.normal(size=3)
    with_sink = np.concatenate([np.where(seen, scores, -np.inf), np.tile(sinks[:, None, None], (2, 1, 1, 1))], -1)
    logits = measures.attention_logits(*(jnp.asarray(x) for x in (scores, seen, sinks)))
    np.testing.assert_allclose(jax.nn.softmax(logits), scipy.special.softmax(with_sink, -1), rtol=1e-6)
    assert float(measures.kl_divergence(logits, logits).max()) == 0  # of keys that nobody sees, too


@pytest.mark.parametrize("count", [2, 5, 8])
def test_rank_flips_are_kendalls_tau_among_the_largest(count: int) -> None:
    p, q = RNG.dirichlet(np.ones(40), size=(2, 7))
    found = measures.rank_flips(*(jnp.asarray(x, jnp.float32) for x in (p, q)), count, most=8)
    for row, a, b in zip(found, p, q, strict=True):
        top = np.argsort(-a)[:count]
        assert float(row) == pytest.approx((1 - scipy.stats.kendalltau(a[top], b[top]).statistic) / 2, abs=1e-6)
    assert not measures.rank_flips(jnp.asarray(p), jnp.asarray(p), count, most=8).any()
    backwards = measures.rank_flips(jnp.asarray(p), -jnp.asarray(p), count, most=8)
    np.testing.assert_array_equal(backwards, 1)
