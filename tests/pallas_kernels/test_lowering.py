"""The scaled dot, and the road from a Pallas kernel to machine code."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import _internals, lowering
from pallas_kernels._internals import dot_scaled

QUERIES, TOKENS, D = 16, 128, 128
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])


def _kernel(q_ref, q_scale_ref, codes_ref, scale_ref, out_ref, *, swap, q_scaled):
    q_scale = q_scale_ref[...] if q_scaled else None
    if swap:
        out_ref[...] = dot_scaled(codes_ref[...], q_ref[...].T, scale_ref[...], q_scale)
    else:
        out_ref[...] = dot_scaled(q_ref[...], codes_ref[...].T, q_scale, scale_ref[...])


def scores(
    q: Array, q_scale: Array, codes: Array, scale: Array, *, swap=False, q_scaled=True, interpret=False
) -> Array:
    """q · Kᵀ of E4M3 queries and E2M1 keys, each with scales of 32 channels; transposed with `swap`."""
    shape = (TOKENS, QUERIES) if swap else (QUERIES, TOKENS)
    return pl.pallas_call(
        functools.partial(_kernel, swap=swap, q_scaled=q_scaled),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="scores",
    )(q, q_scale, codes, scale)


@pytest.fixture(scope="module")
def operands() -> tuple[Array, Array, Array, Array]:
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(QUERIES, D)), jnp.float8_e4m3fn)
    q_scale = jnp.asarray(rng.integers(125, 130, (QUERIES, D // 32)), jnp.uint8)
    codes = jnp.asarray(rng.integers(0, 256, (TOKENS, D // 2)), jnp.uint8)
    return q, q_scale, codes, jnp.asarray(rng.integers(120, 130, (TOKENS, D // 32)), jnp.uint8)


def _expected(q, q_scale, codes, scale, q_scaled=True) -> np.ndarray:
    codes = np.asarray(codes)
    k = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(TOKENS, D).astype(np.float64)
    k *= np.repeat(np.exp2(np.asarray(scale, np.float64) - 127), 32, 1)
    q = np.asarray(q, np.float64)
    if q_scaled:
        q = q * np.repeat(np.exp2(np.asarray(q_scale, np.float64) - 127), 32, 1)
    return q @ k.T


@pytest.mark.parametrize("q_scaled", [True, False])
@pytest.mark.parametrize("swap", [False, True])
def test_the_scaled_dot_is_the_product_of_the_decoded_operands(operands, swap: bool, q_scaled: bool) -> None:
    found = scores(*operands, swap=swap, q_scaled=q_scaled, interpret=True)
    expected = _expected(*operands, q_scaled=q_scaled)
    np.testing.assert_allclose(found, expected.T if swap else expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected).max() > 10


def test_the_scale_bytes_at_the_ends_are_ocps() -> None:
    lhs = jnp.full((1, 96), 2.0, jnp.float8_e4m3fn)  # so that the product with 2^-127 is a normal number
    rhs = jnp.full((96, 1), 1.0, jnp.float8_e4m3fn)
    out = dot_scaled(lhs, rhs, jnp.array([[0, 127, 127]], jnp.uint8))
    assert out.tolist() == [[128.0]]
    assert np.isnan(dot_scaled(lhs, rhs, None, jnp.array([[127, 255, 127]], jnp.uint8)))[0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lhs": jnp.zeros((4, 64), jnp.bfloat16)}, "lhs of dot_scaled is bfloat16"),
        ({"lhs": jnp.zeros((4, 32), jnp.float8_e4m3fn)}, "contracts 32 against 64"),
        ({"rhs_scale": jnp.zeros((8, 1), jnp.uint8)}, r"must be uint8\[8, 2\]"),
        ({"lhs_scale": jnp.zeros((4, 2), jnp.int32)}, r"is int32\[4, 2\]"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, message: str) -> None:
    good = {"lhs": jnp.zeros((4, 64), jnp.float8_e4m3fn), "rhs": jnp.zeros((32, 8), jnp.uint8)}
    assert dot_scaled(**good).shape == (4, 8)
    with pytest.raises(ValueError, match=message):
        dot_scaled(**(good | change))


@pytest.fixture(scope="module")
def texts(operands) -> dict[tuple[str, bool], str]:
    found = {}
    for platform in lowering.PLATFORMS:
        for swap in (False, True):
            [kernel] = lowering.kernels(functools.partial(scores, swap=swap), *operands, platform=platform)
            assert (kernel.grid, kernel.num_warps, kernel.num_stages) == ((1, 1, 1), 4, 2)
            found[platform, swap] = kernel.text
    return found


def test_it_lowers_to_tritons_own(texts) -> None:
    for (_, swap), text in texts.items():
        types = "lhs = e2m1 rhs = e4m3" if swap else "lhs = e4m3 rhs = e2m1"
        assert text.count("tt.dot_scaled") == 1 == text.count(types)


@pytest.mark.parametrize(
    ("target", "swap", "instruction"),
    [
        ("gfx950", False, "v_mfma_scale_f32_16x16x128_f8f6f4"),
        ("gfx950", True, "v_mfma_scale_f32_16x16x128_f8f6f4"),
        ("gfx942", False, "v_mfma_f32_16x16x16_bf16"),  # emulated, as below
        ("sm_100", False, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"),
        ("sm_100", True, "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32"),
        ("sm_90", True, "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16"),
    ],
)
def test_which_matrix_instruction_a_target_has_for_it(texts, target: str, swap: bool, instruction: str) -> None:
    found = lowering.compile_ir(texts[lowering.platform_of(target), swap], target, 4, 2)
    assert found.matrix_instructions == (instruction,)
    assert found.spills == 0
    assert 16 <= found.registers <= 128
    assert found.shared_bytes > 0


def test_sm_80_has_no_e4m3(texts, capfd) -> None:
    with pytest.raises(RuntimeError, match="sm_80; it has no E4M3"):
        lowering.compile_ir(texts["cuda", False], "sm_80")


def test_a_kernel_that_spills_is_seen_to_spill() -> None:
    """One warp cannot hold a product of 128 by 64 in registers: 256 a thread."""

    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = plt.dot(x_ref[...], y_ref[...])

    x, y = jax.ShapeDtypeStruct((128, 16), jnp.bfloat16), jax.ShapeDtypeStruct((16, 64), jnp.bfloat16)
    out, parameters = jax.ShapeDtypeStruct((128, 64), jnp.float32), plt.CompilerParams(num_warps=1)
    [text] = lowering.triton_ir(pl.pallas_call(kernel, out_shape=out, compiler_params=parameters), x, y)
    assert lowering.compile_ir(text, "sm_80", num_warps=1).spills > 0
    assert lowering.compile_ir(text, "sm_80", num_warps=4).spills == 0


def test_mistakes_are_named(operands, monkeypatch) -> None:
    with pytest.raises(ValueError, match="platform='metal' is unknown; allowed: cuda, rocm"):
        lowering.triton_ir(scores, *operands, platform="metal")
    with pytest.raises(ValueError, match="no Triton kernel in the program"):
        lowering.triton_ir(functools.partial(scores, interpret=True), *operands)
    with pytest.raises(ValueError, match="target='sm_70' is unknown"):
        lowering.compile_ir("", "sm_70")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match=r"pip install 'kvq-jax\[dev\]'"):
        lowering.compile_ir("module {}", "sm_90")


def test_another_jax_is_refused_with_a_reason(operands, monkeypatch) -> None:
    assert _internals.available()
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    monkeypatch.setattr(jax, "__version__", "0.11.0")
    _internals.why_unavailable.cache_clear()
    try:
        assert not _internals.available()
        with pytest.raises(RuntimeError, match=r"jax 0\.11\.0 is installed.*install jax 0\.10\.x"):
            lowering.triton_ir(scores, *operands)
    finally:
        _internals.why_unavailable.cache_clear()
