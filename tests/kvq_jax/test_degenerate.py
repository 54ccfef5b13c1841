"""Zero, constant, huge, tiny and non-finite input; every head_dim, number of bits and dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scheme_cases import SMALL, empty, heads_share, pinned

import kvq_jax as kvq
from kvq_jax.packing import BITS

TOKENS, D, AT = 60, 32, (0, 21, 5)  # head, token and channel of the one element that is not finite
NORMAL = pinned(1, TOKENS, head_dim=D, seed=30)[0]
ROWS = {
    "normal": NORMAL,
    "zero": np.zeros_like(NORMAL),
    "negative zero": np.full_like(NORMAL, -0.0),
    "constant": np.full_like(NORMAL, 3.7),
    "constant channels": np.broadcast_to(NORMAL[:, :1], NORMAL.shape),
    "constant tokens": np.broadcast_to(NORMAL[:, :, :1], NORMAL.shape),
    "positive": np.abs(NORMAL) + 5,
    "negative": -np.abs(NORMAL) - 5,
    "huge": NORMAL / np.abs(NORMAL).max() * np.float32(1e30),
    "tiny": NORMAL / np.abs(NORMAL).max() * np.float32(1e-38),
    "one huge": NORMAL.copy(),
    "inf": NORMAL.copy(),
    "nan": NORMAL.copy(),
}
ROWS["one huge"][AT], ROWS["inf"][AT], ROWS["nan"][AT] = 1e30, np.inf, np.nan
NAMES = list(ROWS)
X = np.stack([x.astype(np.float32) for x in ROWS.values()])


@functools.cache
def filled(spec: str) -> kvq.Cache:
    return kvq.append(empty(spec, X), X, X)


@functools.cache
def back(spec: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    k, v = (np.asarray(x) for x in kvq.read(filled(spec)))
    return {name: (k[i], v[i]) for i, name in enumerate(NAMES)}


def relative(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x.astype(np.float64), y.astype(np.float64)
    return float(np.square(x - y).sum() / np.square(x).sum())


@pytest.mark.parametrize("spec", SMALL)
def test_requirement_16_finite_input_comes_back_finite_and_is_attended_to_finitely(spec: str) -> None:
    finite = [name for name in NAMES if name not in ("inf", "nan")]
    for name in finite:
        for side, y in zip("kv", back(spec)[name], strict=True):
            assert np.isfinite(y).all(), (name, side)
    q = np.broadcast_to(pinned(1, 1, head_dim=D), (len(NAMES), 2, 1, D))
    out = np.asarray(kvq.attend(q, filled(spec), q, q))
    for name in finite:
        assert np.isfinite(out[NAMES.index(name)]).all(), name


@pytest.mark.parametrize("spec", SMALL)
def test_requirement_16_zero_is_zero_and_what_is_constant_or_one_signed_is_near(spec: str) -> None:
    for name in ("zero", "negative zero"):
        for y in back(spec)[name]:
            np.testing.assert_array_equal(y, 0)
    for y in back(spec)["tiny"]:
        assert np.abs(y).max() < 1e-6
    one_bit = "v_bits=1" in spec
    for name in ("constant", "positive", "negative"):
        k, v = back(spec)[name]
        if "upper" in filled(spec).k.constants:  # a calibrated range: what lies beyond is kept, or becomes its end
            end = np.asarray(filled(spec).k.constants["upper"])[:, None]
            np.testing.assert_array_equal(np.sign(k), np.sign(ROWS[name]))
            assert (np.abs(k) <= np.maximum(np.abs(ROWS[name]), end) * 1.001).all(), name
        else:  # rotated, a constant is one large channel, beyond a normal book's last level; a sketch adds noise
            assert relative(ROWS[name], k) < (0.5 if "qjl=true" in spec else 0.07), name
        assert one_bit or relative(ROWS[name], v) < 0.25, name


@pytest.mark.parametrize("spec", SMALL)
@pytest.mark.parametrize("name", ["one huge", "inf", "nan"])
def test_what_is_not_finite_stays_in_its_own_tile_head_and_row(spec: str, name: str) -> None:
    scheme, (head, token, _) = kvq.scheme(spec), AT
    for side, y, clean in zip(filled(spec).sides, back(spec)[name], back(spec)["normal"], strict=True):
        tile = side.side.quantizer.tile_tokens
        first = scheme.sink + (token - scheme.sink) // tile * tile
        same = y == clean
        if heads_share(side):
            assert np.delete(same[1 - head], token, axis=0).all()
        else:
            assert same[1 - head].all()
        assert same[head, :first].all()
        assert same[head, first + tile :].all()
        assert not same[head, token].all()
        if name == "nan" and scheme.shows_nan:
            assert not np.isfinite(y[head, token]).all()  # visible, not turned into a number
        elif name == "nan":
            assert (y[head, token] == 0).any()  # as its documentation says


@pytest.mark.parametrize(
    "scheme",
    ["kivi:bits=8,subgroup=8,residual=16,scales=f32", "kvarn:bits=8,group=16,scales=f32,normalize=equivariant"],
)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e6, 1e30])
def test_float32_scales_follow_any_magnitude(scheme: str, magnitude: float) -> None:
    x = (NORMAL * np.float32(magnitude))[None]
    for y in kvq.roundtrip(scheme, x, x):
        assert relative(x, np.asarray(y)) < 2e-4


def both_ways(spec: str, head_dim: int):
    """The largest distance between folded reads and decoded ones, relative; and the error of K and V."""
    k_side, v_side = kvq.scheme(spec).resolve(head_dim)

    @jax.jit
    def run(x, q):
        out = []
        for side in (k_side, v_side):
            quantizer = side.quantizer
            leaves = quantizer.encode(x.reshape(1, -1, quantizer.tile_tokens, head_dim), {})
            y = quantizer.tokens(leaves, {})[0]
            out.append(jnp.sum((x - y) ** 2) / jnp.sum(x**2))
            if side is k_side:
                folded, dense = quantizer.scores(q[None], leaves, {})[0], q @ y.T
            else:
                p = jax.nn.softmax(q @ x.T)
                folded, dense = quantizer.weighted_sum(p[None], leaves, {})[0], p @ y
            out.append(jnp.abs(folded - dense).max() / jnp.abs(dense).max())
        return out

    x = pinned(1, 48, head_dim=head_dim, kv_heads=1)[0, 0]
    return [float(value) for value in run(x, 0.2 * pinned(1, 3, head_dim=head_dim, kv_heads=1, seed=1)[0, 0])]


KIVI, KVARN = "kivi:subgroup=8,residual=16", "kvarn:group=16,iters=2"
COMBINATIONS = [(KIVI, bits, 80) for bits in BITS] + [(KIVI, 2, head_dim) for head_dim in (64, 96, 128, 256)]
COMBINATIONS += [(KVARN, 2, 96), (KVARN, 3, 80), (KVARN, 4, 256)]


@pytest.mark.parametrize(("scheme", "bits", "head_dim"), COMBINATIONS)
def test_requirement_10_folded_reads_equal_decoded_ones_for_every_bits_and_head_dim(scheme, bits, head_dim) -> None:
    k_error, k_read, v_error, v_read = both_ways(str(kvq.scheme(scheme, bits=bits)), head_dim)
    assert max(k_read, v_read) < 1e-5
    expected = {1: (0.2, 3), 2: (0.05, 0.6), 3: (0.005, 0.1), 4: (1e-3, 0.02), 8: (1e-6, 1e-4)}[bits]
    for error in (k_error, v_error):
        assert expected[0] < error < expected[1]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_caches_dtype_is_what_is_kept_and_what_is_quantized(dtype) -> None:
    x = jnp.asarray(X[:2], dtype)
    spec = "kivi:bits=2,subgroup=8,residual=16,sink=3"
    cache = kvq.append(empty(spec, X[:2], dtype=dtype), X[:2], X[:2])  # float32 in: rounded first
    assert cache.k.window.dtype == cache.v.sink.dtype == dtype
    same = kvq.append(empty(spec, x, dtype=dtype), x, x)
    for (name, a), b in zip(kvq.stored(cache).items(), kvq.stored(same).values(), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), name
    k, v = kvq.read(cache)
    flushed = int(cache.k.flushed[0])
    np.testing.assert_array_equal(k[:, :, 3 + flushed :], x[:, :, 3 + flushed :].astype(jnp.float32))
    np.testing.assert_array_equal(v[:, :, :3], x[:, :, :3].astype(jnp.float32))
