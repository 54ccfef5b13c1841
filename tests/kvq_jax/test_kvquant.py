"""KVQuant beyond its golden vectors: what is not finite, wide tokens, calibration, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from scheme_cases import constants, empty, pinned

import kvq_jax as kvq
from kvq_jax.packing import unpack

HEADS, D, TOKENS = 2, 32, 40
X = pinned(1, TOKENS, head_dim=D, seed=50)


def samples(x: np.ndarray, v: np.ndarray | None = None, fisher: np.ndarray | None = None) -> dict[str, np.ndarray]:
    fisher = np.ones_like(x) if fisher is None else fisher
    return {"k": x, "v": x if v is None else v, "k_fisher": fisher, "v_fisher": fisher}


def roundtrip(spec: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    own = constants(spec, x.shape[1], x.shape[3])
    k, v = kvq.roundtrip(spec, x, x, constants=own)
    return np.asarray(k), np.asarray(v)


def test_what_is_not_finite_is_kept_in_its_place() -> None:
    x = X.copy()
    x[0, 0, 7, 3], x[0, 1, 9, 4], x[0, 1, 11, 5] = np.nan, np.inf, -np.inf
    for y in roundtrip("kvquant:bits=3", x):
        assert np.isnan(y[0, 0, 7, 3])
        assert (y[0, 1, 9, 4], y[0, 1, 11, 5]) == (np.inf, -np.inf)
        assert np.isfinite(y).sum() == x.size - 3
    x[0, :, 20, ::3] = np.nan  # more than the side store has entries
    k, v = roundtrip("kvquant:bits=3", x)
    assert np.isnan(k[0, :, 20]).sum() == 2
    assert np.isnan(v[0, :, 20]).sum() == HEADS * D - 1  # all but the entry of the smallest value
    assert np.isfinite(v[0, :, 21:]).all()


def test_values_beyond_float16_saturate_and_an_outlier_of_zero_is_kept() -> None:
    spec, x = "kvquant:bits=3,sink=0", np.full((1, HEADS, 2, D), -2.0, np.float32)
    x[0, 0, 0, 3], x[0, 1, 0, 4] = 1e30, -1e30
    x[0, 0, 1, 1], x[0, 1, 1, 2] = -0.0, 0.0
    own = constants(spec, HEADS, D) | {"k_upper": np.full((HEADS, D), -1.0), "k_lower": np.full((HEADS, D), -3.0)}
    k, v = (np.asarray(y) for y in kvq.roundtrip(spec, x, x, constants=own))
    for y in (k, v):
        assert (y[0, 0, 0, 3], y[0, 1, 0, 4]) == (65504, -65504)
    assert (k[0, 0, 1, 1], k[0, 1, 1, 2]) == (0, 0)  # above K's range: kept, and not taken for an unused entry
    assert v[0, 1, 1, 2] == 0  # one entry for both: the range of the rest ends at 0


@pytest.mark.parametrize(("heads", "head_dim", "dtype"), [(2, 128, np.uint8), (3, 96, np.int16), (8, 256, np.int16)])
def test_an_index_reaches_every_channel_of_a_token(heads: int, head_dim: int, dtype: type) -> None:
    x = 0.1 * np.random.default_rng(0).standard_normal((1, heads, 3, head_dim)).astype(np.float32)
    x[0, -1, 1, -1], x[0, -1, 2, -2], x[0, 0, 1, 0] = 50, -60, 40
    cache = kvq.append(empty("kvquant:bits=2,sink=0", x), x, x)
    entries = 2 * (int(0.005 * heads * head_dim) + 1)
    for side, y in zip("kv", kvq.read(cache), strict=True):
        leaves = kvq.stored(cache)
        assert leaves[f"{side}_outlier_index"].dtype == dtype
        assert leaves[f"{side}_outlier_values"].shape == (1, 1, 3, entries)
        assert (y[0, -1, 1, -1], y[0, -1, 2, -2]) == (50, -60)
    bits = kvq.bits_per_element("kvquant:bits=2", head_dim=head_dim, kv_heads=heads)
    assert bits["k"] == pytest.approx(2 + entries * (16 + 8 * np.dtype(dtype).itemsize) / (heads * head_dim))
    assert bits["v"] == pytest.approx(bits["k"] + 32 / (heads * head_dim))
    leaves = kvq.stored(cache)
    size = sum(
        np.asarray(leaf).nbytes
        for name, leaf in leaves.items()
        if name in ("k_codes", "k_outlier_values", "k_outlier_index")
    )
    assert 8 * size / x.size == pytest.approx(bits["k"])


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_every_head_dim_and_number_of_bits(head_dim: int, bits: int) -> None:
    x = pinned(1, 24, head_dim=head_dim, seed=51)
    scheme = kvq.scheme("kvquant", bits=bits, sink=0)
    found = kvq.roundtrip(scheme, x, x, constants=scheme.calibrate(samples(x)))
    for y in found:
        error = np.square(x - y).sum() / np.square(x).sum()
        assert error < {2: 0.2, 3: 0.06, 4: 0.03}[bits]


def test_heads_share_a_tokens_range_and_its_outliers() -> None:
    x = X.copy()
    x[0, 0] *= 100  # every outlier of V is head 0's, and the range is its
    _, v = roundtrip("kvquant:bits=2,sink=0", x)
    cache = kvq.append(empty("kvquant:bits=2,sink=0", x), x, x)
    assert (np.asarray(kvq.stored(cache)["v_outlier_index"]) < D).all()
    codes = np.asarray(unpack(cache.v.store["codes"], 2))
    assert len(np.unique(codes[0, 0])) == 4
    assert np.abs(v[0, 1] - x[0, 1]).mean() > np.abs(x[0, 1]).mean()


# --- calibration


def test_the_first_tokens_and_what_is_out_of_range_do_not_make_the_table() -> None:
    rng = np.random.default_rng(1)
    x = rng.uniform(-1, 1, (3, HEADS, 200, D)).astype(np.float32)
    fisher = np.ones_like(x)
    fisher[:, :, :2] = 1e9
    x[:, :, :2] = 0.9  # two sinks that would draw every center
    kept, all_tokens = (
        np.asarray(kvq.scheme("kvquant", bits=2, sink=sink).calibrate(samples(x, fisher=fisher))["k_lut"])
        for sink in (2, 0)
    )
    np.testing.assert_allclose(kept, [-0.75, -0.25, 0.25, 0.75], atol=0.03)
    assert np.abs(all_tokens - kept).max() > 0.1
    assert np.abs(kept).max() < 1


def test_calibrated_constants_are_those_that_a_cache_takes() -> None:
    for spec in ("kvquant:k_bits=2,v_bits=4", "kvquant:bits=2,qnorm=true,sink=3"):
        scheme = kvq.scheme(spec)
        found = {name: np.asarray(x)[None] for name, x in scheme.calibrate(samples(X)).items()}
        made = kvq.Constants(found, scheme=scheme.calibrated(), kv_heads=HEADS, head_dim=D)
        made.check(scheme, layers=1)
        k, v = kvq.roundtrip(scheme, X, X, constants=made)
        assert np.isfinite(k).all()
        assert np.isfinite(v).all()
    assert {name for name in found if "lut" in name} == {"k_lut", "k_lut_out", "v_lut", "v_lut_out"}


@pytest.mark.parametrize("value", [0.0, -7.25, 3e4, 1e30])
def test_a_channel_that_never_moves_has_a_range(value: float) -> None:
    x = np.tile(X, (2, 1, 1, 1))
    x[..., 5] = value
    scheme = kvq.scheme("kvquant:bits=3")
    found = scheme.calibrate(samples(x, v=np.tile(X, (2, 1, 1, 1))))
    assert (np.asarray(found["k_upper"]) > np.asarray(found["k_lower"])).all()
    k, _ = kvq.roundtrip(scheme, x, x, constants=found)
    np.testing.assert_allclose(np.asarray(k)[:, :, 1:, 5], np.clip(value, -65504, 65504), rtol=3e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"k": np.where(np.arange(D) == 3, np.nan, X)}, "k has values that are not finite"),
        ({"v": np.where(np.arange(D) == 3, np.inf, X)}, "v has values that are not finite"),
        ({"k_fisher": np.zeros_like(X)}, "nor all zero"),
        ({name: x[:, :, :1] for name, x in samples(X).items()}, "0 values and 0 weights"),
    ],
)
def test_samples_that_cannot_be_calibrated_on_are_named(changed, says) -> None:
    with pytest.raises(ValueError, match=says):
        kvq.scheme("kvquant:bits=3").calibrate(samples(X) | changed)


# --- what is refused


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("kvquant:bits=8", "bits=8 is out of range; allowed: 2, 3, 4"),
        ("kvquant:outliers=0.7", "outliers=0.7 is out of range"),
        ("kvquant:outliers=0,k_entries=3", "k_entries=3 with outliers=0"),
        ("kvquant:k_entries=0", "k_entries=0 is out of range"),
        ("kvquant:scales=fp8", "scales='fp8' is out of range"),
    ],
)
def test_fields_that_cannot_be_are_named(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kvq.scheme(spec)


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "says"),
    [
        (68, 1, "68 codes of 3 bits"),
        (4, 1, "head_dim=4"),
        (256, 129, "kv_heads=129 of head_dim=256 are 33024 channels"),
    ],
)
def test_heads_that_cannot_be_stored_are_named(head_dim: int, kv_heads: int, says: str) -> None:
    own = {"k_lut": np.zeros(8)}
    with pytest.raises(ValueError, match=says):
        kvq.init_cache("kvquant:bits=3", batch=1, kv_heads=kv_heads, head_dim=head_dim, capacity=8, constants=own)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (None, "needs constants, and has no default"),
        ({"k_upper": -np.ones((HEADS, D))}, "k_upper is not above k_lower"),
        ({"v_lut": np.zeros(4)}, r"v_lut has shape \(4,\).* needs \(8,\)"),
        ({"v_lut": np.full(8, np.nan)}, "v_lut is not finite"),
        ({"v_lower": np.zeros((HEADS, D))}, "has no constant 'v_lower'"),
        ({"k_lut_out": np.zeros(8)}, "has no constant 'k_lut_out'"),
    ],
)
def test_constants_that_do_not_fit_are_named(changed, says) -> None:
    own = None if changed is None else constants("kvquant:bits=3", HEADS, D) | changed
    with pytest.raises(ValueError, match=says):
        kvq.roundtrip("kvquant:bits=3", jnp.asarray(X), jnp.asarray(X), constants=own)
