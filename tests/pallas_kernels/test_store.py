"""The store kernels store what the library's encoders store."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_ir_call import call

import kvq_jax as kvq
from kvq_jax.balance import variance_normalize
from kvq_jax.formats import rounded
from kvq_jax.packing import unpack
from kvq_jax.rotation import hadamard
from pallas_kernels import lowering
from pallas_kernels.store import rotated, store_kvarn, store_ultraquant


def once(fn: Any, *args: Any) -> Any:
    """fn(*args), compiled for one call: without optimization."""
    return jax.jit(fn).lower(*args).compile(compiler_options={"xla_backend_optimization_level": 0})(*args)


BATCH, HEADS, TOKENS = 2, 3, 11  # 66 rows of head_dim, which fill no whole number of programs of 16
GROUP = 128  # tokens of a KVarN tile, and its channels


# UltraQuant: the cases differ in head_dim, rotation, type of the tokens and constants.
ULTRA: dict[str, tuple[int, str, bool, Any, bool]] = {
    "k_128": (128, "ultraquant", True, jnp.float32, False),
    "k_96_bf16_heads": (96, "ultraquant:rounding=even", True, jnp.bfloat16, True),
    "v_64": (64, "ultraquant:block=16", False, jnp.float32, False),
}


def _tokens(head_dim: int, dtype: Any) -> jax.Array:
    """Ordinary tokens, and those at the ends: zero, denormal, tiny, huge, infinite, NaN, and ties of the grid.

    (Only where nothing is rotated one that is partly denormal: a CPU's additions take that for zero.)"""
    rng = np.random.default_rng(head_dim)
    x = rng.normal(size=(BATCH, HEADS, TOKENS, head_dim)) * np.exp(rng.normal(size=head_dim))
    x[0, 0, :6] *= np.array([0, 1e-40, 1e-37 if head_dim == 64 else 1e-30, 1e30, np.inf, np.nan])[:, None]
    x[0, 1, 0] = np.resize([0.25, -0.25, 0.75, -0.75, 1.25, -2.5, 5.0, 6.0, -0.0], head_dim)
    x[0, 1, 1] = 1.5
    return jnp.asarray(x, dtype)


@functools.cache
def ultra(name: str) -> Any:
    """(the kernel as a function of x and of interpret, x, the encoder's leaves)"""
    head_dim, spec, rotate, dtype, by_head = ULTRA[name]
    quantizer = kvq.scheme(spec).sides(head_dim)[0 if rotate else 1].quantizer
    x = _tokens(head_dim, dtype)
    constants = {"c": jnp.array([0.1, 0.156, 0.25], jnp.float32)} if by_head else {}

    def encoded(x: jax.Array) -> Any:
        x = x.astype(jnp.float32)
        return quantizer.encode((rounded(hadamard(x), jnp.float32) if rotate else x)[:, :, :, None], constants)

    return functools.partial(store_ultraquant, quantizer, constants=constants, rotate=rotate), x, once(encoded, x)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        assert (found[name].shape, found[name].dtype) == (leaf.shape, leaf.dtype)
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(leaf), err_msg=name)


@pytest.mark.parametrize("name", ULTRA)
def test_ultraquants_bytes_are_the_encoders(name: str) -> None:
    kernel, x, expected = ultra(name)
    assert_equal(once(functools.partial(kernel, interpret=True), x), expected)
    assert len(np.unique(expected["codes"])) > 100
    assert np.unique(expected["scale"]).size > 5
    assert np.any(np.asarray(expected["scale"]) == 0)


@pytest.mark.parametrize("platform", lowering.PLATFORMS)
@pytest.mark.parametrize("name", ULTRA)
def test_ultraquants_lowered_kernel_stores_the_same(name: str, platform: str) -> None:
    kernel, x, expected = ultra(name)
    found, [seen] = call(kernel, x, platform=platform)
    assert_equal(found, expected)
    assert seen.loaded[0] == x.nbytes  # once
    written, rows = sum(leaf.nbytes for leaf in expected.values()), x.size // (x.shape[-1] & -x.shape[-1])
    assert sum(seen.stored) == written // rows * -(-rows // 16) * 16  # whole programs of 16 rows


def test_ultraquants_bytes_are_those_of_a_cache() -> None:
    kernel, x, _ = ultra("k_128")
    x = x[:, :, 6:]
    cache = kvq.init_cache(
        "ultraquant", batch=BATCH, kv_heads=HEADS, head_dim=128, capacity=x.shape[2], dtype=jnp.float32
    )
    stored = kvq.stored(kvq.append(cache, x, x))
    found = once(functools.partial(kernel, interpret=True), x)
    assert_equal(found, {"codes": stored["k_codes"], "scale": stored["k_scale"]})


def test_the_rotation_is_equal_to_the_last_bit() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 256)), jnp.float32)
    np.testing.assert_array_equal(np.asarray(once(rotated, x)), np.asarray(hadamard(x)))


KVARN: dict[str, tuple[str, int]] = {
    "k": ("kvarn", 0),
    "v": ("kvarn", 1),
    "k_4_equivariant_f32": ("kvarn:bits=4,normalize=equivariant,scales=f32", 0),
}


@functools.cache
def kvarn(name: str) -> Any:
    spec, side = KVARN[name]
    quantizer = kvq.scheme(spec).sides(GROUP)[side].quantizer
    rng = np.random.default_rng(1)
    x = rng.normal(size=(1, 2, 1, GROUP, GROUP)) * np.exp(rng.normal(size=GROUP)) + rng.normal(size=GROUP)
    x *= np.exp(0.5 * rng.normal(size=(GROUP, 1)))
    x = jnp.asarray(x, jnp.float32)
    return quantizer, x, once(lambda x: quantizer.encode(x, {}), x)


def assert_close(name: str, found: dict[str, Any]) -> None:
    """Scales to their last bits; codes equal but where a value lies in the middle of two levels, up to 1e-4."""
    quantizer, x, expected = kvarn(name)
    assert found.keys() == expected.keys()
    for leaf in expected:
        assert (found[leaf].shape, found[leaf].dtype) == (expected[leaf].shape, expected[leaf].dtype)
        if leaf != "codes":
            a, b = (np.asarray(y[leaf], np.float64) for y in (found, expected))
            np.testing.assert_allclose(a, b, rtol=1e-3 if a.dtype == np.float16 else 2e-3, atol=1e-4)
    codes, wanted = (np.asarray(unpack(y["codes"], quantizer.bits)).astype(int) for y in (found, expected))
    assert np.bincount(wanted.ravel(), minlength=2**quantizer.bits).min() > 100
    rows = jnp.swapaxes(x, -1, -2) if "token_scale" in expected else x
    how = {"iters": quantizer.iters, "normalize": quantizer.normalize}
    balanced = np.asarray(variance_normalize(rows, **how).balanced, np.float64)
    low, high = balanced.min(-1, keepdims=True), balanced.max(-1, keepdims=True)
    level = (balanced - low) / ((high - low) / (2**quantizer.bits - 1))
    differs = codes != wanted
    assert np.all(np.abs(level[differs] % 1 - 0.5) < 1e-4)
    assert differs.mean() < 1e-3


@pytest.mark.parametrize("name", ["k", "v"])
def test_kvarns_codes_are_the_encoders(name: str) -> None:
    quantizer, x, _ = kvarn(name)
    assert_close(name, once(functools.partial(store_kvarn, quantizer, interpret=True), x))


@pytest.mark.parametrize(("name", "platform"), [("k", "cuda"), ("v", "rocm"), ("k_4_equivariant_f32", "rocm")])
def test_kvarns_lowered_kernel_stores_the_same(name: str, platform: str) -> None:
    quantizer, x, expected = kvarn(name)
    found, [seen] = call(functools.partial(store_kvarn, quantizer), x, platform=platform)
    assert_close(name, found)
    assert sum(seen.stored) == sum(leaf.nbytes for leaf in expected.values())


def test_a_kvarn_row_with_nan_is_unknown_and_the_others_are_not() -> None:
    quantizer, x, expected = kvarn("v")
    spoilt = x.at[0, 0, 0, 5, 7].set(jnp.nan)
    found, _ = call(functools.partial(store_kvarn, quantizer), spoilt, platform="cuda")
    error, usual = (np.abs(np.asarray(quantizer.decode(leaves, {}) - x))[0, 0, 0] for leaves in (found, expected))
    assert np.isnan(error[5]).all()
    others = np.delete(error, 5, axis=0)
    assert others.max() < 2 * usual.max()


def _compiled(fn: Any, x: Any, target: str) -> lowering.Resources:
    [kernel] = lowering.kernels(fn, x, platform=lowering.platform_of(target))
    return lowering.compile_ir(kernel.text, target, kernel.num_warps, kernel.num_stages)


@pytest.mark.parametrize("target", lowering.TARGETS)
def test_they_compile_without_spills(target: str) -> None:
    found = _compiled(ultra("k_128")[0], ultra("k_128")[1], target)
    assert found.spills == 0
    assert found.registers <= 80
    found = _compiled(functools.partial(store_kvarn, kvarn("k")[0]), kvarn("k")[1], target)
    assert found.spills == 0
    assert found.registers <= 128  # of 16 warps on NVIDIA
    assert found.shared_bytes <= 65536


def test_what_they_have_not_is_named() -> None:
    ones = jnp.ones((1, 1, 1, GROUP, GROUP))
    for spec, head_dim, message in [
        ("kvarn:bits=3", GROUP, "bits=3, scales=f16: the kernel has 1, 2, 4 and 8 bits"),
        ("kvarn:scales=fp8", GROUP, "bits=2, scales=fp8"),
        ("kvarn", 96, "head_dim=96: the kernel needs a power of two"),
        ("kvarn:group=24", GROUP, "tokens of a tile=24"),
    ]:
        quantizer = kvq.scheme(spec).sides(head_dim)[1].quantizer
        with pytest.raises(ValueError, match=message):
            store_kvarn(quantizer, ones[..., : quantizer.tile_tokens, :head_dim])
    with pytest.raises(ValueError, match="x has head_dim=32; the quantizer has 128"):
        store_ultraquant(kvq.scheme("ultraquant").sides(128)[0].quantizer, jnp.ones((1, 1, 1, 32)), rotate=True)
