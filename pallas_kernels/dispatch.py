"""Which caches the kernels cover, how a cache becomes a kernel's operands, and how the kernel is cut.

Nothing is copied: the kernels read the leaves of the store as `kvq_jax` keeps them. What is not covered raises
NotImplementedError with the field and the value.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from kvq_jax.cache import Cache, SideCache
from kvq_jax.online_softmax import Softmax
from kvq_jax.packing import codes_in_word
from kvq_jax.quantizers.affine import Affine, ChannelRows, TokenRows
from kvq_jax.quantizers.base import Quantizer
from kvq_jax.quantizers.identity import Identity
from kvq_jax.quantizers.kivi import NarrowChannelRows, NarrowTokenRows
from kvq_jax.quantizers.kvarn import BalancedChannelRows, BalancedTokenRows
from kvq_jax.quantizers.mx import MXFP4Blocks
from kvq_jax.quantizers.tile import TileKeys, TileValues
from kvq_jax.quantizers.ultraquant import UltraBlocks
from pallas_kernels import _internals
from pallas_kernels.bodies import (
    SMALLEST,
    AffineKeys,
    AffineValues,
    BlockKeys,
    BlockValues,
    Codes,
    DenseKeys,
    DenseValues,
    Keys,
    ScaledKeys,
    Values,
)
from pallas_kernels.configurations import Config, configuration
from pallas_kernels.decode_attention import attend_store

HEAD_DIMS = (64, 128, 256)
BITS = (1, 2, 3, 4)
MOST_TOKENS = 128  # of a block of queries
MOST_ELEMENTS = 2**31 - 1  # of a leaf: Pallas counts offsets in 32 bits, with a sign, up to 2^32 bytes
TERMS = 2  # of bfloat16 for a float32 operand; see pallas_kernels.bodies
COVERED = "UltraQuant, MXFP4, KIVI, Hadamard, KVarN, tile, bf16, fp16, fp32"
# Exactly these: subclasses mean other things by a code.
_KEY_ROWS = (ChannelRows, NarrowChannelRows, BalancedChannelRows, TileKeys)
_VALUE_ROWS = (TokenRows, NarrowTokenRows, BalancedTokenRows, TileValues)
_interpreting: ContextVar[bool] = ContextVar("interpreting", default=False)


@dataclass(frozen=True)
class Kernel:
    """A kernel for one cache: hashable, so that it can be a static argument."""

    keys: Keys
    values: Values
    config: Config
    interpret: bool


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """For tests: inside, kernels run in Pallas' interpret mode, and so on any device. (Not when a function that was
    compiled outside is called inside.)"""
    token = _interpreting.set(True)
    try:
        yield
    finally:
        _interpreting.reset(token)


def target() -> str:
    """What the default device is called in `pallas_kernels.lowering.TARGETS`: sm_90, gfx942, …; "" without a GPU."""
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda", "rocm"):
        return ""
    capability = str(getattr(device, "compute_capability", ""))
    return capability if capability.startswith("gfx") else "sm_" + capability.replace(".", "")


def why_unavailable() -> str:
    """Why no kernel can run here; empty if they can."""
    if _interpreting.get():
        return ""
    if not target():
        platform = jax.devices()[0].platform
        return f"it needs a GPU, and the platform here is {platform!r}; use 'xla' or None"
    return _internals.why_unavailable()


def native(target: str, head_dim: int) -> bool | None:
    """Whether a target's scaled instruction wants swapped operands; None where it has none for this head_dim (Triton
    would emulate it)."""
    if target == "gfx950":
        return False if head_dim >= 128 else None  # it contracts 128 channels
    return True if target in ("sm_100", "sm_103") else None


def require() -> None:
    """Raises NotImplementedError with the reason if no kernel can run here."""
    if reason := why_unavailable():
        raise NotImplementedError(f"implementation='pallas_triton': {reason}")


def _refuse(field: str, value: object, allowed: str) -> NotImplementedError:
    return NotImplementedError(
        f"implementation='pallas_triton': no kernel covers {field}={value!r}; covered: {allowed}; use 'xla' or None"
    )


def _power_of_two(x: int) -> bool:
    return x & (x - 1) == 0


def _affine(side: str, quantizer: Affine) -> None:
    if quantizer.bits not in BITS:
        raise _refuse(f"{side}_bits", quantizer.bits, "1 to 4")
    if not _power_of_two(quantizer.group):
        raise _refuse(f"{side}_group", quantizer.group, "powers of two")


def _codes(quantizer: Affine) -> Codes:
    return Codes(quantizer.bits, quantizer.grid if isinstance(quantizer, TileKeys | TileValues) else "")


def _leaves(side: SideCache) -> tuple[str, ...]:
    return tuple(sorted(side.store))


def _key_layout(side: SideCache, terms: int, scaled: bool | None) -> Keys:
    quantizer: Quantizer = side.side.quantizer
    head_dim = quantizer.head_dim
    if isinstance(quantizer, UltraBlocks):
        if scaled is not None and quantizer.rounds_query and quantizer.block >= _internals.GROUP:
            return ScaledKeys(head_dim, 1, scaled)
        return BlockKeys(head_dim, 1 if quantizer.rounds_query else terms, False)
    if isinstance(quantizer, MXFP4Blocks):
        return BlockKeys(head_dim, terms, True)
    if type(quantizer) in _KEY_ROWS:
        assert isinstance(quantizer, Affine)
        _affine("k", quantizer)
        if quantizer.group < SMALLEST:
            raise _refuse("k_group", quantizer.group, f"{SMALLEST} tokens or more")
        return AffineKeys(head_dim, terms, _codes(quantizer), quantizer.group, _leaves(side))
    if isinstance(quantizer, Identity) and quantizer.dtype != "fp8":
        return DenseKeys(head_dim, terms, quantizer.dtype == "bf16")
    raise _refuse("k_quantizer", type(quantizer).__name__, COVERED)


def _value_layout(side: SideCache, keys: Keys, terms: int) -> Values:
    quantizer: Quantizer = side.side.quantizer
    head_dim = quantizer.head_dim
    if quantizer.tile_tokens not in (1, keys.tile):
        raise _refuse("v_group", quantizer.tile_tokens, f"1 and K's {keys.tile}")
    if isinstance(quantizer, UltraBlocks):
        return BlockValues(head_dim, 1 if quantizer.rounds_p else terms, False)
    if isinstance(quantizer, MXFP4Blocks):
        return BlockValues(head_dim, terms, True)
    if type(quantizer) in _VALUE_ROWS:
        assert isinstance(quantizer, Affine)
        _affine("v", quantizer)
        if quantizer.group < codes_in_word(quantizer.bits):
            raise _refuse("v_group", quantizer.group, f"{codes_in_word(quantizer.bits)} channels or more")
        return AffineValues(head_dim, terms, _codes(quantizer), quantizer.group, _leaves(side))
    if isinstance(quantizer, Identity) and quantizer.dtype != "fp8":
        return DenseValues(head_dim, terms, quantizer.dtype == "bf16")
    raise _refuse("v_quantizer", type(quantizer).__name__, COVERED)


def layouts(cache: Cache, *, terms: int = TERMS, scaled: bool | None = None) -> tuple[Keys, Values]:
    """The layouts of a cache's keys and values. scaled: whether to take the scaled product where it fits, and if so
    with swapped operands (True) or not (False); None: no.

    Raises NotImplementedError naming the field and the value that no kernel covers.
    """
    head_dim = cache.k.side.quantizer.head_dim
    if head_dim not in HEAD_DIMS:
        raise _refuse("head_dim", head_dim, ", ".join(map(str, HEAD_DIMS)))
    if cache.rope is not None:
        raise _refuse("keys", "before RoPE", "keys after RoPE")
    for leaf in (*cache.k.store.values(), *cache.v.store.values()):
        if leaf.size > MOST_ELEMENTS:
            raise _refuse("elements of a leaf", leaf.size, f"{MOST_ELEMENTS}, which 32-bit offsets reach")
    keys = _key_layout(cache.k, terms, scaled)
    return keys, _value_layout(cache.v, keys, terms)


def kernel(cache: Cache | None, q: Array | jax.ShapeDtypeStruct) -> Kernel:
    """The kernel for q `[batch, q_heads, tokens, head_dim]` over this cache. Raises NotImplementedError where there is
    none: for the cache, for so many queries, or on this machine."""
    require()
    if cache is None:
        raise _refuse("cache", None, "attention over a cache")
    if q.shape[2] > MOST_TOKENS:
        raise _refuse("tokens", q.shape[2], f"blocks of 1 to {MOST_TOKENS} queries")
    name = target()
    keys, values = layouts(cache, scaled=native(name, q.shape[3]))
    batch, kv_heads = cache.k.window.shape[:2]
    rows = q.shape[1] // kv_heads * q.shape[2]
    tokens = min(cache.k.store_tokens, cache.v.store_tokens)
    config = configuration(keys, values, rows=rows, programs=batch * kv_heads, tokens=tokens, target=name)
    return Kernel(keys, values, config, _interpreting.get())


def over_store(
    kernel: Kernel, q: Array, low: Array, high: Array, cache: Cache, *, scale: float, windowed: bool
) -> Softmax:
    """Attention over the stores of a cache, to be merged with what is not in them.

    q float32 `[batch, kv_heads, rows, head_dim]`, in K's stored basis and as the scheme rounds it; a row sees the
    store's tokens [low, high), int32 `[batch, rows]`, which both sides must have flushed.
    """
    return attend_store(
        q.astype(jnp.float32),
        low,
        high,
        cache.k.store,
        cache.v.store,
        keys=kernel.keys,
        values=kernel.values,
        scale=scale,
        config=kernel.config,
        windowed=windowed,
        interpret=kernel.interpret,
    )
