"""Pseudo-decode: a text in blocks, every block reading the cache of the earlier ones through the scheme.

For each block of b tokens every layer attends to the cache and to the block's own K and V (full precision, causal);
then the block is appended and full groups are flushed. The regimes differ only in whose K and V are appended:

    reference    no quantization
    accumulated  those of the quantized run itself: errors travel down the layers and on in time, as in decoding
    static       those of the reference: an error is made once, is read once, and never becomes an input

b = 1 is a decode loop. One `lax.scan` over blocks inside one `jit`; the regimes are rows of one batch, which no scheme
ever mixes. Nothing of size `[N, vocab]` exists: logits are compared in chunks and only curves by position are kept.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from kvq_jax.cache import Cache, SideCache, block_mask
from kvq_jax.constants import Constants
from kvq_jax.implementations import resolve_implementation
from kvq_jax.layers import CachedAttention, Run, append_run, constants_of_runs, is_array_tree, plan_layers
from kvq_jax.measures import kl_divergence
from kvq_jax.memory import nbytes
from kvq_jax.order import zero_after
from kvq_jax.protocol import Forward, LazyLogits
from kvq_jax.reading import cache_errors
from kvq_jax.schemes import Scheme, full_precision
from kvq_jax.schemes import scheme as make_scheme

REGIMES = ("static", "accumulated")
LOGIT_TOKENS = 128  # tokens whose logits exist at once
_CURVES = ("kl", "agree", "nll", "nll_reference", "attention_mae", "attention_scale")
_BY_LAYER = ("key_relative_mse", "key_norm_ratio_mean", "key_norm_ratio_std", "value_relative_mse")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Trace:
    """What a run measured. Curves are by position, `[..., batch, N]`; NaN or False where a row has no token."""

    scheme: Scheme
    regimes: tuple[str, ...]
    block: int
    implementation: str  # of attention over the quantized caches, as it ran; "a+b" where layers differ
    cache_bytes: dict[str, int]  # of one regime's cache, all layers, by stored leaf
    bits: dict[str, float]  # "store": of quantized layers' main store; "cache": of everything, per stored number
    quantized_tokens: Array  # int32 [layers]: tokens in the main store of layers that quantize
    valid: Array  # bool [batch, N]
    scored: Array  # bool [batch, N]: position has a next token
    kl: Array  # [regimes, batch, N] nats: KL(reference ‖ quantized) of the next token's distribution
    agree: Array  # bool [regimes, batch, N]: the same most likely token
    nll: Array  # [regimes, batch, N] nats: −ln p(next token)
    nll_reference: Array  # [batch, N]
    attention_mae: Array  # [regimes, layers, batch, N]: mean |O − O_ref| over heads and channels, before W_O
    attention_scale: Array  # [layers, batch, N]: mean |O_ref|
    key_relative_mse: Array  # [regimes, layers]: cached against the reference's keys, over quantized tokens
    key_norm_ratio_mean: Array  # [regimes, layers]: ‖k̂‖/‖k‖
    key_norm_ratio_std: Array  # [regimes, layers]
    value_relative_mse: Array  # [regimes, layers]


def _as_lazy(logits: Array | LazyLogits) -> LazyLogits:
    return logits if isinstance(logits, LazyLogits) else LazyLogits(logits, lambda x: x)


def _compare_logits(reference: LazyLogits, quantized: LazyLogits, target: Array, regimes: int) -> dict[str, Array]:
    """KL, agreement and both losses of every position, in chunks of LOGIT_TOKENS. quantized: regimes · batch rows."""
    batch, n = target.shape
    size = min(n, LOGIT_TOKENS)
    chunks = -(-n // size)

    def split(x: Array) -> Array:  # [rows, n, ...] -> [chunks, rows, size, ...]
        x = jnp.pad(x, ((0, 0), (0, chunks * size - n), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, size, *x.shape[2:]), 1, 0)

    def compare(part: tuple[Array, Array, Array]) -> dict[str, Array]:
        hidden_reference, hidden, target = part
        ref = reference.unembed(hidden_reference).astype(jnp.float32)
        out = quantized.unembed(hidden).astype(jnp.float32).reshape(regimes, batch, size, -1)

        def nll(logits: Array) -> Array:
            at = jnp.broadcast_to(target, logits.shape[:-1])[..., None]
            return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, at, axis=-1)[..., 0]

        return {
            "kl": kl_divergence(ref, out),
            "agree": ref.argmax(-1) == out.argmax(-1),
            "nll": nll(out),
            "nll_reference": nll(ref),
        }

    parts = lax.map(compare, (split(reference.hidden), split(quantized.hidden), split(target)))
    return {name: jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1)[..., :n] for name, x in parts.items()}


def _after(x: Array, caches: tuple[Cache, ...]) -> tuple[Cache, ...]:
    """The caches, whose next append must wait for x: attention has then read them, and they are updated in place.

    Without this XLA:CPU keeps the order open, and copies every store at every block.
    """
    zero = zero_after(x)

    def wait(side: SideCache) -> SideCache:
        return dataclasses.replace(side, flushed=side.flushed + zero)

    return tuple(dataclasses.replace(cache, k=wait(cache.k), v=wait(cache.v)) for cache in caches)


def _mean_error(outputs: Array, reference: Array, regimes: int) -> Array:
    """mean |O − O_ref| over heads and channels: regimes · batch rows -> `[(layers,) regimes, batch, tokens]`."""
    *layers, rows, heads, tokens, head_dim = outputs.shape
    outputs = outputs.astype(jnp.float32).reshape(*layers, regimes, rows // regimes, heads, tokens, head_dim)
    return jnp.abs(outputs - reference.astype(jnp.float32)[..., None, :, :, :, :]).mean((-3, -1))


def _by_layer(parts: list[Array], runs: Sequence[Run]) -> Array:
    """One array a run, `[layers, ...]` or `[...]` -> `[all layers, ...]`."""
    return jnp.concatenate([x if run.stacked else x[None] for run, x in zip(runs, parts, strict=True)])


def _stored(
    runs: Sequence[Run], reference: Sequence[Cache], quantized: Sequence[Cache], regimes: int
) -> dict[str, Array]:
    """What the main stores hold at the end: errors `[regimes, layers]`, NaN for layers that do not quantize; tokens."""
    errors: dict[str, list[Array]] = {name: [] for name in _BY_LAYER}
    flushed = []
    for run, exact, cache in zip(runs, reference, quantized, strict=True):
        quantizes = run.scheme is not None and run.scheme.quantizes
        batch = cache.k.flushed.shape[-1] // regimes
        tokens = cache.k.flushed[..., :batch].sum(-1)  # of one regime
        flushed.append(tokens if quantizes else jnp.zeros_like(tokens))
        by_regime = []
        for r in range(regimes):
            measure = functools.partial(cache_errors, rows=slice(r * batch, (r + 1) * batch))
            if quantizes:
                k, v = measure((exact, cache)) if run.stacked is None else lax.map(measure, (exact, cache))
                by_regime.append([k.relative_mse(), k.ratio_mean(), k.ratio_std(), v.relative_mse()])
            else:
                by_regime.append([jnp.full(tokens.shape, jnp.nan)] * len(_BY_LAYER))
        for name, values in zip(_BY_LAYER, zip(*by_regime, strict=True), strict=True):
            errors[name].append(jnp.stack(values, axis=-1))  # [(layers,) regimes]
    measured = {name: _by_layer(parts, runs).T for name, parts in errors.items()}
    return measured | {"quantized_tokens": _by_layer(flushed, runs)}


@functools.partial(
    jax.jit, static_argnames=("static_forward", "runs", "regimes", "dtype", "implementation", "progress", "capacity")
)
def _run(
    forward: Any,
    tokens: Array,  # [blocks, batch, block]
    targets: Array,
    valid: Array | None,  # [blocks, batch, block]; None where every token exists
    constants: tuple[Mapping[str, Array] | None, ...],  # of each run
    *,
    static_forward: Hashable,
    runs: tuple[Run, ...],
    regimes: tuple[str, ...],
    dtype: DTypeLike,
    implementation: str,
    progress: Progress | None,
    capacity: int,
) -> dict[str, Array]:
    forward = forward if static_forward is None else static_forward
    blocks, batch, block = tokens.shape
    count = len(regimes)
    exact = full_precision(dtype)

    def rows(x: Array | None) -> Array | None:  # every regime is a group of rows
        return None if x is None else jnp.tile(x, (count, *[1] * (x.ndim - 1)))

    def body(carry: tuple[Any, ...], xs: tuple[Array, ...]) -> tuple[tuple[Any, ...], dict[str, Array]]:
        reference, quantized, length = carry
        i, tokens, targets, *rest = xs
        exists = rest[0] if rest else None
        step = jnp.ones((batch, block), jnp.int32) if exists is None else exists.astype(jnp.int32)
        positions = jnp.maximum(length[:, None] + jnp.cumsum(step, axis=1) - 1, 0)

        ref = CachedAttention(runs, reference, exists, implementation)
        ref_logits = _as_lazy(forward(tokens, positions, ref))
        reference = _after(ref_logits.hidden, reference)
        reference = tuple(
            append_run(run, c, k, v, exists) for run, c, (k, v) in zip(runs, reference, ref.new, strict=True)
        )
        curves: dict[str, Array] = {
            "attention_scale": _by_layer([jnp.abs(o.astype(jnp.float32)).mean((-3, -1)) for o in ref.outputs], runs)
        }
        if count:
            run_ = CachedAttention(runs, quantized, rows(exists), implementation)
            logits = _as_lazy(forward(rows(tokens), rows(positions), run_))
            quantized = _after(logits.hidden, quantized)
            appended = []
            for run, cache, own, of_reference in zip(runs, quantized, run_.new, ref.new, strict=True):
                kv = []
                for mine, its in zip(own, of_reference, strict=True):
                    parts = jnp.split(mine, count, axis=-4)
                    parts = [its if r == "static" else part for r, part in zip(regimes, parts, strict=True)]
                    kv.append(jnp.concatenate(parts, axis=-4))
                appended.append(append_run(run, cache, kv[0], kv[1], rows(exists)))
            quantized = tuple(appended)
            curves |= _compare_logits(ref_logits, logits, targets, count)
            maes = [_mean_error(o, r, count) for o, r in zip(run_.outputs, ref.outputs, strict=True)]
            curves["attention_mae"] = jnp.moveaxis(_by_layer(maes, runs), 0, 1)
        else:  # the reference alone: the plain chunked forward, for comparison of speed
            curves["nll_reference"] = _compare_logits(ref_logits, ref_logits, targets, 1)["nll_reference"]
        if progress is not None:
            jax.debug.callback(functools.partial(_report, progress, blocks), i)
        return (reference, quantized, length + step.sum(1)), curves

    reference = tuple(run.empty(exact, batch, capacity, dtype) for run in runs)
    quantized = _empty(runs, count * batch, capacity, dtype, constants) if count else ()
    carry = (reference, quantized, jnp.zeros(batch, jnp.int32))
    xs = (jnp.arange(blocks), tokens, targets) + (() if valid is None else (valid,))
    (reference, quantized, _), curves = lax.scan(body, carry, xs)
    # [blocks, ..., batch, block] -> [..., batch, N]
    out = {name: jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1) for name, x in curves.items()}

    return out | (_stored(runs, reference, quantized, count) if count else {})


def _empty(
    runs: Sequence[Run],
    batch: int,
    capacity: int,
    dtype: DTypeLike,
    constants: Sequence[Mapping[str, Array] | None],
) -> tuple[Cache, ...]:
    exact = full_precision(dtype)
    return tuple(
        run.empty(run.scheme or exact, batch, capacity, dtype, own) for run, own in zip(runs, constants, strict=True)
    )


def _report(progress: Progress, blocks: int, i: Any) -> None:
    progress(int(i) + 1, blocks)


def _bits(caches: Sequence[Cache], tokens: int) -> dict[str, float]:
    """Of the caches' shapes, per stored number: the quantized layers' main store, and everything."""
    store_bytes = store_numbers = numbers = 0
    for cache in caches:
        for side in cache.sides:
            a_token = side.flushed.size * side.kv_heads * side.side.quantizer.head_dim  # of all layers and rows
            numbers += tokens * a_token
            if cache.scheme.quantizes:
                store_numbers += side.store_tokens * a_token
                store_bytes += sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in side.store.values())
    store = 8 * store_bytes / store_numbers if store_numbers else float("nan")
    return {"store": store, "cache": 8 * sum(nbytes(caches).values()) / numbers}


def _implementation(implementation: str, runs: Sequence[Run], caches: Sequence[Cache], block: int) -> str:
    """What ran over these caches (their shapes): one name, or several joined by "+" where layers differ."""
    names = set()
    for run, cache in zip(runs, caches, strict=True):
        one = cache
        if run.stacked is not None:
            one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), cache)
        q = jax.ShapeDtypeStruct((one.length.shape[0], run.kv_heads, block, run.head_dim), jnp.float32)
        names.add(resolve_implementation(implementation, one, q))
    return "+".join(sorted(names))


def pseudo_decode(
    forward: Forward,
    tokens: Array,
    *,
    scheme: str | Scheme,
    block: int,
    regimes: Sequence[str] = REGIMES,
    valid: Array | None = None,
    constants: Constants | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Run `tokens` `[batch, N]` through reference and quantized caches, block by block.

    Args:
      forward: `(tokens, positions, attend) -> logits | LazyLogits` (docs/embedding.md). Make it a
        `jax.tree_util.Partial(fn, params)`: its arrays are then arguments of the compiled function, not constants.
      scheme: a spec or Scheme; its `protect` keeps layers at both ends in full precision.
      block: tokens a block, from 1 (a decode loop) to N. N need not be a multiple.
      regimes: of "static", "accumulated"; the reference always runs. Empty: the reference alone.
      valid: bool `[batch, N]`, False at padding; each row measures what it would alone.
      constants: what calibration found for this scheme and model, where the scheme takes any.
      dtype: of the caches' full-precision parts, and of the reference cache.
      implementation: of attention, see `attend`.
      progress: called as progress(blocks done, blocks) while the device works; reuse one object, each new one compiles.

    Raises ValueError for a block outside 1…N, an unknown regime, shapes that do not fit, constants that are missing or
    of another scheme, or a forward that does not follow the protocol.
    """
    policy = make_scheme(scheme)
    regimes = tuple(regimes)
    tokens = jnp.asarray(tokens, jnp.int32)
    if tokens.ndim != 2 or not tokens.size:
        raise ValueError(f"tokens has shape {tokens.shape}; it must be [batch, N]")
    batch, total = tokens.shape
    if not 1 <= block <= total:
        raise ValueError(f"block={block} does not fit a text of {total} tokens; allowed: 1 to {total}")
    for regime in regimes:
        if regime not in REGIMES or regimes.count(regime) > 1:
            raise ValueError(f"regimes={regimes!r}: {regime!r} is unknown or repeated; allowed: {', '.join(REGIMES)}")
    implementation = resolve_implementation(implementation)
    exists = block_mask(valid, batch, total)
    # A row's tokens move together, in their order: blocks then begin where the row does, whatever pads it.
    order = jnp.argsort(~exists, axis=1, stable=True)
    tokens, exists = (jnp.take_along_axis(x, order, axis=1) for x in (tokens, exists))
    targets = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    scored = exists & jnp.pad(exists[:, 1:], ((0, 0), (0, 1)))

    blocks = -(-total // block)
    padding = blocks * block - total

    def split(x: Array) -> Array:  # [batch, N] -> [blocks, batch, block]
        return jnp.moveaxis(jnp.pad(x, ((0, 0), (0, padding))).reshape(batch, blocks, block), 1, 0)

    runs = plan_layers(forward, policy, batch, block, dtype)
    of_runs = constants_of_runs(policy, constants, runs)
    is_tree = is_array_tree(forward)
    arguments: dict[str, Any] = {
        "static_forward": None if is_tree else forward,
        "runs": runs,
        "regimes": regimes,
        "dtype": jnp.dtype(dtype),
        "implementation": implementation,
        "progress": progress,
        "capacity": total,
    }
    mask = None if valid is None and not padding else split(exists)
    try:
        out = _run(forward if is_tree else None, split(tokens), split(targets), mask, of_runs, **arguments)
    except jax.errors.UnexpectedTracerError:
        raise ValueError(
            "forward calls attend inside a jit, checkpoint or scan of its own, where what the layers remember is lost; "
            "take that away, or scan through attend.scan (docs/embedding.md)"
        ) from None
    place = jnp.argsort(order, axis=1)

    def back(x: Array) -> Array:  # [..., batch, N], to where the row had its tokens
        return jnp.take_along_axis(x, jnp.broadcast_to(place, x.shape), axis=-1)

    shapes = jax.eval_shape(lambda: _empty(runs, batch, total, dtype, of_runs))
    curves = {name: back(x[..., :total]) for name, x in out.items() if name in _CURVES}
    exists, scored = back(exists), back(scored)
    if not regimes:
        layers = sum(run.layers for run in runs)
        nothing = jnp.zeros((0, batch, total))
        curves |= {
            "kl": nothing,
            "nll": nothing,
            "agree": nothing > 0,
            "attention_mae": jnp.zeros((0, layers, batch, total)),
        }
        out |= {name: jnp.zeros((0, layers)) for name in _BY_LAYER} | {"quantized_tokens": jnp.zeros(layers, jnp.int32)}
    for name in ("kl", "attention_mae", "attention_scale"):
        curves[name] = jnp.where(exists, curves[name], jnp.nan)
    for name in ("nll", "nll_reference"):
        curves[name] = jnp.where(scored, curves[name], jnp.nan)
    curves["agree"] &= exists
    return Trace(
        scheme=policy,
        regimes=regimes,
        block=block,
        implementation=_implementation(implementation, runs, shapes, block),
        cache_bytes=nbytes(shapes),
        bits=_bits(shapes, total),
        quantized_tokens=out["quantized_tokens"],
        valid=exists,
        scored=scored,
        **curves,
        **{name: out[name] for name in _BY_LAYER},
    )
