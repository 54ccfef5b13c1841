"""The decode kernels against XLA, one decoded token over a long packed cache; without a GPU they are only compiled."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import kvq_jax as kvq
from experiments.harness.run import Row
from pallas_kernels import dispatch, report

HEAD_DIM = 128
COMPILED = ("sm_90", "gfx942")  # where there is no GPU
COLUMNS = ("measure", "status", "ratio", "kernel_us", "xla_us", "gib_per_s", "registers", "spills")
Clock = Callable[..., list[float]]  # of calls: median seconds of each


def timed(spec: str, context: int, clock: Clock, seed: int) -> Row:
    """Kernel and tiled XLA path side by side, on the GPU that is there."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shape: dict[str, Any] = {"batch": 1, "kv_heads": report.KV_HEADS, "head_dim": HEAD_DIM, "capacity": context}
    k, v = (jax.random.normal(key, (1, report.KV_HEADS, context, HEAD_DIM), jnp.bfloat16) for key in keys[1:])
    cache = kvq.append(kvq.init_cache(spec, **shape), k, v)
    q = jax.random.normal(keys[0], (1, report.KV_HEADS * report.QUERIES, 1, HEAD_DIM), jnp.bfloat16)

    def over(implementation: str) -> Callable[[], Array]:
        run = jax.jit(functools.partial(kvq.attend, implementation=implementation))
        return lambda: run(q, cache)

    kernel, xla = clock(over("pallas_triton"), over("xla"))
    read = sum(leaf.nbytes for side in cache.sides for leaf in side.store.values())
    return {
        "measure": f"{spec} on {dispatch.target()}",
        "status": "timed",
        "ratio": xla / kernel,
        "kernel_us": kernel * 1e6,
        "xla_us": xla * 1e6,
        "gib_per_s": read / kernel / 2**30,
    }


def compiled(spec: str, target: str) -> Row:
    """What the compiler makes of it."""
    taken = report.resources(spec, HEAD_DIM, target).taken
    return {
        "measure": f"{spec} for {target}",
        "status": "compiled, not timed",
        "registers": taken.registers,
        "spills": taken.spills,
        "shared_bytes": taken.shared_bytes,
    }


def rows(context: int, clock: Clock, seed: int) -> Iterator[Row]:
    """A row for each method of the report, and where there is no GPU for each of COMPILED. Raises
    NotImplementedError where neither a GPU nor the package triton is there."""
    about = {"context": context, "head_dim": HEAD_DIM, "kv_heads": report.KV_HEADS, "queries": report.QUERIES}
    for spec in report.METHODS:
        if not dispatch.why_unavailable():
            yield timed(spec, context, clock, seed) | about
            continue
        for target in COMPILED:
            try:
                yield compiled(spec, target) | about
            except ImportError as error:  # no compiler either
                raise NotImplementedError(f"--kernels: {error}; or run on a GPU") from error


def cells(row: Row) -> list[str]:
    """A row of the terminal's table."""
    return [f"{value:.4g}" if isinstance(value := row.get(name, "–"), float) else str(value) for name in COLUMNS]
