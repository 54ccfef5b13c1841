"""Attention of few queries over a long packed store: split over tokens, merged by log-sum-exp (flash-decoding).

    out = softmax(scale · q·K̂ᵀ + mask)·V̂,   lse = log Σ_j exp(scale · q·K̂_j)

A program takes `rows` queries of one KV head and every `splits`-th share of the tokens that they see, and runs one
online softmax over them in steps; `merge` adds the shares. Which tokens a query sees is an interval, so that ragged
rows, causal blocks and sliding windows are one case and nothing outside of it is read.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kvq_jax.online_softmax import MASKED, NOTHING, Softmax
from pallas_kernels.bodies import Keys, Ref, Values
from pallas_kernels.configurations import Config

MANY = 2**30  # tokens: more than any store has
PADDING = -1.0  # the sum of a row that is no query


def _see(
    keys: Keys, values: Values, refs: tuple[list[Ref], list[Ref]], scale: float, tokens: int, windowed: bool
) -> Any:
    """The step of the online softmax: (first, q, interval, state) -> state."""

    def step(first: Array, q: Any, low: Array, high: Array, limit: Array, state: Any) -> Any:
        largest, total, *weighted = state
        parts, new = [], largest
        for part in keys.scores(q, refs[0], first, tokens, limit):
            seen = part.tokens[None, :] < high[:, None]
            if windowed:
                seen = seen & (part.tokens[None, :] >= low[:, None])
            scores = jnp.where(seen, part.scores * scale, MASKED)
            new = jnp.maximum(new, jnp.max(scores, axis=1))
            parts.append(part._replace(scores=scores))
        decay = jnp.exp(largest - new)
        total = total * decay
        weighted = [w * decay[:, None] for w in weighted]
        for part in parts:
            p = jnp.exp(part.scores - new[:, None])
            total = total + jnp.sum(p, axis=1)
            more = values.weighted(part._replace(scores=p), refs[1])
            weighted = [x + y for x, y in zip(weighted, more, strict=True)]
        return (new, total, *weighted)

    return step


def _kernel(
    *refs: Ref,
    keys: Keys,
    values: Values,
    counts: tuple[int, int, int],
    queries: int,
    scale: float,
    config: Config,
    windowed: bool,
) -> None:
    low_ref, high_ref, *refs_ = refs
    q_refs, k_refs, v_refs = (refs_[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(3))
    weighted_ref, largest_ref, total_ref = refs_[sum(counts) :]
    there, rows = None, config.rows
    if queries % rows:  # the last program of a head has fewer
        there = pl.program_id(1) % -(-queries // rows) * rows + lax.iota(jnp.int32, rows) < queries
    if there is None:
        low, high = low_ref[...], high_ref[...]
    else:  # what is no query sees nothing, and does not count for what is read
        low, high = plgpu.load(low_ref, mask=there, other=MANY), plgpu.load(high_ref, mask=there, other=0)
    limit = jnp.max(high)
    begin = jnp.min(low) // config.tokens if windowed else jnp.int32(0)
    steps = (limit + config.tokens - 1) // config.tokens - begin
    share = (jnp.maximum(steps, 0) + config.splits - 1) // config.splits
    start = begin + pl.program_id(0) * share
    stop = jnp.minimum(start + share, begin + steps)
    q = keys.load_queries(q_refs, there)
    total = jnp.zeros((rows,), jnp.float32)
    if there is not None:  # a mask kept for the stores would take registers through all steps: the sum, never negative,
        total = jnp.where(there, total, PADDING)  # says which rows they are; a row that sees nothing keeps its own
    state = (
        jnp.full((rows,), NOTHING, jnp.float32),
        total,
        *(jnp.zeros((rows, values.head_dim // values.planes), jnp.float32) for _ in range(values.planes)),
    )
    step = _see(keys, values, (k_refs, v_refs), scale, config.tokens, windowed)
    largest, total, *weighted = lax.fori_loop(
        start, stop, lambda i, state: step(i * config.tokens, q, low, high, limit, state), state
    )
    there = None if there is None else ~(total < 0)  # what is not a number is written
    plgpu.store(largest_ref, largest, mask=there)
    plgpu.store(total_ref, total, mask=there)
    for i, plane in enumerate(weighted):
        mask = None if there is None else there[:, None, None]
        plgpu.store(weighted_ref.at[:, :, pl.ds(i, 1)], plane[:, :, None], mask=mask)


def split_attention(
    q: Array,
    low: Array,
    high: Array,
    k_store: dict[str, Array],
    v_store: dict[str, Array],
    *,
    keys: Keys,
    values: Values,
    scale: float,
    config: Config,
    windowed: bool,
    interpret: bool = False,
) -> Softmax:
    """The kernel, before the merge: leaves of `Softmax` with an axis of splits before the rows.

    Args as `decode_attention`.
    """
    batch, kv_heads, rows, head_dim = q.shape
    operands = [keys.queries(q), keys.operands(k_store), values.operands(v_store)]
    blocks = -(-rows // config.rows)

    def of_queries(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, config.rows, x.shape[3]), lambda s, h, b: (b, h // blocks, h % blocks, 0))

    def of_store(x: Array) -> pl.BlockSpec:
        zeros = (0,) * (x.ndim - 2)
        return pl.BlockSpec((None, None, *x.shape[2:]), lambda s, h, b: (b, h // blocks, *zeros))

    interval = pl.BlockSpec((None, config.rows), lambda s, h, b: (b, h % blocks))
    of_row = pl.BlockSpec((None, None, None, config.rows), lambda s, h, b: (b, h // blocks, s, h % blocks))
    wide = (head_dim // values.planes, values.planes)
    of_output = pl.BlockSpec(
        (None, None, None, config.rows, *wide), lambda s, h, b: (b, h // blocks, s, h % blocks, 0, 0)
    )
    shape = (batch, kv_heads, config.splits, rows)
    weighted, largest, total = pl.pallas_call(
        functools.partial(
            _kernel,
            keys=keys,
            values=values,
            counts=(len(operands[0]), len(operands[1]), len(operands[2])),
            queries=rows,
            scale=scale,
            config=config,
            windowed=windowed,
        ),
        grid=(config.splits, kv_heads * blocks, batch),
        in_specs=[
            interval,
            interval,
            *map(of_queries, operands[0]),
            *(of_store(x) for x in operands[1] + operands[2]),
        ],
        out_specs=[of_output, of_row, of_row],
        out_shape=[
            jax.ShapeDtypeStruct((*shape, *wide), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name="decode_attention",
    )(low, high, *operands[0], *operands[1], *operands[2])
    return Softmax(largest, total, weighted.reshape(*shape, head_dim))


def merge(parts: Softmax) -> Softmax:
    """The shares `[batch, kv_heads, splits, rows, ...]` as one."""
    largest = parts.largest.max(2)
    weight = jnp.exp(parts.largest - largest[:, :, None])
    return Softmax(largest, jnp.sum(parts.total * weight, axis=2), jnp.sum(parts.weighted * weight[..., None], axis=2))


def attend_store(q: Array, low: Array, high: Array, *stores: dict[str, Array], **how: Any) -> Softmax:
    """`decode_attention` as a softmax in progress, to be merged with other keys."""
    return merge(split_attention(q, low, high, *stores, **how))


def decode_attention(q: Array, low: Array, high: Array, *stores: dict[str, Array], **how: Any) -> tuple[Array, Array]:
    """Attention over a packed store: (output float32 `[batch, kv_heads, rows, head_dim]`, log-sum-exp
    `[batch, kv_heads, rows]`); zero and −1e38 for a query that sees nothing.

    Args:
      q: float32 `[batch, kv_heads, rows, head_dim]`, in K's stored basis and as its scheme rounds it; rows are the
        queries of a KV head, heads outside, tokens inside.
      low, high: int32 `[batch, rows]`: a query sees the tokens [low, high) of the store.
      stores: K's and V's leaves, `[batch, kv_heads, tiles, ...]`.
      how: keys, values (the layouts, `pallas_kernels.dispatch.layouts`), scale (of the scores), config, windowed
        (whether any low is above 0), interpret.
    """
    state = attend_store(q, low, high, *stores, **how)
    total = jnp.where(state.total > 0, state.total, 1.0)
    return state.output(), jnp.where(state.total > 0, state.largest + jnp.log(total), NOTHING)
