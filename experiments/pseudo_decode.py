"""What a quantized KV cache does to a model, read as prefill reads it (static) and as decoding does (accumulated).

A text is read in blocks by the unquantized model and, through each method's packed cache, by the quantized one.
Writes config.json, rows.jsonl, summary.csv and plots to --out, and a table to the terminal. Example:

  python -m experiments.pseudo_decode --method=kivi:bits=2 --method=kvarn:bits=2 --sink=128 --recent=0 --group=128
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import kvq_jax as kvq
import models
from experiments import pseudo_decode_plots as plots
from experiments import pseudo_decode_report as report
from experiments.harness import conclusion, environment, inputs, run, trace_rows
from experiments.harness import flags as common
from experiments.harness.progress import Progress

BINARY = "pseudo_decode"
flags.adopt_module_key_flags(common)
flags.set_default(
    common.METHOD,
    [
        "kivi:bits=2,subgroup=128",
        "hadamard:bits=2",
        "kvarn:bits=2,normalize=published",
        "kvarn:bits=2,normalize=equivariant",
    ],
)
BLOCK_SIZE = flags.DEFINE_multi_integer(
    "block_size", [128], "Tokens a block; 1 is a decode loop. Repeat for several.", lower_bound=1
)
REGIME = flags.DEFINE_multi_enum(
    "regime", ["static", "accumulated"], ["static", "accumulated"], "Whose keys and values fill the cache. Repeatable."
)
SKIP_POSITIONS = flags.DEFINE_integer(
    "skip_positions", 256, "First positions, which no mean counts: little is quantized yet.", lower_bound=0
)
BUCKET = flags.DEFINE_integer("bucket", 256, "Positions a point of the curves by position.", lower_bound=1)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Everything a unit of work reads, checked."""

    model: models.Model
    tokens: np.ndarray  # int32 [batch, num_tokens]
    methods: dict[str, kvq.Scheme]  # by the spec as it was typed
    constants: dict[str, kvq.Constants]  # by `Scheme.calibrated`
    blocks: tuple[int, ...]
    regimes: tuple[str, ...]
    implementation: str


Finder = Callable[[Iterable[kvq.Scheme], models.Model], dict[str, kvq.Constants]]


def load_inputs(methods: dict[str, kvq.Scheme] | None = None, find_constants: Finder = inputs.load_constants) -> Inputs:
    """Read and check the flags, the text and the model. Raises for what cannot run, before anything is written.

    methods: instead of those of --method. find_constants: where the methods' constants come from, by `calibrated()`.
    """
    if common.RESUME.value and not common.OUT.value:
        raise ValueError("--resume needs to know which run to go on with; pass its folder as --out")
    if SKIP_POSITIONS.value >= common.NUM_TOKENS.value - 1:
        few = f"--skip_positions={SKIP_POSITIONS.value} leaves nothing of --num_tokens={common.NUM_TOKENS.value}"
        raise ValueError(f"{few} to count; pass fewer, or more tokens")
    methods = common.methods() if methods is None else methods
    if not methods:
        raise ValueError(f"no --method was given; known: {', '.join(kvq.list_schemes())}")
    implementation = kvq.resolve_implementation(common.IMPLEMENTATION.value)
    inputs.read_text(common.TEXT.value)
    blocks = tuple(dict.fromkeys(BLOCK_SIZE.value))
    model = inputs.load_model(blocks)
    tokens = inputs.windows(model)
    constants = find_constants(methods.values(), model)
    inputs.check_methods(methods.values(), model, blocks, constants)
    return Inputs(model, tokens, methods, constants, blocks, tuple(dict.fromkeys(REGIME.value)), implementation)


def determines(given: Inputs) -> dict[str, Any]:
    """Everything but a row's key that its numbers depend on."""
    versions = environment.versions()
    return {
        "model_digest": given.model.digest,
        "text_digest": inputs.digest(given.tokens),
        "constants_digest": {spec: one.digest for spec, one in sorted(given.constants.items())} or None,
        "num_tokens": common.NUM_TOKENS.value,
        "batch": common.BATCH.value,
        "dtype": common.DTYPE.value,
        "skip_positions": SKIP_POSITIONS.value,
        "bucket": BUCKET.value,
        "seed": common.SEED.value,
        "implementation": given.implementation,
        "scan_layers": given.model.decoder.stacked is not None,
        **{name: getattr(common, name.upper()).value for name in ("sink", "recent", "group", "protect")},
        "device": environment.device(),
        "jax": versions["jax"],
        "kvq_jax": versions["kvq-jax"],
    }


def measure(given: Inputs, label: str, block: int, title: str) -> list[run.Row]:
    """One unit of work: the reference and every regime of one method at one block size, side by side."""
    scheme, tokens = given.methods[label], jnp.asarray(given.tokens)
    constants = given.constants.get(scheme.calibrated())
    start = time.perf_counter()

    def compute() -> list[run.Row]:
        trace = kvq.pseudo_decode(
            given.model.forward,
            tokens,
            scheme=scheme,
            block=block,
            regimes=given.regimes,
            constants=constants,
            dtype=common.DTYPE.value,
            implementation=given.implementation,
            progress=progress,
        )
        jax.effects_barrier()  # the last block has been reported
        return trace_rows.rows(trace, skip=SKIP_POSITIONS.value, bucket=BUCKET.value, seed=common.SEED.value)

    with Progress(title) as progress:
        rows = common.interruptible(compute)
    k, v = scheme.resolve(given.model.config.head_dim)
    batch, count = given.tokens.shape
    about: run.Row = {
        "label": label,
        "num_tokens": count,
        "batch": batch,
        "sink": scheme.sink,
        **{f"{side}_recent": one.window.recent for side, one in (("k", k), ("v", v))},
        **{f"{side}_group": one.window.group for side, one in (("k", k), ("v", v))},
        "skip_positions": SKIP_POSITIONS.value,
        "bucket": BUCKET.value,
        # of the text, where the reference and all regimes run; the first block, and with it compilation, is left out
        "tokens_per_second": (count - block) * batch / progress.seconds(),
        "seconds": time.perf_counter() - start,
        "peak_memory_bytes": environment.peak_memory_bytes(),
        "cache_bytes_16_bit": 4 * batch * count * given.model.config.num_hidden_layers * _numbers_a_token(given.model),
    }
    return [row | about | provenance(given, constants) for row in rows]


def provenance(given: Inputs, constants: kvq.Constants | None) -> run.Row:
    """What every row says of where its numbers come from."""
    return {
        "model": common.MODEL.value,
        "model_digest": given.model.digest,
        "text": common.TEXT.value,
        "text_digest": inputs.digest(given.tokens),
        "constants_digest": None if constants is None else constants.digest,
        "seed": common.SEED.value,
        "dtype": common.DTYPE.value,
        "device": environment.device(),
        "git_commit": environment.git_commit(),
        "versions": environment.versions(),
    }


def _numbers_a_token(model: models.Model) -> int:
    """Numbers of one token's keys in one layer."""
    return model.config.num_key_value_heads * model.config.head_dim


KEY = ("method", "block_size", "regime")


def open_results(
    binary: str, given: Inputs, *, key: tuple[str, ...] = KEY, **also: Any
) -> contextlib.AbstractContextManager[run.Run]:
    """The run folder of the flags, whose rows are one method, block size and regime each, or one `key`.

    also: what the numbers depend on besides `determines`.
    """
    config = common.about(binary) | {"model_digest": given.model.digest}
    out = Path(common.OUT.value) if common.OUT.value else run.default_path(binary)
    return run.open_run(out, config=config, determines=determines(given) | also, key=key, resume=common.RESUME.value)


def measure_all(given: Inputs, results: run.Run) -> None:
    """Every method at every block size that has no row yet."""
    units = [(label, block) for block in given.blocks for label in given.methods]
    for i, (label, block) in enumerate(units, start=1):
        method = str(given.methods[label])
        title = f"[{i}/{len(units)}] {label}" + (f", blocks of {block}" if len(given.blocks) > 1 else "")
        if all(results.has(method=method, block_size=block, regime=regime) for regime in given.regimes):
            print(f"{title}: already in {results.path}")
            continue
        results.append(measure(given, label, block, title))


def body() -> None:
    """The binary, after its flags have been parsed."""
    given = common.interruptible(load_inputs)
    with open_results(BINARY, given) as results:
        print(
            report.introduction(
                common.MODEL.value, common.TEXT.value, given.tokens.shape, given.blocks, SKIP_POSITIONS.value
            )
        )
        measure_all(given, results)
        drawn = [results.write(name, png) for name, png in plots.draw(results.rows).items()]
        results.tell(report.conclusions(results.rows))
        print(conclusion.written(results.path, drawn))


if __name__ == "__main__":
    common.main(body)
