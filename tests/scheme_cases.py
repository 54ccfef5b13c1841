"""One row a scheme: what every scheme must do is tested over this table, so a new scheme is one more row.

`small` is the same scheme with groups of a few tokens, for tests of structure: one a scheme, two where windows differ.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import kvq_jax as kvq
from kvq_jax.lloyd_max import gaussian_levels
from kvq_jax.quantizers.tile import feedback_constants


@dataclass(frozen=True)
class Case:
    spec: str
    k_error: tuple[float, float]  # relative MSE of the quantized tokens of `pinned(D=64)`: at least, at most
    v_error: tuple[float, float]
    k_bits: tuple[float, float]  # bits a stored number of the main store, at head_dim 64 and 128
    v_bits: tuple[float, float]
    small: str | None = None
    counter_example: bool = False  # rewrites what it has stored, so that it depends on how tokens were appended

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
    Case("kivi:bits=2,arithmetic=f16", (0.217, 0.24), (0.276, 0.305), (3, 3), (3, 3)),
    Case("kitty:boost=0.125,sink=0", (0.264, 0.292), (0.492, 0.544), (2.5625, 2.5625), (2.5, 2.25)),
    Case("kitty:boost=0.25,rank=variance,recent=0,sink=0,scales=f32", (0.165, 0.182), (0.528, 0.584),
         (3.0625, 3.0625), (3, 2.5), small="kitty:boost=0.3,group=12,sink=3,recent=5,rank=variance"),
    Case("quarot:bits=4", (0.00537, 0.00594), (0.00505, 0.00558), (4.5, 4.25), (4.5, 4.25),
         small="quarot:bits=4,sink=3"),
    Case("quarot:k_bits=3,v_bits=2", (0.0248, 0.0274), (0.126, 0.139), (3.5, 3.25), (2.5, 2.25)),
    Case("quarot:bits=2,zero=float", (0.131, 0.145), (0.125, 0.138), (2.5, 2.25), (2.5, 2.25)),
    Case("quarot:bits=4,clip=0.95,scales=f32", (0.00518, 0.00572), (0.00483, 0.00533), (5, 4.5), (5, 4.5)),
    Case("hadamard:bits=2", (0.45, 0.498), (0.123, 0.137), (2.25, 2.25), (2.5, 2.25),
         small="hadamard:bits=2,group=16,sink=4"),
    Case("hadamard:bits=4,scales=f32", (0.0178, 0.0196), (0.00495, 0.00547), (4.5, 4.5), (5, 4.5)),
    Case("kvarn:bits=2", (0.204, 0.226), (0.123, 0.137), (2.5, 2.375), (2.625, 2.375)),
    Case("kvarn:bits=2,normalize=equivariant", (0.245, 0.271), (0.124, 0.138), (2.5, 2.375), (2.625, 2.375),
         small="kvarn:k_bits=4,v_bits=1,normalize=equivariant,group=16,sink=3,recent=5"),
    Case("kvarn:bits=2,scales=fp8", (0.207, 0.229), (0.126, 0.14), (2.3125, 2.25), (2.4375, 2.25)),
    Case("kvarn:bits=2,scales=f32,iters=16", (0.204, 0.226), (0.123, 0.137), (3, 2.75), (3.25, 2.75)),
    Case("kvarn:bits=3", (0.0371, 0.0411), (0.0225, 0.0249), (3.5, 3.375), (3.625, 3.375)),
    Case("kvarn:k_bits=4,v_bits=2", (0.00808, 0.00894), (0.123, 0.137), (4.5, 4.375), (2.625, 2.375)),
    Case("fp8:", (0.000379, 0.000419), (0.000381, 0.000422), (8.5, 8.25), (8.5, 8.25)),
    Case("fp8:scales=f16", (0.000379, 0.000419), (0.000381, 0.000421), (8.25, 8.125), (8.25, 8.125)),
    Case("fp8:scaling=tensor", (0.000712, 0.000787), (0.00465, 0.00514), (8, 8), (8, 8),
         small="fp8:scaling=tensor,sink=3,recent=5,group=4"),
    Case("int8:", (0.000129, 0.000143), (0.000137, 0.000152), (8.25, 8.125), (8.25, 8.125),
         small="int8:"),
    Case("int8:symmetric=false,scales=bf16", (0.000104, 0.000115), (0.000127, 0.00014), (8.5, 8.25), (8.5, 8.25)),
    Case("int4:", (0.0397, 0.0438), (0.0429, 0.0474), (4.25, 4.125), (4.25, 4.125)),
    Case("int4:symmetric=false", (0.0175, 0.0193), (0.0191, 0.0211), (4.5, 4.25), (4.5, 4.25),
         small="int4:symmetric=false,sink=1,group=8"),
    Case("hf_quantized_cache:", (0.0176, 0.0195), (0.0193, 0.0213), (4.5, 4.5), (4.5, 4.5),
         small="hf_quantized_cache:channels=16,residual=12", counter_example=True),
    Case("hf_quantized_cache:bits=2,channels=32", (0.276, 0.305), (0.276, 0.305), (3, 3), (3, 3), counter_example=True),
    Case("turboquant:bits=4", (0.00793, 0.00876), (0.0191, 0.0211), (4.25, 4.125), (4.5, 4.25)),
    Case("turboquant:k_bits=3,v_bits=4", (0.029, 0.0321), (0.0191, 0.0211), (3.25, 3.125), (4.5, 4.25)),
    Case("turboquant:k_bits=8,v_bits=4", (0.000658, 0.000727), (0.0191, 0.0211), (8, 8), (4.5, 4.25)),
    Case("turboquant:bits=2,norm_correction=false,values=lloyd", (0.0996, 0.11), (0.0979, 0.108), (2.25, 2.125),
         (2.25, 2.125)),
    Case("turboquant:bits=1,values=lloyd", (0.324, 0.358), (0.315, 0.348), (1.25, 1.125), (1.25, 1.125)),
    Case("turboquant:bits=4,qjl=true,values=lloyd", (0.0452, 0.0499), (0.00779, 0.00861), (4.5, 4.25), (4.25, 4.125),
         small="turboquant:bits=4,qjl=true,values=lloyd,group=4"),
    Case("turboquant:k_bits=1,v_bits=8,qjl=true", (1.47, 1.62), (6.62e-05, 7.32e-05), (1.5, 1.25), (8.5, 8.25)),
    Case("ultra_tq:bits=4", (0.00876, 0.00968), (0.0191, 0.0211), (4.25, 4.125), (4.5, 4.25),
         small="ultra_tq:bits=4,recent=2"),
    Case("ultra_tq:k_bits=2,v_bits=3,layers_share=1.0", (0.105, 0.116), (0.0854, 0.0944), (2.25, 2.125), (3.5, 3.25)),
    Case("kvquant:bits=3", (0.12, 0.132), (0.0365, 0.0404), (3.75, 3.375), (4.25, 3.625)),
    Case("kvquant:bits=2,outliers=0,sink=0", (0.326, 0.36), (0.56, 0.619), (2, 2), (2.5, 2.25)),
    Case("kvquant:k_bits=2,v_bits=4,k_entries=3,scales=f32", (0.165, 0.182), (0.0092, 0.0102),
         (4.25, 3.125), (5.75, 4.875),
         small="kvquant:k_bits=2,v_bits=4,outliers=0.1,sink=3,recent=5,group=4"),
    Case("ultraquant:", (0.0161, 0.0178), (0.0265, 0.0292), (4.25, 4.25), (4.25, 4.25)),
    Case("ultraquant:c=0.195", (0.0114, 0.0126), (0.0199, 0.022), (4.25, 4.25), (4.25, 4.25)),
    Case("ultraquant:rounding=even,c=0.25,block=16,rotate_v=true", (0.0111, 0.0122), (0.011, 0.0121), (4.5, 4.5),
         (4.5, 4.5), small="ultraquant:rounding=even,c=0.25,block=16,rotate_v=true,query=f32,sink=3,group=4"),
    Case("ultraquant:rounding=floor,c=0.27,block=64", (0.0118, 0.0131), (0.0262, 0.029), (4.125, 4.125),
         (4.125, 4.125)),
    Case("ultraquant:rounding=ceil,c=0.1375", (0.0114, 0.0126), (0.0199, 0.022), (4.25, 4.25), (4.25, 4.25)),
    Case("mxfp4:", (0.0222, 0.0245), (0.0204, 0.0225), (4.25, 4.25), (4.25, 4.25),
         small="mxfp4:sink=3,recent=4,group=8"),
    Case("mxfp4:rule=even,rotate=true", (0.0114, 0.0126), (0.0112, 0.0124), (4.25, 4.25), (4.25, 4.25)),
    Case("mxfp4:rule=rceil", (0.0246, 0.0272), (0.0271, 0.0299), (4.25, 4.25), (4.25, 4.25)),
    Case("mxfp4:rule=ceil", (0.0432, 0.0477), (0.0454, 0.0501), (4.25, 4.25), (4.25, 4.25)),
    Case("mxint4:", (0.0397, 0.0439), (0.0415, 0.0459), (4.25, 4.25), (4.25, 4.25)),
    Case("mxint4:rule=rceil,rotate=true", (0.0169, 0.0187), (0.0149, 0.0165), (4.25, 4.25), (4.25, 4.25),
         small="mxint4:rule=rceil,rotate=true,sink=2"),
    Case("nvfp4:", (0.00787, 0.00869), (0.00773, 0.00854), (4.5, 4.5), (4.5, 4.5),
         small="nvfp4:recent=6"),
    Case("nvfp4:rotate=true", (0.00905, 0.01), (0.00898, 0.00993), (4.5, 4.5), (4.5, 4.5)),
    Case("tile:bits=2", (0.0599, 0.0662), (0.0665, 0.0735), (2.5, 2.375), (2.5, 2.375),
         small="tile:bits=2,group=16,sink=3,recent=5"),
    Case("tile:bits=2,v_mean=token,grid=lloyd", (0.0771, 0.0852), (0.0725, 0.0801), (2.5, 2.375), (2.625, 2.375)),
    Case("tile:bits=2,v_mean=none,scales=fp8", (0.0606, 0.067), (0.0798, 0.0882), (2.4375, 2.3125), (2.3125, 2.1875)),
    Case("tile:bits=2,v_mean=token,grid=uniform,refit=none,normalize=none", (0.45, 0.498),
         (0.124, 0.137), (2.5, 2.375), (2.625, 2.375)),
    Case("tile:bits=1", (0.216, 0.239), (0.242, 0.268), (1.5, 1.375), (1.5, 1.375)),
    Case("tile:bits=3,scales=f32", (0.0174, 0.0192), (0.0183, 0.0202), (4, 3.75), (4, 3.75)),
    Case("tile:bits=4", (0.00485, 0.00536), (0.00474, 0.00523), (4.5, 4.375), (4.5, 4.375)),
    Case("tile:k_bits=4,v_bits=2", (0.00485, 0.00536), (0.0665, 0.0735), (4.5, 4.375), (2.5, 2.375)),
    Case("tile:bits=2,feedback=true", (0.0984, 0.1088), (0.0665, 0.0735), (2.5, 2.375), (2.5, 2.375),
         small="tile:bits=2,feedback=true,group=16,sink=3"),
    Case("blockgrid:scale=l2,grid=uniform", (0.0095, 0.0105), (0.00936, 0.0103), (4.25, 4.125), (4.25, 4.125)),
    Case("blockgrid:block=32,grid=lloyd", (0.00553, 0.00611), (0.00546, 0.00603), (4.5, 4.5), (4.5, 4.5),
         small="blockgrid:rotate=false,block=16,grid=fp4,sink=3,recent=5,group=4"),
    Case("blockgrid:rotate=false,block=16,grid=fp4", (0.00755, 0.00835), (0.00733, 0.0081), (5, 5), (5, 5)),
    Case("blockgrid:rotate=false,scale=l2,block=32,grid=refit,values=bf16", (0.0471, 0.052), (2.49e-06, 2.75e-06),
         (4.5, 4.5), (16, 16)),
]
# fmt: on

SMALL = [case.small for case in CASES if case.small]
APPEND_ONLY = [case.small for case in CASES if case.small and not case.counter_example]


def pinned(batch: int = 2, tokens: int = 288, head_dim: int = 64, kv_heads: int = 2, seed: int = 0) -> np.ndarray:
    """Float32 `[batch, kv_heads, tokens, head_dim]`: Student-t(4) around a mean per channel, two outlier channels, and
    tokens of very different length, small as real values are, so that each scheme's error is its own."""
    rng = np.random.default_rng(seed)
    x = 0.8 * rng.standard_t(4, (batch, kv_heads, tokens, head_dim))
    x += 0.7 * rng.standard_normal((1, kv_heads, 1, head_dim))
    x[..., :: head_dim // 2] *= 6
    x *= 0.2 * np.exp(0.7 * rng.standard_normal((batch, kv_heads, tokens, 1)))
    return x.astype(np.float32)


def fp8_constants(scheme: kvq.Scheme, kv_heads: int, head_dim: int) -> dict[str, np.ndarray] | None:
    scales = {"k_scale": np.float32(0.05), "v_scale": np.float32(0.04)}  # up to 22 and 18: some of `pinned` saturates
    return scales if scheme.needs_constants else None


def refitted_book(scheme: kvq.Scheme, kv_heads: int, head_dim: int) -> dict[str, np.ndarray]:
    levels = gaussian_levels(scheme.k_bits or scheme.bits)
    return {"k_book": 1.1 * np.array(levels) / head_dim**0.5}  # the normal book, stretched as outliers want it


def block_book(scheme: Any, kv_heads: int, head_dim: int) -> dict[str, np.ndarray] | None:
    return {"k_book": np.linspace(-1, 1, 16)} if scheme.needs_constants else None


def kvquant_tables(scheme: Any, kv_heads: int, head_dim: int) -> dict[str, np.ndarray]:
    """Ranges of `pinned`; tables that are not sorted, and hold 0."""
    upper = np.full((kv_heads, head_dim), 0.9, np.float32)
    upper[:, :: head_dim // 2] *= 6
    halves = {"k": 2 ** (scheme.key_bits - 1), "v": 2 ** (scheme.value_bits - 1)}
    tables = {f"{side}_lut": np.arange(-n, n, dtype=np.float32)[::-1] / n for side, n in halves.items()}
    return tables | {"k_lower": -upper, "k_upper": upper}


def tile_feedback(scheme: Any, kv_heads: int, head_dim: int) -> dict[str, np.ndarray] | None:
    """Of queries whose neighbouring channels go together, and weigh differently in each head."""
    if not scheme.needs_constants:
        return None
    channel = np.arange(head_dim)
    together = 0.8 ** np.abs(channel[:, None] - channel)
    spread = [np.exp(0.5 * np.sin(channel + head)) for head in range(kv_heads)]
    found = [feedback_constants(together * s[:, None] * s) for s in spread]
    return {name: np.stack(x) for name, x in zip(("k_weight", "k_feedback"), zip(*found, strict=True), strict=True)}


# Schemes that need constants: name -> (scheme, kv_heads, head_dim) -> plausible arrays of one layer, or None.
CONSTANTS: dict[str, Callable[[kvq.Scheme, int, int], dict[str, np.ndarray] | None]] = {
    "blockgrid": block_book,
    "fp8": fp8_constants,
    "kvquant": kvquant_tables,
    "tile": tile_feedback,
    "ultra_tq": refitted_book,
}


def constants(spec: str | kvq.Scheme, kv_heads: int, head_dim: int) -> dict[str, np.ndarray] | None:
    """What `init_cache` needs for one layer of this scheme; None for most."""
    scheme = kvq.scheme(spec)
    return CONSTANTS[scheme.name](scheme, kv_heads, head_dim) if scheme.name in CONSTANTS else None


def empty(spec: str | kvq.Scheme, x: Any, capacity: int | None = None, dtype: Any = np.float32) -> kvq.Cache:
    """A cache for rows like those of x `[batch, kv_heads, tokens, head_dim]`."""
    batch, kv_heads, tokens, head_dim = x.shape
    shape = {"batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "capacity": capacity or tokens}
    return kvq.init_cache(spec, **shape, dtype=dtype, constants=constants(spec, kv_heads, head_dim))


def heads_share(side: Any) -> bool:
    """Whether something that is stored belongs to all heads of a token."""
    return any(leaf.shape[1] < side.kv_heads for leaf in side.store.values())


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
