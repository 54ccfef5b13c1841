"""Which of the ways to compute attention runs, and what says so."""

from typing import Any

import jax

from kvq_jax.cache import Cache

IMPLEMENTATIONS = ("reference", "xla", "pallas_triton")
AUTO = "auto"  # on a GPU: kernels where they cover the case, else xla


def resolve_implementation(implementation: str | None, cache: Cache | None = None, q: Any = None) -> str:
    """What `attend` will run: for q over this cache where they are given. None picks: `xla` on a CPU; on a GPU
    `pallas_triton` where a kernel covers the case and else `xla`, which is called `auto` as long as q is not known. Of
    cache and q only the shapes count.

    Raises ValueError for an unknown name, NotImplementedError for one that does not cover the case or cannot run here.
    """
    if implementation is None:
        implementation = "xla" if jax.default_backend() == "cpu" else AUTO
    if implementation not in (*IMPLEMENTATIONS, AUTO):
        allowed = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation={implementation!r} is unknown; allowed: None, {allowed}")
    if implementation in (AUTO, "pallas_triton") and q is not None:
        return "xla" if kernel_for(implementation, cache, q) is None else "pallas_triton"
    if implementation == "pallas_triton":
        from pallas_kernels import dispatch

        dispatch.require()
    return implementation


def kernel_for(implementation: str, cache: Cache | None, q: Any) -> Any:
    """The kernel (`pallas_kernels.dispatch.Kernel`) that will read the tiles; None: XLA does."""
    if implementation not in (AUTO, "pallas_triton"):
        return None
    from pallas_kernels import dispatch  # only where it is wanted: it imports jax's experimental modules

    try:
        return dispatch.kernel(cache, q)
    except NotImplementedError:
        if implementation == AUTO:
            return None
        raise
