"""Attention kernels over packed caches (Pallas, Triton backend). There are none yet: `kvq_jax.attend` runs on XLA, and
`implementation="pallas_triton"` raises NotImplementedError."""
