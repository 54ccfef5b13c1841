"""Calls a function with its Pallas kernels run by the evaluator of Triton IR instead of by interpret mode."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal
from triton_ir import Run, run

from pallas_kernels import lowering
from pallas_kernels._internals import LoweredKernel


def call(
    fn: Callable[..., Any], *args: Any, platform: str, change: Callable[[str], str] = lambda text: text
) -> tuple[Any, list[Run]]:
    """fn(*args), and what the evaluator saw of each kernel. Everything around the kernels is computed by jax. `change`
    may spoil their text first."""
    program, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    lowered = lowering.kernels(fn, *args, platform=platform)
    kernels, runs = iter([dataclasses.replace(kernel, text=change(kernel.text)) for kernel in lowered]), []
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(args)]
    out = _evaluate(program.jaxpr, program.consts, leaves, kernels, runs)
    assert next(kernels, None) is None, "a kernel of the program was not called"
    return jax.tree.unflatten(jax.tree.structure(shape), out), runs


def _evaluate(
    jaxpr: Jaxpr, consts: list[Any], args: list[Any], kernels: Iterator[LoweredKernel], runs: list[Run]
) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        operands = [read(variable) for variable in equation.invars]
        if equation.primitive.name == "pallas_call":
            kernel = next(kernels)
            outputs = [jax.ShapeDtypeStruct(out.aval.shape, out.aval.dtype) for out in equation.outvars]
            runs.append(run(kernel.text, kernel.grid, [*map(np.asarray, operands), *outputs]))
            results = runs[-1].outputs
        elif equation.primitive.name in ("jit", "pjit"):
            inner = equation.params["jaxpr"]
            results = _evaluate(inner.jaxpr, inner.consts, operands, kernels, runs)
        else:
            results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
            results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]
