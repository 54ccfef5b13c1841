"""The operations of Triton IR that are functions of values: numpy arrays in, a numpy array out.

Short floats are computed in float32 and rounded, as Triton does. What hardware leaves open is not decided here: a
conversion to a type too small for the value raises, and a shift by the width or more gives all ones.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

Value = np.ndarray

_UNSIGNED = {np.dtype(f"i{size}"): np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Of tt.dot_scaled, by the numbers of Triton's ScaleDotElemType; it believes them, not the type of the operand.
_ELEMENTS = {0: ml_dtypes.float8_e4m3fn, 1: ml_dtypes.float8_e5m2, 5: ml_dtypes.bfloat16, 6: np.float16}
_PACKED_E2M1 = 4
_TF32, _IEEE = 0, 2  # Triton's InputPrecision


def unsigned(x: Value) -> Value:
    return np.ascontiguousarray(x).view(_UNSIGNED[x.dtype]).reshape(x.shape) if x.dtype in _UNSIGNED else x


def wide(x: Value) -> Value:
    """Floats of 16 and 8 bits as float32; everything else as it is."""
    return x.astype(np.float32) if x.dtype.itemsize < 4 and x.dtype.kind not in "iub" else x


def _quotient(x: Value, y: Value) -> Value:
    if np.any(y == 0):
        raise ZeroDivisionError("integer division by zero in Triton IR")
    quotient = np.floor_divide(np.abs(x.astype(np.int64)), np.abs(y.astype(np.int64)))
    return np.where((x < 0) != (y < 0), -quotient, quotient)  # towards zero


def _shift(shift: Callable[[Value, Value], Value], signed: bool) -> Callable[[Value, Value], Value]:
    def operation(x: Value, by: Value) -> Value:
        by, bits = unsigned(by), 8 * x.dtype.itemsize
        amount = np.minimum(by, bits - 1).astype(_UNSIGNED[x.dtype])
        shifted = shift(x, amount.view(x.dtype)) if signed else shift(unsigned(x), amount)
        return np.where(by < bits, shifted, np.asarray(-1).astype(shifted.dtype))

    return operation


_BINARY: dict[str, Callable[[Value, Value], Value]] = {
    "addi": np.add,
    "subi": np.subtract,
    "muli": np.multiply,
    "andi": np.bitwise_and,
    "ori": np.bitwise_or,
    "xori": np.bitwise_xor,
    "divsi": _quotient,
    "remsi": lambda x, y: x - _quotient(x, y) * y,
    "divui": lambda x, y: _quotient(unsigned(x), unsigned(y)),
    "remui": lambda x, y: unsigned(x) - _quotient(unsigned(x), unsigned(y)) * unsigned(y),
    "maxsi": np.maximum,
    "minsi": np.minimum,
    "maxui": lambda x, y: np.maximum(unsigned(x), unsigned(y)),
    "minui": lambda x, y: np.minimum(unsigned(x), unsigned(y)),
    "shli": _shift(np.left_shift, signed=False),
    "shrui": _shift(np.right_shift, signed=False),
    "shrsi": _shift(np.right_shift, signed=True),
    "addf": np.add,
    "subf": np.subtract,
    "mulf": np.multiply,
    "divf": np.divide,
    "remf": np.fmod,
    "maximumf": np.maximum,
    "minimumf": np.minimum,
    "maxnumf": np.fmax,
    "minnumf": np.fmin,
}

# By the numbers of MLIR's CmpIPredicate (eq, ne, slt, sle, sgt, sge, then unsigned) and CmpFPredicate.
_ORDER: list[Callable[[Value, Value], Value]] = [np.less, np.less_equal, np.greater, np.greater_equal]
_COMPARE_FLOAT: dict[int, Callable[[Value, Value], Value]] = {
    1: np.equal,
    2: np.greater,
    3: np.greater_equal,
    4: np.less,
    5: np.less_equal,
    6: lambda x, y: (x < y) | (x > y),
    7: lambda x, y: ~(np.isnan(x) | np.isnan(y)),
    8: lambda x, y: ~((x < y) | (x > y)),
    9: lambda x, y: ~(x <= y),
    10: lambda x, y: ~(x < y),
    11: lambda x, y: ~(x >= y),
    12: lambda x, y: ~(x > y),
    13: np.not_equal,
    14: lambda x, y: np.isnan(x) | np.isnan(y),
}


def _compare_integers(predicate: int, x: Value, y: Value) -> Value:
    if predicate < 2:
        return x == y if predicate == 0 else x != y
    if predicate < 6:
        return _ORDER[predicate - 2](x, y)
    return _ORDER[predicate - 6](unsigned(x), unsigned(y))


def _leading_zeros(x: Value) -> Value:
    value, bits = unsigned(x).astype(np.uint64), 8 * x.dtype.itemsize
    return bits - sum((value >> np.uint64(bit) > 0).astype(np.int64) for bit in range(bits))


_MATH: dict[str, Callable[..., Value]] = {
    "absf": np.abs,
    "absi": np.abs,
    "ceil": np.ceil,
    "cos": np.cos,
    "ctlz": _leading_zeros,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "fma": lambda x, y, z: np.asarray(x.astype(np.float64) * y + z),
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
}
_LIBRARY = {"fabs": "absf", "abs": "absi", "clz": "ctlz"}  # where CUDA's and ROCm's names differ from MLIR's


def _library_function(symbol: str) -> Callable[..., Value]:
    """Of `__nv_exp2f`, `__ocml_exp2_f32`, …"""
    name = re.sub(r"^__(nv|ocml|ockl)_", "", symbol)
    name = re.sub(r"_[fiu](16|32|64)$", "", name)
    name = _LIBRARY.get(name, name)
    if name not in _MATH and name.endswith("f"):
        name = _LIBRARY.get(name[:-1], name[:-1])
    if name not in _MATH:
        raise NotImplementedError(f"the evaluator has no function {symbol}")
    return _MATH[name]


def to_float(x: Value, dtype: np.dtype) -> Value:
    """Rounded to `dtype`, nearest even. A finite value that is none there raises where dtype has no infinity: XLA makes
    it NaN and GPUs the largest number."""
    out = wide(x).astype(dtype)
    if dtype == ml_dtypes.float8_e4m3fn and np.any(np.isnan(wide(out)) & ~np.isnan(wide(x))):
        raise OverflowError(f"a conversion to E4M3 of {np.nanmax(np.abs(wide(x)))}; the kernel must clip to ±448 first")
    return out


def _to_integer(x: Value, dtype: np.dtype) -> Value:
    limits, value = np.iinfo(dtype), np.trunc(wide(x).astype(np.float64))
    outside = ~((value >= limits.min) & (value <= limits.max))  # NaN too: hardware clips, XLA does something else
    if np.any(outside):
        raise OverflowError(f"a conversion of {value[outside].flat[0]} to {dtype}; the kernel must clip first")
    return value.astype(dtype)


def _bitcast(x: Value, dtype: np.dtype) -> Value:
    if x.dtype.itemsize != dtype.itemsize:
        raise TypeError(f"a bitcast from {x.dtype} to {dtype}, which have different widths")
    return np.ascontiguousarray(x).view(dtype).reshape(x.shape)


def _extend(x: Value, dtype: np.dtype, signed: bool) -> Value:
    if x.dtype == np.bool_:
        return -x.astype(dtype) if signed else x.astype(dtype)
    return x.astype(dtype) if signed else unsigned(x).astype(_UNSIGNED[dtype]).view(dtype)


_CONVERSIONS: dict[str, Callable[[Value, np.dtype], Value]] = {
    "arith.extf": to_float,
    "arith.truncf": to_float,
    "tt.fp_to_fp": to_float,
    "arith.extsi": lambda x, dtype: _extend(x, dtype, signed=True),
    "arith.extui": lambda x, dtype: _extend(x, dtype, signed=False),
    "arith.trunci": lambda x, dtype: (x & 1 if dtype == np.bool_ else x).astype(dtype),
    "arith.index_cast": lambda x, dtype: x.astype(dtype),
    "arith.sitofp": lambda x, dtype: x.astype(np.float64).astype(np.float32).astype(dtype),
    "arith.uitofp": lambda x, dtype: unsigned(x).astype(np.float64).astype(np.float32).astype(dtype),
    "arith.fptosi": _to_integer,
    "arith.fptoui": lambda x, dtype: _to_integer(x, _UNSIGNED[dtype]).view(dtype),
    "arith.bitcast": _bitcast,
    "tt.bitcast": _bitcast,
}


def elementwise(name: str, attributes: dict[str, Any], x: Sequence[Value], dtype: np.dtype) -> Value | None:
    """The result, in `dtype`, of one operation on values of equal shapes; None if it is not one of these."""
    dialect, _, short = name.partition(".")
    if name in _CONVERSIONS:
        return _CONVERSIONS[name](x[0], dtype)
    if name == "arith.cmpi":
        return _compare_integers(attributes["predicate"], *x)
    if name == "arith.cmpf":
        return _COMPARE_FLOAT[attributes["predicate"]](*(wide(y) for y in x))
    if name == "arith.select":
        return np.where(*x)
    function: Callable[..., Value]
    if dialect == "arith" and short in _BINARY:
        function = _BINARY[short]
    elif name == "arith.negf":
        function = np.negative
    elif dialect == "math" and short in _MATH:
        function = _MATH[short]
    elif name == "tt.extern_elementwise":
        function = _library_function(attributes["symbol"])
    else:
        return None
    out = np.asarray(function(*(wide(y) for y in x)))
    if out.dtype.kind == "u":
        return out.astype(_UNSIGNED[dtype]).view(dtype)  # the same bits
    return out.astype(dtype)


def _tf32(x: Value) -> Value:
    bits = x.view(np.uint32) + np.uint32(1 << 12)  # to ten bits of mantissa, a half away from zero
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def dot(attributes: dict[str, Any], lhs: Value, rhs: Value, accumulator: Value) -> Value:
    if lhs.dtype.kind == "i":
        return accumulator + lhs.astype(np.int32) @ rhs.astype(np.int32)
    if lhs.dtype == np.float32 and (precision := attributes["inputPrecision"]) != _IEEE:
        if precision != _TF32:
            raise NotImplementedError(f"the evaluator has no tt.dot with input precision {precision}")
        lhs, rhs = _tf32(lhs), _tf32(rhs)
    return accumulator + wide(lhs) @ wide(rhs)


def _scaled(operand: Value, element: int, scale: Value | None, axis: int) -> Value:
    """Values `[rows, K]` of an operand of tt.dot_scaled, K on `axis`."""
    operand = operand if axis == 1 else operand.T
    if element == _PACKED_E2M1:  # two a byte, low nibble first
        codes = unsigned(operand)
        values = _E2M1[np.stack([codes & 15, codes >> 4], -1)].reshape(len(codes), -1)
    elif element in _ELEMENTS:
        values = wide(_bitcast(operand, np.dtype(_ELEMENTS[element])))
    else:
        raise NotImplementedError(f"the evaluator has no tt.dot_scaled of element type {element}")
    if scale is None:
        return values
    byte = unsigned(scale)
    factor = np.where(byte == 255, np.nan, np.exp2(byte.astype(np.float64) - 127)).astype(np.float32)
    return values * np.repeat(factor, values.shape[1] // factor.shape[1], axis=1)


def dot_scaled(attributes: dict[str, Any], operands: Sequence[Value]) -> Value:
    lhs, rhs, accumulator, *scales = operands
    segments = attributes["operandSegmentSizes"]
    lhs_scale = scales.pop(0) if segments[3] else None
    rhs_scale = scales.pop(0) if segments[4] else None
    left = _scaled(lhs, _element(attributes["a_elem_type"]), lhs_scale, axis=1)
    right = _scaled(rhs, _element(attributes["b_elem_type"]), rhs_scale, axis=0)
    return accumulator + left @ right.T


def _element(attribute: int | str) -> int:
    return attribute if isinstance(attribute, int) else int(attribute.split()[0])
