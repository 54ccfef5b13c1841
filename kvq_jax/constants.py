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
import math
import shlex
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
        """The leading axis of the arrays. Raises ValueError where they have none."""
        for x in self.arrays.values():
            if np.ndim(x):
                return int(np.shape(x)[0])
        raise ValueError(f"constants of {self.scheme} hold no array with a leading axis of layers")

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

    def check(
        self,
        scheme: str | Scheme,
        *,
        layers: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        model_digest: str | None = None,
    ) -> None:
        """Raise ValueError unless these are sensible constants of this scheme (and size, and model)."""
        wanted = make_scheme(scheme)
        if self.scheme != wanted.calibrated():
            raise ValueError(f"constants of {self.scheme} were given to {wanted.calibrated()}; calibrate that scheme")
        sizes = {"layers": (self.layers, layers), "KV heads": (self.kv_heads, kv_heads)}
        for name, (own, other) in (sizes | {"channels a head": (self.head_dim, head_dim)}).items():
            if other is not None and own != other:
                raise ValueError(
                    f"{self.scheme}: constants of {own} {name} were given to a model of {other}; calibrate this model"
                )
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
        shape = spec.shape if layers is None else (layers, *spec.shape)
        if tuple(np.shape(x)) != shape:
            axes = "" if layers is None else f" ({layers} layers first)"
            raise ValueError(
                f"{scheme.name}: {name} has shape {tuple(np.shape(x))}; a model with {kv_heads} KV heads of {head_dim} "
                f"channels needs {shape}{axes}"
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


def missing(scheme: Scheme, *, model: str = "…", text: str = "…") -> ValueError:
    """The error where a scheme needs constants and has none: it says how to make them."""
    command = shlex.join(["python", "-m", "experiments.calibrate", f"--method={scheme.calibrated()}"])
    return ValueError(
        f"{scheme.name} needs constants, and has no default for them; make them with `{command} "
        f"--model={shlex.quote(model)} --text={shlex.quote(text)} --out=DIR`, then pass --constants=DIR, or in Python "
        "constants=kvq.load_constants(DIR, scheme)"
    )


def per_layer(
    scheme: Scheme, given: Given, *, layers: int, kv_heads: int, head_dim: int
) -> list[Mapping[str, Any] | None]:
    """The arrays of each layer, for `of_one_layer`."""
    if given is None:
        return [None] * layers
    if isinstance(given, Constants):
        given.check(scheme, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
        given = given.arrays
    else:
        check_arrays(scheme, given, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    return [{name: x[i] for name, x in given.items()} for i in range(layers)]


def of_one_layer(scheme: Scheme, given: Given, *, kv_heads: int, head_dim: int) -> tuple[Leaves, Leaves]:
    """K's and V's constants of one layer, float32, by the quantizers' names."""
    if given is None:
        if scheme.needs_constants:
            raise missing(scheme)
        return {}, {}
    if isinstance(given, Constants):
        given.check(scheme, layers=1, kv_heads=kv_heads, head_dim=head_dim)
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
    constants.check(constants.scheme)
    arrays = {name: np.asarray(x, np.float32) for name, x in constants.arrays.items()}
    shapes = {name: x.shape for name, x in arrays.items()}
    about = constants.about() | {"digest": constants.digest, "shapes": shapes}
    # One array: where several are damaged, the event loop that reads them prints tracebacks of its own.
    values = np.concatenate([x.ravel() for x in arrays.values()])
    with _manager(path, max_to_keep=1, cleanup_tmp_directories=True) as manager:
        step = (manager.latest_step() or 0) + 1
        manager.save(step, args=_items("Save", ({"values": values},), (about,)))
        manager.wait_until_finished()


def load_constants(
    path: str | Path, scheme: str | Scheme | None = None, *, model_digest: str | None = None
) -> Constants:
    """What `save_constants` saved; without `scheme`, of whichever scheme that is. Raises ValueError if it is not
    there, not whole, or of another scheme or model."""
    if not Path(path).is_dir():
        raise ValueError(f"no constants at {path}: no such folder; make them with python -m experiments.calibrate")
    with _manager(path, create=False) as manager:
        step = manager.latest_step()
        if step is None:
            raise ValueError(f"no constants at {path}: the folder holds no complete checkpoint")
        try:
            restored = manager.restore(step, args=_items("Restore"))
            about = dict(restored["about"])
            values, digest, layers = np.asarray(restored["arrays"]["values"]), about.pop("digest"), about.pop("layers")
            shapes = {name: tuple(shape) for name, shape in about.pop("shapes").items()}
            parts = np.split(values, np.cumsum([math.prod(shape) for shape in shapes.values()]))
            arrays = {name: x.reshape(shape) for (name, shape), x in zip(shapes.items(), parts[:-1], strict=True)}
            constants = Constants(arrays, **about | {"versions": tuple(sorted(about["versions"].items()))})
            if (found := constants.digest) != digest:
                raise ValueError(f"their digest is {found}, and was {digest}")
        except Exception as error:  # damage shows as whatever the layers below Orbax raise
            why = (str(error) or type(error).__name__).splitlines()[0][:200]
            raise ValueError(f"the constants at {path} are damaged ({why}); calibrate again") from error
    try:
        constants.check(constants.scheme if scheme is None else scheme, layers=layers, model_digest=model_digest)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return constants


def _manager(path: str | Path, **options: Any) -> Any:
    import orbax.checkpoint as ocp  # slow to import, and needed by none of the functions over arrays

    return ocp.CheckpointManager(Path(path).absolute(), options=ocp.CheckpointManagerOptions(**options))


def _items(action: str, arrays: tuple[Any, ...] = (), about: tuple[Any, ...] = ()) -> Any:
    """The two items of a checkpoint, to save or to restore."""
    from orbax.checkpoint import args

    return args.Composite(
        arrays=getattr(args, f"Standard{action}")(*arrays), about=getattr(args, f"Json{action}")(*about)
    )
