"""kvq_jax: KV-cache quantization in JAX. Arrays are `[batch, kv_heads, tokens, head_dim]`; see README.md."""

from kvq_jax.attention import CausalAttention, attend
from kvq_jax.balance import variance_normalize
from kvq_jax.cache import (
    Cache,
    append,
    init_cache,
    lengths,
)
from kvq_jax.calibration.calibrate import calibrate
from kvq_jax.calibration.clipping import Clipping, solve_clipping_constant
from kvq_jax.constants import Constants, load_constants, save_constants
from kvq_jax.implementations import resolve_implementation
from kvq_jax.memory import bits_per_element, nbytes, stored
from kvq_jax.protocol import Attend, LazyLogits
from kvq_jax.pseudo_decode import Trace, pseudo_decode
from kvq_jax.reading import read, roundtrip
from kvq_jax.rope import Rope
from kvq_jax.rotation import hadamard
from kvq_jax.rows import select_rows, trim
from kvq_jax.schemes import Scheme, list_schemes, scheme

__all__ = [
    "Attend",
    "Cache",
    "CausalAttention",
    "Clipping",
    "Constants",
    "LazyLogits",
    "Rope",
    "Scheme",
    "Trace",
    "append",
    "attend",
    "bits_per_element",
    "calibrate",
    "hadamard",
    "init_cache",
    "lengths",
    "list_schemes",
    "load_constants",
    "nbytes",
    "pseudo_decode",
    "read",
    "resolve_implementation",
    "roundtrip",
    "save_constants",
    "scheme",
    "select_rows",
    "solve_clipping_constant",
    "stored",
    "trim",
    "variance_normalize",
]
