"""Attention over a store alone: a kernel's arguments, and the answer in float64."""

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from scheme_cases import pinned

import kvq_jax as kvq
from pallas_kernels import dispatch
from pallas_kernels.configurations import Config

CAPACITY, SCALE = 200, 0.3


@dataclass(frozen=True, eq=False)
class Problem:
    """Two rows, two KV heads, four queries a head that see different intervals, the last one of row 1 nothing."""

    arguments: tuple[Any, ...]  # of decode_attention
    how: dict[str, Any]
    output: np.ndarray
    log_sum_exp: np.ndarray  # −inf where nothing is seen


@functools.cache
def problem(spec: str, scaled: bool | None = None, terms: int = 3, head_dim: int = 64) -> Problem:
    """A store of up to 200 tokens, in steps of 32 or a tile, in two shares."""
    k, v = (pinned(2, CAPACITY, head_dim=head_dim, seed=seed) for seed in (1, 2))
    cache = kvq.init_cache(spec, batch=2, kv_heads=2, head_dim=head_dim, capacity=CAPACITY, dtype=np.float32)
    cache = kvq.append(cache, k, v, valid=jnp.arange(CAPACITY) < jnp.array([[199], [77]]))
    keys, values = dispatch.layouts(cache, terms=terms, scaled=scaled)
    q = pinned(2, 4, head_dim=head_dim, seed=3)
    q = np.asarray(cache.k.side.quantizer.query(jnp.asarray(q)))
    stored = np.minimum(cache.k.flushed, cache.v.flushed) // keys.tile * keys.tile
    high = np.maximum(stored[:, None] - np.array([0, 1, 5, 70], np.int32), 0).astype(np.int32)
    low = np.minimum(np.array([[0, 3, 40, 0]], np.int32), high)
    # Of `tile` a step is half a tile.
    config = Config(32 if spec.startswith("tile") else max(keys.tile, 32), 2, rows=16)
    k, v = (np.asarray(side.tokens(side.store), np.float64)[:, :, : stored.max()] for side in cache.sides)
    token = np.arange(stored.max())
    seen = ((token >= low[..., None]) & (token < high[..., None]))[:, None]
    scores = np.where(seen, SCALE * np.einsum("bhqd,bhtd->bhqt", q, k), -np.inf)
    log_sum_exp = np.logaddexp.reduce(scores, axis=-1)
    some = np.where(np.isfinite(log_sum_exp), log_sum_exp, 0)[..., None]
    return Problem(
        (q, low, high, cache.k.store, cache.v.store),
        {"keys": keys, "values": values, "scale": SCALE, "config": config, "windowed": True},
        np.einsum("bhqt,bhtd->bhqd", np.exp(scores - some), v),
        log_sum_exp,
    )


def distance(out: Any, lse: Any, expected: np.ndarray, expected_lse: np.ndarray) -> float:
    """The larger of both errors, the output's over its largest magnitude; infinite where one sees something and the
    other nothing."""
    some = np.isfinite(expected_lse)
    if not ((np.asarray(lse) > -1e37) == some).all():
        return float("inf")
    worst = max(np.abs(out - expected).max() / np.abs(expected).max(), np.abs(lse - expected_lse)[some].max())
    return float(worst) if np.isfinite(worst) else float("inf")
