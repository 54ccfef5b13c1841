"""TurboQuant against vLLM's kernels: bytes, values and attention; see tests/data/golden/README.md. The sketch against
what it promises."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scheme_cases import pinned

import kvq_jax as kvq
from kvq_jax.formats import divide
from kvq_jax.packing import unpack
from kvq_jax.quantizers.turboquant import Codebook, Sketched, gaussian_matrix, normalized

pytestmark = pytest.mark.compiled

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CODECS = ["tq_codec_d64", "tq_codec_d64_s101", "tq_codec_d128"]
PRESETS = {"4bit_nc": "bits=4", "k3v4_nc": "k_bits=3,v_bits=4", "3bit_nc": "bits=3", "k8v4": "k_bits=8,v_bits=4"}
NORMAL = np.random.default_rng(5).standard_normal((1, 2, 400, 1, 64)).astype(np.float32)


@functools.cache
def load(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as file:
        return dict(file)


def filled(preset: str, k: np.ndarray, v: np.ndarray, norm_correction: bool = True) -> kvq.Cache:
    """k and v `[tokens, heads, head_dim]`, everything flushed, with vLLM's book."""
    scheme = kvq.scheme(f"turboquant:{PRESETS[preset]}", norm_correction=norm_correction)
    k, v = (np.moveaxis(x, 1, 0)[None] for x in (k, v))
    _, kv_heads, tokens, head_dim = k.shape
    fp8 = scheme.key_bits == 8
    book = None if fp8 else {"k_book": load("tq_codebooks")[f"cent_d{head_dim}_b{scheme.key_bits}"]}
    shape = {"batch": 1, "kv_heads": kv_heads, "head_dim": head_dim, "capacity": tokens}
    return kvq.append(kvq.init_cache(scheme, **shape, dtype=np.float32, constants=book), k, v)


CODED = [(name, preset) for name in CODECS for preset in PRESETS if f"{preset}_slot" in load(name)]


@pytest.mark.parametrize(("name", "preset"), CODED)
def test_stored_bytes_are_the_slots_of_the_serving_engine(name: str, preset: str) -> None:
    golden = load(name)
    leaves = {n: np.asarray(x) for n, x in kvq.stored(filled(preset, golden["k"], golden["v"])).items()}
    order = ["k_values"] if preset == "k8v4" else ["k_codes", "k_norm"]
    order += ["v_codes", "v_scale", "v_zero"]
    # [1, heads, tokens, 1, n] -> [tokens, heads, bytes]
    parts = [np.moveaxis(np.ascontiguousarray(leaves[part])[0, :, :, 0].view(np.uint8), 0, 1) for part in order]
    np.testing.assert_array_equal(np.concatenate(parts, axis=-1), golden[f"{preset}_slot"])


@pytest.mark.parametrize(("name", "preset"), [(name, preset) for name, preset in CODED if preset != "k8v4"])
def test_values_with_and_without_norm_correction(name: str, preset: str) -> None:
    golden = load(name)
    for corrected, suffix in ((False, "k_deq_rot"), (True, "k_deq_rot_nc")):
        cache = filled(preset, golden["k"], golden["v"], corrected)
        stored = (side.tokens(side.store)[0] for side in cache.sides)
        for y, want in zip(stored, (golden[f"{preset}_{suffix}"], golden[f"{preset}_v_deq"]), strict=True):
            np.testing.assert_allclose(np.moveaxis(np.asarray(y), 0, 1), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CODECS[:2])
def test_eight_bits_of_keys_are_fp8(name: str) -> None:
    golden = load(name)
    k, v = (np.moveaxis(np.asarray(x)[0], 0, 1) for x in kvq.read(filled("k8v4", golden["k"], golden["v"])))
    np.testing.assert_array_equal(k, golden["k8v4_k_deq"])
    np.testing.assert_allclose(v, golden["k8v4_v_deq"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("preset", "corrected"), [(p, c) for p in PRESETS for c in (False, True)][:-1])
def test_attention_is_that_of_the_decode_kernel(preset: str, corrected: bool) -> None:
    golden = load("tq_attn_hq8_hk2_d64_t96")
    cache = filled(preset, golden["k"], golden["v"], corrected)
    out = np.asarray(kvq.attend(golden["q"].reshape(1, 8, 1, 64), cache, scale=float(golden["scale"])))
    want = golden[f"{preset}_out_normcorr{int(corrected)}"]
    np.testing.assert_allclose(out.reshape(1, 8, 64), want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    assert np.abs(want - golden["out_exact"]).max() > 2e-3  # the tolerance tells the presets from no quantization


def test_the_engines_book_is_the_exact_one_within_its_trapezoids() -> None:
    book = load("tq_codebooks")
    for head_dim in (64, 128):
        for bits in (2, 3, 4):
            own = np.asarray(Codebook(head_dim, bits, True).levels({}))
            np.testing.assert_allclose(own, book[f"exact_n01_b{bits}"] / np.sqrt(head_dim), rtol=1e-6)
            np.testing.assert_allclose(own, book[f"cent_d{head_dim}_b{bits}"], rtol=1e-3)
            middles = (own[1:] + own[:-1]) / 2
            np.testing.assert_allclose(middles, book[f"bound_d{head_dim}_b{bits}"], rtol=1e-3, atol=1e-9)


def test_a_quotient_is_rounded_once_where_the_divisor_is_one_number() -> None:
    x = NORMAL[:1, :1, :1]  # one token of one head
    for y in (15.0, np.full((1, 1, 1, 1, 1), 0.3, np.float32)):
        np.testing.assert_array_equal(jax.jit(divide)(x, y), x / np.float32(y))
        np.testing.assert_array_equal(jax.jit(lambda x, y=y: divide(x, y))(x), x / np.float32(y))
    assert np.isnan(divide(jnp.float32(np.nan), 15.0))


# --- the distortion and the bias of the two forms


@pytest.mark.parametrize(("bits", "mse"), [(1, 0.363380), (2, 0.117482), (3, 0.034548), (4, 0.009501)])
def test_distortion_of_normal_data_is_lloyd_and_max(bits: int, mse: float) -> None:
    y, n = (np.asarray(x) for x in normalized(NORMAL))
    quantizer = Codebook(64, bits, norm_correction=False)
    leaves = quantizer.encode(NORMAL, {})
    error = np.square(np.asarray(quantizer.decode(leaves, {})) / n - y).sum(-1)
    # A unit vector of 64 channels has a little less in the tails than N(0, 1/64): some 5 % less error.
    assert 0.93 * mse < error.mean() < 1.01 * mse
    corrected = Codebook(64, bits, norm_correction=True)
    length = np.linalg.norm(np.asarray(corrected.decode(leaves, {})), axis=-1)
    np.testing.assert_allclose(length, leaves["norm"].astype(np.float32)[..., 0], rtol=1e-6)


SEEDS = 120


@pytest.mark.parametrize(("bits", "norm_correction"), [(1, False), (3, False), (3, True)])
def test_scores_of_the_sketch_are_unbiased_where_those_of_the_codes_are_not(bits: int, norm_correction: bool) -> None:
    k = normalized(NORMAL[:, :1, :16])[0]
    q = k[:, :, :, 0]  # the key itself is the query that a shrunk key shows best

    def errors(quantizer: Codebook) -> jax.Array:
        return (quantizer.scores(q, quantizer.encode(k, {}), {}) - q @ jnp.swapaxes(q, -1, -2))[0, 0]

    @jax.jit
    @jax.vmap
    def sketched(matrix: jax.Array) -> jax.Array:
        given = type("Given", (Sketched,), {"matrix": matrix})  # what a seed decides
        return errors(given(64, bits - 1, norm_correction))

    every = np.asarray(sketched(np.stack([gaussian_matrix(64, seed) for seed in range(SEEDS)])))
    mean = every.mean(0)
    z = mean / (every.std(0, ddof=1) / np.sqrt(SEEDS))  # of each pair: standard normal where there is no bias
    assert abs(z.mean()) < 4 / np.sqrt(len(z))  # the pairs of one key share its sketch: 16 are independent
    assert 0.7 < z.std() < 1.4
    assert np.abs(z).max() < 5
    if not norm_correction:
        codes_alone = float(errors(Codebook(64, bits - 1, False)).diagonal().mean())
        mse = {1: 1, 3: 0.117482}[bits]
        assert -1.2 * mse < codes_alone < -0.8 * mse  # E⟨y, ŷ⟩ = 1 − MSE
        assert abs(mean.diagonal().mean()) < 0.2 * abs(codes_alone)


def test_the_sketch_read_back_gives_the_same_scores_and_costs_what_it_should() -> None:
    quantizer = kvq.scheme("turboquant:bits=3,qjl=true").resolve(64)[0].quantizer
    leaves = quantizer.encode(NORMAL, {})
    q = pinned(1, 5, seed=3)
    dense = q @ np.swapaxes(np.asarray(quantizer.tokens(leaves, {})), -1, -2)
    np.testing.assert_allclose(quantizer.scores(q, leaves, {}), dense, rtol=0, atol=1e-5 * np.abs(dense).max())
    assert {name: (x.shape[3:], x.dtype.name) for name, x in leaves.items()} == {
        "codes": ((1, 16), "uint8"),
        "norm": ((1, 1), "float16"),
        "signs": ((1, 8), "uint8"),
        "residual": ((1, 1), "float16"),
    }
    y = normalized(NORMAL)[0]
    residual = np.asarray(y - quantizer.directions(unpack(leaves["codes"], 2, dtype=jnp.int32), {}), np.float64)
    sketch = residual @ gaussian_matrix(64, 0).T.astype(np.float64)
    clear = np.abs(sketch) > 1e-4
    np.testing.assert_array_equal((np.asarray(unpack(leaves["signs"], 1)) == 1)[clear], (sketch > 0)[clear])


@pytest.mark.parametrize("bits", [0, 1, 2])
def test_a_seed_is_another_sketch_of_the_same_codes(bits: int) -> None:
    one, two = (Sketched(64, bits, True, seed).encode(NORMAL, {}) for seed in (0, 1))
    assert 0.4 < np.mean(np.asarray(unpack(one["signs"], 1)) != np.asarray(unpack(two["signs"], 1))) < 0.6
    for name in set(one) - {"signs"}:
        np.testing.assert_array_equal(one[name], two[name])


# --- what cannot be


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("turboquant:k_bits=8,v_bits=4,qjl=true", ["qjl=true", "k_bits", "1 to 4"]),
        ("turboquant:k_bits=4,v_bits=8,values=lloyd", ["values=lloyd", "v_bits=8", "uniform"]),
        ("turboquant:values=kmeans", ["values='kmeans'", "uniform, lloyd"]),
        ("turboquant:seed=-1", ["seed=-1", "at least 0"]),
        ("turboquant:bits=5", ["bits=5", "1, 2, 3, 4, 8"]),
    ],
)
def test_a_wrong_spec_names_the_field(spec: str, says: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        kvq.scheme(spec)
    assert all(part in str(error.value) for part in says)


@pytest.mark.parametrize(("spec", "head_dim"), [("bits=4", 63), ("bits=3", 60), ("bits=4,qjl=true", 68)])
def test_a_head_dim_whose_codes_do_not_fill_bytes_is_refused(spec: str, head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"axis of {head_dim} codes"):
        kvq.scheme(f"turboquant:{spec}").resolve(head_dim)


@pytest.mark.parametrize(
    ("book", "says"),
    [
        (np.linspace(-1, 1, 8), "shape"),
        (np.linspace(1, -1, 16), "does not ascend"),
        (np.append(np.arange(15), np.inf), "not finite"),
    ],
)
def test_a_book_that_cannot_be_one_is_refused(book: np.ndarray, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kvq.roundtrip("turboquant:bits=4", *[NORMAL[..., 0, :]] * 2, constants={"k_book": book})
