"""fp8, int8 and int4 against NumPy; and what hf_quantized_cache, the counter-example, does wrong."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from scheme_cases import assert_same, empty, pinned

import kvq_jax as kvq
from kvq_jax.quantizers.base import Quantizer

TOKENS, D = 40, 32
K, V = (pinned(2, TOKENS, head_dim=D, seed=seed) for seed in (40, 41))
STORES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def stored(spec: str, constants: dict | None = None) -> dict[str, np.ndarray]:
    """What a cache of float32 holds of K and V."""
    shape = {"batch": 2, "kv_heads": 2, "head_dim": D, "capacity": TOKENS, "dtype": np.float32}
    cache = kvq.append(kvq.init_cache(spec, **shape, constants=constants), K, V)
    return {name: np.asarray(x) for name, x in kvq.stored(cache).items()}


def nibbles(codes: np.ndarray) -> np.ndarray:
    """The first code of a pair in the low half of a byte."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def same_scale(scale: np.ndarray, expected: np.ndarray) -> None:
    """Equal, float32 up to its last bit: XLA divides by a constant as it multiplies by the inverse."""
    assert scale.dtype == expected.dtype
    rtol = 2**-22 if scale.dtype == np.float32 else 0
    np.testing.assert_allclose(scale.astype(np.float32), expected.astype(np.float32), rtol=rtol)


# --- fp8


@pytest.mark.parametrize("scales", ["f32", "f16"])
def test_fp8_codes_are_the_bits_of_e4m3_of_each_token_over_its_own_scale(scales: str) -> None:
    leaves = stored(f"fp8:scales={scales}")
    for side, x in (("k", K), ("v", V)):
        scale = np.abs(x).max(-1) / np.float32(448)
        codes = (x / scale[..., None]).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
        assert leaves[f"{side}_codes"].shape == (2, 2, TOKENS, 1, D)  # one byte a number
        np.testing.assert_array_equal(leaves[f"{side}_codes"][..., 0, :], codes.view(np.uint8))
        same_scale(leaves[f"{side}_scale"][..., 0], scale.astype(STORES[scales]))


def test_fp8_values_are_codes_times_scale_and_the_largest_of_a_token_is_exact_to_a_rounding() -> None:
    leaves = stored("fp8:")
    for side, x, y in zip("kv", (K, V), kvq.roundtrip("fp8:", K, V), strict=True):
        codes = leaves[f"{side}_codes"].view(ml_dtypes.float8_e4m3fn).astype(np.float32)[..., 0, :]
        np.testing.assert_array_equal(y, codes * leaves[f"{side}_scale"])
        assert np.abs(codes).max(-1).min() == 448
        normal = np.abs(codes) >= 2**-6
        assert (np.abs(y - x)[normal] <= np.abs(x)[normal] * (2**-4 + 1e-6)).all()


SCALES = {"k_scale": np.float32(0.011), "v_scale": np.float32(0.06)}


def test_fp8_of_one_calibrated_scale_a_side_saturates_beyond_448_scales() -> None:
    leaves = stored("fp8:scaling=tensor", SCALES)
    for side, x in (("k", K), ("v", V)):
        levels = x / SCALES[f"{side}_scale"]
        codes = levels.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        np.testing.assert_array_equal(leaves[f"{side}_codes"][..., 0, :], codes)
        assert leaves[f"{side}_scale"] == SCALES[f"{side}_scale"]
    assert (np.abs(K / SCALES["k_scale"]) > 464).any(), "nothing here would be NaN without the clamp"
    k, v = kvq.roundtrip("fp8:scaling=tensor", K, V, constants=SCALES)
    assert np.isfinite(k).all()
    assert np.abs(k).max() == np.float32(448) * SCALES["k_scale"]
    assert float(np.square(v - V).sum() / np.square(V).sum()) < 1e-3


@pytest.mark.parametrize("spec", ["fp8:", "fp8:scaling=tensor"])
def test_fp8_turns_neither_nan_nor_infinity_into_a_number(spec: str) -> None:
    x = K.copy()
    x[0, 0, 3, 4], x[0, 1, 5, 6], x[1, 0, 7, 8] = np.nan, np.inf, -np.inf
    y = np.asarray(kvq.roundtrip(spec, x, x, constants=SCALES if "tensor" in spec else None)[0])
    assert np.isnan(y[~np.isfinite(x)]).all()
    touched = ~np.isfinite(x) if "tensor" in spec else ~np.isfinite(x).all(-1, keepdims=True) | np.zeros_like(x, bool)
    assert np.isfinite(y[~touched]).all()


def test_requirement_12_a_static_scale_has_no_default_and_must_be_positive_and_finite() -> None:
    shape = {"batch": 1, "kv_heads": 2, "head_dim": D, "capacity": 8}
    with pytest.raises(ValueError, match="fp8 needs constants, and has no default for them"):
        kvq.init_cache("fp8:scaling=tensor", **shape)
    with pytest.raises(ValueError, match="fp8 needs the constant 'v_scale', which is missing"):
        kvq.init_cache("fp8:scaling=tensor", **shape, constants={"k_scale": np.float32(1)})
    for bad, says in (
        (0, "must be positive"),
        (-1, "must be positive"),
        (np.nan, "not finite"),
        (np.inf, "not finite"),
    ):
        with pytest.raises(ValueError, match=says):
            kvq.init_cache("fp8:scaling=tensor", **shape, constants=SCALES | {"k_scale": np.float32(bad)})
    with pytest.raises(ValueError, match="takes no constants"):
        kvq.init_cache("fp8:", **shape, constants=SCALES)


def test_fp8_calibration_is_the_largest_magnitude_over_448_and_shows_what_is_wrong_with_a_sample() -> None:
    scheme = kvq.scheme("fp8:scaling=tensor")
    assert (scheme.needs_constants, scheme.captures) == (True, ("k", "v"))
    samples = {"k": jnp.asarray(K), "v": jnp.asarray(V)}
    constants = scheme.calibrate(samples)
    assert set(constants) == {"k_scale", "v_scale"}
    for side, x in (("k", K), ("v", V)):
        assert constants[f"{side}_scale"] == np.abs(x).max() / np.float32(448)
    for y, x in zip(kvq.roundtrip(scheme, K, V, constants=constants), (K, V), strict=True):
        np.testing.assert_allclose(np.abs(y).max(), np.abs(x).max(), rtol=1e-6)  # nothing saturates
    assert np.isnan(scheme.calibrate(samples | {"k": samples["k"].at[0, 0, 1, 2].set(jnp.nan)})["k_scale"])
    plain = kvq.scheme("fp8:")
    assert (plain.needs_constants, plain.captures) == (False, ())
    with pytest.raises(ValueError, match="takes no constants"):
        plain.calibrate(samples)


# --- integers


@pytest.mark.parametrize("scales", ["f16", "f32", "bf16"])
@pytest.mark.parametrize("bits", [8, 4])
def test_symmetric_integers_are_offset_binary_of_x_over_the_tokens_largest(bits: int, scales: str) -> None:
    leaves, largest = stored(f"int{bits}:scales={scales}"), 2 ** (bits - 1) - 1
    ys = kvq.roundtrip(f"int{bits}:scales={scales}", K, V)
    for side, x, y in zip("kv", (K, V), ys, strict=True):
        scale = np.abs(x).max(-1) / np.float32(largest)
        levels = np.rint(x / scale[..., None])
        assert set(np.abs(levels).max(-1).ravel()) == {largest}  # all of the range, and nothing beyond it
        codes = (levels + 2 ** (bits - 1)).astype(np.uint8)
        np.testing.assert_array_equal(leaves[f"{side}_codes"][..., 0, :], codes if bits == 8 else nibbles(codes))
        rounded = scale.astype(STORES[scales])
        same_scale(leaves[f"{side}_scale"][..., 0], rounded)
        assert f"{side}_zero" not in leaves
        np.testing.assert_allclose(y, levels * rounded[..., None].astype(np.float32), rtol=2**-22)


def test_offset_binary_is_twos_complement_with_the_sign_bit_flipped() -> None:
    codes = stored("int8:")["k_codes"][..., 0, :]
    scale = np.abs(K).max(-1, keepdims=True) / np.float32(127)
    np.testing.assert_array_equal((codes ^ 0x80).view(np.int8), np.rint(K / scale))


@pytest.mark.parametrize("bits", [8, 4])
def test_asymmetric_integers_reach_from_a_tokens_minimum_to_its_maximum(bits: int) -> None:
    leaves = stored(f"int{bits}:symmetric=false,scales=f32")
    for side, x in (("k", K), ("v", V)):
        low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
        scale = (high - low) / np.float32(2**bits - 1)
        codes = np.rint((x - low) / scale).astype(np.uint8)
        assert (codes.min(), codes.max()) == (0, 2**bits - 1)
        np.testing.assert_array_equal(leaves[f"{side}_codes"][..., 0, :], codes if bits == 8 else nibbles(codes))
        same_scale(leaves[f"{side}_scale"][..., 0, :], scale)
        np.testing.assert_array_equal(leaves[f"{side}_zero"][..., 0, :], low)


def test_requirement_15_keys_far_from_zero_on_one_side_are_what_asymmetric_is_for() -> None:
    biased = K * np.float32(0.1) + 5  # as a key bias leaves them

    def error(spec: str) -> float:
        y = kvq.roundtrip(spec, biased, biased)[0]
        return float(np.square(y - biased).sum() / np.square(biased - 5).sum())

    assert error("int4:symmetric=false") < 0.05 < 0.5 < error("int4:")


@pytest.mark.parametrize("spec", ["int4:", "int8:", "fp8:"])
def test_every_token_is_stored_as_it_comes(spec: str) -> None:
    for side in kvq.append(empty(spec, K), K, V).sides:
        assert (side.side.window.recent, side.side.window.group, side.window.shape[2]) == (0, 1, 0)
        np.testing.assert_array_equal(side.flushed, [TOKENS, TOKENS])


def test_a_head_dim_that_leaves_half_a_byte_is_an_error() -> None:
    with pytest.raises(ValueError, match="33 codes of 4 bits does not fill whole bytes; make it a multiple of 2"):
        kvq.init_cache("int4:", batch=1, kv_heads=1, head_dim=33, capacity=8)
    assert kvq.init_cache("int8:", batch=1, kv_heads=1, head_dim=33, capacity=8).k.store["codes"].shape[-1] == 33


# --- reads without dequantizing

READS = ["fp8:", "fp8:scaling=tensor", "int8:", "int4:scales=bf16", "int4:symmetric=false", "kivi:subgroup=8,bits=4"]


@pytest.mark.parametrize(
    ("spec", "head_dim"), [(spec, 32) for spec in READS] + [("fp8:", 256), ("int4:symmetric=false", 256)]
)
def test_requirement_10_folded_scores_and_sums_equal_products_with_what_is_decoded(spec: str, head_dim: int) -> None:
    quantizer = kvq.scheme(spec).resolve(head_dim)[1].quantizer  # V's: per token
    constants = {"scale": jnp.float32(0.03)} if "tensor" in spec else {}
    x = pinned(2, 24, head_dim=head_dim, seed=42)
    leaves = quantizer.encode(x.reshape(2, 2, 24, 1, head_dim), constants)
    for queries in (1, head_dim):  # the last one decodes first where folding costs more
        q = pinned(2, queries, head_dim=head_dim, seed=43)
        p = np.abs(pinned(2, queries, head_dim=24, seed=44))
        for name, arguments in (("scores", q), ("weighted_sum", p)):
            folded = getattr(quantizer, name)(arguments, leaves, constants)
            dense = np.asarray(getattr(Quantizer, name)(quantizer, arguments, leaves, constants))
            np.testing.assert_allclose(folded, dense, rtol=0, atol=1e-5 * np.abs(dense).max(), err_msg=name)


def test_requirement_21_the_compiled_read_of_8_bit_codes_never_widens_the_store() -> None:
    def temporaries(spec: str, capacity: int) -> int:
        def shape(*of: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(of, jnp.float32)

        cache = jax.eval_shape(lambda: kvq.init_cache(spec, batch=1, kv_heads=2, head_dim=64, capacity=capacity))
        block = shape(1, 2, 1, 64)
        run = jax.jit(kvq.attend).lower(shape(1, 8, 1, 64), cache, block, block).compile()
        return run.memory_analysis().temp_size_in_bytes

    short, long = (temporaries("fp8:", capacity) for capacity in (32768, 262144))
    assert 0 < long <= short + 4096


# --- the counter-example

RESIDUAL = 8
HF = f"hf_quantized_cache:channels=16,residual={RESIDUAL}"


def group_oracle(x: np.ndarray, channels: int = 16, bits: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, scale, zero) of groups of channels of one token, in x's dtype throughout."""
    groups = x.reshape(*x.shape[:-1], -1, channels)
    low = groups.min(-1)
    scale = (groups.max(-1) - low) / x.dtype.type(2**bits - 1)
    codes = np.rint(((groups - low[..., None]) / scale[..., None]).astype(np.float32)).clip(0, 2**bits - 1)
    return codes.astype(np.uint8).reshape(x.shape), scale, low


def history_oracle(x: np.ndarray, appends: list[int]) -> tuple[np.ndarray, int]:
    """(all tokens as they are read, how many of them are quantized): the first append at once; then, when `RESIDUAL`
    wait, everything again. In x's dtype."""
    history, waiting, start = x[..., :0, :], x[..., :0, :], 0
    for i, size in enumerate(appends):
        waiting = np.concatenate([waiting, x[..., start : start + size, :]], axis=-2)
        start += size
        if i == 0 or waiting.shape[-2] >= RESIDUAL:
            codes, scale, low = group_oracle(np.concatenate([history, waiting], axis=-2))
            groups = codes.reshape(*scale.shape, -1).astype(x.dtype)
            history = (groups * scale[..., None] + low[..., None]).reshape(codes.shape)
            waiting = waiting[..., :0, :]
    return np.concatenate([history, waiting], axis=-2).astype(np.float32), history.shape[-2]


def streamed(spec: str, appends: list[int], dtype=np.float32, x: np.ndarray = K) -> kvq.Cache:
    """x as K, V as V, in appends of these sizes; all padded to one shape, so that one program runs."""
    cache, start = empty(spec, x, dtype=dtype), 0
    k, v = (jnp.asarray(np.concatenate([y, np.zeros_like(y)], axis=2), dtype) for y in (x, V))
    for size in appends:
        block = (y[:, :, start : start + TOKENS] for y in (k, v))
        cache = kvq.append(cache, *block, valid=jnp.broadcast_to(jnp.arange(TOKENS) < size, (2, TOKENS)))
        start += size
    return cache


@functools.cache
def after(*appends: int) -> kvq.Cache:
    return streamed(HF, list(appends))


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("appends", [[20, *[1] * 20], [3, 2, 7, 9, 1, 1, 8]], ids=str)
def test_hf_reads_back_what_the_rule_gives(name: str, appends: list[int]) -> None:
    cache = streamed(f"{HF},scales={name}", appends, STORES[name])
    for x, y, side in zip((K, V), kvq.read(cache), cache.sides, strict=True):
        expected, quantized = history_oracle(x.astype(STORES[name])[:, :, : sum(appends)], appends)
        np.testing.assert_array_equal(side.flushed, [quantized] * 2)
        off = np.abs(y - expected) > 1e-6 * np.abs(expected).max()
        assert off.mean() < 2e-3  # a quotient in the middle between two codes


def test_hf_stores_groups_of_consecutive_channels_of_one_token() -> None:
    leaves = {name: np.asarray(x) for name, x in kvq.stored(streamed(f"{HF},scales=f32", [TOKENS])).items()}
    for side, x in (("k", K), ("v", V)):
        codes, scale, zero = group_oracle(x)
        np.testing.assert_array_equal(leaves[f"{side}_codes"][..., 0, :], nibbles(codes))
        same_scale(leaves[f"{side}_scale"][..., 0, :], scale)
        np.testing.assert_array_equal(leaves[f"{side}_zero"][..., 0, :], zero)


def test_hf_counter_example_the_newest_tokens_of_a_prompt_are_quantized() -> None:
    for side, x, y in zip(after(TOKENS).sides, (K, V), kvq.read(after(TOKENS)), strict=True):
        np.testing.assert_array_equal(side.flushed, [TOKENS] * 2)
        assert (np.abs(y - x).max(-1) > 1e-3).mean() > 0.99


def test_hf_later_tokens_wait_until_the_residual_is_full_and_then_all_leave() -> None:
    flushed = [int(after(20, *[1] * more).k.flushed[0]) for more in range(2 * RESIDUAL + 1)]
    assert flushed == [20] * RESIDUAL + [20 + RESIDUAL] * RESIDUAL + [20 + 2 * RESIDUAL]
    waiting = after(20, *[1] * (RESIDUAL - 1))
    np.testing.assert_array_equal(np.asarray(kvq.read(waiting)[0])[:, :, 20:], K[:, :, 20 : 20 + RESIDUAL - 1])
    assert not after(20, *[1] * RESIDUAL).k.window.any()  # not one token is exact


def test_hf_with_a_recent_window_keeps_it_and_still_rewrites() -> None:
    cache = streamed(f"{HF},recent=3", [20, *[1] * RESIDUAL])
    np.testing.assert_array_equal(cache.k.flushed, [17 + RESIDUAL] * 2)
    k = np.asarray(kvq.read(cache)[0])
    np.testing.assert_array_equal(k[:, :, -3:], K[:, :, 17 + RESIDUAL : 20 + RESIDUAL])
    assert (np.abs(k - K[:, :, : 20 + RESIDUAL])[:, :, :-3].max(-1) > 1e-3).mean() > 0.99
    assert kvq.scheme(f"{HF},group=4").resolve(64)[0].window.group == 4


def test_hf_counter_example_a_split_into_appends_changes_the_stored_bytes() -> None:
    for one, other in ((after(36), after(20, *[1] * 16)), (after(36), after(30, 6)), (after(8, 8), after(15, 1))):
        np.testing.assert_array_equal(one.length, other.length)
        with pytest.raises(AssertionError, match="differs"):
            assert_same(one, other)


def test_hf_counter_example_a_flush_rewrites_the_history_of_the_rows_that_flush_and_only_theirs() -> None:
    appends = [20, *[1] * (RESIDUAL - 1)]
    before = streamed(f"{HF},scales=f32", appends)
    k, v = (np.roll(x, -sum(appends), axis=2) for x in (K, V))
    later = kvq.append(before, k, v, valid=jnp.broadcast_to(jnp.arange(TOKENS) < 1, (2, TOKENS)).at[1].set(False))
    np.testing.assert_array_equal(later.k.flushed, [20 + RESIDUAL, 20])
    changed = {}
    for leaf in ("codes", "scale", "zero"):
        old, new = (np.asarray(c.k.store[leaf]) for c in (before, later))
        np.testing.assert_array_equal(old[1], new[1])
        assert not new[0, :, 20 + RESIDUAL :].any()  # what is not written yet stays zero
        changed[leaf] = (old[0, :, :20] != new[0, :, :20]).mean()
    assert changed["scale"] > 0.3, changed


def test_hf_counter_example_old_tokens_drift_from_flush_to_flush() -> None:
    def history(flushes: int) -> np.ndarray:
        appends = [16, *[1] * (RESIDUAL * flushes)]
        return np.asarray(kvq.read(streamed(f"{HF},scales=f16", appends, np.float16))[0])[:, :, :16]

    first, drift = history(0), [np.square(history(n) - history(0)).sum() for n in (1, 3)]
    assert 0 < drift[0] < drift[1]
    assert drift[1] < 1e-3 * np.square(first - K[:, :, :16]).sum()  # but what they lost at first is far more


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("hf_quantized_cache:residual=1", "residual=1 is out of range; allowed: a whole number of at least 2"),
        ("hf_quantized_cache:bits=3", "bits=3 is out of range; allowed: 2, 4"),
        ("int8:bits=4", "int8 has no field 'bits'"),
        ("fp8:scaling=head", "scaling='head' is out of range; allowed: token, tensor"),
        ("fp8:scales=bf16", "scales='bf16' is out of range; allowed: f32, f16"),
    ],
)
def test_what_cannot_be_is_named(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kvq.scheme(spec)


def test_a_schemes_own_bits_can_be_replaced() -> None:
    two = kvq.scheme(kvq.scheme("hf_quantized_cache:residual=16"), bits=2)
    assert two == kvq.scheme("hf_quantized_cache:bits=2,residual=16")


def test_hf_groups_are_the_largest_divisor_of_head_dim() -> None:
    for head_dim, group in ((64, 64), (128, 64), (80, 40), (96, 48), (32, 32)):
        assert kvq.scheme("hf_quantized_cache:").resolve(head_dim)[0].quantizer.group == group
