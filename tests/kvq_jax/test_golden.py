"""Against numbers made by running the original implementations; see tests/data/golden/README.md."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from scheme_cases import empty

import kvq_jax as kvq
from kvq_jax.balance import imbalance
from kvq_jax.packing import unpack

pytestmark = pytest.mark.compiled

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


@functools.cache
def load(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as file:
        return dict(file)


def close(x, want, of_range: float = 1e-6) -> None:
    x, want = np.asarray(x, np.float64), np.asarray(want, np.float64)
    np.testing.assert_allclose(x, want, rtol=0, atol=of_range * (want.max() - want.min()))


def ulps(x, want) -> int:
    """The largest distance in float16 steps."""

    def steps(x):
        i = np.asarray(x, np.float16).view(np.int16).astype(np.int32)
        return np.where(i < 0, -32768 - i, i)

    return int(np.abs(steps(x) - steps(want)).max())


# --- KIVI


def kivi_store(golden: dict[str, np.ndarray], bits: int, scales: str, side: str) -> tuple[dict, np.ndarray, np.ndarray]:
    """(stored leaves, codes [1, 2, 256, 64], what is read back), everything flushed."""
    scheme = f"kivi:bits={bits},subgroup=32,scales={scales},recent=0,group=128"
    x = golden["x"]
    cache = kvq.append(empty(scheme, x, dtype=x.dtype), x, x)
    leaves = {name[2:]: np.asarray(leaf) for name, leaf in kvq.stored(cache).items() if name.startswith(f"{side}_")}
    codes = np.asarray(unpack(leaves["codes"], bits))
    if side == "k":
        codes = np.swapaxes(codes, -1, -2)
    k, v = kvq.roundtrip(scheme, x, x)
    return leaves, codes.reshape(x.shape), np.asarray(k if side == "k" else v)


@pytest.mark.parametrize(("name", "side", "bits"), [("k2_g32", "k", 2), ("k4_g32", "k", 4), ("v2_g32", "v", 2)])
def test_kivi_codes_bytes_scales_and_values(name: str, side: str, bits: int) -> None:
    golden = load(f"kivi_{name}")
    leaves, codes, y = kivi_store(golden, bits, "f32", side)
    np.testing.assert_array_equal(codes, golden["codes"])
    if side == "k":  # words of 32/bits tokens of a channel, [1, 2, T·bits/32, D]
        words = leaves["codes"].view("<i4").swapaxes(-1, -2).reshape(golden["packed"].shape)
    else:
        words = leaves["codes"].view("<i4").reshape(golden["packed"].shape)
    np.testing.assert_array_equal(words, golden["packed"])
    close(leaves["scale"].ravel(), golden["scale"].ravel())
    np.testing.assert_array_equal(leaves["zero"].ravel(), golden["mn"].ravel())
    close(y, golden["y"])


def test_kivi_triton_layout_is_the_transpose_of_ours() -> None:
    golden = load("kivi_triton_layout_k2_g32")
    leaves, _, _ = kivi_store(load("kivi_k2_g32"), 2, "f32", "k")
    words = leaves["codes"].view("<i4").transpose(0, 1, 3, 2, 4)  # [1, 2, D, tiles, words]
    np.testing.assert_array_equal(words.reshape(golden["packed"].shape), golden["packed"])
    close(leaves["scale"].swapaxes(-1, -2), golden["scale"])
    np.testing.assert_array_equal(leaves["zero"].swapaxes(-1, -2), golden["mn"])


@pytest.mark.parametrize(("name", "side"), [("k2_g32_f16", "k"), ("v2_g32_f16", "v")])
def test_kivi_in_float16_is_within_one_step_because_we_divide_in_float32(name: str, side: str) -> None:
    # The original computes (x - min)/scale in float16, from the rounded scale; we compute in float32 and store float16.
    golden = load(f"kivi_{name}")
    leaves, codes, y = kivi_store(golden, 2, "f16", side)
    assert ulps(leaves["scale"].ravel(), golden["scale"].ravel()) <= 1
    np.testing.assert_array_equal(leaves["zero"].ravel(), golden["mn"].ravel())
    off = np.abs(codes.astype(int) - golden["codes"])
    assert off.max() <= 1
    assert (off > 0).mean() < 2e-3
    same = off == 0
    close(np.where(same, y, 0), np.where(same, golden["y"].astype(np.float32), 0), 1e-3)


def test_kivi_fake_quantized_values_are_those_of_the_packed_path() -> None:
    golden = load("kivi_fakequant")
    v = golden["v"][:, None]
    _, y = kvq.roundtrip("kivi:bits=2,subgroup=32,scales=f32,recent=0,group=128", v, v)
    close(y[:, 0], golden["v_y"])


# --- QuaRot's rotation


def test_hadamard_is_quarots() -> None:
    golden = load("quarot_k4")
    close(kvq.hadamard(golden["k"]), golden["k_rot"])
    close(kvq.hadamard(golden["k_rot"]), golden["k"])


# --- KVarN: (file, prefix of its arrays, magnitude of the tile)

normalize = jax.jit(kvq.variance_normalize, static_argnames=("iters",))
encode = jax.jit(lambda quantizer, tiles: quantizer.encode(tiles, {}), static_argnums=0)

TILES = [
    *((f"kvarn_vn_{name}", side, 1.0) for name in ("d128", "d64", "d64_s101", "d64_tok128") for side in "KV"),
    ("kvarn_vn_lognormal_d128", "", 1.0),
    *((f"kvarn_mag_{d}", f"{side}_m{m}", float(m)) for d in ("d128", "d64") for side in "KV" for m in ("0.1", "10")),
    *(("kvarn_edge_d64", f"{side}_{what}", 1.0) for side in "KV" for what in ("dead", "const")),
]

# A channel of zeros: every iterate has an imbalance of 1e8, so the iterates, 5e-4 apart, all tie.
DEAD_KEY = "K_dead"


def tile_of(file: str, prefix: str, magnitude: float) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The work tile [rows, columns] and its golden arrays without their prefix."""
    golden = load(file)
    start = f"{prefix}_" if prefix else ""
    own = {name.removeprefix(start): x for name, x in golden.items() if name.startswith(start)}
    tile = own["tile"] if "tile" in own else golden[f"{prefix[0]}_base"] * np.float32(magnitude)
    return tile, own


def is_tied(golden: dict[str, np.ndarray], iters: int) -> bool:
    return iters > 0 and bool(golden["tied"][{1: 0, 8: 1, 16: 2}[iters]])


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t[0]}-{t[1]}")
def test_kvarn_scales_and_imbalance_after_0_1_8_and_16_iterations(tile) -> None:
    x, golden = tile_of(*tile)
    for iters in (0, 1, 8, 16):
        balanced, row_scale, column_scale = map(np.asarray, normalize(x, iters=iters))
        np.testing.assert_allclose(imbalance(balanced), golden["imb_best"][iters], rtol=2e-5)
        np.testing.assert_allclose(balanced * row_scale[:, None] * column_scale, x, rtol=1e-5, atol=1e-30)
        if f"sc_i{iters}" in golden:
            sc, sr = golden[f"sc_i{iters}"], golden[f"sr_i{iters}"]
            if is_tied(golden, iters):  # equal up to a factor that moves from one to the other
                column_scale, sc = column_scale / column_scale[0], sc / sc[0]
                row_scale, sr = row_scale / row_scale[0], sr / sr[0]
            rtol = 1e-3 if tile[1] == DEAD_KEY else 2e-5
            np.testing.assert_allclose(column_scale, sc, rtol=rtol)
            np.testing.assert_allclose(row_scale, sr, rtol=rtol)


def quantizer(spec: str, rows: int, columns: int, is_key: bool):
    """The quantizer whose work tile is [rows, columns]."""
    head_dim, group = (rows, columns) if is_key else (columns, rows)
    side = kvq.scheme(spec, group=group).resolve(head_dim)[0 if is_key else 1]
    return side.quantizer


CODED = [
    (tile, bits, 8) for tile in TILES for bits in (2, 4) if f"{tile[1]}_codes_b{bits}_i8".strip("_") in load(tile[0])
]
CODED += [(("kvarn_vn_d64_tok128", side, 1.0), bits, 0) for side in "KV" for bits in (2, 4)]


@pytest.mark.parametrize(("tile", "bits", "iters"), CODED, ids=str)
def test_kvarn_stored_bytes_and_values_of_a_rotated_tile(tile, bits: int, iters: int) -> None:
    x, golden = tile_of(*tile)
    is_key = not tile[1].startswith("V")
    quant = quantizer(f"kvarn:bits={bits},iters={iters}", *x.shape, is_key)
    leaves = encode(quant, (x.T if is_key else x)[None])
    scale, zero = (np.asarray(leaves[name]).reshape(-1) for name in ("scale", "zero"))
    second = np.asarray(leaves["token_scale" if is_key else "channel_scale"])[0]
    want = {name: golden[f"{name}16_b{bits}_i{iters}"] for name in "az"} | {"c": golden[f"c16_i{iters}"]}

    codes, golden_codes = np.asarray(unpack(leaves["codes"][0], bits)), golden[f"codes_b{bits}_i{iters}"]
    if tile[1] == DEAD_KEY:
        off = np.abs(codes.astype(int) - golden_codes)
        assert off.max() <= 1
        assert (off > 0).mean() < 3e-3
        return
    np.testing.assert_array_equal(codes, golden_codes)
    np.testing.assert_array_equal(leaves["codes"][0], golden[f"packed_b{bits}_i{iters}"])
    for name, leaf in {"a": scale, "z": zero, "c": second}.items():
        assert leaf.dtype == np.float16
        if is_tied(golden, iters):
            factor = {"a": want["c"][0] / second[0], "z": want["c"][0] / second[0], "c": second[0] / want["c"][0]}[name]
            np.testing.assert_allclose(leaf, want[name].astype(np.float32) * np.float32(factor), rtol=3e-3, atol=1e-6)
        else:
            assert ulps(leaf, want[name]) <= 1
    if f"y_b{bits}_i{iters}" in golden:
        y = quant.decode(leaves, {})[0]
        close(y.T if is_key else y, golden[f"y_b{bits}_i{iters}"], 2e-3)  # at most one float16 step of each scale


@pytest.mark.parametrize("name", ["d128", "d64", "d64_s101"])
def test_kvarn_through_the_public_roundtrip(name: str) -> None:
    # The golden tiles are rotated: un-rotate them (H is its own inverse), round-trip, rotate what comes back.
    (k, golden_k), (v, golden_v) = (tile_of(f"kvarn_vn_{name}", side, 1.0) for side in "KV")
    k_back, v_back = kvq.roundtrip("kvarn:bits=2", *(kvq.hadamard(x)[None, None] for x in (k.T, v)))
    for back, golden in ((k_back[0, 0], golden_k["y_b2_i8"].T), (v_back[0, 0], golden_v["y_b2_i8"])):
        off = np.abs(np.asarray(kvq.hadamard(back)) - golden) > 2e-3 * (golden.max() - golden.min())
        assert off.mean() < 5e-4  # a code may flip where the two rotations' rounding meets a boundary


RECORDS = ["d128_k2v2", "d128_k4v2", "d64_k4v2", "d64_k4v4"]


@pytest.mark.parametrize("name", RECORDS)
def test_kvarn_record_of_a_serving_engine(name: str) -> None:
    golden = load(f"kvarn_record_{name}")
    head_dim, heads, group = golden["k_rot"].shape[2], golden["k_rot"].shape[1], int(golden["group"])
    k_bits, v_bits = int(golden["key_bits"]), int(golden["value_bits"])
    scheme = kvq.scheme("kvarn", bits=None, k_bits=k_bits, v_bits=v_bits, iters=int(golden["iters"]), group=group)
    leaves = {}
    for letter, side in zip("kv", scheme.resolve(head_dim), strict=True):
        tiles = np.moveaxis(golden[f"{letter}_rot"], 1, 0)[:, None].astype(np.float32)  # [heads, 1, group, head_dim]
        leaves |= {f"{letter}_{n}": np.asarray(x) for n, x in encode(side.quantizer, tiles).items()}
    order = ["k_codes", "k_scale", "k_zero", "k_token_scale", "v_codes", "v_channel_scale", "v_scale", "v_zero"]
    offsets = golden["offsets"]
    assert [leaves[part].nbytes // heads for part in order] == list(np.diff(offsets))
    for head in range(heads):
        for i, part in enumerate(order):
            letter = part[0]
            tied = bool(golden[f"{letter}_tied"][head])
            got = leaves[part][head].tobytes()
            want = golden["record_torch"][head, offsets[i] : offsets[i + 1]].tobytes()
            if part.endswith("codes"):
                assert got == want, (part, head)
            elif not tied:
                assert ulps(np.frombuffer(got, np.float16), np.frombuffer(want, np.float16)) <= 1, (part, head)


@pytest.mark.parametrize("name", ["d128_k4v2", "d64_k4v2"])
def test_kvarn_record_read_back_from_raw_keys_and_values(name: str) -> None:
    golden = load(f"kvarn_record_{name}")
    k, v = (np.moveaxis(golden[letter], 1, 0)[None] for letter in "kv")
    cache = kvq.append(empty("kvarn:k_bits=4,v_bits=2", k, dtype=np.float16), k, v)
    for y, letter in zip(kvq.read(cache), "kv", strict=True):
        want = np.moveaxis(golden[f"{letter}_back"], 1, 0)[None].astype(np.float32)
        error = np.linalg.norm(np.asarray(y) - want) / np.linalg.norm(want)
        assert error < 0.02  # a few codes flip where float16 rotations differ
