"""The clipping constant c of blocks whose scale is c·max|z|, rounded to a power of two (UltraQuant, arXiv:2606.20474).

The published c minimizes E[(z − s q(z/s))²] with the scale s = c·m, m = max|z|. What is stored is
s = 2^round(log2 c·m), whose best c is another; here s is what the rounding rule makes of it.

As a function of x = log2 c that error is a staircase: a block's exponent jumps where x + log2 m passes a threshold.
The gradient goes straight through the exponent's rounding: with the codes held fixed dẑ/dx = ẑ ln 2, as if s moved
with c. For the squared error, which is continuous in s, that is more than a heuristic. Moving x by dx moves the blocks
next to the threshold by one octave, and the error between two neighbouring octaves is the integral of its derivative
over s; where the fractional part of log2 m is uniform, the straight-through gradient averages just that derivative over
just that octave, and so is the gradient of the staircase seen from afar. Real maxima are not quite uniform, and the
errors of scores and of attention are not continuous in s, so the true objective has the last word, around where the
gradient ended.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvq_jax.block_formats import ROUNDINGS, e2m1, e2m1_codes, power_of_two
from kvq_jax.quantizers.base import dot
from kvq_jax.quantizers.ultraquant import PUBLISHED, UltraBlocks

OBJECTIVES = ("mse", "scores", "attention")
STEPS, RATE = 32, 0.1  # of Adam, and its first step in octaves; the steps shrink to 0, so it reaches 1.6 octaves
ASIDE, CANDIDATES = 0.5, 33  # octaves beyond start and end that the refinement looks at, at this many points; twice
QUERIES = 256  # of a sequence and head, evenly spaced, that the attention objective looks at


def grid(start: float) -> np.ndarray:
    """Constants for a curve, float32 `[65]`: two octaves to each side of start, which is the middle one."""
    return (start * np.exp2(np.arange(-32, 33) / 16)).astype(np.float32)


class Clipping(NamedTuple):
    """float32 arrays, one entry for each constant.

    An error is relative: of `mse` Σ(z − ẑ)²/Σz², of `scores` Σ(q·(k − k̂))²/Σ(q·k)²; of `attention` it is the mean
    KL(p ‖ p̂) of a query, in nats.
    """

    c: np.ndarray
    error: np.ndarray  # at c
    gradient_c: np.ndarray  # where the gradient ended, before the refinement
    start_error: np.ndarray  # at the constant it began with, the published one

    @property
    def excess(self) -> np.ndarray:
        """What the start leaves on the table: 0.34 where its error is 34 % above that of c."""
        more = self.start_error - self.error
        with np.errstate(all="ignore"):  # infinite where c makes no error at all
            return np.where(more > 0, more / self.error, 0)


def solve_clipping_constant(
    z: Array | np.ndarray,
    *,
    rounding: str = "nearest",
    block: int = 32,
    start: float = PUBLISHED,
    objective: str = "mse",
    queries: Array | np.ndarray | None = None,
    pool: Sequence[int] = (),
) -> Clipping:
    """The c that minimizes the error of z `[..., tokens, head_dim]` in its stored basis, for each leading index.

    Adam in log2 c on the straight-through objective, for all constants at once, from `start`; then the lowest of the
    true objective from half an octave before the one to half an octave beyond the other, on a grid of 33 points and
    one of 33 more between the neighbours of its best. Never worse than `start`.

    Args:
      rounding: of log2(c·m): nearest, even, floor, ceil, as UltraQuant stores it; none: s = c·m, the paper's objective.
      block: channels that share a scale.
      objective: "mse"; "scores", with z = K: of q·k over all pairs of queries and keys; "attention": KL of the causal
        softmax(q·k/sqrt(head_dim)), for 256 evenly spaced queries of a sequence.
      queries: for the last two, `[..., tokens, head_dim]` in K's basis; of the last leading axis, the heads, as many
        as z has or a multiple (GQA).
      pool: leading axes of z, counted from the front, over which one constant is shared; the result is without them.
        Their errors are summed, not the relative ones. With z `[layers, sequences, heads, ...]`: (1,) gives a constant
        a head, (1, 2) one a layer.

    Raises ValueError for shapes that do not fit, z or queries that are not finite, or so large that their squares are
    not, a start that is not positive, and an unknown rounding or objective.
    """
    if not (math.isfinite(start) and start > 0):
        raise ValueError(f"start={start} is no scale; pass a positive number")
    how: dict[str, Any] = {"rounding": rounding, "block": block, "objective": objective}
    problems, q, shape = _problems(z, queries, pool, **how)
    found = Clipping(*(np.asarray(x).reshape(shape) for x in _solve(problems, q, math.log2(start), **how)))
    if not np.isfinite(found.start_error).all():
        raise ValueError("z or its queries are so large that their squares are not finite; scale them by a power of 2")
    return found


def clipping_curve(
    z: Array | np.ndarray,
    c: Array | np.ndarray,
    *,
    rounding: str = "nearest",
    block: int = 32,
    objective: str = "mse",
    queries: Array | np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The errors at each of `c` `[n]` as sums `[..., n]`, and what makes them relative, `[...]` (see `Clipping`).

    Sums over layers, heads or sequences are the curves that they have together. Arguments and errors as in
    `solve_clipping_constant`.
    """
    how: dict[str, Any] = {"rounding": rounding, "block": block, "objective": objective}
    problems, q, shape = _problems(z, queries, (), **how)
    curve, norm = _curve(problems, q, jnp.log2(c), **how)
    return np.asarray(curve).reshape(*shape, len(c)), np.asarray(norm).reshape(shape)


def lowest(c: np.ndarray, curve: np.ndarray) -> np.ndarray:
    """Where the curve `[..., n]` over c `[n]`, evenly spaced in log c, is lowest: of the parabola through the lowest
    point and its neighbours; that point itself, where a neighbour is half as high again: a step, and no parabola."""
    i = np.clip(curve.argmin(-1), 1, len(c) - 2)
    before, at, after = (np.take_along_axis(curve, (i + d)[..., None], -1)[..., 0] for d in (-1, 0, 1))
    bend = before - 2 * at + after
    smooth = (bend > 0) & (np.maximum(before, after) < 1.5 * at)
    offset = np.clip((before - after) / np.where(smooth, 2 * bend, np.inf), -1, 1)
    return np.where(smooth, c[i] * (c[1] / c[0]) ** offset, c[curve.argmin(-1)])


def _problems(
    z: Array | np.ndarray,
    queries: Array | np.ndarray | None,
    pool: Sequence[int],
    *,
    rounding: str,
    block: int,
    objective: str,
) -> tuple[Array, Array | None, tuple[int, ...]]:
    """z `[constants, pooled, tokens, head_dim]`, queries `[constants, pooled, group, ...]`, the result's shape."""
    for name, value, allowed in (
        ("rounding", rounding, (*ROUNDINGS, "none")),
        ("objective", objective, OBJECTIVES),
    ):
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is unknown; allowed: {', '.join(allowed)}")
    if (queries is None) != (objective == "mse"):
        raise ValueError(f"objective={objective} {'needs' if queries is None else 'takes no'} queries")
    if np.ndim(z) < 2 or not np.size(z):
        raise ValueError(f"z has shape {list(np.shape(z))}; it must be [..., tokens, head_dim], with something in it")
    lead = np.shape(z)[:-2]
    if len(set(pool)) < len(pool) or not set(pool) <= set(range(len(lead))):
        raise ValueError(f"pool={tuple(pool)} does not name leading axes of z, which are {tuple(range(len(lead)))}")
    kept = [i for i in range(len(lead)) if i not in pool]
    shape = tuple(lead[i] for i in kept)

    def arranged(name: str, x: Array | np.ndarray) -> Array:
        if not np.isfinite(np.asarray(x)).all():
            raise ValueError(f"{name} is not finite everywhere; check what was captured")
        x = jnp.asarray(x, jnp.float32).transpose(*kept, *pool, *range(len(lead), np.ndim(x)))
        return x.reshape(math.prod(shape), -1, *x.shape[len(lead) :])

    _blocks(np.shape(z)[-1], rounding, block)  # raises ValueError for a block that does not divide head_dim
    if queries is None:
        return arranged("z", z), None, shape
    heads, groups = lead[-1:], np.shape(queries)[: np.ndim(queries) - 2][-1:]
    fits = (
        np.ndim(queries) == np.ndim(z)
        and np.shape(queries)[:-3] == lead[:-1]
        and np.shape(queries)[-2:] == z.shape[-2:]
    )
    if not (fits and np.size(queries) and all(g % h == 0 for g, h in zip(groups, heads, strict=True))):
        raise ValueError(
            f"queries have shape {list(np.shape(queries))}, z {list(np.shape(z))}; only the heads may differ, by a "
            "whole factor"
        )
    q = jnp.asarray(queries).reshape(*lead, -1, *z.shape[-2:])
    return arranged("z", z), arranged("queries", q), shape


def _blocks(head_dim: int, rounding: str, block: int) -> UltraBlocks:
    return UltraBlocks(head_dim, block, PUBLISHED, rounding, rounds_query=False, rounds_p=False)


def _rounded(z: Array, x: Array, *, rounding: str, block: int) -> Array:
    """ẑ at c = 2^x, with the straight-through derivative."""
    c, blocks = jnp.exp2(lax.stop_gradient(x)), z.reshape(1, *z.shape[:-1], -1, block)
    if rounding == "none":
        scale = c * jnp.abs(blocks).max(-1)
        unit = jnp.uint8(127)  # the byte of 2^0
        codes = e2m1_codes(blocks / jnp.where(scale > 0, scale, 1)[..., None], unit, ties_to_even=False)
    else:
        codes, byte = _blocks(z.shape[-1], rounding, block).round_blocks(blocks, {"c": c[None]})
        scale = power_of_two(byte)
    values = (e2m1(codes.astype(jnp.int32)) * scale[..., None]).reshape(z.shape)
    return lax.stop_gradient(values) * jnp.exp2(x - lax.stop_gradient(x))


def _measure(objective: str, z: Array, q: Array | None) -> tuple[Callable[[Array], Array], Array]:
    """What ẑ costs, as a sum, and what to divide it by; z `[pooled, tokens, D]`, q `[pooled, group, tokens, D]`."""
    if q is None:
        return lambda approximate: jnp.sum(jnp.square(z - approximate)), jnp.sum(jnp.square(z))
    if objective == "scores":
        rows = q.reshape(len(q), -1, q.shape[-1])
        moment = dot(jnp.swapaxes(rows, -1, -2), rows)  # Σ_q (q·e)² = e (Σ_q q qᵀ) e

        def squares(e: Array) -> Array:
            return jnp.sum(dot(e, moment) * e)

        return lambda approximate: squares(z - approximate), squares(z)
    tokens = z.shape[1]
    at = np.unique(np.linspace(0, tokens - 1, min(tokens, QUERIES)).astype(int))
    q = q[:, :, at] / np.float32(math.sqrt(z.shape[-1]))

    def log_p(k: Array) -> Array:
        scores = dot(q, jnp.swapaxes(k, -1, -2)[:, None])
        return jax.nn.log_softmax(jnp.where(np.arange(tokens) <= at[:, None], scores, -1e30))

    true = log_p(z)
    return lambda approximate: jnp.sum(jnp.exp(true) * (true - log_p(approximate))), jnp.float32(q.size // q.shape[-1])


def _loss(z: Array, q: Array | None, objective: str, **how: Any) -> Callable[[Array], Array]:
    cost, norm = _measure(objective, z, q)
    return lambda x: cost(_rounded(z, x, **how)) / jnp.where(norm > 0, norm, 1)


@functools.partial(jax.jit, static_argnames=("rounding", "block", "objective"))
def _solve(z: Array, q: Array | None, start: float, *, rounding: str, block: int, objective: str) -> tuple[Array, ...]:
    """c, the error there, where the gradient ended, and the error at 2^start, each `[constants]`."""
    import optax  # slow to import, and needed by nothing else

    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, STEPS), eps=1e-12)

    def one(z: Array, q: Array | None) -> tuple[Array, ...]:
        loss = _loss(z, q, objective, rounding=rounding, block=block)

        def step(state: tuple[Array, optax.OptState], _: None) -> tuple[tuple[Array, optax.OptState], None]:
            x, memory = state
            change, memory = optimizer.update(jax.grad(loss)(x), memory)
            return (x + change, memory), None

        begin = jnp.float32(start)
        (ended, _), _ = lax.scan(step, (begin, optimizer.init(begin)), length=STEPS)
        x, low, high = ended, jnp.minimum(begin, ended) - ASIDE, jnp.maximum(begin, ended) + ASIDE
        for _ in range(2):
            candidates = jnp.concatenate([begin[None], x[None], jnp.linspace(low, high, CANDIDATES)])
            errors = lax.map(loss, candidates)
            x = candidates[errors.argmin()]  # of equals the first, so nothing moves in vain
            apart = (high - low) / (CANDIDATES - 1)
            low, high = x - apart, x + apart
        return jnp.exp2(x), errors.min(), jnp.exp2(ended), errors[0]

    return jax.vmap(one)(z, q)


@functools.partial(jax.jit, static_argnames=("rounding", "block", "objective"))
def _curve(z: Array, q: Array | None, x: Array, *, rounding: str, block: int, objective: str) -> tuple[Array, Array]:
    def one(z: Array, q: Array | None) -> tuple[Array, Array]:
        cost, norm = _measure(objective, z, q)
        return lax.map(lambda x: cost(_rounded(z, x, rounding=rounding, block=block)), x), norm

    return jax.vmap(one)(z, q)
