"""The tile scheme against a NumPy transcription, its grids against integrals, and what it promises over KVarN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

import kvq_jax as kvq
from kvq_jax.grids import BITS, grid_codes, grid_planes, levels
from kvq_jax.lloyd_max import gaussian_levels
from kvq_jax.packing import interleave, pack
from kvq_jax.quantizers.tile import feedback_constants

encode = jax.jit(lambda quantizer, tiles: quantizer.encode(tiles, {}), static_argnums=0)
encode_k = jax.jit(lambda quantizer, tiles, constants: quantizer.encode(tiles, constants), static_argnums=0)
decode = jax.jit(lambda quantizer, leaves: quantizer.decode(leaves, {}), static_argnums=0)


@functools.cache
def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def lognormal(tiles: int, tokens: int, channels: int, seed: int = 0) -> np.ndarray:
    """Gaussian tiles with log-normal spreads over channels and tokens, and a mean per channel."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tiles, tokens, channels)) + 0.3 * rng.standard_normal((tiles, 1, channels))
    x *= np.exp(0.5 * rng.standard_normal((tiles, 1, channels)) + 0.6 * rng.standard_normal((tiles, tokens, 1)))
    return (0.1 * x).astype(np.float32)


def sides(spec: str, head_dim: int):
    return [side.quantizer for side in kvq.scheme(spec).resolve(head_dim)]


# --- grids


@pytest.mark.parametrize("bits", BITS)
def test_lloyd_levels_are_the_fixed_point_of_lloyd_and_max(bits: int) -> None:
    found = levels(bits, "lloyd")
    np.testing.assert_allclose(found, gaussian_levels(bits), atol=1e-9)
    edges = np.concatenate([[-np.inf], (found[1:] + found[:-1]) / 2, [np.inf]])
    for level, low, high in zip(found, edges[:-1], edges[1:], strict=True):
        mass = norm.cdf(high) - norm.cdf(low)
        assert quad(lambda x: x * norm.pdf(x), low, high)[0] / mass == pytest.approx(level, abs=2e-6)


def unpacked(codes: jax.Array, bits: int, grid: str) -> jax.Array:
    """The levels of stored codes."""
    return interleave(grid_planes(pack(codes, bits), bits, grid))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("grid", ["lloyd", "uniform"])
def test_every_number_gets_the_nearest_level(bits: int, grid: str) -> None:
    x, all_levels = gaussian(8, 64), levels(bits, grid)
    nearest = np.abs(x[..., None] - all_levels).argmin(-1)
    codes = grid_codes(x, bits, grid)
    np.testing.assert_array_equal(codes, nearest)
    np.testing.assert_allclose(unpacked(codes, bits, grid), all_levels[nearest], atol=2e-6)


def trellis_levels(codes: np.ndarray, bits: int) -> np.ndarray:
    """The level of every code, one after the other, as the definition says."""
    out = np.zeros(codes.shape)
    for row, row_codes in enumerate(codes):
        older = before = 0
        for j, code in enumerate(row_codes.tolist()):
            out[row, j] = levels(bits, "trellis")[2 * (code ^ older) + before]
            older, before = before, code & 1
    return out


@pytest.mark.parametrize("bits", BITS)
def test_a_trellis_code_means_what_the_definition_says(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(2**bits, size=(5, 24))
    got = unpacked(jnp.asarray(codes), bits, "trellis")
    np.testing.assert_allclose(got, trellis_levels(codes, bits), atol=2e-6)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_the_trellis_finds_the_best_of_all_rows_of_codes(bits: int, length: int) -> None:
    x = gaussian(20, length, seed=bits)
    every = np.stack(np.meshgrid(*[np.arange(2**bits)] * length, indexing="ij"), -1).reshape(-1, length)
    errors = np.square(x[:, None] - trellis_levels(every, bits)).sum(-1)
    found = np.square(x - trellis_levels(np.asarray(grid_codes(x, bits, "trellis")), bits)).sum(-1)
    np.testing.assert_allclose(found, errors.min(-1), atol=0.02)  # levels are rounded to 1/512 for the search


@pytest.mark.parametrize(("bits", "error"), [(1, 0.316), (2, 0.0894), (3, 0.0243), (4, 0.0064)])
def test_the_trellis_has_a_quarter_less_error_than_the_best_levels(bits: int, error: float) -> None:
    x = gaussian(400, 128)
    codes = {grid: grid_codes(x, bits, grid).astype(jnp.int32) for grid in ("trellis", "lloyd")}
    mse = {grid: float(np.square(x - unpacked(c, bits, grid)).mean()) for grid, c in codes.items()}
    assert mse["trellis"] == pytest.approx(error, rel=0.02)
    assert mse["trellis"] < (0.9 if bits == 1 else 0.8) * mse["lloyd"]


def test_a_rows_codes_do_not_depend_on_the_rows_beside_it() -> None:
    x = gaussian(3, 7, 32)
    one = jax.jit(functools.partial(grid_codes, bits=2, grid="trellis"))
    np.testing.assert_array_equal(one(x)[1, 2], one(x[1, 2]))


# --- the tile


def f16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float64)


def oracle_codes(x: np.ndarray, bits: int, grid: str) -> np.ndarray:
    """Levels of rows x by exhaustive dynamic programming in float64, over (last bit, the one before)."""
    if grid == "lloyd":
        return levels(bits, grid)[np.abs(x[..., None] - levels(bits, grid)).argmin(-1)]
    out = np.zeros_like(x)
    for i, row in enumerate(x):
        paths = {(0, 0): (0.0, [])}  # (u_(j−1), u_(j−2)) -> cost, levels so far
        for number in row:
            new: dict[tuple[int, int], tuple[float, list[float]]] = {}
            for (before, older), (cost, so_far) in paths.items():
                for code in range(2**bits):
                    level = levels(bits, grid)[2 * (code ^ older) + before]
                    total = cost + (number - level) ** 2
                    state = (code & 1, before)
                    if state not in new or total < new[state][0]:
                        new[state] = (total, [*so_far, level])
            paths = new
        out[i] = min(paths.values(), key=lambda path: path[0])[1]
    return out


def oracle_balance(tile: np.ndarray, iters: int) -> np.ndarray:
    """The column scales of the equivariant normalization, float64."""
    tile = tile / tile.std(ddof=1)
    log_c, log_r = np.zeros(tile.shape[1]), np.zeros(tile.shape[0])

    def current() -> np.ndarray:
        return tile / np.exp(log_c) / np.exp(log_r)[:, None]

    def imbalance() -> float:
        column, row = current().std(0, ddof=1), current().std(1, ddof=1)
        return column.max() / column.min() + row.max() / row.min()

    best, least = log_c, imbalance()
    for _ in range(iters):
        log_c = log_c + np.log(current().std(0, ddof=1))
        log_r = log_r + np.log(current().std(1, ddof=1))
        if imbalance() <= least:
            best, least = log_c, imbalance()
    return np.exp(best)


def oracle(tile: np.ndarray, side: str, grid: str, refit: str, mean: str) -> np.ndarray:
    """Decoded `[tokens, channels]` of one 2-bit tile with f16 scales, after four iterations."""
    tile = tile.astype(np.float64)
    channel_mean = np.zeros(tile.shape[1])
    if side == "v" and mean == "channel":
        channel_mean = f16(tile.mean(0))
    rows = tile.T if side == "k" else tile - channel_mean
    column = oracle_balance(rows, 4)
    column = column if side == "k" else f16(column)
    balanced = rows / column
    zero = balanced.mean(1, keepdims=True) if side == "k" or mean == "token" else np.zeros((len(rows), 1))
    scale = np.sqrt(np.square(balanced - zero).mean(1, keepdims=True))
    if side == "k":
        scale, zero = f16(scale), f16(zero)
    y = oracle_codes((balanced - zero) / scale, 2, grid) * scale + zero
    if side == "v":
        y = y * column
    over = 0 if side == "k" else 1
    square, along = np.square(y).sum(over), (y * channel_mean).sum(over) if side == "v" else 0
    wanted = np.square(rows).sum(over) + (2 * (rows * channel_mean).sum(over) if side == "v" else 0)
    factor = {
        "none": np.broadcast_to(column, y.shape[1:]) if side == "k" else np.ones(len(y)),
        "lsq": (rows * y).sum(over) / square,
        "norm": (np.sqrt(along**2 + square * wanted) - along) / square,
    }[refit]
    return (y * f16(factor)).T if side == "k" else y * factor[:, None] + channel_mean


@pytest.mark.parametrize(
    ("grid", "refit", "mean"),
    [
        ("trellis", "norm", "channel"),
        ("trellis", "norm", "none"),
        ("trellis", "lsq", "token"),
        ("lloyd", "norm", "token"),
        ("lloyd", "none", "channel"),
    ],
)
def test_the_whole_encoder_equals_a_float64_transcription(grid: str, refit: str, mean: str) -> None:
    tile = lognormal(1, 16, 32)
    for name, quantizer in zip("kv", sides(f"tile:group=16,grid={grid},refit={refit},v_mean={mean}", 32), strict=True):
        got = np.asarray(decode(quantizer, encode(quantizer, tile)))[0]
        want = oracle(tile[0], name, grid, refit, mean)
        # a number between two levels may go either way in float32; all others agree to float16's rounding
        close = np.abs(got - want) <= 2e-3 * np.abs(want).max()
        assert close.mean() > 0.99
        assert np.square(got - want).sum() < 2e-3 * np.square(want).sum()


@pytest.mark.parametrize(
    "spec", ["tile:", "tile:v_mean=none,scales=fp8", "tile:v_mean=token,grid=lloyd", "tile:v_mean=none,grid=uniform"]
)
def test_every_tokens_norm_comes_out_right(spec: str) -> None:
    tile = lognormal(3, 128, 64)
    for quantizer in sides(spec, 64):
        leaves = encode(quantizer, tile)
        back = np.asarray(decode(quantizer, leaves))
        ratio = np.linalg.norm(back, axis=-1) / np.linalg.norm(tile, axis=-1)
        # beside a mean that is kept, the norm of a token that is short beside it may be out of reach
        beyond_reach = 0.05 if "channel_mean" in leaves else 0
        assert (np.abs(ratio - 1) > 2**-10).mean() <= beyond_reach


def test_a_mean_far_longer_than_the_tokens_does_not_blow_them_up() -> None:
    deviation = lognormal(1, 128, 64)
    tile = deviation + 10 * gaussian(64)
    _, v = sides("tile:", 64)
    back = np.asarray(decode(v, encode(v, tile)))
    assert np.square(back - tile).sum() < 0.15 * np.square(deviation).sum()


def test_without_a_refit_norms_shrink_and_least_squares_shrinks_them_too() -> None:
    tile = lognormal(3, 128, 64)
    for refit, low, high in (("none", 0.93, 0.97), ("lsq", 0.93, 0.97), ("norm", 0.999, 1.001)):
        for quantizer in sides(f"tile:v_mean=token,refit={refit}", 64):
            back = np.asarray(decode(quantizer, encode(quantizer, tile)))
            assert low < (np.linalg.norm(back, axis=-1) / np.linalg.norm(tile, axis=-1)).mean() < high


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_less_error_than_kvarn_at_no_more_bytes(bits: int) -> None:
    tile = gaussian(4, 128, 64)
    ours, kvarn = f"tile:bits={bits}", f"kvarn:bits={bits},scales=f16"
    for mine, other in zip(sides(ours, 64), sides(kvarn, 64), strict=True):
        errors = [np.square(decode(q, encode(q, tile)) - tile).mean() for q in (mine, other)]
        assert errors[0] < {1: 0.4, 2: 0.45, 3: 0.65, 4: 0.77}[bits] * errors[1]
    for head_dim in (64, 128):
        for side in ("k", "v"):
            mine, other = (kvq.bits_per_element(spec, head_dim=head_dim)[side] for spec in (ours, kvarn))
            assert mine <= other


@pytest.mark.parametrize(
    "spec", ["tile:group=16", "tile:group=16,v_mean=none,scales=fp8", "tile:group=16,v_mean=token"]
)
@pytest.mark.parametrize("head_dim", [32, 80])
def test_folded_reads_equal_decoded_ones(spec: str, head_dim: int) -> None:
    tile, q = lognormal(4, 16, head_dim)[None, None], gaussian(1, 1, 3, head_dim)
    p = np.abs(gaussian(1, 1, 3, 64))
    k, v = sides(spec, head_dim)
    for name, quantizer in (("scores", k), ("weighted_sum", v)):
        leaves = encode(quantizer, tile)
        x = np.asarray(quantizer.tokens(leaves, {}))
        want = q @ np.swapaxes(x, -1, -2) if name == "scores" else p @ x
        got = getattr(quantizer, name)(q if name == "scores" else p, leaves, {})
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


# --- feedback


def queries(head_dim: int, count: int = 500) -> np.ndarray:
    """Which see few directions, as a model's do."""
    rng = np.random.default_rng(3)
    basis = rng.standard_normal((head_dim, head_dim)) * np.exp(-np.arange(head_dim) / (head_dim / 6))
    return rng.standard_normal((count, head_dim)) @ basis.T


def of_heads(*moments: np.ndarray) -> dict[str, jax.Array]:
    weight, feedback = zip(*map(feedback_constants, moments), strict=True)
    return {"weight": jnp.asarray(weight, jnp.float32), "feedback": jnp.asarray(feedback, jnp.float32)}


def test_feedback_is_that_of_a_cholesky_factor_of_the_inverse() -> None:
    """GPTQ's own form: with UᵀU = H⁻¹, an error of S takes U_SS⁻¹·U_SL of it from L."""
    q = queries(24)
    weight, feedback = feedback_constants(q.T @ q / len(q))
    damped = q.T @ q / len(q)
    damped += 0.1 * np.trace(damped) / 24 * np.eye(24)
    np.testing.assert_allclose(weight, np.diagonal(damped) / (np.trace(damped) / 24 / 1.1), rtol=1e-6)
    order = np.argsort(-weight)
    upper = np.linalg.cholesky(np.linalg.inv(damped[order][:, order])).T
    want = np.zeros((24, 24))
    for first in (0, 8):
        now = slice(first, first + 8)
        want[now, first + 8 :] = -np.linalg.solve(upper[now, now], upper[now, first + 8 :])
    np.testing.assert_allclose(feedback[order][:, order], want, atol=1e-9)


def test_without_anything_to_feed_back_the_bytes_are_those_without_feedback() -> None:
    (k, _), (plain, _) = sides("tile:group=16,feedback=true", 32), sides("tile:group=16", 32)
    tile = lognormal(3, 16, 32)[:, None].swapaxes(0, 1)[None]  # [1, 1, 3, 16, 32]
    weight = np.exp(gaussian(32))  # an order, and no correlation
    got = encode_k(k, tile, of_heads(np.diag(weight)))
    for name, leaf in encode_k(plain, tile, {}).items():
        np.testing.assert_array_equal(got[name], leaf, err_msg=name)


def test_feedback_moves_the_error_of_keys_to_where_queries_do_not_see_it() -> None:
    """Each KV head by its own queries; the squared length of the error grows."""
    q, k = queries(64), np.stack([lognormal(4, 128, 64, seed=head) for head in (0, 1)])[None]
    moment = q.T @ q / len(q)
    turned = moment[::-1, ::-1]  # of the other head
    (fed, _), (plain, _) = sides("tile:feedback=true", 64), sides("tile:", 64)
    constants = of_heads(moment, turned)
    errors = [np.asarray(decode(one, encode_k(one, k, given))) - k for one, given in ((fed, constants), (plain, {}))]
    for head, seen in enumerate((moment, turned)):
        of_scores, of_length = (
            [np.einsum("tnd,de,tne->", e[0, head], m, e[0, head]) for e in errors] for m in (seen, np.eye(64))
        )
        assert 0.1 * of_scores[1] < of_scores[0] < 0.6 * of_scores[1]
        assert of_length[1] < of_length[0] < 2 * of_length[1]
    other = np.asarray(decode(fed, encode_k(fed, k, of_heads(turned, moment)))) - k
    assert np.einsum("tnd,de,tne->", other[0, 0], moment, other[0, 0]) > 0.8 * np.einsum(
        "tnd,de,tne->", errors[1][0, 0], moment, errors[1][0, 0]
    )


@pytest.mark.parametrize("scale", [1e-39, 1e39])
def test_constants_do_not_depend_on_how_long_queries_are(scale: float) -> None:
    moment = queries(24).T @ queries(24)
    for one, other in zip(feedback_constants(moment), feedback_constants(scale * moment), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)


def test_channels_that_weigh_the_same_to_float32_are_rounded_in_the_order_that_the_constants_have() -> None:
    """A channel takes up an error only where its own rounding is still to come."""
    near = 0.95 ** np.abs(np.subtract.outer(np.arange(64), np.arange(64))) + np.diag(1e-9 * gaussian(64))
    weight, feedback = feedback_constants(near)
    order = np.asarray(jnp.argsort(-jnp.asarray(weight)))
    later = feedback[order][:, order]
    assert np.abs(later).max() > 0.1
    for first in range(0, 64, 8):
        assert not later[first : first + 8, : first + 8].any()


def test_constants_come_from_the_queries_of_each_kv_head() -> None:
    scheme = kvq.scheme("tile:feedback=true")
    q = np.stack([[queries(16, 40) * (head + 1) for head in range(4)]] * 2).astype(np.float32)
    found = scheme.calibrate({"q": jnp.asarray(q), "k": jnp.zeros((2, 2, 40, 16))})
    for head in range(2):
        x = q[:, 2 * head : 2 * head + 2].reshape(-1, 16).astype(np.float64)
        weight, feedback = feedback_constants(x.T @ x / len(x))
        np.testing.assert_allclose(found["k_weight"][head], weight, rtol=1e-5)
        np.testing.assert_allclose(found["k_feedback"][head], feedback, atol=1e-5)
    with pytest.raises(ValueError, match="takes no constants"):
        kvq.scheme("tile:").calibrate({"q": jnp.asarray(q), "k": jnp.zeros((2, 2, 40, 16))})
    with pytest.raises(ValueError, match="constants"):
        kvq.init_cache("tile:feedback=true", batch=1, kv_heads=2, head_dim=16, capacity=128)


@pytest.mark.parametrize("field", ["bits=8", "grid=e8", "refit=max", "v_mean=row", "scales=bf16", "normalize=full"])
def test_what_is_not_allowed_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=field.split("=")[0] + ".*allowed"):
        kvq.scheme(f"tile:{field}")
