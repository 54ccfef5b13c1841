"""Caches that store keys before RoPE: turned back when they come, turned again when they are read."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scheme_cases import assert_same, constants, pinned

import kvq_jax as kvq
import models
from kvq_jax.quantizers.identity import Identity
from kvq_jax.schemes import Scheme, Side, Window

HEADS, D, TOKENS, N = 2, 32, 70, 5
MODELS = Path(__file__).parents[1] / "data" / "models"
ROPES = {
    "full": kvq.Rope(tuple(100.0 ** (-np.arange(D // 2) / (D // 2)))),
    "partial": kvq.Rope(tuple(100.0 ** (-np.arange(5) / 5))),  # 10 of 32 channels
    "with a factor": kvq.Rope(tuple(50.0 ** (-np.arange(D // 2) / (D // 2))), factor=1.3),
}
PRE_K, V = (pinned(2, TOKENS, head_dim=D, seed=seed) for seed in (40, 41))
Q = pinned(2, N, head_dim=D, kv_heads=6, seed=42) * 3
LENGTHS = [(0, 0), (0, 2), (17, 32), (64, 65)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreRope(Scheme):
    """Float32 keys before RoPE, values that wait in another window: what is lost is RoPE's rounding alone."""

    def sides(self, head_dim: int) -> tuple[Side, Side]:
        exact = Identity(head_dim, "fp32")
        return Side(exact, Window(recent=0, group=4), pre_rope=True), Side(exact, Window(recent=4, group=1))


EXACT, KVQUANT = PreRope(sink=3), kvq.scheme("kvquant:bits=4,sink=3")
BOTH = pytest.mark.parametrize("scheme", [EXACT, KVQUANT], ids=["exact", "kvquant"])
EVERY_ROPE = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)


def turned(x: np.ndarray, rope: kvq.Rope, first: int = 0) -> np.ndarray:
    """x `[..., tokens, head_dim]` at positions first, first + 1, …: complex numbers, float64."""
    half = len(rope.inv_freq)
    turn = rope.factor * np.exp(1j * np.outer(first + np.arange(x.shape[-2]), rope.inv_freq))
    z = (x[..., :half] + 1j * x[..., half : 2 * half].astype(np.float64)) * turn
    return np.concatenate([z.real, z.imag, x[..., 2 * half :]], -1).astype(np.float32)


def init(scheme: Scheme, rope: kvq.Rope | None, capacity: int = TOKENS, batch: int = 2) -> kvq.Cache:
    own = constants(scheme, HEADS, D) if scheme.name == "kvquant" else None
    size = {"batch": batch, "kv_heads": HEADS, "head_dim": D, "capacity": capacity}
    return kvq.init_cache(scheme, **size, dtype=jnp.float32, constants=own, rope=rope)


def filled(scheme: Scheme, rope: kvq.Rope, lengths: tuple[int, int]) -> kvq.Cache:
    valid = jnp.arange(TOKENS) < jnp.array(lengths)[:, None]
    return kvq.append(init(scheme, rope), turned(PRE_K, rope), V, valid=valid)


@functools.cache
def compiled(implementation: str):
    return jax.jit(functools.partial(kvq.attend, implementation=implementation))


def dense(q, k, v, length: int) -> np.ndarray:
    """Float64 attention of one row: q `[q_heads, n, D]` at the positions length …, k and v `[HEADS, length + n, D]`."""
    out = np.zeros(q.shape)
    for h, t in np.ndindex(q.shape[:2]):
        g = h // (q.shape[0] // HEADS)
        scores = k[g, : length + t + 1].astype(np.float64) @ q[h, t] / np.sqrt(D)
        p = np.exp(scores - scores.max())
        out[h, t] = p / p.sum() @ v[g, : length + t + 1]
    return out


def close(a, b, atol: float = 5e-6) -> None:
    np.testing.assert_allclose(a, b, rtol=0, atol=atol * max(1, np.abs(b).max()))


@EVERY_ROPE
def test_a_turn_is_a_product_of_complex_numbers_and_is_taken_back(rope: kvq.Rope) -> None:
    for first in (0, 1000):
        position = first + jnp.arange(TOKENS)[None]
        out = rope.apply(PRE_K, position)
        close(out, turned(PRE_K, rope, first), 1e-4 if first else 1e-5)
        close(rope.apply(out, position, inverse=True), PRE_K, 1e-6)
    np.testing.assert_array_equal(np.asarray(out)[..., 2 * len(rope.inv_freq) :], PRE_K[..., 2 * len(rope.inv_freq) :])


@EVERY_ROPE
def test_keys_are_stored_as_they_were_before_rope_and_read_as_they_came(rope: kvq.Rope) -> None:
    cache = filled(EXACT, rope, (70, 66))
    leaves = kvq.stored(cache)
    assert int(cache.k.flushed[0]) == 64
    close(leaves["k_values"][0, :, :, 0], PRE_K[0, :, 3:67], 1e-6)
    close(leaves["k_sink"][0], PRE_K[0, :, :3], 1e-6)
    close(leaves["k_window"][0], PRE_K[0, :, 67:], 1e-6)
    k, _ = kvq.read(cache)
    close(k[0], turned(PRE_K, rope)[0], 1e-5)
    close(k[1, :, :66], turned(PRE_K, rope)[1, :, :66], 1e-5)
    assert not np.asarray(k)[1, :, 66:].any()


def test_kvquant_rounds_the_keys_as_they_were_before_rope() -> None:
    rope, own = ROPES["full"], constants(KVQUANT, HEADS, D)
    plain, _ = kvq.roundtrip(KVQUANT, PRE_K, V, constants=own)  # no RoPE: taken as they are
    k, _ = kvq.roundtrip(KVQUANT, turned(PRE_K, rope), V, constants=own, rope=rope)
    same = np.abs(np.asarray(k) - turned(np.asarray(plain), rope)) < 1e-4
    assert same.mean() > 0.999  # a code flips where RoPE's rounding meets a boundary
    wrong, _ = kvq.roundtrip(KVQUANT, turned(PRE_K, rope), V, constants=own)
    assert np.abs(np.asarray(wrong) - np.asarray(k)).mean() > 1e-3


@pytest.mark.parametrize(
    ("scheme", "rope"),
    [(EXACT, "full"), (EXACT, "with a factor"), (KVQUANT, "partial")],
    ids=["exact", "factor", "kvq"],
)
def test_attention_turns_what_it_reads(scheme: Scheme, rope: str) -> None:
    """Ragged rows, from empty to nearly full: tiled, reference, and float64 over K that was turned outside."""
    fresh, rope = pinned(2, N, head_dim=D, seed=43), ROPES[rope]
    for lengths in LENGTHS:
        cache = filled(scheme, rope, lengths)
        block_k = np.stack([turned(fresh[row], rope, length) for row, length in enumerate(lengths)])
        tiled, reference = (compiled(i)(Q, cache, block_k, V[:, :, :N]) for i in ("xla", "reference"))
        close(tiled, np.asarray(reference))
        k, v = (np.asarray(x) for x in kvq.read(cache))
        if scheme is EXACT:
            k = turned(PRE_K, rope)
        for row, length in enumerate(lengths):
            keys, values = (
                np.concatenate([x[row, :, :length], new[row]], 1) for x, new in ((k, block_k), (v, V[:, :, :N]))
            )
            close(tiled[row], dense(Q[row], keys, values, length), 2e-5)


@BOTH
def test_rows_padded_on_the_left_count_their_own_tokens(scheme: Scheme) -> None:
    rope, lengths = ROPES["full"], (41, 70)
    expected = filled(scheme, rope, lengths)
    exists = np.arange(TOKENS) >= TOKENS - np.array(lengths)[:, None]
    k, v = np.full_like(V, 1e20), np.full_like(V, 1e20)
    for row, length in enumerate(lengths):
        k[row][:, exists[row]] = turned(PRE_K, rope)[row, :, :length]
        v[row][:, exists[row]] = V[row, :, :length]
    assert_same(kvq.append(init(scheme, rope), k, v, valid=jnp.asarray(exists)), expected)


@BOTH
def test_one_token_at_a_time_equals_one_shot_and_trim_goes_back(scheme: Scheme) -> None:
    rope = ROPES["with a factor"]
    k, whole, cache = turned(PRE_K, rope), filled(scheme, rope, (TOKENS, TOKENS)), init(scheme, rope)
    states = []
    for t in range(TOKENS):
        cache = kvq.append(cache, k[:, :, t : t + 1], V[:, :, t : t + 1])
        states.append(cache)
    assert_same(cache, whole)
    length = TOKENS - 2 if scheme is EXACT else 50
    trimmed = kvq.trim(cache, length)
    if scheme is KVQUANT:  # tiles of one token: as if the rest had never come
        assert_same(trimmed, states[length - 1])
    assert_same(kvq.append(trimmed, k[:, :, length:], V[:, :, length:]), whole)


def test_several_read_tiles() -> None:
    rope, tokens = ROPES["full"], 1300
    pre, v = (pinned(1, tokens + 1, head_dim=D, seed=seed) for seed in (44, 45))
    k = turned(pre, rope)
    cache = kvq.append(init(EXACT, rope, tokens, 1), k[:, :, :tokens], v[:, :, :tokens])
    q = Q[:1, :, :1]
    out = compiled("xla")(q, cache, k[:, :, tokens:], v[:, :, tokens:])
    values = np.concatenate([kvq.read(cache)[1], v[:, :, tokens:]], 2)
    close(out[0], dense(q[0], k[0], values[0], tokens), 5e-5)


@BOTH
def test_gradients_are_the_references(scheme: Scheme) -> None:
    cache = filled(scheme, ROPES["partial"], (17, 64))
    weight = pinned(2, N, head_dim=D, kv_heads=6, seed=46)

    def loss(q, k, v, implementation):
        return jnp.sum(kvq.attend(q, cache, k, v, implementation=implementation) * weight)

    arguments = Q, PRE_K[:, :, :N], V[:, :, :N]
    gradients = [jax.grad(loss, (0, 1, 2))(*arguments, i) for i in ("xla", "reference")]
    for tiled, reference in zip(*gradients, strict=True):
        assert np.abs(reference).max() > 1e-3
        close(tiled, np.asarray(reference), 2e-5)


@BOTH
def test_a_block_that_is_read_quantized_is_turned_back_and_forth(scheme: Scheme) -> None:
    scheme, rope = kvq.scheme(scheme, reads_own="quantized"), ROPES["full"]
    cache = filled(scheme, rope, (17, 60))
    k = np.stack([turned(PRE_K[row, :, :N], rope, length) for row, length in enumerate((17, 60))])
    written = kvq.append(cache, k, V[:, :, :N])
    outs = [kvq.attend(Q, cache, k, V[:, :, :N], implementation=i) for i in ("xla", "reference")]
    outs.append(kvq.attend(Q, written))
    for out in outs[1:]:
        close(outs[0], np.asarray(out))
    keys, values = (np.asarray(x) for x in kvq.read(written))
    for row, length in enumerate((17, 60)):
        close(outs[0][row], dense(Q[row], keys[row], values[row], length), 2e-5)


def test_a_side_is_rotated_or_before_rope_not_both() -> None:
    with pytest.raises(ValueError, match="not both"):
        Side(Identity(D, "fp32"), Window(0, 1), rotate=True, pre_rope=True)


# --- through a model


@functools.cache
def load(folder: str, scan_layers: bool = False) -> models.Model:
    return models.load(MODELS / folder, scan_layers=scan_layers)


TEXT = np.random.default_rng(5).integers(0, 320, (2, 40))
KEPT = np.arange(40) >= np.array([[0], [13]])  # one row is padded on the left
FOLDERS = ("llama31_tiny", "phi3_tiny", "qwen3_tiny")  # scaled, partial, and with a norm of the keys


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_model_whose_keys_are_stored_before_rope_says_the_same(folder: str, scan_layers: bool) -> None:
    model = load(folder, scan_layers)
    found = kvq.pseudo_decode(model.forward, TEXT, scheme=PreRope(sink=1), block=8, valid=KEPT)
    assert float(jnp.nanmean(jnp.abs(found.kl))) < 1e-6
    assert float(jnp.nanmax(found.kl)) < 1e-5  # one position: float32 rounding of large logits, of either sign
    assert float(jnp.nanmax(found.key_relative_mse)) < 1e-10
    assert int(found.quantized_tokens.min()) > 20


def keys_before_rope(model: models.Model) -> np.ndarray:
    """`[layers, batch, kv_heads, tokens, head_dim]`, as a cache stores them."""
    found = []

    def attend(q, k, v, *, rope, **options):
        cache = kvq.init_cache(
            "kvquant:sink=40,outliers=0",  # all sink: nothing is rounded
            batch=len(k), kv_heads=k.shape[1], head_dim=k.shape[3], capacity=40, dtype=jnp.float32, rope=rope,
            constants=constants("kvquant:outliers=0", k.shape[1], k.shape[3]),
        )  # fmt: skip
        found.append(kvq.append(cache, k, v).k.sink)
        return kvq.attend(q, None, k, v, **options)

    model.forward(jnp.asarray(TEXT), jnp.broadcast_to(jnp.arange(40), TEXT.shape), attend)
    return np.stack(found)


def test_before_rope_is_after_the_norm_of_the_keys() -> None:
    model = load("qwen3_tiny")
    for layer, k in enumerate(keys_before_rope(model)):
        weight = np.asarray(model.decoder.layers[layer].k_norm.weight[...])
        np.testing.assert_allclose(np.mean((k / weight) ** 2, -1), 1, rtol=1e-2)  # to the norm's epsilon


@pytest.mark.parametrize("scan_layers", [False, True])
def test_kvquant_in_a_model_loses_what_its_roundtrip_of_the_keys_before_rope_loses(scan_layers: bool) -> None:
    model, scheme = load("qwen3_tiny", scan_layers), kvq.scheme("kvquant:bits=3")
    exact = keys_before_rope(load("qwen3_tiny"))
    layers, _, kv_heads, _, head_dim = exact.shape
    arrays = {name: np.stack([x] * layers) for name, x in constants(scheme, kv_heads, head_dim).items()}
    arrays["k_upper"] = np.quantile(np.abs(exact), 0.99, axis=(1, 3)).astype(np.float32)
    arrays["k_lower"] = -arrays["k_upper"]
    calibrated = kvq.Constants(arrays, scheme=scheme.calibrated(), kv_heads=kv_heads, head_dim=head_dim)
    found = kvq.pseudo_decode(model.forward, TEXT, scheme=scheme, block=8, constants=calibrated)
    for layer, k in enumerate(exact):
        own = {name: x[layer] for name, x in arrays.items()}
        back, _ = kvq.roundtrip(scheme, k, k, constants=own)
        error = float(np.sum((back - k)[:, :, 1:] ** 2) / np.sum(k[:, :, 1:] ** 2))
        assert 1e-3 < error < 0.2
        assert float(found.key_relative_mse[0, layer]) == pytest.approx(error, rel=2e-3)
    assert 0 < float(jnp.nanmean(found.kl[1])) < 1


def test_a_forward_that_does_not_say_which_rope_is_an_error_that_says_what_to_do() -> None:
    model = load("llama31_tiny")

    def silent(tokens, positions, attend):
        class Silent:
            def __call__(self, q, k, v, *, rope, **options):
                return attend(q, k, v, **options)

        return model.forward(tokens, positions, Silent())

    with pytest.raises(ValueError, match=r"stores keys before RoPE, and layer 0 does not say .* pass rope=kvq.Rope"):
        kvq.pseudo_decode(silent, TEXT, scheme=PreRope(), block=8)
    kvq.pseudo_decode(silent, TEXT, scheme="fp32", block=40)  # others do not ask
