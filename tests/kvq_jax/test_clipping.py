"""The clipping constant: the solver against searches in NumPy, what it finds for normal data, and the constants that
UltraQuant makes of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
import models
from kvq_jax.calibration import clipping

ROUNDINGS = ("nearest", "even", "floor", "ceil", "none")
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
EXPONENT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "nearest": lambda t: np.floor(t + 0.5),
    "even": lambda t: np.floor(t + 1 - np.log2(1.75)),
    "floor": np.floor,
    "ceil": np.ceil,
    "none": lambda t: t,
}


def approximate(z: np.ndarray, c: float, rounding: str, block: int = 32) -> np.ndarray:
    """ẑ in float64."""
    blocks = z.astype(np.float64).reshape(*z.shape[:-1], -1, block)
    most = np.abs(blocks).max(-1, keepdims=True)
    scale = np.exp2(EXPONENT[rounding](np.log2(c * np.where(most > 0, most, 1)))) * (most > 0)
    magnitude = np.abs(blocks) / np.where(scale > 0, scale, 1)
    return (np.sign(blocks) * GRID[np.searchsorted((GRID[1:] + GRID[:-1]) / 2, magnitude)] * scale).reshape(z.shape)


def relative(z: np.ndarray, c: float, rounding: str = "nearest", block: int = 32) -> float:
    return float(np.sum((z - approximate(z, c, rounding, block)) ** 2) / np.sum(z.astype(np.float64) ** 2))


def minimum(error: Callable[[float], float]) -> float:
    """The least error found by 97 points over three octaves and a golden section around the best."""
    grid = 0.05 * np.exp2(np.arange(97) / 32)
    errors = [error(c) for c in grid]
    best = min(errors)
    low, high = np.log2(grid[np.argmin(errors)]) + np.array([-1, 1]) / 32
    ratio = (np.sqrt(5) - 1) / 2
    for _ in range(12):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        of_a, of_b = error(2**a), error(2**b)
        best = min(best, of_a, of_b)
        low, high = (low, b) if of_a < of_b else (a, high)
    return best


@pytest.fixture(scope="module")
def captured() -> dict[str, np.ndarray]:
    """Rotated K, V and Q `[layers, sequences, heads, tokens, 32]` of a checkpoint."""
    model = models.load(Path(__file__).parents[1] / "data" / "models" / "qwen3_tiny", context=96)
    tokens = np.random.default_rng(3).integers(0, 200, (2, 96))
    found: list[dict[str, np.ndarray]] = []

    class Keeping(kvq.CausalAttention):
        def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
            rotated = {"q": kvq.hadamard(q), "k": kvq.hadamard(k), "v": v}
            found.append({name: np.asarray(x, np.float32) for name, x in rotated.items()})
            return super().__call__(q, k, v, **options)

    model.forward(jnp.asarray(tokens), jnp.arange(96)[None].repeat(2, 0), Keeping())
    return {name: np.stack([one[name] for one in found]) for name in "qkv"}


def data(name: str) -> np.ndarray:
    rng = np.random.default_rng(7)
    if name == "normal":
        return rng.normal(size=(2, 400, 64)).astype(np.float32)
    return rng.standard_t({"t3": 3, "t2": 2}[name], size=(2, 400, 64)).astype(np.float32)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", ["normal", "t3"])
def test_the_error_is_within_a_percent_of_what_a_search_finds(name: str, rounding: str) -> None:
    z = data(name)
    found = kvq.solve_clipping_constant(z, rounding=rounding)
    for head, c, error, begun in zip(z, found.c, found.error, found.start_error, strict=True):
        assert relative(head, c, rounding) == pytest.approx(error, rel=1e-3)
        assert relative(head, 0.156, rounding) == pytest.approx(begun, rel=1e-3)
        assert error <= 1.01 * minimum(lambda c, head=head: relative(head, c, rounding))
    np.testing.assert_allclose(found.excess, found.start_error / found.error - 1, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("side", ["k", "v"])
def test_on_captures_too_for_all_layers_and_heads_at_once(
    captured: dict[str, np.ndarray], side: str, rounding: str
) -> None:
    z = captured[side]
    found = kvq.solve_clipping_constant(z, rounding=rounding, pool=(1,))
    assert found.c.shape == (z.shape[0], z.shape[2])
    for layer, head in np.ndindex(found.c.shape):
        own = z[layer, :, head]
        assert relative(own, found.c[layer, head], rounding) == pytest.approx(found.error[layer, head], rel=1e-3)
        assert found.error[layer, head] <= 1.01 * minimum(lambda c, own=own: relative(own, c, rounding))


def score_error(k: np.ndarray, q: np.ndarray, c: float) -> float:
    """k `[sequences, tokens, D]`, q `[sequences, group, tokens, D]`."""
    true = np.einsum("sgtd,sud->sgtu", q, k, dtype=np.float64)
    off = np.einsum("sgtd,sud->sgtu", q, k - approximate(k, c, "nearest"), dtype=np.float64)
    return float(np.sum(off**2) / np.sum(true**2))


def attention_error(k: np.ndarray, q: np.ndarray, c: float) -> float:
    total, count = 0.0, 0
    for one, queries in zip(k, q, strict=True):
        scores = [queries @ x.T / np.sqrt(k.shape[-1]) for x in (one, approximate(one, c, "nearest"))]
        for t in range(len(one)):
            p, approximated = (
                np.exp(s := x[:, t, : t + 1] - x[:, t, : t + 1].max(-1, keepdims=True))
                / np.exp(s).sum(-1, keepdims=True)
                for x in scores
            )
            total, count = total + np.sum(p * np.log(p / approximated)), count + len(p)
    return float(total / count)


@pytest.mark.parametrize(("objective", "oracle"), [("scores", score_error), ("attention", attention_error)])
def test_scores_and_attention_by_their_own_searches(
    captured: dict[str, np.ndarray], objective: str, oracle: Callable[..., float]
) -> None:
    k, q = (4 * captured[name].astype(np.float64) for name in "kq")  # sharper attention than a tiny model's own
    found = kvq.solve_clipping_constant(k, objective=objective, queries=q, pool=(1,))
    group = q.shape[2] // k.shape[2]
    layer, head = 1, k.shape[2] - 1
    own = k[layer, :, head], q[layer, :, head * group : (head + 1) * group]
    assert group > 1
    assert oracle(*own, found.c[layer, head]) == pytest.approx(found.error[layer, head], rel=2e-3)
    assert oracle(*own, 0.156) == pytest.approx(found.start_error[layer, head], rel=2e-3)
    assert found.error[layer, head] <= 1.01 * minimum(lambda c: oracle(*own, c))
    assert not np.allclose(found.c, kvq.solve_clipping_constant(k, pool=(1,)).c, rtol=1e-3)


def test_the_constants_of_normal_data() -> None:
    """A power of two knows the magnitude of its data modulo an octave, so the errors are means over 16 of them."""
    z = np.random.default_rng(0).normal(size=(1, 3000, 64)) * np.exp2(np.arange(16) / 16)[:, None, None]
    grid = clipping.grid(0.156)

    def curve(rounding: str) -> np.ndarray:
        errors, norm = clipping.clipping_curve(z, grid, rounding=rounding)
        return (errors / norm[:, None]).mean(0)

    nearest, middle = curve("nearest"), len(grid) // 2
    assert clipping.lowest(grid, nearest) == pytest.approx(0.195, abs=0.002)
    assert nearest.min() == pytest.approx(0.0125, abs=1e-4)
    assert nearest[middle] == pytest.approx(0.0168, abs=1e-4)  # 34 % more
    for rounding, c in (("none", 0.162), ("floor", 0.275), ("ceil", 0.1375), ("even", 0.241)):
        assert clipping.lowest(grid, curve(rounding)) == pytest.approx(c, rel=0.01), rounding
    assert curve("none").min() == pytest.approx(0.0101, abs=1e-4)

    own = kvq.solve_clipping_constant(
        z[0]
    )  # at a standard deviation of just 1 the published c is worse than on average
    assert (own.c, own.excess) == (pytest.approx(0.195, abs=0.002), pytest.approx(0.43, abs=0.01))
    assert abs(np.log2(own.gradient_c / own.c)) < 0.1


def test_the_published_constant_is_that_of_a_continuous_scale() -> None:
    found = kvq.solve_clipping_constant(data("normal"), rounding="none", pool=(0,))
    assert found.c.shape == ()
    assert found.c == pytest.approx(0.162, abs=0.003)
    assert found.excess < 0.05


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_powers_of_two_change_nothing(rounding: str) -> None:
    z = data("t3")
    found, scaled = (kvq.solve_clipping_constant(x, rounding=rounding) for x in (z, np.float32(2**-7) * z))
    for one, other in zip(found, scaled, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_pooled_constant_minimizes_the_sum_of_errors() -> None:
    z = data("t3") * np.array([1, 3], np.float32)[:, None, None]
    both, merged = kvq.solve_clipping_constant(z, pool=(0,)), kvq.solve_clipping_constant(z.reshape(-1, 64))
    for one, other in zip(both, merged, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    swapped = kvq.solve_clipping_constant(np.stack([z, z[::-1]]), pool=(0,))
    np.testing.assert_allclose(swapped.c, [both.c, both.c], rtol=0.01)


def test_degenerate_data_keep_the_start_and_jagged_errors_find_the_step() -> None:
    zero = kvq.solve_clipping_constant(np.zeros((1, 4, 32)))
    assert (zero.c, zero.error, zero.excess) == (pytest.approx(0.156, rel=1e-5), 0, 0)
    alike = kvq.solve_clipping_constant(np.ones((1, 4, 32)), start=0.156)  # one step: 0.156 stores 0.75, 0.18 stores 1
    assert alike.start_error == pytest.approx(1 / 16)
    assert (alike.error, alike.excess) == (0, np.inf)


def test_the_start_is_never_left_for_worse() -> None:
    for start in (0.01, 0.05, 0.5, 3.0):
        found = kvq.solve_clipping_constant(data("t2"), start=start)
        assert (found.error <= found.start_error).all()
    with pytest.raises(ValueError, match="start=0"):
        kvq.solve_clipping_constant(data("normal"), start=0)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"rounding": "up"}, "rounding='up' is unknown; allowed: nearest, even, floor, ceil, none"),
        ({"objective": "mae"}, "objective='mae' is unknown; allowed: mse, scores, attention"),
        ({"objective": "scores"}, "needs queries"),
        ({"queries": np.ones((2, 8, 64))}, "takes no queries"),
        ({"objective": "scores", "queries": np.ones((3, 8, 64))}, "only the heads may differ"),
        ({"objective": "scores", "queries": np.ones((2, 9, 64))}, "only the heads may differ"),
        ({"objective": "scores", "queries": np.full((2, 8, 64), np.nan)}, "queries is not finite"),
        ({"start": float("nan")}, "start=nan"),
        ({"pool": (1,)}, "pool=.1,. does not name leading axes"),
        ({"block": 128}, "head_dim=64 is not a multiple of block=128"),
        ({"z": np.full((2, 8, 64), np.inf)}, "z is not finite"),
        ({"z": np.full((2, 8, 64), 1e30)}, "squares are not finite"),
        ({"z": np.ones((2, 0, 64))}, "something in it"),
        ({"z": np.ones(64)}, "something in it"),
    ],
)
def test_bad_input(how: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kvq.solve_clipping_constant(**{"z": np.ones((2, 8, 64)), **how})


def samples(layers: int = 2) -> list[dict[str, jax.Array]]:
    rng = np.random.default_rng(5)
    shapes = {"k": (2, 2, 600, 32), "v": (2, 2, 600, 32), "q": (2, 4, 600, 32)}
    found = [{name: 1.3 * rng.standard_t(4, size=shape) for name, shape in shapes.items()} for _ in range(layers)]
    found[-1]["k"][:, 1] = np.sign(found[-1]["k"][:, 1])  # a head whose constant is its own
    return [{name: jnp.asarray(x, jnp.float32) for name, x in one.items()} for one in found]


@pytest.mark.parametrize("rounding", ["nearest", "floor"])
def test_ultraquant_shares_constants_as_chosen(rounding: str) -> None:
    scheme, of_layers = kvq.scheme("ultraquant", rounding=rounding), samples()

    def solved(granularity: str) -> dict[str, np.ndarray]:
        found = [scheme.calibrate(one, granularity=granularity) for one in of_layers]
        stacked = {name: jnp.stack([one[name] for one in found]) for name in found[0]}
        arrays = scheme.compare_layers(stacked, granularity=granularity)
        return {name: np.asarray(x) for name, x in arrays.items()}

    for side in "kv":
        z = np.stack([one[side] for one in of_layers])  # [layers, sequences, heads, tokens, D]
        for granularity, pool in (("head", (1,)), ("layer", (1, 2)), ("global", (0, 1, 2))):
            arrays = solved(granularity)
            assert sorted(arrays) == ["k_c", "v_c"]
            c = arrays[f"{side}_c"]
            assert c.shape == (2, 2)
            shared = {"head": c, "layer": c[:, :1], "global": c[:1, :1]}[granularity]
            np.testing.assert_array_equal(c, np.broadcast_to(shared, c.shape))
            want = kvq.solve_clipping_constant(z, rounding=rounding, pool=pool)
            parts = {"head": np.moveaxis(z, 1, 2).reshape(4, -1, 32), "layer": z, "global": z[None]}[granularity]
            errors = [relative(x, one, rounding) for x, one in zip(parts, shared.ravel(), strict=True)]
            assert (errors <= 1.01 * np.ravel(want.error)).all()


def test_what_ultraquant_finds_besides() -> None:
    scheme, one = kvq.scheme("ultraquant:c=0.2"), samples(1)[0]
    found = scheme.calibrate(one)
    np.testing.assert_array_equal(found["lengths"], [512, 600])
    assert found["grid"][32] == np.float32(0.2)
    for side in "kv":
        for i, n in enumerate((512, 600)):
            z = np.asarray(one[side])[:, 1, :n]
            np.testing.assert_allclose(found[f"{side}_norm"][i, 1], np.sum(z**2), rtol=1e-4)
            curve = found[f"{side}_curve"][i, 1] / found[f"{side}_norm"][i, 1]
            np.testing.assert_allclose(curve[::16], [relative(z, c) for c in found["grid"][::16].tolist()], rtol=1e-3)


@pytest.mark.parametrize("objective", ["scores", "attention"])
def test_objectives_of_scores_move_k_alone(objective: str) -> None:
    scheme, one = kvq.scheme("ultraquant"), samples(1)[0]
    assert scheme.captured(**scheme.chosen({})) == ("k", "v")
    assert scheme.captured(**scheme.chosen({"objective": objective})) == ("k", "v", "q")
    mse, found = (
        scheme.calibrate(one, granularity="head"),
        scheme.calibrate(one, granularity="head", objective=objective),
    )
    np.testing.assert_array_equal(found["v_c"], mse["v_c"])
    want = kvq.solve_clipping_constant(one["k"], objective=objective, queries=one["q"], pool=(0,))
    np.testing.assert_allclose(found["k_c"], want.c, rtol=1e-6)
    np.testing.assert_allclose(found["k_curve"][-1, :, 32] / found["k_norm"][-1], want.start_error, rtol=1e-4)


def test_choices_that_are_not_there_are_errors() -> None:
    scheme = kvq.scheme("ultraquant")
    assert scheme.chosen({"granularity": "head"}) == {"granularity": "head", "objective": "mse"}
    with pytest.raises(ValueError, match="granularity='row' is unknown to calibration; allowed: layer, global, head"):
        scheme.chosen({"granularity": "row"})
    with pytest.raises(ValueError, match="ultra_tq: calibration has no granularity to choose"):
        kvq.scheme("ultra_tq").chosen({"granularity": "head"})
