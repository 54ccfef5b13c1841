"""The decode kernels as they are lowered: run by the evaluator, their bytes counted, compiled for every target."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_ir
from store_problem import Problem, distance, problem

import kvq_jax as kvq
from kvq_jax.online_softmax import Softmax
from pallas_kernels import decode_attention, dispatch, lowering, report
from pallas_kernels.configurations import Config


def evaluated(given: Problem, platform: str) -> tuple[Any, ...]:
    """Output and log-sum-exp by the lowered kernel, run in numpy and merged as XLA would, and what they should be."""
    q, low, high, *stores = given.arguments
    rows = given.how["config"].rows
    q = np.pad(q, ((0, 0), (0, 0), (0, rows - q.shape[2]), (0, 0)))
    low, high = (np.pad(x, ((0, 0), (0, rows - x.shape[1])), mode="edge") for x in (low, high))
    parts, _ = split(given.how, (q, low, high, *stores), platform)
    merged = jax.tree.map(lambda x: x[:, :, :4], decode_attention.merge(parts))
    total = np.where(merged.total > 0, merged.total, 1.0)
    lse = np.where(merged.total > 0, merged.largest + np.log(total), -1e38)
    return np.asarray(merged.output()), lse, given.output, given.log_sum_exp


def split(how: dict[str, Any], arguments: tuple[Any, ...], platform: str) -> tuple[Softmax, triton_ir.Run]:
    """`split_attention` by the evaluator."""
    fn = functools.partial(decode_attention.split_attention, **how)
    (kernel,) = lowering.kernels(fn, *arguments, platform=platform)
    q, low, high, k_store, v_store = arguments
    keys, values = how["keys"], how["values"]
    operands = [*keys.queries(jnp.asarray(q)), *keys.operands(k_store), *values.operands(v_store)]
    shape = jax.eval_shape(fn, *arguments)
    wide = (*shape.weighted.shape[:-1], shape.weighted.shape[-1] // values.planes, values.planes)
    outputs = [jax.ShapeDtypeStruct(x, jnp.float32) for x in (wide, shape.largest.shape, shape.total.shape)]
    found = triton_ir.run(kernel.text, kernel.grid, [low, high, *map(np.asarray, operands), *outputs])
    weighted, largest, total = found.outputs
    return Softmax(largest, total, weighted.reshape(shape.weighted.shape)), found


KERNELS = [
    ("ultraquant:", None),
    ("ultraquant:", False),
    ("ultraquant:", True),
    ("mxfp4:", None),
    ("kivi:bits=2,residual=64", None),
    ("kvarn:bits=2,group=64,iters=1", None),
]


@pytest.mark.parametrize("platform", lowering.PLATFORMS)
@pytest.mark.parametrize(("spec", "scaled"), KERNELS)
def test_the_lowered_kernel_computes_the_formula(spec: str, scaled: bool | None, platform: str) -> None:
    assert distance(*evaluated(problem(spec, scaled=scaled), platform)) < 5e-6


@pytest.mark.parametrize(
    ("spec", "bits"), [("ultraquant:", 4.25), ("kvarn:bits=2", 2.375), ("hadamard:bits=2", 2.25), ("kivi:bits=2", 3)]
)
@pytest.mark.parametrize("scaled", [None, False])
def test_no_byte_is_moved_twice(spec: str, bits: float, scaled: bool | None) -> None:
    """What a kernel loads and stores is at most 1.02 of the main store's bytes, the query and the output."""
    if scaled is not None and spec != "ultraquant:":
        pytest.skip("the scaled product is UltraQuant's")
    tokens, head_dim, rows = 512, 128, 16
    cache = kvq.init_cache(spec, batch=1, kv_heads=1, head_dim=head_dim, capacity=tokens + 128)
    keys, values = dispatch.layouts(cache, scaled=scaled)
    config = Config(max(keys.tile, 64), 2, rows=rows)
    how = {"keys": keys, "values": values, "config": config, "scale": 0.1, "windowed": False}
    q = np.zeros((1, 1, rows, head_dim), np.float32)
    high = np.full((1, rows), tokens, np.int32)
    _, found = split(how, (q, np.zeros_like(high), high, cache.k.store, cache.v.store), "cuda")
    store = 2 * tokens * head_dim * bits / 8
    query = config.splits * (rows * head_dim * 4 + 2 * high.nbytes)
    output = config.splits * rows * (head_dim + 2) * 4
    moved = sum(found.loaded) + sum(found.stored)
    assert store < moved <= 1.02 * (store + query + output)


DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"
COMPILED = [
    *(("ultraquant:", target) for target in lowering.TARGETS),
    ("mxfp4:", "sm_90"),
    ("kivi:bits=2", "gfx942"),
    ("kvarn:bits=2", "sm_90"),
    ("kvarn:bits=2", "gfx950"),
]


@pytest.fixture(scope="module")
def committed() -> dict[tuple[str, int, str], dict[str, str]]:
    return report.committed(DOCS.read_text())


@pytest.mark.parametrize(("spec", "target"), COMPILED)
def test_resources_are_those_of_the_committed_table(spec: str, target: str, committed: dict) -> None:
    found = dict(zip(report.COLUMNS, report.resources(spec, 128, target).cells(), strict=True))
    row = committed[spec, 128, target]
    assert found["spills"] == "0"
    assert {name: found[name] for name in ("tokens", "warps", "stages", "instructions")} == {
        name: row[name] for name in ("tokens", "warps", "stages", "instructions")
    }
    for name in ("registers", "shared"):
        assert int(found[name]) == pytest.approx(int(row[name]), rel=0.1), name


def test_the_table_is_whole_and_nothing_in_it_spills_at_head_dim_128(committed: dict) -> None:
    assert set(committed) == {(m, d, t) for m in report.METHODS for d in report.HEAD_DIMS for t in lowering.TARGETS}
    assert {row["spills"] for (_, head_dim, _), row in committed.items() if head_dim == 128} == {"0"}
