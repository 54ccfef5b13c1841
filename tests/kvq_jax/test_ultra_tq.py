"""Ultra-TQ: books refitted to samples, of the layers that the normal book fits worst."""

import dataclasses

import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.lloyd_max import gaussian_levels
from kvq_jax.quantizers.turboquant import normalized

D = 64


def keys(kurtosis: float, seed: int) -> np.ndarray:
    """Rotated keys `[2, 3, 200, 64]`: the larger `kurtosis`, the fewer channels hold the length. 0 is normal."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 3, 200, D)) * np.exp(kurtosis * rng.standard_normal(D))
    return (x * np.exp(rng.standard_normal((2, 3, 200, 1)))).astype(np.float32)


LAYERS = [{"k": keys(kurtosis, seed)} for seed, kurtosis in enumerate((0, 0.4, 0, 1.2, 0.8))]
NORMAL = (np.array(gaussian_levels(4)) / np.sqrt(D)).astype(np.float32)


def mse(k: np.ndarray, book: np.ndarray) -> float:
    """Per element of the normalized keys."""
    y = np.asarray(normalized(k)[0])
    return float(np.square(np.abs(y[..., None] - np.asarray(book)).min(-1)).mean())


def calibrated(scheme: kvq.Scheme, layers=LAYERS) -> dict[str, np.ndarray]:
    found = [scheme.calibrate(samples) for samples in layers]
    return scheme.compare_layers({name: np.stack([one[name] for one in found]) for name in found[0]})


def test_a_layers_book_is_lloyd_and_maxs_of_its_normalized_keys() -> None:
    scheme = kvq.scheme("ultra_tq:bits=4")
    for samples in LAYERS:
        book = scheme.calibrate(samples)["k_book"]
        y = np.asarray(normalized(samples["k"])[0]).ravel()
        nearest = np.abs(y[:, None] - np.asarray(book)).argmin(1)
        means = [y[nearest == i].mean(dtype=np.float64) for i in range(16)]
        np.testing.assert_allclose(book, means, rtol=1e-3, atol=1e-4)
        assert mse(samples["k"], book) < mse(samples["k"], NORMAL)
        twice = {"k": samples["k"] * 1000}  # the norm is not the book's business
        np.testing.assert_allclose(book, scheme.calibrate(twice)["k_book"], rtol=1e-4)
    assert mse(LAYERS[3]["k"], scheme.calibrate(LAYERS[3])["k_book"]) < 0.8 * mse(LAYERS[3]["k"], NORMAL)


@pytest.mark.parametrize(("share", "refitted"), [(0.0, []), (0.1, [3]), (0.2, [3]), (0.4, [3, 4]), (1.0, range(5))])
def test_the_share_of_layers_that_the_normal_book_fits_worst_gets_its_own(share: float, refitted) -> None:
    scheme = kvq.scheme("ultra_tq:bits=4,norm_correction=false", layers_share=share)
    arrays = calibrated(scheme)
    assert arrays.keys() == {"k_book"}
    assert arrays["k_book"].shape == (5, 16)
    errors = [mse(samples["k"], NORMAL) for samples in LAYERS]
    assert sorted(np.argsort(errors)[::-1][: len(refitted)]) == list(refitted)
    for layer, (samples, book) in enumerate(zip(LAYERS, arrays["k_book"], strict=True)):
        own = scheme.calibrate(samples)["k_book"]
        np.testing.assert_array_equal(book, own if layer in refitted else NORMAL)


def test_a_tenth_of_thirty_layers_is_three() -> None:
    scheme = kvq.scheme("ultra_tq:bits=2")
    layers = [{"k": keys(0.03 * i, i)[:1, :1, :50]} for i in range(30)]
    books = np.asarray(calibrated(scheme, layers)["k_book"])
    normal = (np.array(gaussian_levels(2)) / np.sqrt(D)).astype(np.float32)
    assert (books != normal).any(1).sum() == 3


def test_calibrated_constants_make_a_cache_and_its_error_is_smaller() -> None:
    refit, plain = kvq.scheme("ultra_tq:bits=4,layers_share=1.0"), "turboquant:bits=4"
    arrays = calibrated(refit)
    constants = kvq.Constants(arrays, scheme=refit.calibrated(), kv_heads=3, head_dim=D)
    shape = {"batch": 2, "kv_heads": 3, "head_dim": D, "capacity": 200, "dtype": np.float32, "layers": 5}
    caches = kvq.init_cache(refit, **shape, constants=constants)
    normal = kvq.init_cache(plain, **shape)
    for layer, samples in enumerate(LAYERS):
        k = np.asarray(kvq.hadamard(samples["k"]))  # samples are rotated; a cache rotates
        errors = []
        for cache in (caches[layer], normal[layer]):
            k_hat, v_hat = kvq.read(kvq.append(cache, k, k))
            errors.append(np.square((k_hat - k) / np.linalg.norm(k, axis=-1, keepdims=True)).mean())
        assert errors[0] < errors[1] * 1.001
        np.testing.assert_allclose(v_hat, kvq.roundtrip(plain, k, k)[1], rtol=1e-5, atol=1e-5)
    protected = dataclasses.replace(refit, protect=1)
    assert not kvq.init_cache(protected, **shape, constants=constants)[0].k.constants


def test_the_normal_book_is_turboquant() -> None:
    k = keys(0.5, 9)
    stored = [
        kvq.stored(
            kvq.append(
                kvq.init_cache(spec, batch=2, kv_heads=3, head_dim=D, capacity=200, dtype=np.float32, constants=book),
                k,
                k,
            )
        )
        for spec, book in (("ultra_tq:bits=4", {"k_book": NORMAL}), ("turboquant:bits=4", None))
    ]
    for name in ("k_codes", "k_norm", "v_codes", "v_scale", "v_zero"):
        np.testing.assert_array_equal(stored[0][name], stored[1][name])


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("ultra_tq:bits=8", ["bits=8", "1, 2, 3, 4"]),
        ("ultra_tq:layers_share=1.5", ["layers_share=1.5", "at most 1"]),
        ("ultra_tq:qjl=true", ["'qjl'", "layers_share"]),
    ],
)
def test_a_wrong_spec_names_the_field(spec: str, says: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        kvq.scheme(spec)
    assert all(part in str(error.value) for part in says)


def test_without_constants_there_is_no_cache_and_samples_that_are_not_finite_have_no_book() -> None:
    with pytest.raises(ValueError, match="ultra_tq needs constants"):
        kvq.roundtrip("ultra_tq:bits=4", LAYERS[0]["k"], LAYERS[0]["k"])
    spoilt = LAYERS[0]["k"].copy()
    spoilt[0, 0, 0, 0] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        kvq.scheme("ultra_tq:bits=4").calibrate({"k": spoilt})
    with pytest.raises(ValueError, match="nothing to calibrate"):
        kvq.scheme("turboquant:bits=4").calibrate(LAYERS[0])
