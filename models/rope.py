"""Rotary position embedding: the frequency tables of each published scaling, and the rotation.

Token t's channel pair (x_i, x_{i + d/2}) turns by the angle t · f_i (RoFormer, arXiv:2104.09864, in the half-split
channel order of the publishers' checkpoints); the first `d` of the head's channels turn and the others pass
unchanged (partial rotation). With θ the base and i = 0 … d/2 − 1:

    default    f_i = θ^(−2i/d)
    linear     f_i / factor                                        (position interpolation, arXiv:2306.15595)
    llama3     f_i where the wavelength 2π/f_i is short, f_i / factor where it is long, a blend between (Llama 3.1)
    longrope   f_i / short_i or f_i / long_i; cos and sin times an attention factor (arXiv:2402.13753)

**Which LongRoPE table.** Transformers chooses a call at a time: `long` when the call's largest position is at or
beyond `original_context`, else `short`. Keys that were written under one table are wrong under the other, so a cache
must never meet both. Here: with `context=N` at load the choice is fixed for the session (`long` when
N > `original_context`). Without it each row of a call chooses by its own largest position, as Transformers would,
and a row that would have to change tables midway (it reaches `original_context` but does not start at position 0)
becomes NaN instead of silently mixing them; so does a row beyond `original_context` under a fixed short table.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

import kvq_jax as kvq

ROPE_TYPES = ("default", "linear", "llama3", "longrope")
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_KEYS = {
    "default": _COMMON_KEYS,
    "linear": _COMMON_KEYS | {"factor"},
    "llama3": _COMMON_KEYS | {"factor", "low_freq_factor", "high_freq_factor"},
    "longrope": _COMMON_KEYS | {"factor", "short_factor", "long_factor", "attention_factor"},
}


@dataclass(frozen=True)
class Rope:
    """Frequencies in radians a token, already scaled; `len(inv_freq)` is half the number of rotated channels."""

    inv_freq: tuple[float, ...]
    long_inv_freq: tuple[float, ...] | None = None  # LongRoPE's table for long contexts
    original_context: int | None = None  # LongRoPE: the longest context of the short table
    attention_factor: float = 1.0  # multiplies cos and sin, of both tables
    context: int | None = None  # LongRoPE: the context that was asked for at load, which fixes the table

    @property
    def rotary_dim(self) -> int:
        """How many of the head's channels turn."""
        return 2 * len(self.inv_freq)

    def applied(self) -> kvq.Rope | None:
        """What q and k go through, for caches that store keys before it; None where each call chooses its table."""
        if self.long_inv_freq is None:
            return kvq.Rope(self.inv_freq, self.attention_factor)
        if self.context is None or self.original_context is None:
            return None
        table = self.long_inv_freq if self.context > self.original_context else self.inv_freq
        return kvq.Rope(table, self.attention_factor)


def _floats(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(v) for v in np.asarray(values, np.float32))


def base_frequencies(theta: float, rotary_dim: int) -> np.ndarray:
    """θ^(−2i/d), float64 `[rotary_dim / 2]`."""
    return float(theta) ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


def llama3_frequencies(freq: np.ndarray, *, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """Llama 3.1's scaling: with w = 2π/f, s = (original/w − low) / (high − low) clipped to [0, 1],
    f' = (1 − s) f / factor + s f."""
    turns = original * freq / (2 * math.pi)  # how often the pair turns within the original context
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - keep) * freq / factor + keep * freq


def make_rope(
    params: Mapping[str, Any],
    *,
    theta: float,
    head_dim: int,
    partial_rotary_factor: float,
    max_position: int,
    original_max_position: int | None,
    context: int | None,
    where: str,
) -> Rope:
    """A `Rope` from a checkpoint's scaling dictionary (`rope_parameters` or `rope_scaling`; empty: default)."""
    given = {k for k in ("rope_type", "type") if params.get(k) is not None}
    kinds = {str(params[k]) for k in given} or {"default"}
    if "su" in kinds:  # LongRoPE's name in the first Phi-3 checkpoints
        kinds = (kinds - {"su"}) | {"longrope"}
    kind = kinds.pop()
    if kinds or kind not in ROPE_TYPES:
        raise ValueError(
            f"{where}: rope type {kind!r}{' and ' + repr(kinds.pop()) if kinds else ''} is not supported; "
            f"supported is one of {', '.join(ROPE_TYPES)}"
        )

    def number(key: str) -> float:
        value = params.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ValueError(f"{where}: rope type {kind!r} needs a positive number {key!r}, got {value!r}")
        return float(value)

    for key, value in params.items():
        if key not in _KEYS[kind] and value is not None and value is not False:
            raise ValueError(
                f"{where}: rope key {key!r} = {value!r} is not supported with rope type {kind!r}; "
                f"supported are {', '.join(sorted(_KEYS[kind]))}"
            )
    rotary_dim = int(head_dim * partial_rotary_factor)
    if rotary_dim <= 0 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(
            f"{where}: partial_rotary_factor = {partial_rotary_factor!r} of head_dim {head_dim} rotates {rotary_dim} "
            f"channels; supported is an even number from 2 to {head_dim}"
        )
    freq = base_frequencies(theta, rotary_dim)
    if kind == "default":
        return Rope(_floats(freq))
    if kind == "linear":
        return Rope(_floats(freq / number("factor")))
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low >= high:
            raise ValueError(f"{where}: low_freq_factor = {low} must be below high_freq_factor = {high}")
        original = int(number("original_max_position_embeddings"))
        return Rope(_floats(llama3_frequencies(freq, factor=number("factor"), low=low, high=high, original=original)))
    return _longrope(params, freq, number, max_position, original_max_position, context, where)


def _longrope(
    params: Mapping[str, Any],
    freq: np.ndarray,
    number: Any,
    max_position: int,
    original: int | None,
    context: int | None,
    where: str,
) -> Rope:
    """LongRoPE: the factor is max_position / original, the attention factor √(1 + ln factor / ln original)."""
    tables = {}
    for key in ("short_factor", "long_factor"):
        values = params.get(key)
        if not isinstance(values, list | tuple) or len(values) != len(freq):
            got = f"{len(values)} values" if isinstance(values, list | tuple) else repr(values)
            raise ValueError(f"{where}: rope type 'longrope' needs {len(freq)} values of {key!r}, got {got}")
        tables[key] = np.asarray(values, np.float64)
        if not (np.isfinite(tables[key]).all() and (tables[key] > 0).all()):
            raise ValueError(f"{where}: every value of {key!r} must be finite and positive")
    if params.get("original_max_position_embeddings") is not None:
        inner = int(number("original_max_position_embeddings"))
        if original not in (None, inner):
            raise ValueError(
                f"{where}: original_max_position_embeddings = {original} disagrees with {inner} in the rope dictionary"
            )
        original = inner
    if original is None:
        raise ValueError(f"{where}: rope type 'longrope' needs 'original_max_position_embeddings', which is missing")
    factor = max_position / original
    if params.get("factor") is not None and not math.isclose(number("factor"), factor, rel_tol=1e-6):
        raise ValueError(
            f"{where}: rope factor = {params['factor']!r} disagrees with max_position_embeddings / "
            f"original_max_position_embeddings = {factor}"
        )
    if params.get("attention_factor") is not None:
        attention_factor = number("attention_factor")
    else:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return Rope(
        _floats(freq / tables["short_factor"]),
        _floats(freq / tables["long_factor"]),
        original,
        attention_factor,
        context,
    )


def rotary_tables(rope: Rope, positions: Array) -> tuple[Array, Array]:
    """cos and sin, float32 `[batch, 1, tokens, rotary_dim / 2]`, of `positions` int32 `[batch, tokens]`."""
    inv_freq = jnp.asarray(np.asarray(rope.inv_freq, np.float32))
    angles = positions.astype(jnp.float32)[:, None, :, None]
    if rope.long_inv_freq is None:
        angles = angles * inv_freq
    else:
        assert rope.original_context is not None
        long_inv_freq = jnp.asarray(np.asarray(rope.long_inv_freq, np.float32))
        beyond = positions.max(axis=1) >= rope.original_context  # [batch]
        if rope.context is None:
            use_long = beyond
            mixed = beyond & (positions.min(axis=1) > 0)
        else:
            use_long = jnp.full_like(beyond, rope.context > rope.original_context)
            mixed = beyond & ~use_long
        table = jnp.where(use_long[:, None], long_inv_freq, inv_freq)  # [batch, rotary_dim / 2]
        table = jnp.where(mixed[:, None], jnp.nan, table)
        angles = angles * table[:, None, None, :]
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turns the first `rotary_dim` channels of `x` `[batch, heads, tokens, head_dim]`, in float32; x's dtype out."""
    half = cos.shape[-1]
    first, second, rest = jnp.split(x, (half, 2 * half), axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1)
