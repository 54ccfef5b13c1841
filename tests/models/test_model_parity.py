"""The decoder against Hugging Face transformers, and every way of running it against the plain one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoints import DATA, FOLDERS, TOLERANCE, Recording, assert_golden, golden, read, run, write

import models
from kvq_jax.attention import CausalAttention


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_logits_and_greedy_tokens_are_those_of_transformers(folder: str, scan_layers: bool) -> None:
    model = models.load(DATA / folder, scan_layers=scan_layers)
    assert_golden(model, folder)
    greedy = golden(folder)["greedy"]  # 16 prompt tokens, then each the argmax after the ones before it
    chosen = np.asarray(model.logits(greedy[:, :-1])).argmax(-1)
    np.testing.assert_array_equal(chosen[:, 15:], greedy[:, 16:])


@pytest.mark.parametrize("folder", FOLDERS)
def test_attend_gets_the_keys_after_rope_and_the_values_of_transformers(folder: str) -> None:
    want = golden(folder)
    model = models.load(DATA / folder)
    tokens = jnp.asarray(want["tokens"])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    recording = Recording()
    model.forward(tokens, positions, recording)
    assert len(recording.keys) == model.config.num_hidden_layers
    for got, expected in ((recording.keys[0], want["key_layer0"]), (recording.values[-1], want["value_last"])):
        assert np.abs(np.asarray(got)[:, :, :32] - expected).max() < TOLERANCE * expected.std()


@pytest.mark.parametrize("folder", ["llama31_tiny", "qwen3_tiny"])
def test_scanned_layers_equal_unrolled_layers_and_weights_live_once(folder: str) -> None:
    tokens = golden(folder)["tokens"]
    unrolled, scanned = models.load(DATA / folder), models.load(DATA / folder, scan_layers=True)
    # One program may fuse what the other does not, so equal to rounding.
    np.testing.assert_allclose(scanned.logits(tokens), unrolled.logits(tokens), atol=1e-5)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(model.forward)) for model in (unrolled, scanned)]
    assert sizes[0] == sizes[1] == sum(value.size for value in read(folder)[1].values())
    of_module = jax.tree.leaves(models.decoder.nnx.state(unrolled.decoder))
    in_forward = jax.tree.leaves(unrolled.forward)
    assert {id(a) for a in of_module} == {id(a) for a in in_forward}


def test_scan_layers_refuses_layers_with_different_windows(tmp_path) -> None:
    config, tensors = read("qwen2_tiny")
    config |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    del config["layer_types"]
    path = write(tmp_path / "m", config, tensors)
    with pytest.raises(ValueError, match="scan_layers=False"):
        models.load(path, scan_layers=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_dtypes_stay_near_float32(dtype: str) -> None:
    model, want = models.load(DATA / "llama31_tiny", dtype=dtype), golden("llama31_tiny")
    kept = {leaf.dtype.name for leaf in jax.tree.leaves(model.forward) if leaf.ndim > 1}
    assert kept == {dtype}
    logits = model.logits(want["tokens"])
    assert logits.dtype == jnp.float32
    error = np.asarray(logits)[:, want["logit_positions"]] - want["logits"]
    assert np.sqrt((error**2).mean()) < 0.02 * want["logits"].std()


def test_second_call_and_second_model_of_equal_shape_do_not_retrace() -> None:
    traces = []

    @jax.jit
    def run(forward, tokens, positions):
        traces.append(None)
        return forward(tokens, positions, CausalAttention()).all()

    tokens = jnp.zeros((1, 4), jnp.int32)
    positions = jnp.arange(4)[None]
    for model in (models.load(DATA / "qwen2_tiny"), models.load(DATA / "qwen2_tiny")):
        run(model.forward, tokens, positions)
        run(model.forward, tokens + 1, positions)
    assert len(traces) == 1


def test_weights_are_arguments_and_not_constants_of_the_program() -> None:
    model = models.load(DATA / "llama31_tiny")
    tokens = jnp.zeros((1, 4), jnp.int32)
    program = jax.jit(lambda f, t, p: f(t, p, CausalAttention()).all()).trace(model.forward, tokens, tokens).jaxpr
    assert max((np.size(c) for c in program.consts), default=0) <= 64  # RoPE's frequencies at most
    assert sum(v.aval.size for v in program.jaxpr.invars) > 300_000


def test_positions_are_logical_so_a_left_padded_row_equals_the_row_alone() -> None:
    model = models.load(DATA / "qwen3_tiny")
    tokens = jnp.asarray(golden("qwen3_tiny")["tokens"][:, :12])
    alone = run(model.forward, tokens[:1, 4:], jnp.arange(8)[None])
    positions = jnp.stack([jnp.maximum(jnp.arange(12) - 4, 0), jnp.arange(12)])
    valid = jnp.stack([jnp.arange(12) >= 4, jnp.ones(12, bool)])
    padded = run(model.forward, tokens, positions, valid)
    np.testing.assert_allclose(padded[0, 4:], alone[0], atol=1e-5)


def test_lazy_logits_of_a_part_equal_that_part_of_all() -> None:
    model = models.load(DATA / "phi3_tiny")
    tokens = jnp.asarray(golden("phi3_tiny")["tokens"][:, :10])
    lazy = model.forward(tokens, jnp.broadcast_to(jnp.arange(10), tokens.shape), CausalAttention())
    assert lazy.hidden.shape == (2, 10, model.config.hidden_size)
    np.testing.assert_allclose(lazy.unembed(lazy.hidden[:, 3:5]), lazy.all()[:, 3:5], atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[0, 320]], "0 … 319"),
        ([[-1]], "-1"),
        ([0, 1], r"\[batch, tokens\]"),
        ([[0.5]], "integers"),
        (np.zeros((1, 0), int), "empty"),
    ],
)
def test_tokens_outside_the_vocabulary_or_of_another_shape_are_refused(tokens, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.load(DATA / "qwen2_tiny").logits(np.asarray(tokens))


def test_a_token_outside_the_vocabulary_is_nan_inside_jit_and_not_another_token() -> None:
    model = models.load(DATA / "qwen2_tiny")
    tokens = jnp.asarray([[0, 1, 2], [0, 320, 2]])
    logits = run(model.forward, tokens, jnp.broadcast_to(jnp.arange(3), (2, 3)))
    assert np.isfinite(logits[0]).all()
    assert np.isnan(logits[1, 1:]).all()


def test_config_is_frozen_and_digest_names_the_checkpoint(tmp_path) -> None:
    model = models.load(DATA / "qwen2_tiny")
    assert hash(model.config) == hash(models.load(DATA / "qwen2_tiny", dtype="bfloat16").config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.config.head_dim = 1
    assert model.digest == models.load(DATA / "qwen2_tiny", scan_layers=True).digest
    config, tensors = read("qwen2_tiny")
    copied = models.load(write(tmp_path / "copy", config, tensors))
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * np.float32(1.001)
    changed = models.load(write(tmp_path / "changed", config, tensors))
    moved = models.load(write(tmp_path / "moved", config | {"rms_norm_eps": 1e-5}, tensors))
    assert len({model.digest, changed.digest, moved.digest}) == 3
    assert len(copied.digest) == 16
