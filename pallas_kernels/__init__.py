"""Kernels for GPUs (Pallas, Triton backend): decode attention over packed caches, which `kvq_jax.attend` dispatches to,
and kernels that write the store. See docs/kernels.md."""
