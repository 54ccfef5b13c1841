"""Decoding token by token with a view of the attention: which keys every query of a step looks at, and how much."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial
from jax.typing import DTypeLike

import kvq_jax as kvq
from experiments.harness import replay
from kvq_jax.cache import Cache, pad_tokens, put_tokens
from kvq_jax.layers import CachedAttention, Run
from kvq_jax.measures import attention_logits
from kvq_jax.quantizers.base import dot
from kvq_jax.rope import Rope
from kvq_jax.schemes import full_precision


class Asked(NamedTuple):
    """The queries of a layer `[batch, q_heads, tokens, head_dim]`, and how they are to be read (protocol.py)."""

    q: Array
    scale: float | None = None
    sinks: Array | None = None
    sliding_window: int | None = None


class Remembering(CachedAttention):
    """`CachedAttention` that also keeps what each layer asked. Layers are unrolled: a scan keeps no queries."""

    def __init__(self, runs: Sequence[Run], caches: Sequence[Cache], implementation: str) -> None:
        super().__init__(runs, caches, None, implementation)
        self.asked: list[Asked] = []

    def __call__(self, q: Array, k: Array, v: Array, *, rope: Rope | None = None, **options: Any) -> Array:
        self.asked.append(Asked(q, **options))
        return super().__call__(q, k, v, rope=rope, **options)

    def scan(self, layer: Any, x: Any, layers: Any) -> Any:
        raise ValueError("--scan_layers: queries are kept of unrolled layers only; leave the flag out")


class Step(NamedTuple):
    """What one block of tokens gave."""

    logits: Array  # float32 [batch, vocab], of the block's last token
    asked: list[Asked]  # one a layer
    new: list[tuple[Array, Array]]  # K and V of the block, one pair a layer
    caches: tuple[Cache, ...]  # with the block appended


def step(
    forward: Partial, tokens: Array, caches: tuple[Cache, ...], runs: tuple[Run, ...], implementation: str
) -> Step:
    """One block of tokens `[batch, n]` behind what the caches hold. To be called inside `jit`."""
    attention = Remembering(runs, caches, implementation)
    positions = caches[0].length[:, None] + jnp.arange(tokens.shape[1])
    out = forward(tokens, positions, attention)
    last = out.unembed(out.hidden[:, -1:]) if isinstance(out, kvq.LazyLogits) else out[:, -1:]
    caches = replay.append(runs, caches, attention.new)
    return Step(last[:, 0].astype(jnp.float32), attention.asked, attention.new, caches)


compiled_step = functools.partial(jax.jit, static_argnames=("runs", "implementation"))(step)


def _logits(asked: Asked, scores: Array, length: Array) -> Array:
    """Of the token that is number `length` `[batch]` of its row, over keys by position."""
    *_, head_dim = asked.q.shape
    behind = length[:, None] - jnp.arange(scores.shape[-1])
    seen = behind >= 0
    if asked.sliding_window is not None:
        seen &= behind < asked.sliding_window
    scale = head_dim**-0.5 if asked.scale is None else asked.scale
    return attention_logits(scores * scale, seen[:, None, None], asked.sinks)


def exact_logits(asked: Asked, keys: Array, length: Array) -> Array:
    """Attention logits of one new token's queries over exact keys `[batch, kv_heads, positions, head_dim]`, of which
    those up to its own position `length` `[batch]` exist: `[batch, q_heads, 1, positions (+ 1 for a sink)]`."""
    return _logits(asked, dot(asked.q, _per_head(keys, asked.q)), length)


def cached_logits(asked: Asked, cache: Cache, k: Array) -> Array:
    """`exact_logits` over what the cache held when the token read it, and the token's own key k, which it reads in full
    precision. Queries meet the store as the scheme rounds them."""
    side = cache.k.side
    keys = kvq.read(cache)[0]
    keys = pad_tokens(keys, cache.capacity - keys.shape[2])  # outside of a trace it reads up to the longest row
    keys = _per_head(put_tokens(keys, k.astype(jnp.float32), cache.length), asked.q)
    scores = dot(asked.q, keys)
    basis = kvq.hadamard if side.rotate else lambda x: x
    q = basis(asked.q.astype(jnp.float32))
    rounded = side.quantizer.query(q)
    if rounded is not q:
        after_sink = jnp.arange(keys.shape[-1]) - cache.scheme.sink
        stored = (after_sink >= 0) & (after_sink < cache.k.flushed[:, None])
        scores = jnp.where(stored[:, None, None], dot(basis(rounded), keys), scores)
    return _logits(asked, scores, cache.length)


def _per_head(keys: Array, q: Array) -> Array:
    """Keys of every query head, transposed: `[batch, q_heads, head_dim, positions]`."""
    return jnp.swapaxes(jnp.repeat(keys, q.shape[1] // keys.shape[1], axis=1), -1, -2)


class Reference(NamedTuple):
    """What an unquantized model did with every prompt: `answer[:, i + 1]` is what it says after `answer[:, i]`."""

    prompt: list[tuple[Array, Array]]  # K and V of the prompt, one pair a layer
    answer: np.ndarray  # int32 [prompts, steps + 1]
    length: np.ndarray  # int32 [prompts]: tokens of the answer, up to where it stops
    logits: list[Array]  # [prompts, vocab], one a step
    asked: list[list[Asked]]  # one a layer, of every step
    keys: list[Array]  # [prompts, kv_heads, prompt + steps, head_dim], one a layer


def responses(answer: np.ndarray, stops: Sequence[int]) -> np.ndarray:
    """Tokens of each answer `[rows, tokens]` up to the first stop, which counts; all where there is none."""
    stopped = np.isin(answer, stops)
    return np.where(stopped.any(1), stopped.argmax(1) + 1, answer.shape[1])


def read_reference(
    forward: Partial,
    prompts: np.ndarray,
    *,
    steps: int,
    stops: Sequence[int],
    dtype: DTypeLike,
    implementation: str,
    progress: Callable[[int, int], None],
) -> Reference:
    """Prefill prompts `[prompts, tokens]` in one block and decode greedily, without quantization. Raises ValueError
    where a logit is not finite."""
    batch, count = prompts.shape
    of = replay.plan(forward, full_precision(dtype), None, batch, 1, dtype)
    how: dict[str, Any] = {"runs": of.runs, "implementation": implementation}
    first = now = compiled_step(forward, jnp.asarray(prompts), of.empty(batch, count + steps), **how)
    answer, logits, asked = [jnp.argmax(first.logits, -1)], [], []
    for i in range(steps):
        now = compiled_step(forward, answer[-1][:, None], now.caches, **how)
        logits.append(now.logits)
        asked.append(now.asked)
        answer.append(jax.block_until_ready(jnp.argmax(now.logits, -1)))
        progress(i + 1, steps)
    if not all(np.isfinite(one).all() for one in logits):
        raise ValueError(
            "the unquantized reference's logits are not finite; pass --dtype=float32, and check the checkpoint if that "
            "is what ran"
        )
    tokens = np.stack([np.asarray(one) for one in answer], axis=1).astype(np.int32)
    return Reference(
        first.new, tokens, responses(tokens, stops), logits, asked, [kvq.read(cache)[0] for cache in now.caches]
    )
