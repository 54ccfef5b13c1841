"""RoPE scalings and sliding windows against an independent decoder in NumPy."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoints import DATA, TOLERANCE, Recording, golden, oracle_logits, read, run, write

import models
from models.rope import llama3_frequencies


def assert_oracle(model: models.Model, tokens: np.ndarray, want: np.ndarray) -> None:
    assert np.abs(np.asarray(model.logits(tokens)) - want).max() < TOLERANCE * want.std()


def test_linear_scaling(tmp_path) -> None:
    config, tensors = read("llama31_tiny")
    config["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    tokens = golden("llama31_tiny")["tokens"][:, :40]
    want = oracle_logits(config, tensors, tokens, 10000.0 ** (-np.arange(16) / 16) / 4)
    assert_oracle(models.load(write(tmp_path / "m", config, tensors)), tokens, want)


@pytest.mark.parametrize("layout", ["newest", "2024"])
def test_partial_rotation_turns_three_quarters_of_the_channels(layout: str, tmp_path) -> None:
    config, tensors = read("phi3_tiny")
    if layout == "newest":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.75}
    else:
        del config["rope_parameters"]
        config |= {"rope_theta": 5e5, "rope_scaling": None, "partial_rotary_factor": 0.75}
    tokens = golden("phi3_tiny")["tokens"][:, :40]
    want = oracle_logits(config, tensors, tokens, 5e5 ** (-np.arange(12) / 12))
    model = models.load(write(tmp_path / "m", config, tensors))
    assert model.config.rope.rotary_dim == 24
    assert_oracle(model, tokens, want)


SHORT = [1.0 + 0.1 * i for i in range(12)]
LONG = [1.0 + 0.9 * i for i in range(12)]


def longrope(tmp_path, **changes) -> tuple[dict, dict]:
    """Phi-4-mini's kind of config: LongRoPE over three quarters of the channels, original context 32."""
    config, tensors = read("phi3_tiny")
    del config["rope_parameters"]
    config |= {
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
        "max_position_embeddings": 1024,
        "original_max_position_embeddings": 32,
    }
    return config | changes, tensors


@pytest.mark.parametrize(
    ("length", "context", "table"),
    [(32, None, SHORT), (33, None, LONG), (32, 32, SHORT), (20, 1024, LONG), (40, 1024, LONG)],
)
def test_longrope_uses_the_table_of_the_context(length: int, context: int | None, table, tmp_path) -> None:
    config, tensors = longrope(tmp_path)
    tokens = golden("phi3_tiny")["tokens"][:, :length]
    inv_freq = 10000.0 ** (-np.arange(12) / 12) / np.asarray(table)
    factor = math.sqrt(1 + math.log(1024 / 32) / math.log(32))
    want = oracle_logits(config, tensors, tokens, inv_freq, attention_factor=factor)
    assert_oracle(models.load(write(tmp_path / "m", config, tensors), context=context), tokens, want)


def test_longrope_never_mixes_its_tables_silently(tmp_path) -> None:
    config, tensors = longrope(tmp_path)
    path = write(tmp_path / "m", config, tensors)
    tokens = jnp.asarray(golden("phi3_tiny")["tokens"][:, :16])
    late = jnp.broadcast_to(jnp.arange(24, 40), (2, 16))  # crosses 32, and earlier keys were short
    early = late - 24
    undecided = models.load(path)
    rows = run(undecided.forward, tokens, jnp.stack([late[0], early[1]]))
    assert np.isnan(rows[0]).any()
    assert np.isfinite(rows[1]).all()  # a row does not suffer from its neighbour
    assert np.isnan(run(models.load(path, context=32).forward, tokens, late)).any()
    assert np.isfinite(run(models.load(path, context=1024).forward, tokens, late)).all()


def test_longrope_in_chunks_equals_the_whole_once_the_context_is_given(tmp_path) -> None:
    config, tensors = longrope(tmp_path)
    model = models.load(write(tmp_path / "m", config, tensors), context=100)
    tokens = jnp.asarray(golden("phi3_tiny")["tokens"][:1, :48])
    positions = jnp.arange(48)[None]
    whole, parts = Recording(), Recording()
    model.forward(tokens, positions, whole)
    for i in range(0, 48, 16):
        model.forward(tokens[:, i : i + 16], positions[:, i : i + 16], parts)
    layers = model.config.num_hidden_layers
    np.testing.assert_allclose(jnp.concatenate(parts.keys[::layers], axis=2), whole.keys[0], atol=1e-5)


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        ({"type": "su"}, math.sqrt(1 + math.log(32) / math.log(32))),  # LongRoPE's name in the first Phi-3 files
        ({"rope_type": "longrope", "attention_factor": 1.5}, 1.5),
        ({"rope_type": "longrope", "factor": 32.0}, math.sqrt(2)),
    ],
)
def test_longrope_attention_factor(scaling, factor: float, tmp_path) -> None:
    config, tensors = longrope(tmp_path)
    config["rope_scaling"] = {"short_factor": SHORT, "long_factor": LONG} | scaling
    assert math.isclose(models.load(write(tmp_path / "m", config, tensors)).config.rope.attention_factor, factor)


def test_longrope_attention_factor_is_one_without_extension(tmp_path) -> None:
    config, tensors = longrope(tmp_path, original_max_position_embeddings=1024)
    assert models.load(write(tmp_path / "m", config, tensors)).config.rope.attention_factor == 1.0


def test_llama3_scaling_keeps_fast_pairs_and_slows_slow_ones() -> None:
    freq = 2 * math.pi / np.asarray([10.0, 8192 / 4, 8192 / 2, 8192.0, 1e6])  # given by wavelength
    got = llama3_frequencies(freq, factor=8.0, low=1.0, high=4.0, original=8192)
    middle = (2 - 1) / (4 - 1)
    np.testing.assert_allclose(got / freq, [1, 1, (1 - middle) / 8 + middle, 1 / 8, 1 / 8])


@pytest.mark.parametrize(
    ("folder", "changes", "windows"),
    [
        ("phi3_tiny", {"sliding_window": 7}, (7, 7)),
        ("qwen3_tiny", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}, (None, 7, 7)),
        ("qwen3_tiny", {"sliding_window": 7, "use_sliding_window": False}, (None, None, None)),
        (
            "qwen3_tiny",
            {
                "sliding_window": 5,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (5, None, 5),
        ),
        (
            "llama31_tiny",
            {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 9},
            (9, 9),
        ),
    ],
)
def test_sliding_windows_reach_attend_layer_by_layer(folder: str, changes, windows, tmp_path) -> None:
    config, tensors = read(folder)
    if "layer_types" not in changes:
        config.pop("layer_types", None)
    config |= changes
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    model = models.load(write(tmp_path / "m", config, tensors))
    tokens = golden(folder)["tokens"][:, :30]
    recording = Recording()
    model.forward(jnp.asarray(tokens), jnp.broadcast_to(jnp.arange(30), tokens.shape), recording)
    assert tuple(recording.windows) == windows == model.config.sliding_windows
    want = oracle_logits(config, tensors, tokens, 1e4 ** (-np.arange(16) / 16), windows=windows)
    assert_oracle(model, tokens, want)


def test_tiny_checkpoints_have_no_window() -> None:
    for folder in ("phi3_tiny", "qwen2_tiny"):
        assert set(models.load(DATA / folder).config.sliding_windows) == {None}
