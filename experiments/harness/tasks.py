"""What the binaries that set a model tasks share: the model, methods at equal windows, and the run's folder."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import kvq_jax as kvq
import models
from experiments.harness import environment, flags, generation, inputs, run
from kvq_jax.schemes import full_precision
from models.registry import open_checkpoint

REFERENCE = "reference"  # the label of the unquantized model
READ = flags.flags.DEFINE_integer("read_block", 64, "Tokens of a context that are read at a time.", lower_bound=1)
METHODS = ["kivi:bits=2", "hadamard:bits=2", "kvarn:bits=2", "tile", "ultraquant"]


@dataclasses.dataclass(frozen=True)
class Given:
    """The model and the methods, checked."""

    model: models.Model
    methods: dict[str, kvq.Scheme]  # by the spec as it was typed; without the reference
    constants: dict[str, kvq.Constants]
    implementation: str
    dtype: str = "float32"  # of the model and the caches

    def scheme(self, label: str) -> kvq.Scheme:
        return full_precision(self.dtype) if label == REFERENCE else self.methods[label]

    def reader(self, label: str) -> generation.Reader:
        """The model as it reads through a method."""
        scheme = self.scheme(label)
        return generation.reader(
            self.model.forward,
            scheme,
            constants=self.constants.get(scheme.calibrated()),
            dtype=self.dtype,
            implementation=self.implementation,
        )


def set_defaults(*, sink: int, recent: int, group: int, batch: int) -> None:
    """Of a binary that runs as the main program: the methods, one window for all of them, rows read side by side."""
    flags.flags.set_default(flags.METHOD, METHODS)
    for flag, value in (flags.SINK, sink), (flags.RECENT, recent), (flags.GROUP, group), (flags.BATCH, batch):
        flags.flags.set_default(flag, value)


def load(needed: int, *, scan: bool) -> Given:
    """The model and methods of the flags, for sequences of up to `needed` tokens. Raises before anything is written.

    scan: whether to scan over stacked layers where --scan_layers does not say: it compiles in less time, and copies
    the layers' weights at every step.
    """
    if flags.RESUME.value and not flags.OUT.value:
        raise ValueError("--resume needs to know which run to go on with; pass its folder as --out")
    methods = {label: one for label, one in flags.methods().items() if one.quantizes}
    if not methods:
        raise ValueError(f"no --method that quantizes was given; known: {', '.join(kvq.list_schemes())}")
    config = open_checkpoint(flags.MODEL.value).config
    if needed > (limit := config.max_position_embeddings):
        raise ValueError(f"sequences of {needed} tokens are beyond the {limit} of the context of {flags.MODEL.value}")
    scan = scan and len(set(config.sliding_windows)) == 1
    if flags.SCAN_LAYERS.value is not None:
        scan = flags.SCAN_LAYERS.value
    model = models.load(flags.MODEL.value, dtype=flags.DTYPE.value, scan_layers=scan, context=needed)
    constants = inputs.load_constants(methods.values(), model)
    given = Given(model, methods, constants, kvq.resolve_implementation(flags.IMPLEMENTATION.value), flags.DTYPE.value)
    for label in methods:
        try:
            jax.eval_shape(functools.partial(given.reader(label).empty, 1, needed))
        except ValueError as error:
            raise ValueError(f"--method={label}: {error}") from None
    return given


def fewest(scheme: kvq.Scheme, head_dim: int) -> int:
    """Tokens that must be cached before the first one is quantized."""
    return scheme.sink + min(side.window.recent + side.window.group for side in scheme.resolve(head_dim))


def check_reads(given: Given, tokens: int, what: str, label: str | None = None) -> None:
    """Raise ValueError for a method that has quantized nothing after `tokens` tokens: it would pass for perfect.
    label: only this one, or the reference, which quantizes nothing."""
    for name, scheme in given.methods.items():
        if label not in (None, name):
            continue
        needed = fewest(scheme, given.model.config.head_dim)
        if tokens < needed:
            raise ValueError(
                f"--method={name} quantizes nothing that is read: its first tokens leave the full-precision window "
                f"once {needed} are cached, and {what} has {tokens}; pass longer ones, or a smaller --sink, --recent "
                "or --group"
            )


def check_quantized(label: str, scheme: kvq.Scheme, state: generation.State) -> None:
    """Raise ValueError where a method that quantizes has quantized nothing of any row."""
    if scheme.quantizes and not state.quantized_tokens.any():
        raise ValueError(
            f"--method={label} quantized nothing that was read; pass a smaller --sink, --recent or --group"
        )


def open_results(
    binary: str, given: Given, *, key: Sequence[str], **determines: Any
) -> contextlib.AbstractContextManager[run.Run]:
    """The run folder of the flags. determines: what the numbers depend on besides model, methods' fields and device."""
    versions = environment.versions()
    common = {
        "model_digest": given.model.digest,
        "constants_digest": {spec: one.digest for spec, one in sorted(given.constants.items())} or None,
        "dtype": flags.DTYPE.value,
        "seed": flags.SEED.value,
        "batch": flags.BATCH.value,
        "implementation": given.implementation,
        "scan_layers": given.model.decoder.stacked is not None,
        "device": environment.device(),
        "jax": versions["jax"],
        "kvq_jax": versions["kvq-jax"],
    }
    out = Path(flags.OUT.value) if flags.OUT.value else run.default_path(binary)
    config = flags.about(binary) | {"model_digest": given.model.digest}
    return run.open_run(out, config=config, determines=common | determines, key=tuple(key), resume=flags.RESUME.value)


def about(given: Given, label: str) -> run.Row:
    """Columns of every row: which method, at which windows, on what."""
    scheme, config = given.scheme(label), given.model.config
    k, v = scheme.resolve(config.head_dim)
    bits = kvq.bits_per_element(scheme, head_dim=config.head_dim)["store"] if scheme.quantizes else None
    return {
        "label": label,
        "method": str(scheme),
        "bits_per_element_store": bits,
        "sink": scheme.sink,
        **{f"{side}_recent": one.window.recent for side, one in (("k", k), ("v", v))},
        **{f"{side}_group": one.window.group for side, one in (("k", k), ("v", v))},
        "model": flags.MODEL.value,
        "dtype": flags.DTYPE.value,
        "seed": flags.SEED.value,
        "packed": scheme.quantizes,
        "implementation": given.implementation,
        "device": environment.device(),
        "git_commit": environment.git_commit(),
    }


def chunks(items: Sequence[Any], size: int) -> list[list[Any]]:
    """In order, `size` at a time; the last one is filled up with its own first item, so that every shape is equal."""
    parts = [list(items[i : i + size]) for i in range(0, len(items), size)]
    return [part + part[:1] * (min(size, len(items)) - len(part)) for part in parts]
