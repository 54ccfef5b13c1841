"""What each layer's attention is given, in the basis that a scheme stores, and how much the loss depends on it.

`k_fisher` and `v_fisher` are squared gradients: the diagonal of the empirical Fisher information, which weights
KVQuant's codebooks (arXiv:2401.18079). The loss is the sum over one sequence, −Σ_t ln p(x_{t+1} | x_{≤t}) in nats; a
perturbation of zero is added to each number that would be stored, taken to the basis of the model, and differentiated.
A sum weighs a token alike in short and long sequences; with the mean over T tokens all of a sequence's weights would be
(T − 1)² times smaller, which no weighted mean over sequences of one length sees.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvq_jax.attention import CausalAttention
from kvq_jax.cache import from_stored_basis, to_stored_basis
from kvq_jax.layers import Run, is_array_tree
from kvq_jax.protocol import Attend, Forward, LazyLogits
from kvq_jax.rope import Rope
from kvq_jax.schemes import Scheme

CAPTURES = ("k", "v", "q", "k_fisher", "v_fisher")
LOGIT_TOKENS = 128  # tokens whose logits exist at once

Shifts = Mapping[str, Array]  # of k and v, in the stored basis


class CapturingAttention:
    """The `Attend` of a plain forward that keeps q, k, v (those of `names`) of each layer as the scheme would store
    them, q in the basis of K; before attention reads k and v, it adds the layer's `shifts` to them.

    found: one mapping a run of layers, float32 `[(layers,) batch, heads, tokens, head_dim]` by name.
    """

    def __init__(self, scheme: Scheme, names: Sequence[str], shifts: Sequence[Shifts]) -> None:
        self.scheme, self.names, self.todo = scheme, names, list(shifts)
        self.found: list[dict[str, Array]] = []

    def __call__(self, q: Array, k: Array, v: Array, *, rope: Rope | None = None, **options: Any) -> Array:
        of_k, of_v = self.scheme.resolve(k.shape[-1])
        position, shifts = jnp.arange(k.shape[2])[None], self.todo.pop(0)
        given = {"q": (of_k, q), "k": (of_k, k), "v": (of_v, v)}
        self.found.append(
            {
                name: to_stored_basis(side, x.astype(jnp.float32), jnp.float32, rope, position)
                for name, (side, x) in given.items()
                if name in self.names
            }
        )
        for name, shift in shifts.items():
            side, x = given[name]
            given[name] = (side, (x + from_stored_basis(side, shift, rope, position)).astype(x.dtype))
        return CausalAttention()(*(x for _, x in given.values()), **options)

    def scan(self, layer: Callable[[Any, Any, Attend], Any], x: Any, layers: Any) -> Any:
        def step(x: Any, one: tuple[Any, Shifts]) -> tuple[Any, dict[str, Array]]:
            inner = CapturingAttention(self.scheme, self.names, [one[1]])
            return layer(x, one[0], inner), inner.found[0]

        x, found = lax.scan(step, x, (layers, self.todo.pop(0)))
        self.found.append(found)
        return x


def loss(logits: Array | LazyLogits, tokens: Array, count: Array) -> Array:
    """−Σ ln p(next token) over the first `count` of tokens `[1, N]`, whose logits never exist all at once."""
    lazy = logits if isinstance(logits, LazyLogits) else LazyLogits(logits, lambda x: x)
    total = tokens.shape[1]
    size = min(total, LOGIT_TOKENS)
    padding = -total % size
    hidden = jnp.pad(lazy.hidden, ((0, 0), (0, padding), *[(0, 0)] * (lazy.hidden.ndim - 2)))
    target = jnp.pad(tokens[:, 1:], ((0, 0), (0, padding + 1)))

    @jax.checkpoint
    def chunk(start: Array) -> Array:
        part = lazy.unembed(lax.dynamic_slice_in_dim(hidden, start, size, axis=1)).astype(jnp.float32)
        at = lax.dynamic_slice_in_dim(target, start, size, axis=1)
        nll = jax.nn.logsumexp(part, axis=-1) - jnp.take_along_axis(part, at[..., None], axis=-1)[..., 0]
        return jnp.sum(jnp.where(start + jnp.arange(size) < count - 1, nll, 0))

    return lax.map(chunk, jnp.arange(0, total + padding, size)).sum()


# XLA:CPU's default schedule holds the attention gradients of all layers at once: 4 times the memory at 1,024 tokens.
@functools.partial(
    jax.jit,
    static_argnames=("static_forward", "scheme", "names", "runs"),
    compiler_options={"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"},
)
def _capture(
    forward: Any,
    tokens: Array,  # [1, N], the sequence in front
    count: Array,
    *,
    static_forward: Hashable,
    scheme: Scheme,
    names: tuple[str, ...],
    runs: tuple[Run, ...],
) -> list[dict[str, Array]]:
    forward = forward if static_forward is None else static_forward
    shifted = [name for name in "kv" if f"{name}_fisher" in names]

    def run(shifts: list[Shifts]) -> tuple[Array, list[dict[str, Array]]]:
        attend = CapturingAttention(scheme, names, shifts)
        logits = forward(tokens, jnp.arange(tokens.shape[1])[None], attend)
        return loss(logits, tokens, count) if shifted else jnp.float32(0), attend.found

    zeros = []
    for one in runs:
        shape = (*(() if one.stacked is None else (one.stacked,)), 1, one.kv_heads, tokens.shape[1], one.head_dim)
        zeros.append({name: jnp.zeros(shape) for name in shifted})
    gradients, found = jax.grad(run, has_aux=True)(zeros)
    return [
        own | {f"{name}_fisher": jnp.square(x) for name, x in gradient.items()}
        for own, gradient in zip(found, gradients, strict=True)
    ]


def capture(
    forward: Forward, tokens: np.ndarray, *, scheme: Scheme, runs: tuple[Run, ...], names: Sequence[str], size: int
) -> dict[str, np.ndarray]:
    """Read one sequence of up to `size` tokens `[N]`; one size is compiled once.

    Returns float32 `[heads, N, head_dim]` by `<layer>.<name>`, for every name of `names` and every layer. Raises
    ValueError where one is not finite.
    """
    padded = np.zeros((1, size), np.int32)
    padded[0, : len(tokens)] = tokens  # after all that exists, where causal attention never looks
    is_tree = is_array_tree(forward)
    how = {"scheme": scheme, "names": tuple(names), "runs": runs, "static_forward": None if is_tree else forward}
    try:
        of_runs = _capture(forward if is_tree else None, padded, jnp.int32(len(tokens)), **how)
    except jax.errors.UnexpectedTracerError:
        raise ValueError(
            "forward calls attend inside a jit, checkpoint or scan of its own, where what it is given is lost; take "
            "that away, or scan through attend.scan (docs/embedding.md)"
        ) from None
    layers: list[dict[str, np.ndarray]] = []
    for run, own in zip(runs, of_runs, strict=True):
        arrays = {name: np.asarray(x)[..., 0, :, : len(tokens), :] for name, x in own.items()}
        layers += [{name: x if run.stacked is None else x[i] for name, x in arrays.items()} for i in range(run.layers)]
    found = {f"{i}.{name}": x for i, arrays in enumerate(layers) for name, x in arrays.items()}
    for name in sorted(found, key=lambda name: "fisher" in name):  # one bad number makes every gradient bad
        if not np.isfinite(found[name]).all():
            layer, what = name.split(".")
            raise ValueError(
                f"the model's {what} of layer {layer} is not finite, so nothing can be calibrated; check the "
                "checkpoint, or load it in float32"
            )
    return found
