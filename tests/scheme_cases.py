"""One row a scheme: what every scheme must do is tested over this table, so a new scheme is one more row.

`small` is the same scheme with groups of a few tokens, for tests of structure; rows that only vary a number have none.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import kvq_jax as kvq


@dataclass(frozen=True)
class Case:
    spec: str
    k_error: tuple[float, float]  # relative MSE of the quantized tokens of `pinned(D=64)`: at least, at most
    v_error: tuple[float, float]
    k_bits: tuple[float, float]  # bits a stored number of the main store, at head_dim 64 and 128
    v_bits: tuple[float, float]
    small: str | None = None

    def __str__(self) -> str:
        return self.spec


# fmt: off
CASES = [
    Case("fp32:", (0, 0), (0, 0), (32, 32), (32, 32),
         small="fp32:sink=3,recent=4,group=8"),
    Case("bf16:", (2.61e-06, 2.89e-06), (2.49e-06, 2.75e-06), (16, 16), (16, 16)),
    Case("fp16:", (3.9e-08, 4.31e-08), (4.2e-08, 4.64e-08), (16, 16), (16, 16)),
    Case("kivi:bits=2", (0.218, 0.24), (0.276, 0.306), (3, 3), (3, 3),
         small="kivi:bits=2,subgroup=8,residual=16,sink=3"),
    Case("kivi:bits=1", (2.32, 2.56), (2.15, 2.37), (2, 2), (2, 2)),
    Case("kivi:bits=3", (0.0389, 0.0431), (0.0476, 0.0526), (4, 4), (4, 4)),
    Case("kivi:bits=4", (0.00835, 0.00923), (0.0104, 0.0114), (5, 5), (5, 5)),
    Case("kivi:bits=8,scales=bf16", (5.94e-05, 6.56e-05), (7.63e-05, 8.43e-05), (9, 9), (9, 9)),
    Case("kivi:bits=2,subgroup=128,scales=f32", (0.528, 0.584), (0.492, 0.544), (2.5, 2.5), (3, 2.5)),
    Case("kivi:k_bits=4,v_bits=2", (0.00835, 0.00923), (0.276, 0.306), (5, 5), (3, 3)),
    Case("hadamard:bits=2", (0.45, 0.498), (0.123, 0.137), (2.25, 2.25), (2.5, 2.25),
         small="hadamard:bits=2,group=16,sink=4"),
    Case("hadamard:bits=4,scales=f32", (0.0178, 0.0196), (0.00495, 0.00547), (4.5, 4.5), (5, 4.5)),
    Case("kvarn:bits=2", (0.204, 0.226), (0.123, 0.137), (2.5, 2.375), (2.625, 2.375)),
    Case("kvarn:bits=2,normalize=equivariant", (0.245, 0.271), (0.124, 0.138), (2.5, 2.375), (2.625, 2.375),
         small="kvarn:k_bits=4,v_bits=1,normalize=equivariant,group=16,sink=3,recent=5"),
    Case("kvarn:bits=2,scales=fp8", (0.207, 0.229), (0.126, 0.14), (2.3125, 2.25), (2.4375, 2.25),
         small="kvarn:bits=2,scales=fp8,group=8,iters=4"),
    Case("kvarn:bits=2,scales=f32,iters=16", (0.204, 0.226), (0.123, 0.137), (3, 2.75), (3.25, 2.75)),
    Case("kvarn:bits=3", (0.0371, 0.0411), (0.0225, 0.0249), (3.5, 3.375), (3.625, 3.375)),
    Case("kvarn:k_bits=4,v_bits=2", (0.00808, 0.00894), (0.123, 0.137), (4.5, 4.375), (2.625, 2.375)),
    Case("tile:bits=2", (0.0599, 0.0662), (0.0665, 0.0735), (2.5, 2.375), (2.5, 2.375),
         small="tile:bits=2,group=16,sink=3,recent=5"),
    Case("tile:bits=2,v_mean=token,grid=lloyd", (0.0771, 0.0852), (0.0725, 0.0801), (2.5, 2.375), (2.625, 2.375),
         small="tile:k_bits=4,v_bits=3,v_mean=token,grid=lloyd,refit=lsq,normalize=published,group=8"),
    Case("tile:bits=2,v_mean=none,scales=fp8", (0.0606, 0.067), (0.0798, 0.0882), (2.4375, 2.3125), (2.3125, 2.1875),
         small="tile:k_bits=3,v_bits=2,v_mean=channel,scales=fp8,group=8,iters=2"),
    Case("tile:bits=2,v_mean=token,grid=uniform,refit=none,normalize=none", (0.45, 0.498),
         (0.124, 0.137), (2.5, 2.375), (2.625, 2.375)),
    Case("tile:bits=1", (0.216, 0.239), (0.242, 0.268), (1.5, 1.375), (1.5, 1.375)),
    Case("tile:bits=3,scales=f32", (0.0174, 0.0192), (0.0183, 0.0202), (4, 3.75), (4, 3.75)),
    Case("tile:bits=4", (0.00485, 0.00536), (0.00474, 0.00523), (4.5, 4.375), (4.5, 4.375)),
    Case("tile:k_bits=4,v_bits=2", (0.00485, 0.00536), (0.0665, 0.0735), (4.5, 4.375), (2.5, 2.375)),
]
# fmt: on

SMALL = [case.small for case in CASES if case.small]


def pinned(batch: int = 2, tokens: int = 288, head_dim: int = 64, kv_heads: int = 2, seed: int = 0) -> np.ndarray:
    """Float32 `[batch, kv_heads, tokens, head_dim]`: Student-t(4) around a mean per channel, two outlier channels, and
    tokens of very different length, small as real values are, so that each scheme's error is its own."""
    rng = np.random.default_rng(seed)
    x = 0.8 * rng.standard_t(4, (batch, kv_heads, tokens, head_dim))
    x += 0.7 * rng.standard_normal((1, kv_heads, 1, head_dim))
    x[..., :: head_dim // 2] *= 6
    x *= 0.2 * np.exp(0.7 * rng.standard_normal((batch, kv_heads, tokens, 1)))
    return x.astype(np.float32)


# Schemes that need constants: name -> (scheme, kv_heads, head_dim) -> plausible arrays of one layer.
CONSTANTS: dict[str, Callable[[kvq.Scheme, int, int], dict[str, np.ndarray]]] = {}


def constants(spec: str | kvq.Scheme, kv_heads: int, head_dim: int) -> dict[str, np.ndarray] | None:
    """What `init_cache` needs for one layer of this scheme; None for most."""
    scheme = kvq.scheme(spec)
    return CONSTANTS[scheme.name](scheme, kv_heads, head_dim) if scheme.name in CONSTANTS else None


def empty(spec: str | kvq.Scheme, x: Any, capacity: int | None = None, dtype: Any = np.float32) -> kvq.Cache:
    """A cache for rows like those of x `[batch, kv_heads, tokens, head_dim]`."""
    batch, kv_heads, tokens, head_dim = x.shape
    shape = {"batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "capacity": capacity or tokens}
    return kvq.init_cache(spec, **shape, dtype=dtype, constants=constants(spec, kv_heads, head_dim))


def assert_same(one: kvq.Cache, other: kvq.Cache) -> None:
    """Every stored array equal, bit by bit."""
    for (name, a), b in zip(kvq.stored(one).items(), kvq.stored(other).values(), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), f"{name} differs"


@contextlib.contextmanager
def compiles() -> Iterator[list[str]]:
    """A list that grows with every compilation inside."""
    found: list[str] = []

    def listen(event: str, _: float, **__: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
