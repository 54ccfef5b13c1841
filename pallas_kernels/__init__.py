"""GPU kernels in Pallas (Triton backend): attention over packed caches, and their stores. docs/kernels.md."""
