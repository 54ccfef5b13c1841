"""Speed of the packed path, as ratios of two things measured side by side in this run.

Times on a shared machine move by tens of percent from one run to the next; the two sides of a ratio are therefore
measured alternately, and the median of each is taken. Nothing here compiles while the clock runs, except where
compilation is what is measured. Writes config.json, rows.jsonl and summary.csv to --out. Example:

  python -m experiments.benchmark --method=kvarn:bits=2

With --kernels the GPU kernels against XLA and nothing else; where there is no GPU they are compiled, not timed.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import Array, lax

import kvq_jax as kvq
import models
from experiments import kernel_times
from experiments.harness import environment, inputs, run
from experiments.harness import flags as common
from experiments.harness.table import table
from kvq_jax.layers import CachedAttention, append_run, plan_layers
from models.decoder import Decoder, as_forward
from models.placement import Weights
from models.registry import open_checkpoint

flags.adopt_module_key_flags(common)
REPEATS = flags.DEFINE_integer("repeats", 5, "Times each side of a ratio is measured.", lower_bound=1)
CONTEXT = flags.DEFINE_integer("context", 32768, "Tokens of the cache in the attention benchmark.", lower_bound=1024)
KERNELS = flags.DEFINE_bool("kernels", False, "Measure the GPU kernels, and nothing else.")


@dataclasses.dataclass(frozen=True)
class Ratio:
    """above / below, both in `unit`; `target` is what the project holds itself to."""

    name: str
    above: float
    below: float
    unit: str
    target: str
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def row(self) -> run.Row:
        fields = {"measure": self.name, "ratio": self.above / self.below, "target": self.target}
        return fields | {"above": self.above, "below": self.below, "unit": self.unit} | self.extra


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of one call, results ready."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def side_by_side(*calls: Callable[[], Any], repeats: int | None = None) -> list[float]:
    """Median seconds of each, measured in turn after one call that compiles."""
    for call in calls:
        jax.block_until_ready(call())
    times = [[seconds(call) for call in calls] for _ in range(repeats or REPEATS.value)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def pseudo_decode(model: models.Model, scheme: kvq.Scheme, tokens: Array) -> Iterator[Ratio]:
    """Blocks of 128 through the packed cache against the same blocks unquantized, and against blocks of one."""

    def curves(text: Array, block: int, regimes: tuple[str, ...]) -> Array:
        return kvq.pseudo_decode(model.forward, text, scheme=scheme, block=block, regimes=regimes).nll_reference

    both, plain = side_by_side(lambda: curves(tokens, 128, ("accumulated",)), lambda: curves(tokens, 128, ()))
    count = tokens.size
    # A run of one regime is two forwards of every token: the reference's and the quantized one.
    yield Ratio("pseudo-decode / chunked forward, b = 128", 2 * count / both, count / plain, "tokens/s", ">= 0.7")
    few = tokens[:, :256]
    wide, single = side_by_side(
        lambda: curves(few, 128, ("accumulated",)), lambda: curves(few, 1, ("accumulated",)), repeats=3
    )
    yield Ratio("pseudo-decode, b = 128 / b = 1", few.size / wide, few.size / single, "tokens/s", ">= 10")


def attention(scheme: kvq.Scheme) -> Iterator[Ratio]:
    """One query over a long packed cache against the same attention over dense float32 keys and values."""
    heads, queries, head_dim, context = 8, 4, 128, CONTEXT.value
    keys = jax.random.split(jax.random.key(common.SEED.value), 3)
    q = jax.random.normal(keys[0], (1, heads * queries, 1, head_dim))
    k, v = (jax.random.normal(key, (1, heads, context, head_dim)) for key in keys[1:])
    shape: dict[str, Any] = {"batch": 1, "kv_heads": heads, "head_dim": head_dim, "capacity": context}
    packed, unpacked = (
        kvq.append(kvq.init_cache(one, **shape, dtype=jnp.float32), k, v) for one in (scheme, kvq.scheme("fp32"))
    )

    @jax.jit
    def dense(q: Array, k: Array, v: Array) -> Array:
        scores = jnp.einsum("bhgd,bhtd->bhgt", q.reshape(1, heads, queries, head_dim), k) / head_dim**0.5
        return jnp.einsum("bhgt,bhtd->bhgd", jax.nn.softmax(scores, axis=-1), v)

    tiled = jax.jit(lambda q, cache: kvq.attend(q, cache))
    memory = tiled.lower(q, packed).compile().memory_analysis()
    temporaries = memory.temp_size_in_bytes / 2**20 if memory else float("nan")
    ours, formula, same_path = side_by_side(
        lambda: tiled(q, packed), lambda: dense(q, k, v), lambda: tiled(q, unpacked), repeats=4 * REPEATS.value
    )
    extra = {"temporaries_mib": temporaries, "context": context}
    name = f"packed attention, {context:,} tokens"
    yield Ratio(f"{name} / dense float32 formula", 1 / ours, 1 / formula, "queries/s", ">= 1", extra)
    yield Ratio(f"{name} / float32 cache, same path", 1 / ours, 1 / same_path, "queries/s", "")
    yield Ratio("its XLA temporaries / 8 MiB", temporaries, 8.0, "MiB", "<= 1")


def encoding() -> Iterator[Ratio]:
    """Writing the store: `tile`, with its search, against KVarN at the same bits; K and V, 8 KV heads."""
    heads, head_dim, tokens = 8, 128, 1024
    x = jax.random.normal(jax.random.key(common.SEED.value), (1, heads, tokens // 128, 128, head_dim))

    def of(spec: str) -> Callable[[], Any]:
        sides = kvq.scheme(spec, group=128).resolve(head_dim)
        encode = jax.jit(lambda x: [side.quantizer.encode(x, {}) for side in sides])
        return lambda: encode(x)

    for bits in (2, 4):
        tile, kvarn = side_by_side(of(f"tile:bits={bits}"), of(f"kvarn:bits={bits}"), repeats=2 * REPEATS.value)
        yield Ratio(f"writing tile / kvarn, {bits} bits", tokens / tile, tokens / kvarn, "tokens/s", ">= 0.5")


def decoding(model: models.Model, scheme: kvq.Scheme, tokens: Array, capacity: int) -> Callable[[], Array]:
    """A loop of 16 decoded tokens (b = 1) at a context of 256, in caches of `capacity`."""
    runs = plan_layers(model.forward, scheme, 1, 1, jnp.float32)

    def step(caches: Any, x: tuple[Array, Array], forward: Any) -> tuple[Any, Array]:
        token, position = x
        attend = CachedAttention(runs, caches, None, "xla")
        logits = forward(token, position, attend).all()
        caches = tuple(append_run(r, c, k, v, None) for r, c, (k, v) in zip(runs, caches, attend.new, strict=True))
        return caches, logits[:, -1].argmax(-1)

    @jax.jit
    def fill(forward: Any, caches: Any) -> Any:
        return step(caches, (tokens[:, :256], jnp.arange(256)[None]), forward)[0]

    @jax.jit
    def loop(forward: Any, caches: Any) -> Array:
        xs = (tokens[:, 256:272].T[:, :, None], jnp.arange(256, 272)[:, None, None])
        return lax.scan(lambda caches, x: step(caches, x, forward), caches, xs)[1]

    caches = fill(model.forward, tuple(r.empty(r.scheme or scheme, 1, capacity, jnp.float32) for r in runs))
    return lambda: loop(model.forward, caches)


def capacity(model: models.Model, scheme: kvq.Scheme, tokens: Array) -> Iterator[Ratio]:
    """What a large empty cache costs while its context is short: only filled tiles are read."""
    large, small = side_by_side(*(decoding(model, scheme, tokens, size) for size in (8192, 512)))
    yield Ratio("decoding in capacity 8,192 / 512", 16 / large, 16 / small, "tokens/s", ">= 0.7")


def compilation(scheme: kvq.Scheme, tokens: Array) -> Iterator[Ratio]:
    """First call less second call, at two depths."""
    checkpoint = open_checkpoint(common.MODEL.value)
    depths = (max(checkpoint.config.num_hidden_layers // 6, 1), max(checkpoint.config.num_hidden_layers // 3, 2))
    times = []
    for depth in depths:
        windows = checkpoint.config.sliding_windows[:depth]
        config = dataclasses.replace(checkpoint.config, num_hidden_layers=depth, sliding_windows=windows)
        forward = as_forward(Decoder(config, Weights(checkpoint, "float32", None)))

        def call(forward: Any = forward) -> Array:
            return kvq.pseudo_decode(forward, tokens[:, :256], scheme=scheme, block=128).kl

        times.append(seconds(call) - seconds(call))
    deep, shallow = (t / depth for t, depth in zip(reversed(times), reversed(depths), strict=True))
    extra = {"layers": list(depths), "compile_seconds": times}
    yield Ratio(f"compiling a layer at {depths[1]} / {depths[0]} layers", deep, shallow, "s/layer", "<= 1", extra)


def kernels() -> None:
    """`--kernels`."""
    out = Path(common.OUT.value) if common.OUT.value else run.default_path("benchmark")
    about = common.about("benchmark") | {"context": CONTEXT.value}
    with run.open_run(out, config=about, determines={}, key=("measure",), resume=False) as results:
        clock = functools.partial(side_by_side, repeats=4 * REPEATS.value)
        found = kernel_times.rows(CONTEXT.value, clock, common.SEED.value)
        while row := common.interruptible(lambda: next(found, None)):
            results.append([row])
            print("  " + "  ".join(kernel_times.cells(row)), flush=True)
        print("\n" + table(kernel_times.COLUMNS, [kernel_times.cells(row) for row in results.rows]))
        print(f"\nWritten to {out}.")


def body() -> None:
    """The binary, after its flags have been parsed."""
    if KERNELS.value:
        return kernels()
    (scheme,) = common.methods().values()
    model = inputs.load_model()
    tokens = jnp.asarray(inputs.windows(model))
    if tokens.shape[1] < 272:
        raise ValueError(f"--num_tokens={tokens.shape[1]} is too few; the benchmark needs 272 or more")
    about = common.about("benchmark") | {"method": str(scheme), "model_digest": model.digest}
    out = Path(common.OUT.value) if common.OUT.value else run.default_path("benchmark")

    def measure() -> Iterator[Ratio]:
        yield from attention(scheme)
        yield from encoding()
        yield from capacity(model, scheme, tokens)
        yield from compilation(scheme, tokens)
        yield from pseudo_decode(model, scheme, tokens)

    with run.open_run(out, config=about, determines={}, key=("measure",), resume=False) as results:
        ratios = measure()
        while ratio := common.interruptible(lambda: next(ratios, None)):
            results.append([ratio.row() | {"method": str(scheme)}])
            print(f"  {ratio.name}: {ratio.above / ratio.below:.2f} {ratio.target}", flush=True)
        rows = [
            [
                row["measure"],
                f"{row['ratio']:.2f}",
                row["target"],
                f"{row['above']:.4g}",
                f"{row['below']:.4g}",
                row["unit"],
            ]
            for row in results.rows
        ]
        print("\n" + table(["above / below", "ratio", "target", "above", "below", "unit"], rows))
        peak = environment.peak_memory_bytes() / 2**30
        print(f"\nPeak memory of this process: {peak:.2f} GiB; {np.prod(tokens.shape)} tokens. Written to {out}.")


if __name__ == "__main__":  # defaults of this program, not of whoever imports it beside another binary
    flags.set_default(common.METHOD, ["kvarn:bits=2"])
    flags.set_default(common.NUM_TOKENS, 1024)
    common.main(body)
