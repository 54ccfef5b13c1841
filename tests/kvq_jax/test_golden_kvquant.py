"""KVQuant against numbers made by running its original simulation; see tests/data/golden/README.md."""

import functools
from pathlib import Path

import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.calibration.kmeans import inertia
from kvq_jax.packing import unpack

pytestmark = pytest.mark.compiled

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
HEADS, D = 2, 64


@functools.cache
def load(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"kvquant_{name}.npz", allow_pickle=False) as file:
        return dict(file)


def as_heads(x: np.ndarray) -> np.ndarray:
    """`[T, C]` -> `[1, H, T, D]`."""
    return x.reshape(1, -1, HEADS, D).swapaxes(1, 2)


def as_rows(x) -> np.ndarray:
    return np.asarray(x).swapaxes(1, 2).reshape(-1, HEADS * D)


def both(golden: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Constants of both sides, where a file has those of one."""
    lower, upper = (golden.get(name, np.float32(sign)) for name, sign in (("lower", -1), ("upper", 1)))
    bounds = {
        f"k_{n}": np.broadcast_to(x, (HEADS * D)).reshape(HEADS, D) for n, x in (("lower", lower), ("upper", upper))
    }
    return bounds | ({"k_lut": golden["lut"], "v_lut": golden["lut"]} if "lut" in golden else {})


def spec(golden: dict[str, np.ndarray], sink: int = 0, entries: int = 24) -> str:
    grid = "nuq" if "lut" in golden else "int"
    return f"kvquant:bits={golden['bits']},grid={grid},scales=f32,sink={sink},k_entries={entries}"


def filled(golden: dict[str, np.ndarray], scheme: str) -> kvq.Cache:
    x = as_heads(golden["x"])
    cache = kvq.init_cache(
        scheme, batch=1, kv_heads=HEADS, head_dim=D, capacity=x.shape[2], dtype=np.float32, constants=both(golden)
    )
    return kvq.append(cache, x, x)


def side_store(cache: kvq.Cache, side: str) -> tuple[np.ndarray, np.ndarray]:
    """(mask of the outliers, their values or 0), `[T, C]`, from the stored leaves alone."""
    leaves = kvq.stored(cache)
    values, index = (np.asarray(leaves[f"{side}_outlier_{name}"])[0, 0] for name in ("values", "index"))
    assert (values.dtype, index.dtype) == (np.float16, np.uint8)
    mask, dense = np.zeros((len(values), HEADS * D), bool), np.zeros((len(values), HEADS * D), np.float32)
    token, entry = np.nonzero(values.view(np.uint16) != 0x8000)  # -0: not used
    mask[token, index[token, entry]] = True
    dense[token, index[token, entry]] = values[token, entry]
    return mask, dense


@pytest.mark.parametrize("name", ["nuq2_k", "nuq3_k", "nuq3_v", "nuq4_v", "int3_k"])
def test_values_are_the_originals_bit_for_bit(name: str) -> None:
    golden = load(name)
    x = as_heads(golden["x"])
    y = kvq.roundtrip(spec(golden), x, x, constants=both(golden))["kv".index(name[-1])]
    np.testing.assert_allclose(as_rows(y), golden["y"], rtol=0, atol=1e-6 * np.ptp(golden["y"]))
    outlier = golden["mask"].astype(bool)
    np.testing.assert_array_equal(as_rows(y)[outlier], golden["x"][outlier])


@pytest.mark.parametrize("name", ["nuq2_k", "nuq3_k", "nuq3_v", "nuq4_v"])
def test_stored_codes_and_side_store_are_the_originals(name: str) -> None:
    golden, side = load(name), name[-1]
    cache = filled(golden, spec(golden))
    outlier = golden["mask"].astype(bool)
    mask, values = side_store(cache, side)
    np.testing.assert_array_equal(mask, outlier)
    np.testing.assert_array_equal(values[outlier], golden["x"][outlier])
    leaves = {n[2:]: np.asarray(leaf) for n, leaf in kvq.stored(cache).items() if n[0] == side}
    codes = as_rows(unpack(leaves["codes"], int(golden["bits"])))
    if side == "k":
        center, radius = (
            (golden["upper"] + s * golden["lower"]) / np.float16(2) for s in (np.float16(1), np.float16(-1))
        )
    else:
        center, radius = (leaves[part][0, 0][:, None] for part in ("center", "radius"))
    want = np.rint((golden["y"] - np.float32(center)) / np.float32(radius) * 2**20)  # entries of the table, to 1e-6
    table = np.rint(golden["lut"] * 2**20)
    assert np.abs(table[codes] - want)[~outlier].max() <= 8
    ends = golden["lut"].argmax(), golden["lut"].argmin()
    above = golden["x"] > np.float32(center)
    np.testing.assert_array_equal(codes[outlier], np.where(above, *ends)[outlier])


@pytest.mark.parametrize("name", ["nuq2_k", "nuq3_k"])
def test_the_first_token_is_a_sink(name: str) -> None:
    golden = load(name)
    x = as_heads(golden["x"])
    y, _ = kvq.roundtrip(spec(golden, sink=1), x, x, constants=both(golden))
    np.testing.assert_allclose(as_rows(y), golden["y_sink1"], rtol=0, atol=1e-6 * np.ptp(golden["y"]))
    np.testing.assert_array_equal(as_rows(y)[0], golden["x"][0])


@pytest.mark.parametrize("entries", [None, 1, 3])
def test_more_outliers_than_entries_keep_the_largest_by_rank_and_clamp_the_rest(entries: int | None) -> None:
    golden = load("nuq3_k")
    scheme = spec(golden, entries=entries) if entries else "kvquant:bits=3,sink=0"
    cache = filled(golden, scheme)
    mask, _ = side_store(cache, "k")
    count = 2 * (entries or 0.005 * HEADS * D // 1 + 1)
    center, radius = ((golden["upper"] + s * golden["lower"]) / np.float16(2) for s in (np.float16(1), np.float16(-1)))
    z = (golden["x"] - np.float32(center)) / np.float32(radius)
    outlier = golden["mask"].astype(bool)
    assert (outlier.sum(1) > count).sum() >= 4
    np.testing.assert_array_equal(mask.sum(1), np.minimum(outlier.sum(1), count))
    for row, excess in enumerate(np.where(outlier, np.abs(z), -1)):
        kept = np.argsort(-excess, kind="stable")[: mask[row].sum()]
        np.testing.assert_array_equal(np.flatnonzero(mask[row]), np.sort(kept))
    y = as_rows(kvq.read(cache)[0])
    clamped = outlier & ~mask
    ends = np.where(z > 0, golden["lut"].max(), golden["lut"].min()) * np.float32(radius) + np.float32(center)
    np.testing.assert_allclose(y[clamped], ends[clamped], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(y[~outlier], golden["y"][~outlier])


@pytest.mark.parametrize("name", ["nuq2_k", "nuq3_k", "nuq3_v", "nuq4_v"])
def test_our_tables_are_as_good_as_the_originals(name: str) -> None:
    """Calibrated on the very samples: weighted inertia of what k-means sees, and the constants around it."""
    golden, side = load(name), name[-1]
    x, fisher = as_heads(golden["x"]), as_heads(golden["fisher"])
    scheme = kvq.scheme(spec(golden))
    found = scheme.calibrate({"k": x, "v": x, "k_fisher": fisher, "v_fisher": fisher})
    assert set(found) == set(both(golden))
    if side == "k":
        for end in ("lower", "upper"):
            np.testing.assert_array_equal(np.float16(found[f"k_{end}"]).ravel(), golden[end])
        low, high = np.float32(golden["lower"]), np.float32(golden["upper"])
    else:
        low, high = np.quantile(golden["x"], (0.005, 0.995), axis=1, keepdims=True).astype(np.float32)
    z = (golden["x"] - (high + low) / 2) / ((high - low) / 2)
    kept = np.abs(z) <= 1
    sample = z[kept], golden["fisher"][kept]
    theirs, ours = (inertia(*sample, lut) for lut in (golden["lut"], np.asarray(found[f"{side}_lut"])))
    assert ours <= 1.001 * theirs
    assert theirs < 0.9 * inertia(*sample, np.linspace(-1, 1, len(golden["lut"])))


def test_qnorm_reads_with_a_table_that_restores_mean_and_deviation() -> None:
    golden = load("nuq2_k")
    x, fisher = as_heads(golden["x"]), as_heads(golden["fisher"])
    samples = {"k": x, "v": x, "k_fisher": fisher, "v_fisher": fisher}
    plain, normed = (kvq.scheme("kvquant:bits=2,sink=0", qnorm=qnorm) for qnorm in (False, True))
    constants = normed.calibrate(samples)
    assert {name for name in constants if "out" in name} == {"k_lut_out", "v_lut_out"}
    before, after = (
        kvq.append(
            kvq.init_cache(s, batch=1, kv_heads=HEADS, head_dim=D, capacity=256, dtype=np.float32, constants=c), x, x
        )
        for s, c in ((plain, {n: a for n, a in constants.items() if "out" not in n}), (normed, constants))
    )
    np.testing.assert_array_equal(before.k.store["codes"], after.k.store["codes"])  # the choice is the plain table's
    lower, upper = (np.asarray(constants[f"k_{end}"]).ravel() for end in ("lower", "upper"))
    z, y0, y1 = (
        (as_rows(a) - (upper + lower) / 2) / ((upper - lower) / 2) for a in (x, kvq.read(before)[0], kvq.read(after)[0])
    )
    kept = (np.abs(z) <= 1) & ~side_store(before, "k")[0]
    assert abs(y0[kept].std() / z[kept].std() - 1) > 0.02
    assert y1[kept].std() == pytest.approx(z[kept].std(), rel=2e-3)
    assert y1[kept].mean() == pytest.approx(z[kept].mean(), abs=2e-3)
