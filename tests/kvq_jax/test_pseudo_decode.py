"""Pseudo-decode of a small decoder that an embedding user would write: plain jnp and the attend it is given."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scheme_cases import compiles

import kvq_jax as kvq

VOCAB, WIDTH, HEADS, KV, D, LAYERS, N = 61, 32, 4, 2, 16, 2, 96
KVARN = "kvarn:bits=2,group=16"
ROTATED = "hadamard:bits=2,group=16"
KIVI = "kivi:bits=2,subgroup=8,residual=16,sink=3"


class Weights(NamedTuple):
    embed: Any  # [vocab, width]
    q: Any  # [layers, width, heads·D]
    k: Any
    v: Any
    o: Any


def weights(vocab: int = VOCAB, layers: int = LAYERS) -> Weights:
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-2])).astype(np.float32)

    stacked = random(layers, WIDTH, HEADS * D), random(layers, WIDTH, KV * D), random(layers, WIDTH, KV * D)
    return Weights(*map(jnp.asarray, (4 * random(vocab, WIDTH), *stacked, random(layers, HEADS * D, WIDTH))))


def rope(x, positions):
    angle = positions[:, None, :, None] / 100 ** (jnp.arange(D // 2) / (D // 2))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


def layer(x, one, positions, attend):
    y = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    heads = [jnp.swapaxes((y @ w).reshape(*y.shape[:2], -1, D), 1, 2) for w in one[:3]]
    out = attend(rope(2 * heads[0], positions), rope(heads[1], positions), heads[2])
    return x + jnp.swapaxes(out, 1, 2).reshape(*x.shape[:2], -1) @ one[3]


def forward(w: Weights, tokens, positions, attend, *, scan: bool = False, lazy: bool = False):
    x = w.embed[tokens]
    if scan:
        x = attend.scan(lambda x, one, attend: layer(x, one, positions, attend), x, tuple(w[1:]))
    else:
        for i in range(w.q.shape[0]):
            x = layer(x, [leaf[i] for leaf in w[1:]], positions, attend)
    logits = kvq.LazyLogits(x, jax.tree_util.Partial(lambda e, x: x @ e.T, w.embed))
    return logits if lazy else logits.all()


W = weights()
FORWARD = jax.tree_util.Partial(forward, W)
TOKENS = np.random.default_rng(1).integers(0, VOCAB, (2, N))


@functools.cache
def trace(scheme: str, block: int, regimes: tuple[str, ...] = ("static", "accumulated")) -> kvq.Trace:
    return kvq.pseudo_decode(FORWARD, TOKENS, scheme=scheme, block=block, regimes=regimes, dtype=jnp.float32)


@functools.cache
def plain() -> tuple[np.ndarray, list]:
    """(logits of the plain forward, every layer's K and V)."""
    seen = []

    def attend(q, k, v):
        seen.append((k, v))
        return kvq.attend(q, None, k, v)

    return np.asarray(forward(W, TOKENS, jnp.broadcast_to(jnp.arange(N), TOKENS.shape), attend)), seen


def nll(logits, tokens) -> np.ndarray:
    log_p = jax.nn.log_softmax(logits[:, :-1])
    return -np.take_along_axis(np.asarray(log_p), tokens[:, 1:, None], -1)[..., 0]


@pytest.mark.parametrize("block", [1, 16, 50, N])  # 50 does not divide N
def test_identity_reproduces_the_plain_forward_for_every_block(block: int) -> None:
    found = trace("fp32", block)
    assert float(jnp.abs(found.kl).max()) < 1e-6
    assert bool(found.agree.all())
    expected = nll(plain()[0], TOKENS)
    np.testing.assert_allclose(found.nll_reference[:, :-1], expected, atol=2e-5)
    for regime in found.nll:
        np.testing.assert_allclose(regime[:, :-1], expected, atol=2e-5)
    assert np.isnan(found.nll_reference[:, -1]).all()  # the last token has no next one
    assert float(found.attention_mae.max()) < 1e-5


def decode_loop(scheme: str) -> dict[str, np.ndarray]:
    """KL(reference ‖ run) of every position, one token at a time, written out."""
    one = kvq.scheme(scheme)

    def caches(spec):
        return kvq.init_cache(spec, batch=2, kv_heads=KV, head_dim=D, capacity=N, dtype=jnp.float32, layers=LAYERS)

    class Reader:
        def __init__(self, caches):
            self.caches, self.new = caches, []

        def __call__(self, q, k, v):
            cache = self.caches[len(self.new)]
            self.new.append((k, v))
            if cache.scheme.reads_own == "quantized":
                return kvq.attend(q, kvq.append(cache, k, v))
            return kvq.attend(q, cache, k, v)

    @jax.jit
    def step(caches, token, position):
        readers = {name: Reader(c) for name, c in caches.items()}
        logits = {
            name: forward(W, token[:, None], jnp.full((2, 1), position), reader)[:, 0]
            for name, reader in readers.items()
        }
        new = {name: readers["reference" if name == "static" else name].new for name in caches}
        caches = {name: [kvq.append(c, *kv) for c, kv in zip(caches[name], new[name], strict=True)] for name in caches}
        return caches, logits

    runs = {"reference": list(caches("fp32"))} | {name: list(caches(one)) for name in ("static", "accumulated")}
    kl = {"static": [], "accumulated": []}
    for i in range(N):
        runs, logits = step(runs, TOKENS[:, i], i)
        p = jax.nn.log_softmax(logits["reference"])
        for name, of in kl.items():
            of.append(np.sum(np.exp(p) * (p - jax.nn.log_softmax(logits[name])), -1))
    return {name: np.stack(x, 1) for name, x in kl.items()}


@pytest.mark.parametrize("scheme", [KIVI, ROTATED + ",reads_own=quantized"])
def test_blocks_of_one_token_are_a_decode_loop(scheme: str) -> None:
    found, expected = trace(scheme, 1), decode_loop(scheme)
    assert found.regimes == ("static", "accumulated")
    for i, regime in enumerate(found.regimes):
        np.testing.assert_allclose(found.kl[i], expected[regime], atol=1e-5 + 1e-3 * expected[regime].max())
        assert expected[regime][:, 40:].mean() > 1e-3


def test_static_stores_the_references_keys_and_values_and_accumulated_its_own() -> None:
    found = trace(KVARN, 16)
    for i, (k, v) in enumerate(plain()[1]):
        k_hat, v_hat = kvq.roundtrip(KVARN, k, v)  # all 96 tokens are flushed
        for name, x, x_hat in (("key", k, k_hat), ("value", v, v_hat)):
            relative = float(jnp.sum((x - x_hat) ** 2) / jnp.sum(x**2))
            static, accumulated = getattr(found, f"{name}_relative_mse")[:, i]
            assert float(static) == pytest.approx(relative, rel=1e-3)
            if i:  # the first layer's keys and values come from the tokens alone
                assert float(accumulated) > 1.02 * relative
    np.testing.assert_array_equal(found.quantized_tokens, [2 * N] * LAYERS)
    static, accumulated = found.kl
    np.testing.assert_array_equal(static[:, :16], accumulated[:, :16])  # before anything quantized is read
    assert float(jnp.abs(found.kl[:, :, :16]).max()) < 1e-6
    assert float(static[:, 16:].mean()) > 1e-3
    assert float(jnp.abs(static - accumulated)[:, 32:].max()) > 1e-3


def test_requirement_9_ragged_rows_measure_what_each_measures_alone() -> None:
    short, full = 70, trace(KIVI, 16)
    alone = kvq.pseudo_decode(FORWARD, TOKENS[:1, :short], scheme=KIVI, block=16, dtype=jnp.float32)
    for first in (0, N - short):  # padding on the right, on the left
        tokens, valid = TOKENS.copy(), np.ones((2, N), bool)
        valid[0] = (np.arange(N) >= first) & (np.arange(N) < first + short)
        tokens[0] = 0
        tokens[0, valid[0]] = TOKENS[0, :short]
        found = kvq.pseudo_decode(FORWARD, tokens, scheme=KIVI, block=16, valid=jnp.asarray(valid), dtype=jnp.float32)
        np.testing.assert_array_equal(found.valid, valid)
        for name in ("kl", "attention_mae", "nll"):
            assert np.isnan(np.asarray(getattr(found, name))[..., ~valid]).all()
        np.testing.assert_allclose(found.kl[:, 1], full.kl[:, 1], atol=2e-4)  # rounding feeds back in `accumulated`
        own = found.nll_reference[0, first : first + short]
        np.testing.assert_allclose(own[:-1], alone.nll_reference[0, :-1], atol=2e-5)
        if first == 0:  # on the left the blocks begin at other tokens, so others are read in full precision
            np.testing.assert_allclose(found.kl[:, 0, :short], alone.kl[:, 0], atol=2e-4)
            np.testing.assert_allclose(found.nll[:, 0, : short - 1], alone.nll[:, 0, :-1], atol=1e-3)


def test_protected_ends_stay_in_full_precision_and_scanned_layers_equal_unrolled_ones() -> None:
    three, scheme = weights(layers=3), ROTATED + ",protect=1"
    runs = [jax.tree_util.Partial(functools.partial(forward, scan=scan), three) for scan in (False, True)]
    found, scanned = (kvq.pseudo_decode(run, TOKENS, scheme=scheme, block=16, dtype=jnp.float32) for run in runs)
    np.testing.assert_array_equal(found.quantized_tokens, [0, 2 * N, 0])
    assert np.isnan(found.key_relative_mse[:, [0, 2]]).all()
    assert (found.key_relative_mse[:, 1] > 0.01).all()
    assert float(found.kl[:, :, 32:].mean()) > 1e-4
    assert {"k_values", "k_codes"} <= set(found.cache_bytes)
    np.testing.assert_allclose(scanned.kl, found.kl, atol=2e-4)
    np.testing.assert_allclose(scanned.attention_mae, found.attention_mae, atol=2e-4)
    np.testing.assert_allclose(scanned.key_relative_mse, found.key_relative_mse, rtol=1e-3)
    np.testing.assert_array_equal(scanned.quantized_tokens, found.quantized_tokens)
    assert scanned.cache_bytes == found.cache_bytes


def test_a_second_call_does_not_compile() -> None:
    trace(KVARN, 16)
    with compiles() as count:
        kvq.pseudo_decode(FORWARD, (TOKENS + 1) % VOCAB, scheme=KVARN, block=16, dtype=jnp.float32)
    assert count == []


def sizes(jaxpr) -> set[tuple[int, ...]]:
    """The shape of every array in a program and the programs inside it."""
    found = set()
    for equation in jaxpr.eqns:
        found |= {tuple(v.aval.shape) for v in (*equation.invars, *equation.outvars) if hasattr(v.aval, "shape")}
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found |= sizes(inner)
    return found


def test_no_array_of_text_times_vocabulary_exists() -> None:
    vocab, n = 997, 300
    run = jax.tree_util.Partial(functools.partial(forward, lazy=True), weights(vocab))
    program = jax.make_jaxpr(
        lambda tokens: kvq.pseudo_decode(run, tokens, scheme=KIVI, block=n, regimes=("accumulated",)).kl
    )(np.zeros((1, n), np.int32))
    with_vocab = [shape for shape in sizes(program.jaxpr) if vocab in shape]
    assert any(128 in shape for shape in with_vocab)  # the chunks of logits are found
    assert max(np.prod(shape) for shape in with_vocab) < n * vocab


def test_program_and_memory_beside_the_caches_do_not_grow_with_the_text() -> None:
    def measured(tokens):
        found = kvq.pseudo_decode(FORWARD, tokens, scheme=KVARN, block=32, dtype=jnp.float32)
        return found.kl, found.nll, found.attention_mae, found.key_relative_mse

    found = []
    for n in (512, 2048):
        program = jax.jit(measured).lower(jax.ShapeDtypeStruct((1, n), jnp.int32))
        shape = {"batch": 1, "kv_heads": KV, "head_dim": D, "capacity": n, "dtype": jnp.float32}
        bytes_of = {spec: LAYERS * sum(kvq.nbytes(kvq.init_cache(spec, **shape)).values()) for spec in ("fp32", KVARN)}
        caches = bytes_of["fp32"] + 2 * bytes_of[KVARN]  # the reference's, and one a regime
        memory = program.compile().memory_analysis()
        found.append((len(program.as_text().splitlines()), memory.temp_size_in_bytes - caches))
    (lines, beside), (lines_of_4_times, beside_of_4_times) = found
    assert lines_of_4_times <= 1.02 * lines  # what is compiled, and with it how long that takes
    assert beside_of_4_times <= 1.1 * beside


def test_what_is_not_a_number_is_visible() -> None:
    broken = W._replace(k=W.k.at[1].set(jnp.nan))
    found = kvq.pseudo_decode(jax.tree_util.Partial(forward, broken), TOKENS, scheme=KVARN, block=16, dtype=jnp.float32)
    assert np.isnan(found.kl).all()
    assert np.isnan(found.nll_reference).all()
    tokens = TOKENS.copy()
    tokens[tokens == 7] = 8
    tokens[0, 40] = 7
    embed = W.embed.at[7].set(jnp.nan)
    found = kvq.pseudo_decode(
        jax.tree_util.Partial(forward, W._replace(embed=embed)), tokens, scheme=KVARN, block=16, dtype=jnp.float32
    )
    assert np.isnan(found.attention_mae[:, :, 0, 40:]).all()
    assert np.isfinite(found.attention_mae[:, :, 0, :32]).all()  # the blocks before
    assert np.isfinite(found.attention_mae[:, :, 1]).all()


def test_progress_counts_blocks() -> None:
    calls = []
    kvq.pseudo_decode(FORWARD, TOKENS, scheme="fp32", block=48, regimes=(), progress=lambda *done: calls.append(done))
    jax.effects_barrier()
    assert sorted(calls) == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"block": 0}, "block=0 does not fit a text of 96 tokens; allowed: 1 to 96"),
        ({"block": 97}, "block=97 does not fit"),
        ({"regimes": ("online",)}, "'online' is unknown or repeated; allowed: static, accumulated"),
        ({"regimes": ("static", "static")}, "unknown or repeated"),
        ({"tokens": TOKENS[0]}, r"tokens has shape \(96,\); it must be \[batch, N\]"),
        ({"valid": np.ones((2, 3), bool)}, r"valid has shape \(2, 3\)"),
        ({"scheme": "kvarm"}, "unknown scheme"),
        ({"scheme": KVARN + ",protect=1"}, "protect=1 leaves none of 2 layers"),
        ({"implementation": "flash"}, "implementation='flash' is unknown"),
        (
            {"forward": lambda tokens, positions, attend: jnp.zeros((*tokens.shape, VOCAB))},
            "never called the attention",
        ),
    ],
)
def test_wrong_arguments_are_named(changed, says) -> None:
    arguments = {"forward": FORWARD, "tokens": TOKENS, "scheme": KVARN, "block": 16} | changed
    with pytest.raises(ValueError, match=says):
        kvq.pseudo_decode(arguments.pop("forward"), arguments.pop("tokens"), **arguments)


def test_requirement_22_log_likelihoods_are_scored_through_the_cache() -> None:
    exact, quantized = trace("fp32", 16), trace(KVARN, 16)
    np.testing.assert_allclose(exact.nll[0][exact.scored], exact.nll_reference[exact.scored], atol=1e-5)
    moved = jnp.abs(quantized.nll - quantized.nll_reference)[:, quantized.scored]
    assert float(moved.max()) > 1e-3, "a score that the cache cannot change does not read it"


def test_requirement_7_padding_on_any_side_by_any_amount_changes_nothing() -> None:
    alone = kvq.pseudo_decode(FORWARD, TOKENS[:1, :59], scheme=KIVI, block=20)
    valid = np.zeros((1, N), bool)
    valid[:, 10:40] = valid[:, 67:] = True  # 59 tokens, with a hole
    tokens = np.full((1, N), 7)
    tokens[valid] = TOKENS[0, :59]
    padded = kvq.pseudo_decode(FORWARD, tokens, scheme=KIVI, block=20, valid=valid)
    np.testing.assert_allclose(padded.kl[:, valid], alone.kl[:, 0], atol=1e-5)
    np.testing.assert_array_equal(padded.scored[valid], alone.scored[0])
    assert jnp.isnan(padded.kl[:, ~valid]).all()


def test_attend_inside_a_trace_of_the_forwards_own_is_named() -> None:
    def hidden(w: Weights, tokens, positions, attend):
        return jax.jit(lambda t: forward(w, t, positions, attend))(tokens)

    with pytest.raises(ValueError, match="attend inside a jit"):
        kvq.pseudo_decode(jax.tree_util.Partial(hidden, W), TOKENS, scheme="fp32", block=16)
