"""What a decoder and the attention it is given say to each other (`docs/embedding.md` has an example).

A *forward* is any callable `forward(tokens, positions, attend) -> logits`. It computes q, k and v of each layer
after RoPE and calls `attend(q, k, v)` once a layer, in order; whoever passes `attend` decides what the queries see:
the block itself (`CausalAttention`), or a cache and the block (`pseudo_decode`). A forward that scans over stacked
layers hands its layer function to `attend.scan` instead, because the attention owns what each layer remembers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax
from jax import Array

from kvq_jax.rope import Rope

X = TypeVar("X")


class Attend(Protocol):
    """The attention that a forward is given."""

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        scale: float | None = None,
        sinks: Array | None = None,
        sliding_window: int | None = None,
        rope: Rope | None = None,
    ) -> Array:
        """Attention of one layer: q `[batch, q_heads, tokens, head_dim]`, k and v `[batch, kv_heads, ...]`.

        `scale` defaults to 1/sqrt(head_dim). `sinks` `[q_heads]` is an extra logit a head. With
        `sliding_window=w` a query sees itself and the w − 1 tokens before it. `rope` is the rotation that q and k
        have been through, for schemes that store keys as they were before it. Returns q's shape and dtype.
        """
        ...

    def scan(self, layer: Callable[[X, Any, "Attend"], X], x: X, layers: Any) -> X:
        """`x = layer(x, layers[i], attend)` for every i, where each leaf of `layers` has a leading layer axis.

        `layer` calls the attend it is given exactly once.
        """
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LazyLogits:
    """Logits that are computed only where they are read, so that no `[tokens, vocab]` array need exist.

    `unembed(hidden[:, i:j])` gives float32 logits `[batch, j - i, vocab]`. Make it a
    `jax.tree_util.Partial(fn, weights)`, so that the pair passes through `jit`.
    """

    hidden: Array  # [batch, tokens, width]
    unembed: Callable[[Array], Array]

    def all(self) -> Array:
        """Every logit, `[batch, tokens, vocab]`."""
        return self.unembed(self.hidden)


Forward = Callable[[Array, Array, Attend], "Array | LazyLogits"]
