"""Reading, generating and scoring through a quantized cache: rows of any length, each as if it were alone.

A `State` is what a model has read so far, one row a sequence. Every token of it is seen through the scheme's packed
caches (sink and window in full precision), but by those of its own block; a block is appended when all its tokens have
been read. `read` fills the caches with what the quantized run itself computes (accumulated); `filled` fills them with
the keys and values of another state, that of an unquantized reader (static).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import kvq_jax as kvq
from experiments.harness.states import State, repeated, stacked
from kvq_jax.cache import Cache
from kvq_jax.layers import CachedAttention, Run, append_run, constants_of_runs, plan_layers
from kvq_jax.protocol import Forward, LazyLogits
from kvq_jax.schemes import full_precision

FEW = 16  # tokens of a block whose logits cost less than compiling a program without them
__all__ = ["Reader", "State", "filled", "generate", "padded", "read", "reader", "repeated", "score"]
Rows = Sequence[Sequence[int]]  # token ids of each row
Report = Callable[[int, int], None]  # (done, of)


@dataclass(frozen=True)
class Reader:
    """A forward and the scheme that it reads its own past through. `reader` makes it."""

    forward: Forward
    scheme: kvq.Scheme
    runs: tuple[Run, ...]
    constants: tuple[Mapping[str, Array] | None, ...]
    dtype: str
    implementation: str

    def empty(self, rows: int, capacity: int) -> "State":
        """Nothing read yet; room for `capacity` tokens a row."""
        exact = full_precision(self.dtype)
        caches = tuple(
            run.empty(run.scheme or exact, rows, capacity, self.dtype, own)
            for run, own in zip(self.runs, self.constants, strict=True)
        )
        return State(caches, jnp.zeros(rows, jnp.int32), None)


def reader(
    forward: Forward,
    scheme: kvq.Scheme,
    *,
    constants: kvq.Constants | None = None,
    dtype: str = "float32",
    implementation: str | None = None,
) -> Reader:
    """A forward (a `jax.tree_util.Partial` over weights) that reads through `scheme`. Raises as `pseudo_decode`."""
    runs = plan_layers(forward, scheme, 1, 1, jnp.dtype(dtype))
    of_runs = constants_of_runs(scheme, constants, runs)
    return Reader(forward, scheme, runs, of_runs, dtype, kvq.resolve_implementation(implementation))


def padded(rows: Rows, multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids `[rows, width]`, zero beyond each row's end, and which exist; width: a multiple of `multiple`."""
    width = -(-max(map(len, rows)) // multiple) * multiple
    tokens, exists = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], exists[i, : len(row)] = row, True
    return tokens, exists


def _block(
    forward: Forward,
    state: State,
    tokens: Array,
    exists: Array,
    *,
    runs: tuple[Run, ...],
    implementation: str,
    scored: bool,
) -> tuple[State, tuple[Array, Array]]:
    """Read one block `[rows, block]`, whose tokens exist from the left. `scored`: also ln p of each token that exists
    given all before it `[rows, block]`, and whether it was the most likely one."""
    step = exists.astype(jnp.int32)
    positions = jnp.maximum(state.length[:, None] + jnp.cumsum(step, axis=1) - 1, 0)
    attention = CachedAttention(runs, state.caches, exists, implementation)
    out = forward(tokens, positions, attention)
    lazy = out if isinstance(out, LazyLogits) else LazyLogits(out, lambda x: x)
    caches = tuple(
        append_run(run, cache, k, v, exists)
        for run, cache, (k, v) in zip(runs, state.caches, attention.new, strict=True)
    )
    count = step.sum(1)
    last = jnp.take_along_axis(lazy.hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
    logits = lazy.unembed(last)[:, 0]
    before = jnp.zeros_like(logits) if state.logits is None else state.logits
    logits = jnp.where((count > 0)[:, None], logits, before)
    found = jnp.zeros(tokens.shape), jnp.zeros(tokens.shape, bool)
    if scored:
        given = jnp.concatenate([before[:, None], lazy.unembed(lazy.hidden[:, :-1])], axis=1)
        at = jnp.take_along_axis(jax.nn.log_softmax(given), tokens[..., None], axis=-1)[..., 0]
        found = jnp.where(exists, at, 0.0), (given.argmax(-1) == tokens) | ~exists
    return State(caches, state.length + count, logits), found


_read_block = functools.partial(jax.jit, static_argnames=("runs", "implementation", "scored"))(_block)


@functools.partial(jax.jit, static_argnames=("runs", "implementation"), donate_argnames="state")  # updated in place
def _step(
    forward: Forward, state: State, going: Array, tokens: Array, *, runs: tuple[Run, ...], implementation: str
) -> State:
    """Read one token `[rows]` of the rows that are going on."""
    how: dict[str, Any] = {"runs": runs, "implementation": implementation, "scored": False}
    return _block(forward, state, tokens[:, None], going[:, None], **how)[0]


@functools.partial(jax.jit, static_argnames="sampled")
def _choose(logits: Array, length: Array, keys: Array, temperature: Array, sampled: bool) -> Array:
    """The most likely token of each row, or one drawn by the row's own key and position, whoever is beside it."""
    if not sampled:
        return logits.argmax(-1)
    own = jax.vmap(jax.random.fold_in)(keys, length)
    return jax.vmap(jax.random.categorical)(own, logits / temperature)


def _check_finite(reader: Reader, numbers: Array | np.ndarray) -> None:
    """Raise ValueError for logits (or ln p) that are not finite: their answers would pass for those of a model."""
    if not np.isfinite(np.asarray(numbers.max(-1))).all():
        raise ValueError(
            f"{reader.scheme}: the logits are not finite; pass --dtype=float32, and check the checkpoint if that is "
            "what ran"
        )


def _room(state: State, rows: Sequence[int] | np.ndarray) -> None:
    capacity, most = state.caches[0].capacity, int((np.asarray(state.length) + np.asarray(rows)).max())
    if most > capacity:
        raise ValueError(f"a row would hold {most} tokens, and capacity={capacity}; make the state with more")


def read(reader: Reader, state: State, rows: Rows, *, block: int, progress: Report | None = None) -> State:
    """The state after each row has read its tokens, `block` at a time, through the caches."""
    return _read(reader, state, rows, block, False, progress)[0]


def score(reader: Reader, state: State, rows: Rows, *, block: int) -> tuple[np.ndarray, np.ndarray]:
    """ln p of each row's tokens after what it has read, float `[rows]` in nats, and whether greedy decoding would
    give just them, bool `[rows]`. Tokens after the first `block` read those before them through the caches."""
    _, found = _read(reader, state, rows, block, True, None)
    nats = np.sum([np.asarray(p, np.float64).sum(1) for p, _ in found], axis=0)
    _check_finite(reader, nats)
    return nats, np.all([np.all(g, axis=1) for _, g in found], axis=0)


def _read(
    reader: Reader, state: State, rows: Rows, block: int, scored: bool, progress: Report | None
) -> tuple[State, list[tuple[Array, Array]]]:
    if len(rows) != len(state.length) or not any(len(row) for row in rows):
        raise ValueError(f"rows has {len(rows)} sequences, one with tokens is needed, and as many as the state's rows")
    if scored and state.logits is None:
        raise ValueError("nothing was read yet, so no token has a probability; read at least one")
    _room(state, [len(row) for row in rows])
    tokens, exists = padded(rows, block)
    found, blocks = [], tokens.shape[1] // block
    how: dict[str, Any] = {"runs": reader.runs, "implementation": reader.implementation}
    how["scored"] = scored or block <= FEW
    for i in range(blocks):
        part = slice(i * block, (i + 1) * block)
        state, of_block = _read_block(reader.forward, state, tokens[:, part], exists[:, part], **how)
        found.append(of_block)
        if progress is not None:
            state.length.block_until_ready()
            progress(i + 1, blocks)
    assert state.logits is not None
    _check_finite(reader, state.logits)
    return state, found


@functools.partial(jax.jit, static_argnames="runs")
def _fill(state: State, caches: tuple[Cache, ...], runs: tuple[Run, ...]) -> tuple[Cache, ...]:
    exists = jnp.arange(caches[0].capacity) < state.length[:, None]
    filled = []
    for run, exact, cache in zip(runs, state.caches, caches, strict=True):
        k, v = kvq.read(exact) if run.stacked is None else jax.vmap(kvq.read)(exact)
        filled.append(append_run(run, cache, k.astype(cache.dtype), v.astype(cache.dtype), exists))
    return tuple(filled)


def filled(reader: Reader, exact: State) -> State:
    """A state of `reader` whose caches hold the keys and values of `exact`, an unquantized reader's: errors are made
    once, and have not become inputs. Its logits are the unquantized ones, until it reads on."""
    rows, capacity = len(exact.length), exact.caches[0].capacity
    if any(cache.scheme.quantizes for cache in exact.caches):
        raise ValueError("exact has been read through a scheme that quantizes; pass the state of an unquantized reader")
    if [run.stacked for run in reader.runs] != stacked(exact):
        raise ValueError("protect= splits stacked layers; load the model with scan_layers=False")
    caches = _fill(exact, reader.empty(rows, capacity).caches, reader.runs)
    return State(caches, exact.length, exact.logits)


def generate(
    reader: Reader,
    state: State,
    *,
    most: int,
    stop: Callable[[list[int]], bool],
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
    progress: Report | None = None,
) -> list[list[int]]:
    """Up to `most` tokens of each row after what it has read, each read back through the caches, until `stop` of a
    row's new tokens is true. temperature 0: the most likely token; else sampled, every row by its own seed."""
    rows = len(state.length)
    if state.logits is None:
        raise ValueError("nothing was read yet; read at least one token before generating")
    if temperature > 0 and (seeds is None or len(seeds) != rows):
        raise ValueError(f"temperature={temperature} needs a seed for each of the {rows} rows")
    _room(state, np.full(rows, most - 1))
    keys = jnp.stack([jax.random.key(seed) for seed in (seeds if seeds is not None else [0] * rows)])
    warm, sampled = jnp.float32(max(temperature, 1e-6)), temperature > 0
    token = _choose(state.logits, state.length, keys, warm, sampled)
    state = jax.tree.map(jnp.copy, state)
    out: list[list[int]] = [[] for _ in range(rows)]
    going = np.ones(rows, bool)
    how: dict[str, Any] = {"runs": reader.runs, "implementation": reader.implementation}
    for done in range(1, most + 1):
        for i, one in enumerate(np.asarray(token)):
            if going[i]:
                out[i].append(int(one))
                going[i] = not stop(out[i])
        if progress is not None:
            progress(done if going.any() else most, most)
        if done == most or not going.any():
            break
        state = _step(reader.forward, state, going, token, **how)
        token = _choose(state.logits, state.length, keys, warm, sampled)
    assert state.logits is not None
    _check_finite(reader, state.logits)
    return out
