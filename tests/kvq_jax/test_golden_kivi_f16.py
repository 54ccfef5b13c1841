"""KIVI's bytes in float16, and where the original's fake quantization differs from its own packed path."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scheme_cases import empty

import kvq_jax as kvq
from kvq_jax.formats import rounded
from kvq_jax.packing import unpack

pytestmark = pytest.mark.compiled

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


@functools.cache
def load(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as file:
        return dict(file)


@pytest.mark.parametrize("side", ["k", "v"])
def test_codes_bytes_scales_and_minima_in_float16_are_the_originals(side: str) -> None:
    golden = load(f"kivi_{side}2_g32_f16")
    x = golden["x"]
    cache = kvq.append(empty("kivi:bits=2,arithmetic=f16,recent=0,group=128", x, dtype=x.dtype), x, x)
    stored = {name: np.asarray(leaf) for name, leaf in kvq.stored(cache).items()}
    packed, codes = stored[f"{side}_codes"], np.asarray(unpack(stored[f"{side}_codes"], 2))
    words = packed.view("<i4")
    if side == "k":
        words, codes = words.swapaxes(-1, -2), codes.swapaxes(-1, -2)
    np.testing.assert_array_equal(codes.reshape(x.shape), golden["codes"])
    np.testing.assert_array_equal(words.reshape(golden["packed"].shape), golden["packed"])
    np.testing.assert_array_equal(stored[f"{side}_scale"].ravel(), golden["scale"].ravel())
    np.testing.assert_array_equal(stored[f"{side}_zero"].ravel(), golden["mn"].ravel())
    y = np.asarray(kvq.read(cache)[0 if side == "k" else 1])
    np.testing.assert_allclose(y, golden["y"].astype(np.float32), rtol=2**-10, atol=2e-2)


def test_rounded_is_float16_to_the_bit_compiled_or_not() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    x = bits.view(np.float32)
    x = np.concatenate([x, np.random.default_rng(1).standard_normal(50_000).astype(np.float32) * 1e-5])
    x = np.concatenate([x, np.float32([0, -0.0, 65504, 65519, 65520, 1e30, -1e30, np.inf, -np.inf, np.nan, 2**-25])])
    x = np.concatenate([x, np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)])
    x = x[(np.abs(x) >= np.finfo(np.float32).tiny) | (x == 0) | np.isnan(x)]  # a CPU flushes the rest to 0, as we do
    with np.errstate(over="ignore"):
        want = x.astype(np.float16).astype(np.float32)
    want = np.where(np.isinf(want) & np.isfinite(x), np.copysign(np.float32(65504), x), want)  # saturates
    for f in (rounded, jax.jit(rounded, static_argnums=1)):
        np.testing.assert_array_equal(f(jnp.asarray(x), jnp.float16), want)


def test_float16_operations_inside_one_compiled_function_are_each_rounded() -> None:
    rng = np.random.default_rng(2)
    for magnitude in (1.0, 1e-4, 1e-6, 1e4):
        x = (rng.standard_normal((1, 2, 64, 64)) * magnitude).clip(-3e4, 3e4).astype(np.float16)
        cache = kvq.append(empty("kivi:bits=4,arithmetic=f16,recent=0,group=32", x, dtype=x.dtype), x, x)
        stored = {name: np.asarray(leaf) for name, leaf in kvq.stored(cache).items()}
        rows = x.reshape(1, 2, 2, 32, 64).swapaxes(-1, -2)
        low, scale = rows.min(-1), (rows.max(-1) - rows.min(-1)) / np.float16(15)
        codes = np.clip(np.rint((rows - low[..., None]) / scale[..., None]), 0, 15)
        assert scale.dtype == codes.dtype == np.float16
        np.testing.assert_array_equal(stored["k_scale"], scale)
        np.testing.assert_array_equal(stored["k_zero"], low)
        np.testing.assert_array_equal(unpack(stored["k_codes"], 4), codes)


def test_float16_arithmetic_needs_float16_scales() -> None:
    with pytest.raises(ValueError, match="arithmetic=f16 makes f16 scales, not scales=f32; use scales=f16"):
        kvq.scheme("kivi:arithmetic=f16,scales=f32")


# --- the original's fake quantization


def heads(x: np.ndarray) -> np.ndarray:
    """[B, T, C] -> [B, 1, T, C]: its channels are those of all heads, and each has groups of its own."""
    return x[:, None]


def test_the_keys_one_group_over_the_whole_sequence_is_a_subgroup_as_long() -> None:
    golden = load("kivi_fakequant")
    k = heads(golden["k"])
    back, _ = kvq.roundtrip("kivi:bits=2,subgroup=256,residual=256,scales=f32", k, k)
    want = golden["k_y_whole_seq"]
    np.testing.assert_allclose(back[:, 0], want, rtol=0, atol=1e-6 * np.ptp(want))


def test_whole_groups_are_the_originals_and_the_tail_it_pads_with_zeros_waits_here() -> None:
    golden = load("kivi_fakequant")
    k, whole = heads(golden["k250"]), 7 * 32
    cache = kvq.append(empty("kivi:bits=2,subgroup=32,residual=32,scales=f32", k), k, k)
    assert int(cache.k.flushed[0]) == whole
    stored = kvq.stored(cache)
    for name, want in (("k_scale", golden["k250_scale"]), ("k_zero", golden["k250_mn"])):
        np.testing.assert_allclose(np.asarray(stored[name])[0, 0].T, want[:, :7], rtol=1e-6)
    back = np.asarray(kvq.read(cache)[0])[:, 0]
    want = golden["k250_y"]
    np.testing.assert_allclose(back[:, :whole], want[:, :whole], rtol=0, atol=1e-6 * np.ptp(want))
    np.testing.assert_array_equal(back[:, whole:], golden["k250"][:, whole:])
    assert (np.abs(want - golden["k250"])[:, whole:] > 1e-3).any()
