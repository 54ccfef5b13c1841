"""Schemes: what is stored of K and V, and when a token leaves the full-precision window.

A scheme is a frozen dataclass whose fields are the fields of its spec string, so that
`scheme("kvarn:bits=2,iters=8") == scheme("kvarn", bits=2, iters=8)`. A scheme is one file in `quantizers/`.
"""

import abc
import dataclasses
import difflib
import importlib
import numbers
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kvq_jax.packing import BITS
from kvq_jax.quantizers.base import Quantizer


@dataclass(frozen=True)
class Window:
    """A side flushes its oldest `group` tokens whenever recent + group tokens after the sink are unflushed."""

    recent: int
    group: int
    rewrites: ClassVar[bool] = False  # whether a flush encodes the whole store anew; one counter-example does

    @property
    def size(self) -> int:
        """The most tokens that stay unflushed after an append."""
        return self.recent + self.group - 1

    def flushes(self, waiting: Array, length: Array) -> Array:
        """How many of the `waiting` unflushed tokens leave, int32 `[batch]`; `length`: of the row before the append."""
        whole = (waiting - self.recent) // self.group * self.group
        return jnp.where(waiting >= self.recent + self.group, whole, 0)

    def room(self, tokens: int) -> int:
        """The most tokens of `tokens` post-sink ones that are ever flushed."""
        return max(0, tokens - self.recent) // self.group * self.group

    def most(self, tokens: int) -> int:
        """The most tokens that can leave when `tokens` are appended."""
        return (self.group - 1 + tokens) // self.group * self.group


@dataclass(frozen=True)
class Side:
    """K or V of one layer: in which basis it is stored, how it is rounded, and when."""

    quantizer: Quantizer
    window: Window
    rotate: bool = False  # by the Hadamard matrix
    pre_rope: bool = False  # keys as they were before RoPE, where the cache knows it

    def __post_init__(self) -> None:
        if self.rotate and self.pre_rope:
            raise ValueError(
                "a side is stored rotated by a Hadamard matrix or before RoPE, not both: they do not commute"
            )


def option(
    default: Any,
    *,
    kind: type | None = None,
    optional: bool = False,
    allowed: tuple[Any, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    about: str = "",
) -> Any:
    """A field of a spec string: its default, what is allowed, and what it means. `optional` fields may be None."""
    metadata = {
        "kind": kind or type(default),
        "optional": optional or default is None,
        "allowed": allowed,
        "minimum": minimum,
        "maximum": maximum,
        "about": about,
    }
    return dataclasses.field(default=default, metadata=metadata)


def _allowed(metadata: Any) -> str:
    if metadata["allowed"]:
        return "allowed: " + ", ".join(map(str, metadata["allowed"]))
    kind = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[metadata["kind"]]
    least = "" if metadata["minimum"] is None else f" of at least {metadata['minimum']:g}"
    most = "" if metadata["maximum"] is None else f" and at most {metadata['maximum']:g}"
    return f"allowed: {kind}{least}{most}"


@dataclass(frozen=True, kw_only=True)
class Scheme(abc.ABC):
    """The fields that every scheme has. `recent` and `group`, where given, replace those of both sides."""

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    quantizes: ClassVar[bool] = True
    packed: ClassVar[bool] = (
        True  # stored as it would be served; False where an experiment simulates what it asks about
    )
    needs_constants: ClassVar[bool] = False  # no calibration, no cache
    shows_nan: ClassVar[bool] = True  # a stored token with NaN in it reads back with NaN
    captures: ClassVar[tuple[str, ...]] = ()  # what `calibrate` reads, of k, v, q, k_fisher, v_fisher
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # keyword arguments of `calibrate`, their defaults first

    sink: int = option(0, minimum=0, about="first tokens, in full precision for good")
    recent: int | None = option(None, kind=int, minimum=0, about="newest tokens in full precision, of both sides")
    group: int | None = option(None, kind=int, minimum=1, about="tokens flushed at a time, of both sides")
    reads_own: str = option("raw", allowed=("raw", "quantized"), about="how a block sees its own K and V")
    protect: int = option(0, minimum=0, about="first and last layers in full precision")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check(field, getattr(self, field.name))

    def _check(self, field: "dataclasses.Field[Any]", value: Any) -> None:
        keys = ("kind", "allowed", "minimum", "maximum")
        kind, allowed, minimum, maximum = (field.metadata[key] for key in keys)
        if value is None and field.metadata["optional"]:
            return
        number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if number and kind in (int, float):  # NumPy's integers too
            value = kind(value)
            object.__setattr__(self, field.name, value)
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        fits = fits and (not allowed or value in allowed)
        fits = fits and (minimum is None or value >= minimum) and (maximum is None or value <= maximum)
        if not fits:
            raise ValueError(f"{self.name}: {field.name}={value!r} is out of range; {_allowed(field.metadata)}")

    @abc.abstractmethod
    def sides(self, head_dim: int) -> tuple[Side, Side]:
        """K and V with the scheme's own windows."""

    def chosen(self, given: Mapping[str, str]) -> dict[str, str]:
        """A value for each of `choices`. Raises ValueError for what they do not allow."""
        for name, value in given.items():
            if name not in self.choices:
                raise ValueError(f"{self.name}: calibration has no {name} to choose, so {name}={value} means nothing")
            if value not in self.choices[name]:
                raise ValueError(
                    f"{self.name}: {name}={value!r} is unknown to calibration; allowed: {', '.join(self.choices[name])}"
                )
        return {name: given.get(name, allowed[0]) for name, allowed in self.choices.items()}

    def captured(self, **chosen: str) -> tuple[str, ...]:
        """`captures`, with what these choices need besides."""
        return self.captures

    def calibrate(self, samples: Mapping[str, Array]) -> dict[str, Array]:
        """The constants of one layer by array name (`k_lut`, ...), from what `captured` asked for. A scheme with
        `choices` is given all of them, by keyword, here and in `compare_layers`.

        samples: float32 `[sequences, heads, tokens, head_dim]` in the basis that the scheme stores; q of all query
        heads, in K's; fisher is the squared gradient of the language-model loss.
        """
        raise ValueError(f"{self.name} takes no constants, so there is nothing to calibrate")

    def compare_layers(self, found: dict[str, Array]) -> dict[str, Array]:
        """The constants `[layers, ...]` from what `calibrate` found in every layer: the same, unless layers compete."""
        return found

    def resolve(self, head_dim: int) -> tuple[Side, Side]:
        """K and V for a head_dim, with `recent` and `group` applied. Raises ValueError for what cannot be."""
        if head_dim < 1:
            raise ValueError(f"{self.name}: head_dim={head_dim} is not positive")
        resolved = []
        for label, side in zip("KV", self.sides(head_dim), strict=True):
            window = side.window
            if side.rotate and head_dim % 2:
                raise ValueError(
                    f"{self.name}: head_dim={head_dim} is odd, so it has nothing to rotate; use an even head_dim or a "
                    "scheme without rotation"
                )
            if self.recent is not None:
                window = dataclasses.replace(window, recent=self.recent)
            if self.group is not None:
                window = dataclasses.replace(window, group=self.group)
            tile = side.quantizer.tile_tokens
            if window.group % tile:
                raise ValueError(
                    f"{self.name}: group={window.group} is not divisible by the {tile} tokens that {label} rounds "
                    f"together; use a multiple of {tile}"
                )
            resolved.append(dataclasses.replace(side, window=window))
        return resolved[0], resolved[1]

    def calibrated(self) -> str:
        """The spec without the common fields (windows, protected layers), which no constant depends on."""
        common: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(self) if f.name in COMMON_FIELDS}
        return str(dataclasses.replace(self, **common))

    def __str__(self) -> str:
        """The canonical spec: the scheme's own fields always, the common ones where they were set."""
        own: list[str] = []
        common: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            inherited = field.name in COMMON_FIELDS and field.default == COMMON_FIELDS[field.name].default
            if value is None or (inherited and value == field.default):
                continue
            text = str(value).lower() if isinstance(value, bool) else str(value)
            (common if inherited else own).append(f"{field.name}={text}")
        return ":".join(filter(None, (self.name, ",".join(own + common))))


COMMON_FIELDS = {field.name: field for field in dataclasses.fields(Scheme)}


@dataclass(frozen=True, kw_only=True)
class Bits(Scheme):
    """`bits` for both sides, or `k_bits` and `v_bits`. Equal sides are kept as `bits`, so equal schemes are equal."""

    bits: int | None = option(2, optional=True, allowed=BITS)
    k_bits: int | None = option(None, kind=int, allowed=BITS)
    v_bits: int | None = option(None, kind=int, allowed=BITS)

    def __post_init__(self) -> None:
        super().__post_init__()
        k, v = self.k_bits or self.bits, self.v_bits or self.bits
        if k is None or v is None:
            raise ValueError(f"{self.name}: bits=None needs both k_bits and v_bits")
        for name, value in zip(("bits", "k_bits", "v_bits"), (k, None, None) if k == v else (None, k, v), strict=True):
            object.__setattr__(self, name, value)

    @property
    def key_bits(self) -> int:
        return self.k_bits or self.bits or 0

    @property
    def value_bits(self) -> int:
        return self.v_bits or self.bits or 0


_REGISTRY: dict[str, type[Scheme]] = {}
S = TypeVar("S", bound=type[Scheme])


def register(name: str, summary: str) -> Callable[[S], S]:
    """Class decorator: make a scheme available under `name`."""

    def add(cls: S) -> S:
        if name in _REGISTRY:
            raise ValueError(f"scheme {name!r} is registered twice")
        cls.name, cls.summary = name, summary
        _REGISTRY[name] = cls
        return cls

    return add


def _registry() -> dict[str, type[Scheme]]:
    from kvq_jax import quantizers

    for module in pkgutil.iter_modules(quantizers.__path__):  # a scheme is registered by being a file there
        importlib.import_module(f"{quantizers.__name__}.{module.name}")
    return _REGISTRY


def list_schemes() -> tuple[str, ...]:
    """The names of all schemes."""
    return tuple(sorted(_registry()))


def scheme(spec: str | Scheme, **fields: Any) -> Scheme:
    """A scheme from a spec string `name:field=value,...`, keyword arguments, or both.

    `scheme("kvarn:bits=2,iters=8") == scheme("kvarn", bits=2, iters=8)`; `str(scheme)` is the canonical spec.
    A Scheme is returned with `fields` replaced. Raises ValueError naming the field, its value and what is allowed.
    """
    if isinstance(spec, Scheme):
        cls, given = type(spec), {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
        if {"k_bits", "v_bits"} & set(fields) and given.get("bits"):  # one side changes, the other keeps its bits
            given |= {"bits": None, "k_bits": given["bits"], "v_bits": given["bits"]}
        elif "bits" in fields and "k_bits" in given:
            given |= {"k_bits": None, "v_bits": None}
        return _build(cls, given | fields)
    name, _, rest = spec.strip().partition(":")
    registry = _registry()
    if name not in registry:
        near = difflib.get_close_matches(name, registry, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown scheme {name!r}; known: {', '.join(sorted(registry))}{hint}")
    cls = registry[name]
    given = {}
    for part in filter(None, (p.strip() for p in rest.split(","))):
        key, equals, text = (p.strip() for p in part.partition("="))
        if not equals or not text:
            raise ValueError(f"{name}: {part!r} is not of the form field=value")
        if key in given:
            raise ValueError(f"{name}: {key} is given twice")
        given[key] = _parse(cls, key, text)
        if key in fields and given[key] != fields[key]:
            raise ValueError(f"{name}: {key} is both {given[key]} and {fields[key]}; give one")
    return _build(cls, given | fields)


def _field(cls: type[Scheme], key: str) -> "dataclasses.Field[Any]":
    known = {field.name: field for field in dataclasses.fields(cls)}
    if key not in known:
        raise ValueError(f"{cls.name} has no field {key!r}; its fields: {', '.join(known)}")
    return known[key]


def _parse(cls: type[Scheme], key: str, text: str) -> Any:
    field = _field(cls, key)
    kind = field.metadata["kind"]
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise ValueError(f"{cls.name}: {key}={text!r} is not understood; {_allowed(field.metadata)}") from None


def _build(cls: type[Scheme], given: dict[str, Any]) -> Scheme:
    for key in given:
        _field(cls, key)
    if all(given.get(key) is not None for key in ("bits", "k_bits", "v_bits")):
        raise ValueError(f"{cls.name}: bits, k_bits and v_bits are all given; give bits, or k_bits and v_bits")
    built = cls(**given)
    built.resolve(128)  # what no head_dim can satisfy fails here
    return built


_FULL_PRECISION = {jnp.dtype(jnp.bfloat16): "bf16", jnp.dtype(jnp.float16): "fp16", jnp.dtype(jnp.float32): "fp32"}


def full_precision(dtype: DTypeLike) -> Scheme:
    """The identity scheme of `dtype`."""
    if jnp.dtype(dtype) not in _FULL_PRECISION:
        raise ValueError(f"dtype={jnp.dtype(dtype).name} is not a cache dtype; allowed: bfloat16, float16, float32")
    return scheme(_FULL_PRECISION[jnp.dtype(dtype)])


def layer_schemes(policy: Scheme, layers: int, dtype: DTypeLike) -> tuple[Scheme, ...]:
    """One scheme a layer: `policy.protect` layers at both ends in full precision, `policy` between them."""
    ends = policy.protect
    if ends and 2 * ends >= layers:
        raise ValueError(
            f"{policy.name}: protect={ends} leaves none of {layers} layers quantized; use less than {layers / 2:g}"
        )
    inner = scheme(policy, protect=0)
    kept = full_precision(dtype)
    return tuple(kept if min(i, layers - 1 - i) < ends else inner for i in range(layers))
