"""Everything that touches jax's internals: the primitive behind `dot_scaled`, and the Triton IR of a lowered program.

Written against jax 0.10 (`SUPPORTED`). With another version `why_unavailable()` says so, and only what needs the
Triton lowering is refused: `dot_scaled` goes on working in interpret mode and in plain programs.
"""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir

SUPPORTED = (0, 10)  # major and minor version of jax
GROUP = 32  # elements of the contraction that share a scale (OCP Microscaling Formats v1.0)

_CUSTOM_CALL = "__gpu$xla.gpu.triton"
_ELEMENT_TYPES = {"float8_e4m3fn": 0, "uint8": 4}  # of Triton's ScaleDotElemType: E4M3, E2M1


@functools.cache
def why_unavailable() -> str:
    """Why Pallas kernels cannot be lowered with Triton by the installed jax; empty if they can."""
    if jax.__version_info__[:2] != SUPPORTED:
        wanted = ".".join(map(str, SUPPORTED))
        return (
            f"jax {jax.__version__} is installed, and pallas_kernels reaches into the Triton lowering of jax "
            f"{wanted}.x; install jax {wanted}.x, or use implementation='xla'"
        )
    try:
        for module in ("jax._src.pallas.triton.lowering", "jaxlib.mlir.ir", "jaxlib.triton"):
            importlib.import_module(module)
    except ImportError as error:
        return f"this build of jaxlib has no Triton dialect ({error}); use implementation='xla'"
    return ""


def _lowering() -> Any:
    """jax's Triton lowering, which a jax without it must not be asked for."""
    return importlib.import_module("jax._src.pallas.triton.lowering")


def available() -> bool:
    """Whether the Triton lowering can be used; `why_unavailable()` tells why not."""
    return not why_unavailable()


def require() -> None:
    """Raises RuntimeError with the reason if the Triton lowering cannot be used."""
    if reason := why_unavailable():
        raise RuntimeError(reason)


def dot_scaled(lhs: Array, rhs: Array, lhs_scale: Array | None = None, rhs_scale: Array | None = None) -> Array:
    """The product of the microscaling matrix instructions, float32 `[M, N]`:

        out[m, n] = Σ_k lhs[m, k] · 2^(lhs_scale[m, k/32] − 127) · rhs[k, n] · 2^(rhs_scale[n, k/32] − 127)

    Args: lhs float8_e4m3fn `[M, K]`, or E2M1 codes packed in uint8 `[M, K/2]`; rhs float8_e4m3fn `[K, N]`, or packed
    `[K/2, N]`; the low nibble is the even k. Scales: E8M0 bytes, uint8 `[M, K/32]` and `[N, K/32]`; absent means 1.
    In a Pallas kernel for Triton this is `tt.dot_scaled`; in interpret mode and elsewhere the exact values are decoded
    and multiplied in float32. A scale byte of 255 is NaN (OCP), of 0 the number 2^−127.

    Raises ValueError for other types or for shapes that do not fit together.
    """
    k, k_rhs = _contraction(lhs, 1, "lhs"), _contraction(rhs, 0, "rhs")
    if k != k_rhs or k % GROUP:
        raise ValueError(f"dot_scaled contracts {k} against {k_rhs}; they must be equal and a multiple of {GROUP}")
    for name, scale, count in (("lhs", lhs_scale, lhs.shape[0]), ("rhs", rhs_scale, rhs.shape[1])):
        if scale is not None and (scale.dtype != jnp.uint8 or scale.shape != (count, k // GROUP)):
            raise ValueError(
                f"{name}_scale of dot_scaled is {scale.dtype}{list(scale.shape)}; it must be "
                f"uint8[{count}, {k // GROUP}]"
            )
    scales = [scale for scale in (lhs_scale, rhs_scale) if scale is not None]
    given = {"has_lhs_scale": lhs_scale is not None, "has_rhs_scale": rhs_scale is not None}
    out: Array = _primitive.bind(lhs, rhs, *scales, **given)
    return out


_primitive = Primitive("kvq_dot_scaled")


def _contraction(operand: Array, axis: int, name: str) -> int:
    if operand.ndim != 2 or operand.dtype.name not in _ELEMENT_TYPES:
        raise ValueError(
            f"{name} of dot_scaled is {operand.dtype}{list(operand.shape)}; allowed: two axes of float8_e4m3fn, or of "
            "uint8 with two E2M1 codes a byte"
        )
    return operand.shape[axis] * (2 if operand.dtype == jnp.uint8 else 1)


def _values(operand: Array, axis: int) -> Array:
    if operand.dtype != jnp.uint8:
        return operand.astype(jnp.float32)
    codes = operand.astype(jnp.int32)
    pairs = jnp.stack([codes & 15, codes >> 4], axis=axis + 1)
    shape = list(operand.shape)
    shape[axis] *= 2
    codes = pairs.reshape(shape)
    half = ((codes & 8) << 12 | (codes & 7) << 9).astype(jnp.uint16)  # a float16 of the value times 2^-14
    return lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) * np.float32(2**14)


def _factors(scale: Array) -> Array:
    """Of E8M0 bytes `[rows, K/32]`: float32 `[rows, K]`."""
    bits = scale.astype(jnp.uint32) << 23
    factor = lax.bitcast_convert_type(bits, jnp.float32)
    factor = jnp.where(scale == 0, np.float32(2.0**-127), jnp.where(scale == 255, jnp.nan, factor))
    return jnp.repeat(factor, GROUP, axis=1)


def _decoded(lhs: Array, rhs: Array, *scales: Array, has_lhs_scale: bool, has_rhs_scale: bool) -> Array:
    left, right = _values(lhs, 1), _values(rhs, 0)
    if has_lhs_scale:
        left *= _factors(scales[0])
    if has_rhs_scale:
        right *= _factors(scales[-1]).T
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


def _to_triton(
    context: Any, lhs: Any, rhs: Any, *scales: Any, has_lhs_scale: bool, has_rhs_scale: bool
) -> Any:  # of jax._src.pallas.triton.lowering: values of the IR
    lowering = _lowering()
    dialect: Any = importlib.import_module("jaxlib.triton.dialect")
    [out] = context.avals_out
    integer = ir.IntegerType.get_signless(32)
    types = [ir.IntegerAttr.get(integer, _ELEMENT_TYPES[aval.dtype.name]) for aval in context.avals_in[:2]]
    zeros = lowering._zeros(ir.RankedTensorType.get(out.shape, ir.F32Type.get()))
    named = dict(zip(["a_scale"] * has_lhs_scale + ["b_scale"] * has_rhs_scale, scales, strict=True))
    return dialect.dot_scaled(zeros.type, lhs, rhs, zeros, *types, False, lhs_k_pack=True, rhs_k_pack=True, **named)


def _register() -> None:
    _primitive.def_abstract_eval(
        lambda lhs, rhs, *_, **__: jax.core.ShapedArray((lhs.shape[0], rhs.shape[1]), jnp.dtype(jnp.float32))
    )
    _primitive.def_impl(lambda *operands, **which: jax.jit(functools.partial(_decoded, **which))(*operands))
    mlir.register_lowering(_primitive, mlir.lower_fun(_decoded, multiple_results=False))
    if available():
        lowering = _lowering()
        lowering.register_lowering(_primitive)(_to_triton)


_register()


@dataclass(frozen=True)
class LoweredKernel:
    """One pallas_call, lowered: its name, Triton IR, grid (three axes) and how it asks to be compiled."""

    name: str
    text: str
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int


def parse_ir(ir_text: str | bytes) -> Any:
    """The MLIR module of a text (or bytecode) of Triton IR, verified. Raises jaxlib's MLIRError if it is not valid."""
    require()
    lowering = _lowering()
    with lowering._new_ir_context():
        module = ir.Module.parse(ir_text)
        module.operation.verify()
    return module


def lowered_kernels(fn: Callable[..., Any], args: Sequence[Any], platform: str) -> list[LoweredKernel]:
    """Lowers `fn(*args)` for `platform` and takes the kernels out; each is parsed again, which verifies it."""
    require()
    module = jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    found = []
    for call in _custom_calls(module.operation):
        backend: Any = ir.DictAttr(call.attributes["mhlo.backend_config"])  # its stub does not say that it iterates
        config = {entry.name: entry.attr for entry in backend}
        number = {name: ir.IntegerAttr(attr).value for name, attr in config.items() if name.startswith(("grid", "num"))}
        text = parse_ir(ir.StringAttr(config["ir"]).value_bytes).operation.get_asm(enable_debug_info=False)
        grid = (number["grid_x"], number["grid_y"], number["grid_z"])
        name = ir.StringAttr(config["name"]).value
        found.append(LoweredKernel(name, text, grid, number["num_warps"], number["num_stages"]))
    return found


def _custom_calls(operation: Any) -> Iterator[Any]:
    """The pallas_calls in an operation, in the order of the module's text."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                inner = inner.operation
                if inner.name == "stablehlo.custom_call" and inner.attributes["call_target_name"].value == _CUSTOM_CALL:
                    yield inner
                yield from _custom_calls(inner)
