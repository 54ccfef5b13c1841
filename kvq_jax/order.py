"""In which order a compiled program does things."""

import jax.numpy as jnp
from jax import Array, lax


def zero_after(x: Array) -> Array:
    """int32 0 that is known only once x is: what is indexed with it waits for x.

    XLA:CPU drops `optimization_barrier` before it orders operations and places buffers, so the order is made of a zero
    that it does not see through.
    """
    bits = lax.bitcast_convert_type(x.ravel()[0].astype(jnp.float32), jnp.uint32)
    return ((bits >> 31) >> 1).astype(jnp.int32)
