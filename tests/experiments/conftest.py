"""A tiny checkpoint that the binaries can read a text with, and programs that are compiled in less time."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

CHECKPOINT = Path(__file__).parents[1] / "data" / "models" / "qwen2_tiny"  # 2 layers, head_dim 32, context 2048


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with a tokenizer whose tokens are bytes."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(CHECKPOINT, path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly() -> Iterator[None]:
    """What these tests hold does not depend on how fast a program runs, and compiling is what they cost."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
