"""Triton IR as plain Python objects: jaxlib's own parser reads the text, and what an evaluator needs is taken over."""

import functools
import re
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels._internals import ir, parse_ir

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "i1": np.bool_,
        "i8": np.int8,
        "i16": np.int16,
        "i32": np.int32,
        "i64": np.int64,
        "index": np.int64,
        "f16": np.float16,
        "bf16": ml_dtypes.bfloat16,
        "f32": np.float32,
        "f64": np.float64,
        "f8E4M3FN": ml_dtypes.float8_e4m3fn,
        "f8E5M2": ml_dtypes.float8_e5m2,
    }.items()
}


@dataclass(frozen=True)
class Type:
    """Of a value: its shape (a scalar's is empty), element type, and whether it is a pointer to elements of it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    pointer: bool


@dataclass(frozen=True)
class Operation:
    """`operands` and `results` are numbers of values; `attributes` have Python values; `used`: whether a result is."""

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    types: tuple[Type, ...]
    attributes: dict[str, Any]
    regions: tuple["Block", ...]
    used: bool


@dataclass(frozen=True)
class Block:
    arguments: tuple[int, ...]
    types: tuple[Type, ...]
    operations: tuple[Operation, ...]


def _type(mlir_type: ir.Type) -> Type:
    shape, element = (), mlir_type
    if isinstance(mlir_type, ir.RankedTensorType):
        shape, element = tuple(mlir_type.shape), mlir_type.element_type
    name = str(element)
    pointer = re.fullmatch(r"!tt\.ptr<(\w+)>", name)
    name = pointer[1] if pointer else name
    if name not in DTYPES:
        raise NotImplementedError(f"the evaluator has no type {name}")
    return Type(shape, DTYPES[name], pointer is not None)


def _attribute(attribute: ir.Attribute) -> Any:
    if isinstance(attribute, ir.DenseElementsAttr):
        if not attribute.is_splat:
            raise NotImplementedError(f"the evaluator has no constant {attribute}")
        return attribute.get_splat_value().value
    if isinstance(attribute, ir.DenseI32ArrayAttr):
        return tuple(attribute)
    return attribute.value if hasattr(attribute, "value") else str(attribute)


class _Numbers:
    """Numbers for the values of a module."""

    def __init__(self) -> None:
        self.of: dict[ir.Value, int] = {}

    def new(self, value: ir.Value) -> int:
        self.of[value] = len(self.of)
        return self.of[value]

    def block(self, block: Any) -> Block:
        arguments = tuple(self.new(argument) for argument in block.arguments)
        types = tuple(_type(argument.type) for argument in block.arguments)
        return Block(arguments, types, tuple(self.operation(op.operation) for op in block.operations))

    def operation(self, op: Any) -> Operation:
        operands = tuple(self.of[value] for value in op.operands)
        results, types = tuple(self.new(r) for r in op.results), tuple(_type(r.type) for r in op.results)
        attributes = {entry: _attribute(op.attributes[entry]) for entry in _names(op)}
        used = any(next(iter(result.uses), None) is not None for result in op.results)
        regions = [tuple(region.blocks) for region in op.regions]
        if any(len(blocks) > 1 for blocks in regions):
            raise NotImplementedError(f"{op.name} has a region of several blocks")
        inner = tuple(self.block(blocks[0]) for blocks in regions if blocks)
        return Operation(op.name, operands, results, types, attributes, inner, used)


def _names(op: Any) -> list[str]:
    return [getattr(entry, "name", entry) for entry in op.attributes]


@functools.cache
def parse(text: str) -> Block:
    """The body of the one function in a module of Triton IR; its arguments are the kernel's pointers."""
    module = parse_ir(text)
    with module.context:
        functions = [op.operation for op in module.body.operations]
        if [op.name for op in functions] != ["tt.func"]:
            raise NotImplementedError(f"a module of {[op.name for op in functions]}; the evaluator runs one tt.func")
        [body] = functions[0].regions[0].blocks
        return _Numbers().block(body)
