"""docs/kernels.md: the resources that it commits to, and the memory traffic of every scheme that it speaks of."""

import functools
from pathlib import Path

import numpy as np
import pytest
from triton_ir_call import call

import kvq_jax as kvq
from pallas_kernels import dispatch, lowering, report
from pallas_kernels.configurations import Config
from pallas_kernels.decode_attention import split_attention

DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"


@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        ("ultraquant:", 4.25),
        ("kvarn:bits=2", 2.375),
        ("hadamard:bits=2", 2.25),
        ("kivi:bits=2", 3),
        ("tile:bits=2", 2.375),
    ],
)
def test_the_bytes_moved_are_the_main_stores_and_the_querys_and_outputs(spec: str, bits: float) -> None:
    """At most 1.02 of them, at head_dim 128: 512 tokens in two shares, four queries in programs of 16 rows. What `tile`
    reads again, it read in the same step or the step before: it comes from a cache."""
    tokens, head_dim, rows = 512, 128, 4
    cache = kvq.init_cache(spec, batch=1, kv_heads=1, head_dim=head_dim, capacity=tokens + 128)
    keys, values = dispatch.layouts(cache)
    config = Config(64 if spec.startswith("tile") else max(keys.tile, 64), 2, rows=16)
    fn = functools.partial(split_attention, keys=keys, values=values, config=config, scale=0.1, windowed=False)
    q, high = np.zeros((1, 1, rows, head_dim), np.float32), np.full((1, rows), tokens, np.int32)
    _, [found] = call(fn, q, np.zeros_like(high), high, cache.k.store, cache.v.store, platform="cuda")
    store = 2 * tokens * head_dim * bits / 8
    query = config.splits * (q.nbytes + 2 * high.nbytes)
    output = config.splits * rows * (head_dim + 2) * 4
    loaded = found.touched if spec.startswith("tile") else found.loaded
    assert store < sum(loaded) + sum(found.stored) <= 1.02 * (store + query + output)
    assert sum(found.stored) == output


NATIVE = {  # the instruction of a target that multiplies FP4 blocks itself
    "gfx950": "`v_mfma_scale_f32_16x16x128_f8f6f4`",
    "sm_100": "`tcgen05.mma.kind::mxf8f6f4.block_scale.block32`",
}
COMPILED = [
    *(("ultraquant:", target) for target in lowering.TARGETS),
    ("mxfp4:", "sm_90"),
    ("kivi:bits=2", "gfx942"),
    ("kvarn:bits=2", "sm_90"),
    ("kvarn:bits=2", "gfx950"),
    ("tile:bits=2", "sm_90"),
    ("tile:bits=2", "gfx942"),
]


@pytest.fixture(scope="module")
def committed() -> dict[tuple[str, int, str], dict[str, str]]:
    return report.committed(DOCS.read_text())


@pytest.mark.parametrize(("spec", "target"), COMPILED)
def test_what_the_dispatch_chooses_compiles_to_the_committed_resources(spec: str, target: str, committed: dict) -> None:
    found = dict(zip(report.COLUMNS, report.resources(spec, 128, target).cells(), strict=True))
    row = committed[spec, 128, target]
    for name in ("tokens", "warps", "stages", "spills", "instructions"):
        assert found[name] == row[name], name
    for name in ("registers", "shared"):
        assert int(found[name]) == pytest.approx(int(row[name]), rel=0.1), name
    if spec == "ultraquant:" and target in NATIVE:
        assert NATIVE[target] in found["instructions"]


def test_the_table_is_whole_and_nothing_in_it_spills(committed: dict) -> None:
    assert set(committed) == {(m, d, t) for m in report.METHODS for d in report.HEAD_DIMS for t in lowering.TARGETS}
    assert {row["spills"] for row in committed.values()} == {"0"}
    assert all("mma" in row["instructions"] or "mfma" in row["instructions"] for row in committed.values())
