"""The Hadamard rotation of the channels.

H is the Sylvester (natural order) Hadamard matrix over sqrt(D): H = Hᵀ = H⁻¹, no random signs (QuaRot; KVarN).
Where D is not a power of two no Sylvester matrix exists, and H is block-diagonal with blocks of
the largest power of two that divides D: 80 = 5·16, 96 = 3·32.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array


def block_size(head_dim: int) -> int:
    """The largest power of two that divides `head_dim`: the size of the rotation's blocks."""
    return head_dim & -head_dim


def hadamard(x: Array, axis: int = -1) -> Array:
    """x·H along `axis`, computed in float32 and returned as float32; its own inverse.

    Butterflies rather than a product with H: every token is the same sum in the same order however many tokens come
    with it, so streamed and one-shot appends store the same bytes.

    Raises ValueError for an odd size, where every block would be 1 and nothing would be rotated.
    """
    size = x.shape[axis]
    block = block_size(size)
    if block < 2:
        raise ValueError(
            f"an odd head_dim ({size}) has nothing to rotate; use an even head_dim or a scheme without rotation"
        )
    y = jnp.moveaxis(x.astype(jnp.float32), axis, -1)
    shape, done = y.shape, 1
    while done < block:
        radix = min(RADIX, block // done)
        parts = y.reshape(*shape[:-1], size // (radix * done), radix, done)
        y = jnp.stack(_butterflies([parts[..., i, :] for i in range(radix)]), axis=-2).reshape(shape)
        done *= radix
    return jnp.moveaxis(y * np.float32(1 / math.sqrt(block)), -1, axis)


RADIX = 8  # of one pass: fewer passes over the array, and fewer kernels to compile, than butterflies of two


def _butterflies(parts: list[Array]) -> list[Array]:
    """The unscaled Hadamard transform across a list of 2^n arrays."""
    if len(parts) == 1:
        return parts
    half = len(parts) // 2
    sums = [a + b for a, b in zip(parts[:half], parts[half:], strict=True)]
    differences = [a - b for a, b in zip(parts[:half], parts[half:], strict=True)]
    return _butterflies(sums) + _butterflies(differences)
