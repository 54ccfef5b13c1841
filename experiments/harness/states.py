"""What a model has read so far: one cache a run of layers, and the logits of what comes next."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import kvq_jax as kvq
from kvq_jax.cache import Cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """What `rows` sequences have read."""

    caches: tuple[Cache, ...]  # one a run of layers
    length: Array  # int32 [rows]
    logits: Array | None  # float32 [rows, vocab]: of the token after the last one that was read; None before the first

    @property
    def quantized_tokens(self) -> np.ndarray:
        """Tokens of each row, int `[rows]`, whose keys lie in the main store of at least one layer that quantizes."""
        counts = [np.zeros(self.length.shape, int)]
        for cache in self.caches:
            if cache.scheme.quantizes:
                counts.append(np.asarray(cache.k.flushed).reshape(-1, len(self.length)).max(0))
        return np.max(counts, axis=0)


def repeated(state: State, rows: int) -> State:
    """The state of one sequence, `rows` times: what follows a common beginning is read side by side."""
    index = jnp.zeros(rows, jnp.int32)

    def one(cache: Cache) -> Cache:
        return kvq.select_rows(cache, index)

    layers = stacked(state)
    caches = tuple(one(c) if n is None else jax.vmap(one)(c) for c, n in zip(state.caches, layers, strict=True))
    logits = None if state.logits is None else state.logits[index]
    return State(caches, state.length[index], logits)


def stacked(state: State) -> list[int | None]:
    """Layers of each run of a state, None for one that is not stacked."""
    return [None if cache.length.ndim == 1 else len(cache.length) for cache in state.caches]
