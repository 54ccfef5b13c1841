"""Weights from a checkpoint to devices: dtype, matmul layout, stacking, and the split over a mesh.

Matrices are kept `[in, out]`. Measured on XLA:CPU (float32, the shapes of SmolLM2-135M), that layout is 3 to 6 %
faster than the published `[out, in]` at 128 tokens and 10 % slower at one; one matmul for q, k, v or for gate and up
gains nothing over separate ones.
"""

import jax
import ml_dtypes
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.checkpoints import Checkpoint
from models.config import ModelConfig

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
MODEL_AXIS = "model"
ALL_LAYERS = "layers.*."  # a name with this prefix is the weight of every layer, stacked


class Weights:
    """`weights(name, spec)` is the named weight as a device array laid out over the mesh by `spec`."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, mesh: Mesh | None) -> None:
        self._checkpoint, self._dtype, self._mesh = checkpoint, dtype, mesh

    def __call__(self, name: str, spec: P) -> Array:
        if name.startswith(ALL_LAYERS):
            rest = name.removeprefix(ALL_LAYERS)
            layers = range(self._checkpoint.config.num_hidden_layers)
            array = np.stack([self._host(f"layers.{i}.{rest}") for i in layers])
            spec = P(None, *spec)
        else:
            array = self._host(name)
        if self._mesh is None:
            return jax.device_put(array)
        if _pieces(self._checkpoint.config, name) % self._mesh.shape[MODEL_AXIS]:
            spec = P()
        return jax.device_put(array, NamedSharding(self._mesh, spec))

    def _host(self, name: str) -> np.ndarray:
        """A copy of its own (a reader may hand out a view of the file): norms and biases float32, matrices `dtype`."""
        value = self._checkpoint.tensor(name)
        if value.ndim == 1:
            return np.array(value, np.float32)
        if name not in ("embed_tokens.weight", "lm_head.weight"):  # these stay `[vocab, width]`
            value = value.T
        with np.errstate(over="ignore"):
            cast = np.array(value, DTYPES[self._dtype], order="C")
        if self._dtype == "float16" and not np.isfinite(cast).all() and np.isfinite(value.astype(np.float32)).all():
            raise ValueError(
                f"{self._checkpoint.files[0].parent}: tensor {name} holds values beyond float16's 65504; load with "
                "dtype='bfloat16' or 'float32'"
            )
        return cast


def _pieces(config: ModelConfig, name: str) -> int:
    """In how many pieces a weight can be cut without cutting a head; 1 for what every device needs whole."""
    for part, pieces in (
        ("q_proj", config.num_attention_heads),
        ("o_proj", config.num_attention_heads),
        ("k_proj", config.num_key_value_heads),
        ("v_proj", config.num_key_value_heads),
        ("mlp.", config.intermediate_size),
        ("embed_tokens", config.vocab_size),
        ("lm_head", config.vocab_size),
    ):
        if part in name:
            return pieces
    return 1
