"""Hugging Face directories: `config.json`, `model.safetensors` or shards with an index, `tokenizer.json`."""

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which safetensors needs)
import numpy as np
from safetensors import SafetensorError, safe_open

from models.checkpoints import check_tensors, weight_shapes
from models.config import ModelConfig, read_config
from models.tokenizer import Tokenizer, hf_tokenizer

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# Buffers that old Llama checkpoints carry; they follow from the config.
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class SafetensorsCheckpoint:
    """An opened directory. Phi-3's fused `qkv_proj` and `gate_up_proj` are read as row ranges."""

    def __init__(self, directory: Path, *, context: int | None = None) -> None:
        self._directory = directory
        config_path = directory / "config.json"
        if not config_path.is_file():
            raise FileNotFoundError(f"{config_path} does not exist; a Hugging Face checkpoint has one, copy it there")
        self.config: ModelConfig = read_config(config_path, context=context)
        shards = _shards(directory)
        self.files = tuple(sorted(shards))
        self._handles: dict[Path, Any] = {path: _open(path) for path in self.files}
        self._where: dict[str, Path] = {}
        for path, promised in shards.items():
            names = set(self._handles[path].keys())
            if promised is not None and (lost := sorted(promised - names)):
                raise ValueError(f"{path}: tensor {lost[0]} is missing, but the index places it here; copy it again")
            for name in names:
                if name in self._where:
                    raise ValueError(f"{path}: tensor {name} is also in {self._where[name]}; keep one of the files")
                if not _IGNORED.fullmatch(name):
                    self._where[name] = path
        self._rows = _published_rows(self.config, set(self._where))
        self._check(config_path)

    def tensor(self, name: str) -> np.ndarray:
        """The named tensor in the dtype of the file."""
        published, start, stop = self._rows[name]
        path = self._where[published]
        handle = self._handles[path]
        try:
            if start is None:
                return handle.get_tensor(published)
            return handle.get_slice(published)[start:stop]
        except SafetensorError as error:
            raise ValueError(f"{path}: tensor {published} cannot be read ({error}); copy the file again") from None

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of `tokenizer.json`."""
        return hf_tokenizer(self._directory / "tokenizer.json")

    def _check(self, config_path: Path) -> None:
        shapes = weight_shapes(self.config)
        expected: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            published, _, stop = self._rows[name]
            rows = max(stop or 0, expected.get(published, (0,))[0]) if stop else shape[0]
            expected[published] = (rows, *shape[1:])
        found: dict[str, tuple[int, ...]] = {}
        for name, path in self._where.items():
            part = self._handles[path].get_slice(name)
            if (dtype := part.get_dtype()) not in DTYPES:
                raise ValueError(
                    f"{path}: tensor {name} has dtype {dtype}, which is not supported; supported are "
                    f"{', '.join(DTYPES)}; convert the checkpoint"
                )
            found[name] = tuple(part.get_shape())
        if self.config.tie_word_embeddings and "lm_head.weight" in found:
            self._check_tied_head(found.pop("lm_head.weight"), config_path)
        check_tensors(expected, found, where=str(self._directory), config=str(config_path))

    def _check_tied_head(self, shape: tuple[int, ...], config_path: Path) -> None:
        """Some tied checkpoints store the embedding twice. A head that differs contradicts the config."""
        path = self._where["lm_head.weight"]
        embedding = "model.embed_tokens.weight"
        head = self._handles[path].get_tensor("lm_head.weight")
        same = embedding in self._where and np.array_equal(
            head, self._handles[self._where[embedding]].get_tensor(embedding)
        )
        if not same:
            raise ValueError(
                f"{path}: tensor lm_head.weight {list(shape)} differs from {embedding}, but {config_path} ties them; "
                "set tie_word_embeddings to false there or use the checkpoint that belongs to it"
            )


def _shards(directory: Path) -> dict[Path, set[str] | None]:
    """The files with the tensors that the index promises in each (None: there is no index)."""
    single, index_path = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if not index_path.is_file():
        if single.is_file():
            return {single: None}
        kinds = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = f"; {kinds[0]} is there, but only safetensors is read from a directory" if kinds else ""
        raise FileNotFoundError(f"{directory} has no model.safetensors and no model.safetensors.index.json{hint}")
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[Path, set[str] | None] = {}
        for name, file in weight_map.items():
            promised = shards.setdefault(directory / file, set())
            assert promised is not None
            promised.add(name)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index_path}: must hold an object with a 'weight_map'; copy the file again") from None
    for path in shards:
        if path.parent != directory:
            raise ValueError(f"{index_path}: names {path.name} outside the directory; shards lie beside the index")
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist, but {index_path.name} lists it; get the missing shard")
    if not shards:
        raise ValueError(f"{index_path}: 'weight_map' is empty; copy the file again")
    return shards


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{path}: is not a whole safetensors file ({error}); copy the file again") from None


def _published_rows(config: ModelConfig, names: set[str]) -> dict[str, tuple[str, int | None, int | None]]:
    """For each weight: the published tensor, and the rows of it that are this weight (None: all)."""
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    ffn = config.intermediate_size
    fused = {
        "self_attn.q_proj.weight": ("self_attn.qkv_proj.weight", 0, q),
        "self_attn.k_proj.weight": ("self_attn.qkv_proj.weight", q, q + kv),
        "self_attn.v_proj.weight": ("self_attn.qkv_proj.weight", q + kv, q + 2 * kv),
        "mlp.gate_proj.weight": ("mlp.gate_up_proj.weight", 0, ffn),
        "mlp.up_proj.weight": ("mlp.gate_up_proj.weight", ffn, 2 * ffn),
    }
    rows: dict[str, tuple[str, int | None, int | None]] = {}
    for name in weight_shapes(config):
        rows[name] = ("lm_head.weight" if name == "lm_head.weight" else f"model.{name}", None, None)
        prefix, number, rest = name.split(".", 2) if name.startswith("layers.") else ("", "", name)
        if rest in fused:
            whole, start, stop = fused[rest]
            published = f"model.{prefix}.{number}.{whole}"
            if published in names:
                rows[name] = (published, start, stop)
    return rows
