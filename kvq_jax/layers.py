"""The layers of a forward that is not ours: finding them, and giving each its cache.

Layers are found by tracing the forward once with an attention that only takes notes. A forward that scans over stacked
layers gets stacked caches, in runs of layers with equal schemes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from kvq_jax.attention import attend
from kvq_jax.cache import Cache, append, init_cache
from kvq_jax.constants import Constants, per_layer
from kvq_jax.protocol import Attend, Forward
from kvq_jax.rope import Rope
from kvq_jax.schemes import Scheme, layer_schemes


@dataclass(frozen=True)
class Run:
    """Consecutive layers with one scheme; `stacked` of them at once where the forward scans, else None: one layer."""

    kv_heads: int
    head_dim: int
    stacked: int | None
    scheme: Scheme | None = None
    rope: Rope | None = None

    @property
    def layers(self) -> int:
        return self.stacked or 1

    def empty(
        self, scheme: Scheme, batch: int, capacity: int, dtype: DTypeLike, constants: Mapping[str, Array] | None = None
    ) -> Cache:
        """An empty cache; constants `[layers, ...]` by name."""

        def one(constants: Mapping[str, Array] | None) -> Cache:
            return init_cache(
                scheme,
                batch=batch,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                capacity=capacity,
                dtype=dtype,
                constants=constants,
                rope=self.rope,
            )

        if self.stacked is None:
            return one(None if constants is None else {name: x[0] for name, x in constants.items()})
        return jax.vmap(one, axis_size=self.stacked)(constants)


class _Probe:
    """An `Attend` that only notes the layers it meets."""

    def __init__(self) -> None:
        self.found: list[Run] = []

    def __call__(self, q: Array, k: Array, v: Array, *, rope: Rope | None = None, **_: Any) -> Array:
        if k.shape != v.shape:
            raise ValueError(f"layer {len(self.found)}: k {k.shape} and v {v.shape} differ; a cache holds equal shapes")
        self.found.append(Run(k.shape[1], k.shape[3], None, rope=rope))
        return jnp.zeros(q.shape, q.dtype)

    def scan(self, layer: Callable[[Any, Any, Attend], Any], x: Any, layers: Any) -> Any:
        inner = _Probe()
        x = layer(x, jax.tree.map(lambda leaf: leaf[0], layers), inner)
        (one,) = inner.found  # the protocol: one attention a layer
        self.found.append(dataclasses.replace(one, stacked=jax.tree.leaves(layers)[0].shape[0]))
        return x


def is_array_tree(forward: Forward) -> bool:
    """Whether the forward is a pytree of arrays (a `Partial` over weights), which `jit` can take as an argument."""
    return all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in jax.tree.leaves(forward))


def plan_layers(forward: Forward, policy: Scheme, batch: int, block: int, dtype: DTypeLike) -> tuple[Run, ...]:
    """The model's layers, in runs of equal schemes. Traces the forward, computes nothing."""
    if not is_array_tree(forward):
        if getattr(type(forward), "__hash__", None) is None:
            name = type(forward).__name__
            raise ValueError(f"a forward of type {name} is not hashable; make it a jax.tree_util.Partial(fn, params)")
        return _plan((), forward, policy, batch, block, jnp.dtype(dtype))
    leaves, tree = jax.tree.flatten(forward)
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    return _plan(shapes, tree, policy, batch, block, jnp.dtype(dtype))


@functools.lru_cache(maxsize=64)
def _plan(
    leaves: tuple[jax.ShapeDtypeStruct, ...], tree: Any, policy: Scheme, batch: int, block: int, dtype: DTypeLike
) -> tuple[Run, ...]:
    """`plan_layers`, remembered: tracing takes as long as several blocks.

    tree: a forward less its leaves, or one that is no pytree of arrays.
    """
    probe = _Probe()

    def trace(leaves: tuple[Array, ...], tokens: Array) -> Any:
        forward = tree.unflatten(leaves) if isinstance(tree, jax.tree_util.PyTreeDef) else tree
        return forward(tokens, tokens, probe)

    jax.eval_shape(trace, leaves, jax.ShapeDtypeStruct((batch, block), jnp.int32))
    if not probe.found:
        raise ValueError("forward never called the attention it was given; see docs/embedding.md for the protocol")
    for layer, run in enumerate(probe.found):
        if run.rope is None and policy.resolve(run.head_dim)[0].pre_rope:
            raise ValueError(
                f"{policy.name} stores keys before RoPE, and layer {layer} does not say which RoPE it applied; pass "
                "rope=kvq.Rope(...) to attend (docs/embedding.md; a LongRoPE model of ours says it when loaded with "
                "context=...)"
            )
    schemes = iter(layer_schemes(policy, sum(run.layers for run in probe.found), dtype))
    runs = []
    for found in probe.found:
        of_layers = [next(schemes) for _ in range(found.layers)]
        start = 0
        for end in range(1, found.layers + 1):
            if end == found.layers or of_layers[end] != of_layers[start]:
                stacked = None if found.stacked is None else end - start
                runs.append(dataclasses.replace(found, stacked=stacked, scheme=of_layers[start]))
                start = end
    return tuple(runs)


def constants_of_runs(
    policy: Scheme, constants: Constants | None, runs: Sequence[Run]
) -> tuple[Mapping[str, Array] | None, ...]:
    """The constants `[layers, ...]` of each run, None for runs that are not quantized. Raises ValueError as
    `init_cache` does."""
    total = sum(run.layers for run in runs)
    of_layers: list[Mapping[str, Any] | None] = [None] * total
    for kv_heads, head_dim in {(run.kv_heads, run.head_dim) for run in runs}:
        of_layers = per_layer(policy, constants, layers=total, kv_heads=kv_heads, head_dim=head_dim)
    found, start = [], 0
    for run in runs:
        own = of_layers[start : start + run.layers]
        start += run.layers
        quantizes = run.scheme is not None and run.scheme.quantizes
        parts = [one for one in own if one is not None] if quantizes else []
        stacked = {name: jnp.stack([jnp.asarray(one[name]) for one in parts]) for name in parts[0]} if parts else None
        found.append(stacked)
    return tuple(found)


class CachedAttention:
    """An `Attend` over one cache a layer. Keeps each run's new K and V, and its outputs, for the caller."""

    def __init__(self, runs: Sequence[Run], caches: Sequence[Cache], valid: Array | None, implementation: str) -> None:
        self.todo = list(zip(runs, caches, strict=True))
        self.valid, self.implementation = valid, implementation
        self.new: list[tuple[Array, Array]] = []  # one a run: [(layers,) batch, kv_heads, tokens, head_dim]
        self.outputs: list[Array] = []

    def __call__(self, q: Array, k: Array, v: Array, *, rope: Rope | None = None, **options: Any) -> Array:
        _, cache = self.todo.pop(0)
        how = {"valid": self.valid, "implementation": self.implementation, **options}
        out = attend(q, cache, k, v, **how)
        self.new.append((k, v))
        self.outputs.append(out)
        return out

    def scan(self, layer: Callable[[Any, Any, Attend], Any], x: Any, layers: Any) -> Any:
        total, start = jax.tree.leaves(layers)[0].shape[0], 0
        while start < total:
            run, caches = self.todo.pop(0)
            part = jax.tree.map(lambda leaf, i=start, j=start + run.layers: leaf[i:j], layers)

            def step(x: Any, one: tuple[Any, Cache], run: Run = run) -> tuple[Any, Any]:
                inner = CachedAttention([run], [one[1]], self.valid, self.implementation)
                x = layer(x, one[0], inner)
                return x, (inner.new[0], inner.outputs[0])

            x, (new, outputs) = lax.scan(step, x, (part, caches))
            self.new.append(new)
            self.outputs.append(outputs)
            start += run.layers
        return x


def append_run(run: Run, cache: Cache, k: Array, v: Array, valid: Array | None) -> Cache:
    one = functools.partial(append, valid=valid)
    return one(cache, k, v) if run.stacked is None else jax.vmap(one)(cache, k, v)
