"""`calibrate`: read a text with the unquantized model, layer by layer make a scheme's constants of what was seen."""

import dataclasses
import functools
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvq_jax.cache import block_mask
from kvq_jax.calibration.capture import CAPTURES, capture
from kvq_jax.constants import Constants, versions
from kvq_jax.layers import is_array_tree, plan_layers
from kvq_jax.protocol import Forward
from kvq_jax.pseudo_decode import Progress
from kvq_jax.schemes import Scheme
from kvq_jax.schemes import scheme as make_scheme

Arrays = dict[str, np.ndarray]


def calibrate(
    scheme: str | Scheme,
    forward: Forward,
    tokens: Array | np.ndarray,
    *,
    valid: Array | np.ndarray | None = None,
    model_digest: str = "",
    text_digest: str = "",
    progress: Progress | None = None,
    workdir: str | Path | None = None,
    choices: Mapping[str, str] | None = None,
    inspect: Callable[[dict[str, Array]], None] | None = None,
) -> Constants:
    """The constants of every layer, protected ones too, from `tokens` int `[sequences, N]`, read one row at a time.

    A pure function of the scheme's own fields (windows and protected layers do not matter), the forward and the tokens;
    called again with other weights of the same shapes, nothing is compiled anew.

    Args:
      forward: as `pseudo_decode` takes it; a `jax.tree_util.Partial(fn, params)`.
      valid: bool `[sequences, N]`, False at padding, which enters nothing. Where it leaves the sequences different
        lengths, the scheme is given them one after the other, as a single sequence.
      model_digest, text_digest: what the constants are said to be of; without text_digest, SHA-256 of the tokens.
      progress: called as progress(steps done, steps); a step is a sequence that was read or a layer that was solved.
      workdir: a folder for finished work: a call that was interrupted goes on from there when it is repeated, and K
        and V of one layer, not of all, are in memory at a time. Its files are named by a digest of all that
        determines them, so other files there do not matter; delete them when you have the constants. Needs
        model_digest, because nothing else tells one set of weights from another.
      choices: how to calibrate, where the scheme leaves a choice (`Scheme.choices`): `{"granularity": "head"}`.
      inspect: is given all that the scheme found, `[layers, ...]` by name, before it makes the constants of it.

    Raises ValueError for a scheme that takes no constants, tokens or masks of another shape, layers of unequal sizes, a
    model whose numbers are not finite, a damaged file in workdir, and constants that come out useless.
    """
    own = make_scheme(make_scheme(scheme).calibrated())
    if not own.captures:
        raise ValueError(f"{own.name} takes no constants, so there is nothing to calibrate")
    chosen = own.chosen(choices or {})
    names = own.captured(**chosen)
    for name in names:
        if name not in CAPTURES:
            raise ValueError(f"{own.name} asks for {name!r}, which is not captured; allowed: {', '.join(CAPTURES)}")
    if workdir is not None and not model_digest:
        raise ValueError("workdir needs model_digest, which tells whose keys and values are kept there")
    sequences = _sequences(tokens, valid)
    size = np.shape(tokens)[1]
    runs = plan_layers(forward, own, 1, size, jnp.float32)
    sizes = {(run.kv_heads, run.head_dim) for run in runs}
    if len(sizes) > 1:
        raise ValueError(f"layers of different (KV heads, head_dim) {sorted(sizes)} cannot share a set of constants")
    (kv_heads, head_dim), layers = sizes.pop(), sum(run.layers for run in runs)
    text = hashlib.sha256(np.concatenate(sequences).astype("<i4").tobytes()).hexdigest()

    basis = [(side.rotate, side.pre_rope) for side in own.resolve(head_dim)]
    shapes = [(x.shape, str(x.dtype)) for x in jax.tree.leaves(forward)] if is_array_tree(forward) else []
    model = [model_digest, shapes, [repr(dataclasses.replace(run, scheme=None)) for run in runs]]
    read = [_digest(model, basis, names, versions(), size, one.tolist()) for one in sequences]
    solved = [f"{_digest(read, str(own), *chosen.items())}.{layer}" for layer in range(layers)]
    kept = _Kept(workdir)

    def report(done: int) -> None:
        if progress is not None:
            progress(done, len(read) + layers)

    def solve(layer: int) -> Arrays:
        sequences = [kept.load(one, f"{layer}.") for one in read]
        found = of_layer({name: _samples([one[name] for one in sequences]) for name in names}, **chosen)
        return {name: np.asarray(x, np.float32) for name, x in found.items()}

    of_layer: Callable[..., dict[str, Array]] = own.calibrate
    of_model: Callable[..., dict[str, Array]] = own.compare_layers
    how: dict[str, Any] = {"scheme": own, "runs": runs, "names": names, "size": size}
    for i, one in enumerate(sequences):
        kept.add(read[i], functools.partial(capture, forward, one, **how))
        report(i + 1)
    for layer, name in enumerate(solved):
        kept.add(name, functools.partial(solve, layer))
        report(len(read) + layer + 1)
    of_layers = [kept.load(name) for name in solved]
    found = {name: jnp.stack([one[name] for one in of_layers]) for name in of_layers[0]}
    if inspect is not None:
        inspect(found)
    arrays = of_model(found, **chosen)
    constants = Constants(
        {name: np.asarray(x, np.float32) for name, x in arrays.items()},
        scheme=str(own),
        kv_heads=kv_heads,
        head_dim=head_dim,
        model_digest=model_digest,
        text_digest=text_digest or text,
        tokens=sum(map(len, sequences)),
    )
    constants.check(own)
    return constants


def _digest(*determines: object) -> str:
    return hashlib.sha256(json.dumps(determines).encode()).hexdigest()[:16]


def _sequences(tokens: Array | np.ndarray, valid: Array | np.ndarray | None) -> list[np.ndarray]:
    """The tokens that exist of every row."""
    ids = np.asarray(tokens)
    if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"tokens are {ids.dtype} {list(ids.shape)}; they must be integers [sequences, N]")
    exists = np.asarray(block_mask(None if valid is None else jnp.asarray(valid), *ids.shape))
    if not (some := exists.any(axis=1)).all():
        raise ValueError(f"valid leaves nothing of sequence {int(some.argmin())}; take the sequence out")
    return [row[mask].astype(np.int32) for row, mask in zip(ids, exists, strict=True)]


def _samples(sequences: Sequence[np.ndarray]) -> Array:
    """`[sequences, heads, tokens, head_dim]` from each sequence's `[heads, tokens, head_dim]`."""
    ragged = len({one.shape for one in sequences}) > 1
    return jnp.asarray(np.concatenate(sequences, axis=1)[None] if ragged else np.stack(sequences))


class _Kept:
    """Arrays of finished work by name: in memory, or in a folder, where a file that has its name is whole."""

    def __init__(self, folder: str | Path | None) -> None:
        self._memory: dict[str, Arrays] = {}
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, make: Callable[[], Arrays]) -> None:
        """Make it, unless it is there."""
        if self._folder is None:
            self._memory[name] = make()
        elif not (path := self._folder / f"{name}.npz").exists():
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                with temporary.open("wb") as file:
                    np.savez(file, **make())  # type: ignore[arg-type]
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

    def load(self, name: str, prefix: str = "") -> Arrays:
        """The arrays whose names begin with `prefix`, by the rest of their names."""
        if self._folder is None:
            return {key.removeprefix(prefix): x for key, x in self._memory[name].items() if key.startswith(prefix)}
        path = self._folder / f"{name}.npz"
        try:
            with path.open("rb") as opened, np.load(opened) as file:
                return {key.removeprefix(prefix): file[key] for key in file.files if key.startswith(prefix)}
        except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is damaged ({error}); delete it, so that it is made again") from None
