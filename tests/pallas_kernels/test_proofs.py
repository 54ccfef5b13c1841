"""The decode kernels as they are lowered, without a GPU: run by the evaluator of Triton IR, and their bytes
counted."""

import functools
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scheme_cases import pinned
from triton_ir import Race
from triton_ir_call import call

import kvq_jax as kvq
from pallas_kernels import decode_attention, dispatch, lowering
from pallas_kernels.configurations import Config

BATCH, HEADS, ROWS, HEAD_DIM, CAPACITY = 2, 2, 12, 64, 128
PROGRAM_ROWS = 16  # four of them padding, in the last program of a head: neither read nor written
LENGTHS = np.array([128, 70])  # of the two rows of the batch
SPLITS = 2
OUTPUTS = 3  # of the kernel: weighted sums, largest scores, totals


@dataclass(frozen=True)
class Case:
    spec: str
    scaled: bool | None = None
    windowed: bool = False


CASES = {
    "ultraquant": Case("ultraquant:"),
    "ultraquant_scaled": Case("ultraquant:", scaled=False),
    "ultraquant_swapped": Case("ultraquant:", scaled=True, windowed=True),
    "mxfp4": Case("mxfp4:", windowed=True),
    "kvarn": Case("kvarn:bits=2,group=64,iters=1"),
    "kivi": Case("kivi:bits=4,residual=32"),
    "kvarn_3": Case("kvarn:bits=3,group=64,iters=1"),
    "tile": Case("tile:k_bits=2,v_bits=1,group=64,iters=1"),
    "tile_3": Case("tile:k_bits=3,v_bits=4,group=64,iters=1,v_mean=token"),
    "bf16": Case("bf16:"),
    "bf16_windowed": Case("bf16:", windowed=True),
}


@functools.cache
def cached(spec: str) -> Any:
    k, v = (pinned(BATCH, CAPACITY, head_dim=HEAD_DIM, seed=seed) for seed in (1, 2))
    cache = kvq.init_cache(spec, batch=BATCH, kv_heads=HEADS, head_dim=HEAD_DIM, capacity=CAPACITY, dtype=jnp.float32)
    return kvq.append(cache, k, v, valid=jnp.arange(CAPACITY) < LENGTHS[:, None])


def seen(spec: str) -> np.ndarray:
    """Tokens of each row's store."""
    return np.minimum(cached(spec).k.flushed, cached(spec).v.flushed)


def problem(name: str) -> tuple[Any, tuple[Any, ...]]:
    """(the kernel and its merge as a function, its arguments)"""
    case, cache = CASES[name], cached(CASES[name].spec)
    keys, values = dispatch.layouts(cache, scaled=case.scaled)
    # Of `tile` a step is half a tile.
    config = Config(32 if name.startswith("tile") else max(keys.tile, 32), SPLITS, rows=PROGRAM_ROWS)
    how = {"keys": keys, "values": values, "scale": 0.3, "config": config, "windowed": case.windowed}
    q = pinned(BATCH, ROWS, head_dim=HEAD_DIM, kv_heads=HEADS, seed=3)
    q = np.asarray(cache.k.side.quantizer.query(jnp.asarray(q)), np.float32)
    high = np.repeat(seen(case.spec)[:, None], ROWS, axis=1).astype(np.int32)
    low = np.zeros_like(high)
    if case.windowed:  # the queries of a block, each of which sees 33 tokens at most
        high = np.maximum(high - np.arange(ROWS, dtype=np.int32), 0)
        low = np.maximum(high - 33, 0)
    args = (q, low, high, cache.k.store, cache.v.store)
    return functools.partial(decode_attention.decode_attention, **how), args


@functools.cache
def interpreted(name: str) -> tuple[np.ndarray, np.ndarray]:
    fn, args = problem(name)
    lowered = jax.jit(functools.partial(fn, interpret=True)).lower(*args)
    out, log_sum = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})(*args)
    return np.asarray(out), np.asarray(log_sum)


def distance(name: str, found: tuple[Any, Any]) -> float:
    """The larger error of the output and of the log-sum-exp against interpret mode."""
    (out, log_sum), (expected, expected_log_sum) = found, interpreted(name)
    errors = np.abs(out - expected).max() / np.abs(expected).max(), np.abs(log_sum - expected_log_sum).max()
    return float(max(np.nan_to_num(error, nan=np.inf) for error in errors))


@pytest.mark.parametrize(
    ("name", "platform"),
    [
        ("ultraquant", "cuda"),
        ("ultraquant", "rocm"),
        ("ultraquant_scaled", "rocm"),
        ("ultraquant_swapped", "cuda"),
        ("mxfp4", "rocm"),
        ("kvarn", "cuda"),
        ("kvarn", "rocm"),
        ("kivi", "cuda"),
        ("kvarn_3", "cuda"),
        ("tile", "cuda"),
        ("tile", "rocm"),
        ("tile_3", "rocm"),
        ("bf16_windowed", "rocm"),
    ],
)
def test_the_lowered_kernel_computes_what_interpret_mode_computes(name: str, platform: str) -> None:
    fn, args = problem(name)
    found, [seen_by_evaluator] = call(fn, *args, platform=platform)
    assert distance(name, found) < 1e-5
    scaled = "tt.dot_scaled" in seen_by_evaluator.operations
    assert scaled == (CASES[name].scaled is not None)


def test_every_comparison_of_the_lowered_kernel_matters() -> None:
    """Each mask and each bound, off by one, changes what is computed or what is read, or is an error."""
    name = "ultraquant_swapped"
    fn, args = problem(name)
    [text] = lowering.triton_ir(fn, *args, platform="cuda")
    count = len(re.findall(r"arith\.cmpi s?lt, .*tensor", text))
    assert count >= 2
    _, [right] = call(fn, *args, platform="cuda")
    for i in range(count):

        def off_by_one(text: str, which: int = i) -> str:
            places = [match.start() for match in re.finditer(r"arith\.cmpi s?lt, .*tensor", text)]
            at = places[which]
            return text[:at] + re.sub(r"cmpi slt", "cmpi sle", text[at:], count=1)

        try:
            found, [wrong] = call(fn, *args, platform="cuda", change=off_by_one)
        except (IndexError, Race):
            continue
        assert distance(name, found) > 1e-4 or wrong.loaded != right.loaded, f"comparison {i} of\n{text}"


@pytest.mark.parametrize("name", ["ultraquant", "kvarn", "kivi", "tile", "bf16"])
def test_each_packed_byte_of_what_is_seen_is_read_once(name: str) -> None:
    """And no other: of the store's leaves what belongs to the tokens seen, or where K's tiles are of several tokens to
    those tiles; of queries and outputs the rows that there are, and nothing is written but what is merged. (Of `tile`
    the byte before each is read again, and what the tokens of a tile share for each of its parts.)"""
    fn, args = problem(name)
    stores = args[3], args[4]
    _, [found] = call(fn, *args, platform="cuda")
    sides = cached(CASES[name].spec).sides
    tokens = int(sum(-(-seen(CASES[name].spec) // sides[0].tile_tokens))) * sides[0].tile_tokens
    expected = []
    for store, side in zip(stores, sides, strict=True):
        of_tile = sum(leaf.nbytes // (leaf.shape[0] * leaf.shape[2]) for leaf in store.values())
        expected.append(tokens // side.tile_tokens * of_tile)
    store = slice(-OUTPUTS - sum(len(store) for store in stores), -OUTPUTS)
    assert sum(found.touched[store]) == sum(expected)
    assert name == "tile" or found.loaded[store] == found.touched[store]
    queries = BATCH * HEADS * SPLITS * ROWS
    assert sum(found.loaded[: store.start]) <= queries * (4 * HEAD_DIM + 8)
    assert sum(found.stored) == queries * 4 * (HEAD_DIM + 2)


def test_ultraquant_reads_17_bytes_where_bfloat16_reads_64() -> None:
    read = {}
    for name, leaves in (("ultraquant", 4), ("bf16", 2)):
        fn, args = problem(name)
        _, [found] = call(fn, *args, platform="cuda")
        read[name] = sum(found.loaded[-leaves - OUTPUTS : -OUTPUTS])
    assert read["ultraquant"] * 64 == read["bf16"] * 17


def test_a_sliding_window_reads_only_the_steps_that_it_touches() -> None:
    """Steps of 32 tokens: of 128 tokens the queries see [84, 128), of 70 [26, 70)."""
    fn, args = problem("bf16_windowed")
    _, [found] = call(fn, *args, platform="cuda")
    tokens = (128 - 64) + 70
    assert found.loaded[-5] == found.loaded[-4] == HEADS * tokens * HEAD_DIM * 2
