"""The evaluator of Triton IR: it agrees with interpret mode, and sees what is wrong in a kernel."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from triton_ir import Race, run

from kvq_jax.block_formats import e2m1
from pallas_kernels import lowering
from pallas_kernels._internals import dot_scaled, ir

RNG = np.random.default_rng(0)
PARAMETERS = plt.CompilerParams(num_warps=4, num_stages=2)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.normal(size=shape).astype(dtype)


def codes(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def matmul(x: Array, y: Array, **how: Any) -> Any:
    """`[64, 64] · [64, 32]` over a grid, in a loop of blocks of 16, with bfloat16 operands."""

    def kernel(x_ref, y_ref, out_ref):
        def body(i, total):
            k = pl.ds(i * 16, 16)
            return total + plt.dot(x_ref[:, k].astype(jnp.bfloat16), y_ref[k, :].astype(jnp.bfloat16))

        out_ref[...] = lax.fori_loop(0, 4, body, jnp.zeros((16, 16), jnp.float32))

    specs = [pl.BlockSpec((16, 64), lambda i, j: (i, 0)), pl.BlockSpec((64, 16), lambda i, j: (0, j))]
    return pl.pallas_call(
        kernel,
        grid=(4, 2),
        in_specs=specs,
        out_specs=pl.BlockSpec((16, 16), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((64, 32), jnp.float32),
        **how,
    )(x, y)


def softmax(x: Array, lengths: Array, **how: Any) -> Any:
    """Of the first `lengths[i]` of 37 numbers of each row, read 64 at a time; and their largest's place."""

    def kernel(x_ref, length_ref, out_ref, place_ref):
        at = lax.iota(jnp.int32, 64)
        row = plt.load(x_ref.at[at], mask=at < length_ref[...], other=-jnp.inf)
        powers = jnp.exp2((row - row.max()) * 1.4426950408889634)
        plt.store(out_ref.at[at], powers / powers.sum(), mask=at < 37)
        place_ref[...] = jnp.argmax(row).astype(jnp.int32)

    row = pl.BlockSpec((None, 37), lambda i: (i, 0))
    one = pl.BlockSpec((None,), lambda i: (i,))
    out = [jax.ShapeDtypeStruct((5, 37), jnp.float32), jax.ShapeDtypeStruct((5,), jnp.int32)]
    return pl.pallas_call(kernel, grid=(5,), in_specs=[row, one], out_specs=[row, one], out_shape=out, **how)(
        x, lengths
    )


def decode(packed: Array, **how: Any) -> Any:
    """E2M1 through the bits of float16: even channels in one plane, odd ones in the other; and joined again."""

    def kernel(codes_ref, planes_ref, joined_ref):
        code = codes_ref[...].astype(jnp.int32)
        low, high = e2m1(code & 15), e2m1(code >> 4)
        planes_ref[0], planes_ref[1] = low, high
        joined_ref[...] = jnp.stack([low, high], axis=-1).reshape(16, 64)

    out = [jax.ShapeDtypeStruct((2, 16, 32), jnp.float32), jax.ShapeDtypeStruct((16, 64), jnp.float32)]
    return pl.pallas_call(kernel, out_shape=out, **how)(packed)


def scaled(q: Array, scale: Array, packed: Array, **how: Any) -> Any:
    def kernel(q_ref, scale_ref, codes_ref, out_ref):
        out_ref[...] = dot_scaled(q_ref[...], codes_ref[...].T, None, scale_ref[...])

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((16, 32), jnp.float32), **how)(q, scale, packed)


def conversions(x: Array, y: Array, **how: Any) -> Any:
    """Casts, bits, shifts, integer division, selects, branches and loops of unknown length."""

    def kernel(x_ref, y_ref, floats_ref, integers_ref, rest_ref):
        x, y = x_ref[...], y_ref[...]
        short = x.astype(jnp.float8_e4m3fn).astype(jnp.float32) + x.astype(jnp.float16).astype(jnp.float32)
        floats_ref[...] = short + jnp.where(x > 0, jnp.sqrt(jnp.abs(x)), jnp.floor(x)) - jnp.log(jnp.abs(x) + 1)
        bits = lax.bitcast_convert_type(x, jnp.int32)
        integers_ref[...] = (bits >> 20) ^ ((y // 7) << 3) ^ (y % 5) ^ lax.clz(y) ^ (x * 8).astype(jnp.int32)
        doublings = lax.while_loop(lambda c: c[0] < y.max(), lambda c: (c[0] * 2, c[1] + 1), (jnp.int32(1), 0))[1]
        rest_ref[...] = lax.cond(y.min() < -50, lambda: x.astype(jnp.bfloat16), lambda: -x.astype(jnp.bfloat16))
        integers_ref[...] += doublings

    out = [jax.ShapeDtypeStruct((8, 16), dtype) for dtype in (jnp.float32, jnp.int32, jnp.bfloat16)]
    return pl.pallas_call(kernel, out_shape=out, **how)(x, y)


LENGTHS = np.array([1, 36, 37, 20, 2], np.int32)
CASES: dict[str, tuple[Any, tuple[np.ndarray, ...]]] = {
    "matmul": (matmul, (normal(64, 64), normal(64, 32))),
    "softmax": (softmax, (normal(5, 37), LENGTHS)),
    "decode": (decode, (codes(16, 32),)),
    "scaled": (
        scaled,
        (normal(16, 64, dtype=jnp.float8_e4m3fn), RNG.integers(120, 130, (32, 2), dtype=np.uint8), codes(32, 32)),
    ),
    "conversions": (conversions, (normal(8, 16), RNG.integers(-99, 99, (8, 16), dtype=np.int32))),
}


@functools.cache
def interpreted(name: str) -> list[np.ndarray]:
    fn, arrays = CASES[name]
    return [np.asarray(out) for out in jax.tree.leaves(jax.jit(functools.partial(fn, interpret=True))(*arrays))]


@functools.cache
def lowered(name: str, platform: str = "cuda") -> Any:
    fn, arrays = CASES[name]
    [kernel] = lowering.kernels(functools.partial(fn, compiler_params=PARAMETERS), *arrays, platform=platform)
    return kernel


def evaluated(name: str, text: str | None = None, platform: str = "cuda") -> Any:
    outputs = [jax.ShapeDtypeStruct(out.shape, out.dtype) for out in interpreted(name)]
    kernel = lowered(name, platform)
    return run(text or kernel.text, kernel.grid, [*CASES[name][1], *outputs])


def distance(name: str, found: Any) -> float:
    """The largest difference from interpret mode, over the largest magnitude."""
    worst = 0.0
    for x, y in zip(found.outputs, interpreted(name), strict=True):
        a, b = x.astype(np.float64), y.astype(np.float64)
        assert np.isfinite(b).all()
        worst = max(worst, float(np.nan_to_num(np.abs(a - b), nan=np.inf).max() / np.abs(b).max()))
    return worst


@pytest.mark.parametrize("platform", lowering.PLATFORMS)
@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_interpret_mode(name: str, platform: str) -> None:
    assert distance(name, evaluated(name, platform=platform)) < 2e-6


def changed(name: str, pattern: str, replacement: str) -> str:
    """The kernel's text with the first match of a pattern replaced."""
    text, count = re.subn(pattern, replacement, lowered(name).text, count=1)
    assert count, f"{pattern} is not in\n{text}"
    return text


def test_bytes_are_counted_for_each_argument() -> None:
    found = evaluated("matmul")
    x, y, out = 64 * 64 * 4, 64 * 32 * 4, 64 * 32 * 4
    assert found.loaded == (2 * x, 4 * y, 0)  # two columns and four rows of blocks; the load before a store is dead
    assert found.stored == (0, 0, out)
    found = evaluated("softmax")
    assert found.loaded == (4 * int(LENGTHS.sum()), 4 * 5, 0, 0)
    assert found.stored == (0, 0, 4 * 5 * 37, 4 * 5)


@pytest.mark.parametrize(
    ("name", "pattern", "replacement"),
    [
        ("matmul", r"arith\.addf", "arith.subf"),
        ("matmul", r"arith\.constant 4 : i32", "arith.constant 3 : i32"),  # blocks of the loop
        ("softmax", r"cmpi slt", "cmpi sle"),  # one number too many
        ("softmax", r"(tt\.load %\w+, %\w+), %\w+ ", r"\1 "),  # what is masked is nothing in particular
        ("softmax", r"arith\.maxnumf", "arith.minnumf"),
        ("decode", r"tt\.join (%\w+), (%\w+)", r"tt.join \2, \1"),  # the nibbles
        ("decode", r"arith\.constant 7 : i32", "arith.constant 3 : i32"),
        ("scaled", r"lhs = e4m3", "lhs = e5m2"),
        ("scaled", r"(c2_i32_\d+ = arith\.constant) 2", r"\1 1"),  # the stride of the scales
        ("conversions", r"arith\.shrsi", "arith.shrui"),
        ("conversions", r"(scf\.condition.* %\w+, )(%\w+), %\w+ :", r"\1\2, \2 :"),
    ],
)
def test_what_is_wrong_in_a_kernel_is_seen(name: str, pattern: str, replacement: str) -> None:
    assert distance(name, evaluated(name, changed(name, pattern, replacement))) > 1e-3


def test_an_access_outside_of_an_argument_is_an_error() -> None:
    unmasked = changed("softmax", r"(tt\.load %\w+), %\w+, %\w+ ", r"\1 ")
    with pytest.raises(IndexError, match=r"tt\.load of elements 148 … 211 of argument 0, which has 185"):
        evaluated("softmax", unmasked)


def test_programs_that_write_the_same_element_are_seen() -> None:
    with pytest.raises(Race, match=r"program \(1, 0, 0\) stores to argument 2 what another program uses"):
        evaluated("softmax", changed("softmax", r"tt\.get_program_id x", "arith.constant 0"))
    with pytest.raises(Race, match=r"program \(1, 0, 0\) stores to argument 2 what another program uses"):
        evaluated("softmax", changed("softmax", r"(tt\.store %\w+, %\w+), %\w+ ", r"\1 "))
    with pytest.raises(Race, match="two lanes of one store write the same element of argument 2"):
        evaluated("decode", changed("decode", r"(c64_i32_\d+ = arith\.constant) 64", r"\1 32"))


def test_an_operation_that_it_does_not_know_is_named() -> None:
    with pytest.raises(NotImplementedError, match="no function __nv_cosh"):
        evaluated("softmax", changed("softmax", "__nv_exp2f", "__nv_coshf"))
    called = r'tt\.extern_elementwise (%\w+) {.*"__nv_sqrtf"} : \(.*\) -> '
    with pytest.raises(NotImplementedError, match=r"no operation math\.cosh"):
        evaluated("conversions", changed("conversions", called, r"math.cosh \1 : "))


def test_what_is_not_triton_ir_is_refused() -> None:
    with pytest.raises(ir.MLIRError):
        evaluated("matmul", changed("matmul", r"arith\.addf", "arith.addi"))


def test_a_conversion_that_hardware_and_xla_do_differently_is_an_error() -> None:
    big = (np.full((8, 16), 1e3, np.float32), CASES["conversions"][1][1])
    outputs = [jax.ShapeDtypeStruct(out.shape, out.dtype) for out in interpreted("conversions")]
    with pytest.raises(OverflowError, match="to E4M3 of 1000"):
        run(lowered("conversions").text, (1,), [*big, *outputs])
