"""The error anatomy on a tiny checkpoint, its statistics against known answers, and what its oracles leave alone."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from running import run

import kvq_jax as kvq
import models
from experiments import ablation, error_anatomy, error_anatomy_report
from experiments.harness import oracles, replay
from experiments.harness.progress import Progress
from kvq_jax.layers import Run
from kvq_jax.measures import magnitude_direction
from kvq_jax.quantizers.base import Leaves, Quantizer

INNER = kvq.scheme("kivi:bits=2,sink=16,recent=0,group=32")
TOKENS, BLOCK = 384, 128  # one shape, so that the tests share compiled programs with the binary
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(2, 1, 3, 32, 32)) * np.exp(RNG.normal(size=(2, 1, 3, 32, 1))), jnp.float32)


@functools.partial(jax.jit, static_argnames="quantizer")
def stored(quantizer: Quantizer, x: jax.Array, constants: Leaves) -> jax.Array:
    return quantizer.decode(quantizer.encode(x, constants), constants)


PLAIN = stored(INNER.resolve(32)[0].quantizer, X, {})


def remade(by: str, low: float, high: float, x: jax.Array = X) -> jax.Array:
    """What the oracle over K stores of x."""
    oracle = oracles.Restored.of(INNER, by=by).resolve(32)[0].quantizer
    return stored(oracle, x, {"low": jnp.float32(low), "high": jnp.float32(high)})


@pytest.mark.parametrize("by", ["token", "element"])
def test_what_is_restored_and_its_complement_part_the_tokens(by: str) -> None:
    x_hat = remade(by, *oracles.NOTHING)
    np.testing.assert_allclose(x_hat, PLAIN, rtol=1e-5, atol=1e-6)  # as another program fuses it
    error = jnp.square(X - x_hat)
    error = error.sum(-1) if by == "token" else error
    threshold = float(np.quantile(error, 0.9))
    worst, rest = remade(by, threshold, oracles.EVERYTHING[1]), remade(by, 0.0, threshold)
    chosen = np.asarray(error >= threshold)
    assert chosen.mean() == pytest.approx(0.1, abs=0.01)
    chosen = np.broadcast_to(chosen[..., None] if by == "token" else chosen, X.shape)
    np.testing.assert_array_equal(worst, np.where(chosen, X, x_hat))
    np.testing.assert_array_equal(rest, np.where(chosen, x_hat, X))
    np.testing.assert_array_equal(remade(by, *oracles.EVERYTHING), X)


def test_restoring_norms_keeps_directions() -> None:
    restored, x_hat = remade("magnitude", *oracles.EVERYTHING), PLAIN
    norm, restored_norm, hat_norm = (jnp.linalg.norm(x, axis=-1) for x in (X, restored, x_hat))
    np.testing.assert_allclose(restored_norm / norm, 1, rtol=1e-5)
    cosine = jnp.sum(restored * x_hat, -1) / restored_norm / hat_norm
    np.testing.assert_allclose(cosine, 1, rtol=1e-5)
    assert float(jnp.abs(hat_norm / norm - 1).max()) > 0.05
    zero = X.at[0, 0, 0, 0].set(0)  # has no direction to keep
    assert not remade("magnitude", *oracles.EVERYTHING, x=zero)[0, 0, 0, 0].any()


def test_scale_noise_has_the_energy_of_the_rounding_and_no_direction() -> None:
    x_hat, found = PLAIN, []
    for seed in (0, 1):
        noise = oracles.ScaleNoise.of(INNER, seed=seed).resolve(32)[0].quantizer
        found.append(stored(noise, X, {}))
        energy, wanted = (jnp.square(X - y).sum(-1) for y in (found[-1], x_hat))
        np.testing.assert_allclose(energy, wanted, rtol=1e-4)
        split = magnitude_direction(X, found[-1])
        assert float(split.direction.sum()) < 1e-4 * float(split.magnitude.sum())
        alone = stored(noise, X[:1, :, 1:2], {})
        np.testing.assert_array_equal(alone, found[-1][:1, :, 1:2])  # in any company
    signs = [np.sign(jnp.linalg.norm(y, axis=-1) - jnp.linalg.norm(X, axis=-1)) for y in found]
    tossed = np.asarray(jnp.square(X - x_hat).sum(-1) < jnp.square(X).sum(-1))
    assert 0.3 < (signs[0] == signs[1])[tossed].mean() < 0.7
    assert abs(signs[0][tossed].mean()) < 0.3  # of some 80 coins
    assert (np.asarray(signs[0])[~tossed] == 1).all()  # a scale stays positive
    assert 0.2 < tossed.mean() < 1


def test_an_oracle_is_no_method_of_the_library() -> None:
    oracle = oracles.Restored.of(kvq.scheme("kvarn:bits=2,group=64,sink=4"), by="token")
    assert (oracle.sink, oracle.group, oracle.packed, INNER.packed) == (4, 64, False, True)
    assert oracle.resolve(64)[0].rotate
    assert not {"restored", "scale_noise"} & set(kvq.list_schemes())
    with pytest.raises(ValueError, match="by='vector' is out of range; allowed: token, element, magnitude"):
        oracles.Restored.of(INNER, by="vector")
    with pytest.raises(ValueError, match="needs constants"):
        kvq.init_cache(oracle, batch=1, kv_heads=1, head_dim=64, capacity=128)


def test_the_norms_part_of_the_worst_errors() -> None:
    magnitude, direction = np.array([8.0, 0, 1, 0, 0.5]), np.array([2.0, 5, 0, 3, 0.5])
    assert error_anatomy.tail(magnitude + direction, 0.4).tolist() == [0, 1]
    assert error_anatomy.magnitude_share(magnitude, direction, 0.4) == pytest.approx(8 / 15)
    assert error_anatomy.magnitude_share(magnitude, direction, 0.001) == pytest.approx(0.8)  # at least one
    assert error_anatomy.magnitude_share(magnitude, direction, 1) == pytest.approx(9.5 / 20)
    assert np.isnan(error_anatomy.magnitude_share(0 * magnitude, 0 * direction, 1))


def test_the_anatomy_of_errors_of_norm_alone() -> None:
    x = jnp.asarray(RNG.normal(size=(1, 2, 200, 16)), jnp.float32)
    found = error_anatomy.anatomy([(x, 1.5 * x), (x, 0.5 * x)], seed=0)
    assert found["norm_ratio_mean"] == pytest.approx(1, rel=1e-4)
    assert found["norm_ratio_mean_by_layer"] == pytest.approx([1.5, 0.5], rel=1e-4)
    assert found["magnitude_share_0p1"] == pytest.approx(1, rel=1e-4)
    assert found["relative_mse"] == pytest.approx(0.25, rel=1e-4)
    assert found["same_tokens_10"] == 1
    counts = np.array(found["norm_counts"])
    assert counts.sum() > 0.95 * found["vectors"]
    assert np.diag(counts).sum() < 0.1 * counts.sum()


def unit(kl: float, **axes: str) -> dict[str, Any]:
    row = {"label": str(axes), "method": str(axes), "constants_digest": None, "skip_positions": 0}
    return row | axes | {"bucket_start": [0, 64, 128], "kl_by_bucket": [kl, 2 * kl, 3 * kl]}


def test_what_restoring_norms_is_worth_in_tokens() -> None:
    both = {"sides": "K and V", "part": "worst"}
    known = {"0": 1.0, "1": 0.9, "5": 0.7, "10": 0.6}
    rows = [
        unit(kl, restored="token" if share != "0" else "nothing", share=share, **both) for share, kl in known.items()
    ]
    for left, share in ((0.95, 0.005), (0.8, 0.03), (0.3, 0.55)):
        all_rows = [*rows, unit(left, restored="magnitude", share="100", **both)]
        measured = ablation.units(
            [row | {"regime": regime} for row in all_rows for regime in ablation.REGIMES], error_anatomy_report.AXES
        )
        kl = error_anatomy_report.left(measured, "static", seed=0)
        found = error_anatomy_report.worth(measured, kl, "K and V")
        assert found is not None
        np.testing.assert_allclose([found.value, found.low, found.high], share, rtol=1e-6)
        assert error_anatomy_report.worth(measured, kl, "K") is None
        assert error_anatomy_report.of_tail(measured, kl) is None


def test_what_the_norms_of_the_tail_do_of_what_the_tail_does() -> None:
    both = {"sides": "K and V", "part": "worst"}
    known = [("nothing", "0", 1.0), ("token", "5", 0.7), ("token", "10", 0.6), ("magnitude", "5", 0.97)]
    rows = [unit(kl, restored=by, share=share, **both) for by, share, kl in known]
    measured = ablation.units(
        [row | {"regime": regime} for row in rows for regime in ablation.REGIMES], error_anatomy_report.AXES
    )
    found = error_anatomy_report.of_tail(measured, error_anatomy_report.left(measured, "static", seed=0))
    assert found is not None
    assert found[0] == "5"  # the worst 10 % were not measured of both
    np.testing.assert_allclose([found[1].value, found[1].low, found[1].high], 0.1)


def test_there_is_no_part_of_what_restoring_the_tail_does_where_it_may_do_nothing() -> None:
    both = {"sides": "K and V", "part": "worst", "share": "10"}
    kl = np.array([[1.0] * 5, [0.9, 0.9, 0.9, 1.1, 0.9], [0.95] * 5])  # of the text, then of four draws
    measured = [unit(1.0, restored=by, **both) for by in ("nothing", "token", "magnitude")]
    units = ablation.units(
        [row | {"regime": regime} for row in measured for regime in ablation.REGIMES], error_anatomy_report.AXES
    )
    assert error_anatomy_report.of_tail(units, kl) is None
    found = error_anatomy_report.of_tail(units, np.minimum(kl, 0.95))
    assert found is not None
    assert found[1].low == pytest.approx(0.5)


@pytest.fixture(scope="module")
def loaded(model: Path) -> models.Model:
    return models.load(str(model), context=TOKENS, scan_layers=True)


def tokens() -> np.ndarray:
    return RNG.integers(0, 250, (1, TOKENS)).astype(np.int32)


def decode(
    model: models.Model, text: jax.Array, scheme: kvq.Scheme, constants: kvq.Constants | None = None
) -> kvq.Trace:
    """In the program that the binary runs, which reports to a bar."""
    with Progress("test") as progress:
        how: dict[str, Any] = {"block": BLOCK, "constants": constants, "progress": progress}
        return kvq.pseudo_decode(model.forward, text, scheme=scheme, **how)


def everything(pair: tuple[float, float]) -> Mapping[str, np.ndarray]:
    return {
        f"{side}_{name}": np.full(2, x, np.float32)
        for side in "kv"
        for name, x in zip(("low", "high"), pair, strict=True)
    }


def test_restoring_everything_is_the_reference_and_nothing_the_method(loaded: models.Model) -> None:
    text, oracle = jnp.asarray(tokens()), oracles.Restored.of(INNER, by="token")
    plain = decode(loaded, text, INNER)
    assert float(plain.kl.max()) > 1e-3
    for pair, kl in ((oracles.EVERYTHING, 0 * plain.kl), (oracles.NOTHING, plain.kl)):
        constants = oracles.constants(oracle, everything(pair), None, loaded)
        trace = decode(loaded, text, oracle, constants)
        np.testing.assert_allclose(trace.kl, kl, atol=2e-5)


@pytest.mark.parametrize("before", [(None,) * 5, (5,), (2, None, 2)])
@pytest.mark.parametrize("after", [(None,) * 5, (5,), (None, 3, None)])
def test_layers_are_regrouped_in_order(before: tuple[int | None, ...], after: tuple[int | None, ...]) -> None:
    layers = RNG.normal(size=(5, 2, 1, 1, 4, 8)).astype(np.float32)  # [layers, K or V, batch, kv_heads, tokens, D]

    def grouped(sizes: tuple[int | None, ...]) -> list[replay.KV]:
        ends = np.cumsum([size or 1 for size in sizes])
        groups = [layers[end - (size or 1) : end] for size, end in zip(sizes, ends, strict=True)]
        found = []
        for size, one in zip(sizes, groups, strict=True):
            own = jnp.asarray(one)
            found.append((own[:, 0], own[:, 1]) if size else (own[0, 0], own[0, 1]))
        return found

    runs = [Run(kv_heads=1, head_dim=8, stacked=size) for size in after]
    jax.tree.map(np.testing.assert_array_equal, replay.regrouped(grouped(before), runs), grouped(after))


def test_a_replay_holds_what_pseudo_decode_measures(loaded: models.Model) -> None:
    text = tokens()
    trace = decode(loaded, jnp.asarray(text), INNER)
    exact, of = (
        replay.plan(loaded.forward, scheme, None, 1, BLOCK, "float32") for scheme in (kvq.scheme("fp32"), INNER)
    )
    how = {"block": BLOCK, "implementation": "xla"}
    kv, _ = replay.replay(loaded.forward, text, exact, **how)
    _, accumulated = replay.replay(loaded.forward, text, of, **how)
    for caches, key, value in zip(
        (replay.filled(of, kv), accumulated), trace.key_relative_mse, trace.value_relative_mse, strict=True
    ):
        layers = replay.quantized(kv, caches)
        assert [one["k"][0].shape[2] for one in layers] == trace.quantized_tokens.tolist()
        for side, wanted in (("k", key), ("v", value)):
            pairs = [one[side] for one in layers]
            found = [float(jnp.sum(jnp.square(x - y)) / jnp.sum(jnp.square(x))) for x, y in pairs]
            np.testing.assert_allclose(found, wanted, rtol=1e-4)


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def test_the_binary_says_what_norms_are_worth_and_goes_on(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "words.txt", tmp_path / "out"
    text.write_text("".join(f"{i} sheep jumped over fence {i * i}. " for i in range(40)))
    argv = [f"--model={model}", f"--text={text}", f"--out={out}", f"--num_tokens={TOKENS}", "--sink=16", "--recent=0"]
    argv += ["--group=32", "--skip_positions=128", "--bucket=64", "--quick"]
    assert run(error_anatomy, [*argv, "--method=kivi:bits=2", "--method=kivi:bits=4"]) == 2
    assert "pass one" in capsys.readouterr().err
    assert run(error_anatomy, [*argv, "--method=fp32"]) == 2
    assert "rounds nothing" in capsys.readouterr().err
    assert not out.exists()
    assert run(error_anatomy, argv) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("• Asked:", "• Found:", "Of K's static error", "as the worst", "• How sure:", "KL left"):
        assert part in shown
    rows = read(out)
    anatomy, restores = [row for row in rows if "side" in row], [row for row in rows if "restored" in row]
    assert [(row["side"], row["regime"]) for row in anatomy] == [(s, r) for r in ablation.REGIMES for s in "kv"]
    assert {row["packed"] for row in restores if row["restored"] != "nothing"} == {False}
    static = {row["label"]: row for row in restores if row["regime"] == "static"}
    plain, worst, rest, norms = (
        static[name]["key_relative_mse"]
        for name in ("nothing", "worst 5 % of tokens", "all but worst 5 % of tokens", "all tokens' norms")
    )
    assert plain == pytest.approx(anatomy[0]["relative_mse"], rel=1e-3)  # which is a mean of layers, too
    assert worst + rest == pytest.approx(plain, rel=1e-3)
    assert 0 < norms < plain
    for name in ("kl_by_restore.png", "norms.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert run(error_anatomy, [*argv, "--resume"]) == 0
    assert capsys.readouterr().out.count("already in") == len(static)
    assert read(out) == rows
