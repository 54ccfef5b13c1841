"""Constants: what calibration found for a scheme on a model, with where it came from; saved and loaded with Orbax.

An array is named by side and constant (`k_lut`, `v_c`, ...) and has a leading axis of layers. A quantizer declares its
constants' shapes (`Quantizer.constants`), and everything here is checked against that: a scale that is zero, negative
or not finite, a missing array, another number of layers or heads, another scheme or model are errors, when constants
are made, saved, loaded and used. There is no default for a constant that a scheme needs.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvq_jax.quantizers.base import ConstantSpec, Leaves
from kvq_jax.schemes import Scheme
from kvq_jax.schemes import scheme as make_scheme


def versions() -> tuple[tuple[str, str], ...]:
    """Of the packages whose version can change a constant."""
    found = []
    for package in ("jax", "kvq-jax"):
        try:
            found.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            found.append((package, "from the checkout"))
    return tuple(found)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Constants:
    """Calibrated arrays `[layers, ...]` by name, and their provenance. Raises ValueError for what cannot be used."""

    arrays: dict[str, Any]
    scheme: str = dataclasses.field(metadata={"static": True})  # as `Scheme.calibrated` spells it
    kv_heads: int = dataclasses.field(metadata={"static": True})
    head_dim: int = dataclasses.field(metadata={"static": True})
    model_digest: str = dataclasses.field(default="", metadata={"static": True})
    text_digest: str = dataclasses.field(default="", metadata={"static": True})
    tokens: int = dataclasses.field(default=0, metadata={"static": True})  # of the calibration text
    versions: tuple[tuple[str, str], ...] = dataclasses.field(default_factory=versions, metadata={"static": True})

    @property
    def layers(self) -> int:
        return int(next(iter(self.arrays.values())).shape[0])

    @property
    def digest(self) -> str:
        """16 hex digits that name the arrays and their provenance."""
        total = hashlib.sha256(json.dumps(self.about(), sort_keys=True).encode())
        for name in sorted(self.arrays):
            total.update(name.encode() + np.ascontiguousarray(self.arrays[name], np.float32).tobytes())
        return total.hexdigest()[:16]

    def about(self) -> dict[str, Any]:
        """Everything but the arrays, as JSON."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "arrays"}
        return fields | {"versions": dict(self.versions), "layers": self.layers}

    def check(self, scheme: str | Scheme, *, layers: int | None = None, model_digest: str | None = None) -> None:
        """Raise ValueError unless these are constants of this scheme (and number of layers, and model)."""
        wanted = make_scheme(scheme)
        if self.scheme != wanted.calibrated():
            raise ValueError(f"constants of {self.scheme} were given to {wanted.calibrated()}; calibrate that scheme")
        if layers is not None and self.layers != layers:
            raise ValueError(f"constants of {self.layers} layers were given to a model of {layers}")
        if model_digest is not None and self.model_digest != model_digest:
            raise ValueError(
                f"constants of the model with digest {self.model_digest or '(none)'} were given to the model with "
                f"digest {model_digest}; calibrate this model"
            )
        check_arrays(wanted, self.arrays, layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim)


Given = Constants | Mapping[str, Any] | None


def specs(scheme: Scheme, kv_heads: int, head_dim: int) -> dict[str, ConstantSpec]:
    """The constants of a scheme by array name, `above` included."""
    found = {}
    for side, resolved in zip("kv", scheme.resolve(head_dim), strict=True):
        for name, spec in resolved.quantizer.constants(kv_heads).items():
            above = None if spec.above is None else f"{side}_{spec.above}"
            found[f"{side}_{name}"] = dataclasses.replace(spec, above=above)
    return found


def check_arrays(
    scheme: Scheme, arrays: Mapping[str, Any], *, layers: int | None, kv_heads: int, head_dim: int
) -> None:
    """Raise ValueError unless `arrays` are the scheme's constants, all of a side or none, of sensible values.

    layers: the leading axis, None for arrays of one layer without it. Values are checked outside of traces only.
    """
    wanted = specs(scheme, kv_heads, head_dim)
    if not wanted:
        raise ValueError(f"{scheme.name} takes no constants; leave constants=None")
    for name in arrays:
        if name not in wanted:
            raise ValueError(f"{scheme.name} has no constant {name!r}; its constants: {', '.join(wanted)}")
    for name, spec in wanted.items():
        partly = any(other.startswith(name[:2]) for other in arrays)
        if name not in arrays:
            if scheme.needs_constants or partly:
                raise ValueError(f"{scheme.name} needs the constant {name!r}, which is missing")
            continue
        x = arrays[name]
        shape = (spec.shape if layers is None else (layers, *spec.shape),)
        if tuple(np.shape(x)) != shape[0]:
            axes = "" if layers is None else f" ({layers} layers first)"
            raise ValueError(
                f"{scheme.name}: {name} has shape {tuple(np.shape(x))}; a model with {kv_heads} KV heads of {head_dim} "
                f"channels needs {shape[0]}{axes}"
            )
        if isinstance(x, jax.core.Tracer):
            continue
        x = np.asarray(x, np.float32)
        if not np.isfinite(x).all():
            raise ValueError(f"{scheme.name}: {name} is not finite everywhere; calibrate again")
        if spec.positive and not (x > 0).all():
            raise ValueError(f"{scheme.name}: {name} is {x.min():g} somewhere, and must be positive; calibrate again")
        if spec.ascending and not (np.diff(x) >= 0).all():
            raise ValueError(f"{scheme.name}: {name} does not ascend along its last axis; sort it, or calibrate again")
        if spec.above is not None and not (x > np.asarray(arrays[spec.above], np.float32)).all():
            raise ValueError(f"{scheme.name}: {name} is not above {spec.above} everywhere; calibrate again")


def _missing(scheme: Scheme) -> ValueError:
    return ValueError(
        f"{scheme.name} needs constants, and has no default for them; make them with\n"
        f"  python -m experiments.calibrate --method={scheme.calibrated()} --model=… --text=… --out=DIR\n"
        "and pass kvq.load_constants(DIR, scheme), or --constants=DIR"
    )


def per_layer(
    scheme: Scheme, given: Given, *, layers: int, kv_heads: int, head_dim: int
) -> list[Mapping[str, Any] | None]:
    """The arrays of each layer, for `of_one_layer`."""
    if given is None:
        return [None] * layers
    if isinstance(given, Constants):
        given.check(scheme, layers=layers)
        given = given.arrays
    check_arrays(scheme, given, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    return [{name: x[i] for name, x in given.items()} for i in range(layers)]


def of_one_layer(scheme: Scheme, given: Given, *, kv_heads: int, head_dim: int) -> tuple[Leaves, Leaves]:
    """K's and V's constants of one layer, float32, by the quantizers' names."""
    if given is None:
        if scheme.needs_constants:
            raise _missing(scheme)
        return {}, {}
    if isinstance(given, Constants):
        given.check(scheme, layers=1)
        given = {name: x[0] for name, x in given.arrays.items()}
    check_arrays(scheme, given, layers=None, kv_heads=kv_heads, head_dim=head_dim)
    sides: list[Leaves] = [
        {name[2:]: jnp.asarray(x, jnp.float32) for name, x in given.items() if name.startswith(f"{side}_")}
        for side in "kv"
    ]
    return sides[0], sides[1]


def save_constants(path: str | Path, constants: Constants) -> None:
    """Save with Orbax, as another step of the checkpoint at `path`; the earlier one goes when this one is complete, so
    that a kill at any moment leaves one that loads. Raises ValueError for constants that could not be used."""
    import orbax.checkpoint as ocp  # slow to import, and needed by none of the functions over arrays

    constants.check(constants.scheme)
    arrays = {name: np.asarray(x, np.float32) for name, x in constants.arrays.items()}
    about = constants.about() | {"digest": constants.digest}
    with ocp.CheckpointManager(Path(path).absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=1)) as manager:
        step = (manager.latest_step() or 0) + 1
        manager.save(
            step, args=ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), about=ocp.args.JsonSave(about))
        )
        manager.wait_until_finished()


def load_constants(path: str | Path, scheme: str | Scheme, *, model_digest: str | None = None) -> Constants:
    """What `save_constants` saved. Raises ValueError if it is not there, not whole, or of another scheme or model."""
    import orbax.checkpoint as ocp

    where = Path(path).absolute()
    if not where.is_dir():
        raise ValueError(f"no constants at {path}: no such folder; make them with python -m experiments.calibrate")
    with ocp.CheckpointManager(where, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        step = manager.latest_step()
        if step is None:
            raise ValueError(f"no constants at {path}: the folder holds no complete checkpoint")
        try:
            restored = manager.restore(
                step, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(), about=ocp.args.JsonRestore())
            )
            about = dict(restored["about"])
            arrays = {name: np.asarray(x) for name, x in restored["arrays"].items()}
            digest, layers = about.pop("digest"), about.pop("layers")
            constants = Constants(arrays, **about | {"versions": tuple(sorted(about["versions"].items()))})
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the constants at {path} cannot be read ({error}); calibrate again") from error
    constants.check(scheme, layers=layers, model_digest=model_digest)
    if constants.digest != digest:
        raise ValueError(f"the constants at {path} are not what was saved: digest {constants.digest}, not {digest}")
    return constants
