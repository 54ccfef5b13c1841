"""Runs the Triton IR of a lowered kernel with numpy: what interpret mode never does.

One program of the grid after the other. Besides what the kernel computes it watches what a GPU would not forgive:

* an access outside of its argument raises IndexError (lanes that a mask turns off access nothing);
* an element that two programs write, or that one writes and another reads, raises `Race`;
* outputs, and what a masked load has no `other` for, start as NaN, or integers of all ones: who uses them shows;
* conversions that hardware and XLA do differently raise OverflowError (see `triton_ir_ops`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import jax
import numpy as np
import triton_ir_ops as ops
from triton_ir_parser import Block, Operation, Type, parse

Value = Any  # a numpy array, or a Pointer


class Race(RuntimeError):
    """Two programs of one grid use the same element, and one writes it."""


@dataclass
class Memory:
    """One argument of the kernel, flat, and who wrote and read each element: numbers of programs, −1 nobody."""

    name: str
    data: np.ndarray
    writer: np.ndarray
    reader: np.ndarray
    loaded: int = 0
    stored: int = 0


@dataclass(frozen=True)
class Pointer:
    memory: Memory
    offset: np.ndarray  # of elements, int64


@dataclass(frozen=True)
class Run:
    """`outputs`: of the arguments given as ShapeDtypeStruct. `loaded`, `stored`: bytes of each argument; an address
    that several lanes of one load share counts once, what different loads or programs fetch again counts again. A load
    whose result nobody uses does not count: compilers drop it. `touched`: bytes of each argument that were fetched at
    all. `operations`: how often each ran."""

    outputs: list[np.ndarray]
    loaded: tuple[int, ...]
    stored: tuple[int, ...]
    touched: tuple[int, ...]
    operations: dict[str, int] = field(repr=False)


def run(text: str, grid: Sequence[int], arrays: Sequence[Any]) -> Run:
    """Run the kernel over `grid` (up to three axes).

    arrays: of the kernel's arguments in order: an array of an input, a `jax.ShapeDtypeStruct` of an output. Raises
    NotImplementedError with the name of an operation that it does not know.
    """
    body = parse(text)
    if len(arrays) != len(body.arguments):
        raise ValueError(f"{len(arrays)} arrays for a kernel of {len(body.arguments)} arguments")
    memories = [_memory(f"argument {i}", x, t) for i, (x, t) in enumerate(zip(arrays, body.types, strict=True))]
    start = {
        number: Pointer(memory, np.zeros((), np.int64)) for number, memory in zip(body.arguments, memories, strict=True)
    }
    extents = (*grid, *(1,) * (3 - len(grid)))
    count: dict[str, int] = {}
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        for number, program in enumerate(product(*(range(extent) for extent in reversed(extents)))):
            _Program(number, program[::-1], extents, count).block(body, dict(start))
    outputs = [
        memory.data.view(given.dtype).reshape(given.shape)
        for memory, given in zip(memories, arrays, strict=True)
        if isinstance(given, jax.ShapeDtypeStruct)
    ]
    loaded, stored = (tuple(getattr(m, name) for m in memories) for name in ("loaded", "stored"))
    touched = tuple(int((m.reader >= 0).sum()) * m.data.itemsize for m in memories)
    return Run(outputs, loaded, stored, touched, count)


def _memory(name: str, given: Any, wanted: Type) -> Memory:
    if isinstance(given, jax.ShapeDtypeStruct):
        nbytes = prod(given.shape) * np.dtype(given.dtype).itemsize
        data = np.full(nbytes, 0xFF, np.uint8).view(given.dtype)
    else:
        data = np.array(given).ravel()  # a copy
    if data.dtype.itemsize != wanted.dtype.itemsize or not wanted.pointer:
        raise TypeError(f"{name} is {data.dtype}, of which the kernel wants {wanted}")
    nobody = np.full(data.size, -1, np.int32)
    return Memory(name, data.view(wanted.dtype), nobody, nobody.copy())


@dataclass
class _Program:
    """One program of the grid."""

    number: int
    program: tuple[int, ...]
    grid: tuple[int, ...]
    count: dict[str, int]

    def block(self, block: Block, values: dict[int, Value], lanes: tuple[int, ...] = ()) -> list[Value]:
        """Runs a block; the operands of what ends it. What the block takes for scalars may have the shape `lanes`."""
        for operation in block.operations:
            operands = [values[number] for number in operation.operands]
            name = operation.name
            if name in ("scf.yield", "scf.condition", "tt.return", "tt.reduce.return"):
                return operands
            self.count[name] = self.count.get(name, 0) + 1
            results = self.operation(operation, operands, values)
            for number, type_, result in zip(operation.results, operation.types, results, strict=True):
                values[number] = _checked(name, type_, result, lanes)
        return []

    def inner(
        self, block: Block, values: dict[int, Value], arguments: Sequence[Value], lanes: tuple[int, ...] = ()
    ) -> list[Value]:
        return self.block(block, values | dict(zip(block.arguments, arguments, strict=True)), lanes)

    def operation(self, op: Operation, x: list[Value], values: dict[int, Value]) -> list[Value]:
        name, attributes = op.name, op.attributes
        if name == "tt.load":
            return [self.load(op, x)]
        if name == "tt.store":
            self.store(*x)
            return []
        if name == "scf.for":
            lower, upper, step = (int(bound) for bound in x[:3])
            carried, counter = x[3:], op.regions[0].types[0].dtype
            for i in range(lower, upper, step):
                carried = self.inner(op.regions[0], values, [np.asarray(i, counter), *carried])
            return carried
        if name == "scf.while":
            before, after = op.regions
            while True:
                goes_on, *passed = self.inner(before, values, x)
                if not goes_on:
                    return passed
                x = self.inner(after, values, passed)
        if name == "scf.if":
            chosen = op.regions[0 if x[0] else 1 : 1 if x[0] else 2]
            return self.inner(chosen[0], values, []) if chosen else []
        if name == "tt.reduce":
            return self.reduce(op.regions[0], x, attributes["axis"], values)
        if name == "tt.split":
            return [x[0][..., 0], x[0][..., 1]]
        if name == "tt.get_program_id":
            return [np.asarray(self.program[attributes["axis"]], np.int32)]
        if name == "tt.get_num_programs":
            return [np.asarray(self.grid[attributes["axis"]], np.int32)]
        [result] = op.types
        return [_value(name, attributes, x, result)]

    def reduce(self, combine: Block, x: list[Value], axis: int, values: dict[int, Value]) -> list[Value]:
        """Halves with halves; the order of a reduction is not defined."""
        x = [np.moveaxis(part, axis, 0) for part in x]
        while len(x[0]) > 1:
            half = len(x[0]) // 2
            halves = [*(part[:half] for part in x), *(part[half:] for part in x)]
            x = self.inner(combine, values, halves, halves[0].shape)
        return [part[0] for part in x]

    def load(self, op: Operation, operands: list[Value]) -> np.ndarray:
        segments = op.attributes["operandSegmentSizes"]
        pointer, *rest = operands
        mask = rest.pop(0) if segments[1] else np.True_
        on, offset = np.broadcast_to(mask, pointer.offset.shape), pointer.offset
        memory, wanted = pointer.memory, op.types[0].dtype
        places = _places(op.name, memory, offset[on])
        if op.used:
            if np.any((memory.writer[places] >= 0) & (memory.writer[places] != self.number)):
                raise Race(f"program {self.program} loads from {memory.name} what another program stores")
            memory.reader[places] = self.number
            memory.loaded += np.unique(places).size * memory.data.itemsize
        out = np.array(np.broadcast_to(rest[0], offset.shape)) if rest else _poison(offset.shape, wanted)
        out[on] = memory.data[places].view(wanted)
        return out

    def store(self, pointer: Pointer, value: np.ndarray, mask: np.ndarray = np.True_) -> None:
        on, memory = np.broadcast_to(mask, pointer.offset.shape), pointer.memory
        places = _places("tt.store", memory, pointer.offset[on])
        for others in (memory.writer[places], memory.reader[places]):
            if np.any((others >= 0) & (others != self.number)):
                raise Race(f"program {self.program} stores to {memory.name} what another program uses")
        if np.unique(places).size != places.size:
            raise Race(f"two lanes of one store write the same element of {memory.name}")
        memory.writer[places] = self.number
        memory.stored += places.size * memory.data.itemsize
        memory.data[places] = value[on].view(memory.data.dtype)


def _poison(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.full(prod(shape) * dtype.itemsize, 0xFF, np.uint8).view(dtype).reshape(shape)


def _places(name: str, memory: Memory, offset: np.ndarray) -> np.ndarray:
    if np.any((offset < 0) | (offset >= memory.data.size)):
        raise IndexError(
            f"{name} of elements {offset.min()} … {offset.max()} of {memory.name}, which has {memory.data.size}"
        )
    return offset


def _checked(name: str, wanted: Type, result: Value, lanes: tuple[int, ...]) -> Value:
    """A mistake of the evaluator would show here."""
    if wanted.pointer:
        found = (result.offset.shape, result.memory.data.dtype.itemsize)
        assert found == (wanted.shape, wanted.dtype.itemsize), (name, wanted, found)
        return result
    result = np.asarray(result)
    shapes = (wanted.shape,) if wanted.shape else ((), lanes)
    assert result.shape in shapes, (name, wanted, result.shape)
    assert result.dtype == wanted.dtype, (name, wanted, result.dtype)
    return result


def _value(name: str, attributes: dict[str, Any], x: list[Value], result: Type) -> Value:
    """An operation without effects that has one result."""
    if name == "arith.constant":
        return np.full(result.shape, np.asarray(attributes["value"]).astype(result.dtype))
    if name == "tt.make_range":
        return np.arange(attributes["start"], attributes["end"], dtype=np.int32)
    if name == "tt.addptr":
        return Pointer(x[0].memory, x[0].offset + x[1].astype(np.int64))
    if name == "tt.bitcast" and result.pointer:
        return x[0]
    if name in _SHAPES:
        moved = x[0].offset if result.pointer else x[0]
        moved = _SHAPES[name](moved, attributes, result.shape)
        return Pointer(x[0].memory, moved) if result.pointer else moved
    if name == "tt.join":
        return np.stack(x, axis=-1)
    if name == "tt.dot":
        return ops.dot(attributes, *x)
    if name == "tt.dot_scaled":
        return ops.dot_scaled(attributes, x)
    out = ops.elementwise(name, attributes, x, result.dtype)
    if out is None:
        raise NotImplementedError(f"the evaluator has no operation {name}")
    return out


_SHAPES = {
    "tt.splat": lambda x, _, shape: np.broadcast_to(x, shape),
    "tt.unsplat": lambda x, _, shape: x.reshape(shape),
    "tt.broadcast": lambda x, _, shape: np.broadcast_to(x, shape),
    "tt.expand_dims": lambda x, attributes, _: np.expand_dims(x, attributes["axis"]),
    "tt.reshape": lambda x, _, shape: x.reshape(shape),
    "tt.trans": lambda x, attributes, _: np.transpose(x, attributes["order"]),
}
