"""Do the largest errors of a cache's tokens lie in their norms, and is it these tokens that move the model's output?

Design: one method's cache (kivi:bits=2) of one text, in both regimes. The squared error of a token's key or value is
E_M + E_D, E_M = (‖k‖ − ‖k̂‖)² of its norm and E_D = 2‖k‖‖k̂‖(1 − cos) of its direction; accumulated errors are against
the reference's keys. Then oracles, which know what was rounded, restore the worst 1, 5 and 10 % of tokens, or of single
numbers, of a layer to full precision; or everything but those; or only the norms of all tokens (K; K and V) or of the
worst. Which are the worst is one threshold a layer and side, found in the static regime. Reading `kl_by_restore.png`:
a line that falls steeply says that few errors do the harm; where the level of "norms" meets the line of the worst
tokens is the part of the tokens that restoring all norms is worth. Near 1 %, the norm does not explain the tail; near
5 to 10 % it may, if the norms of the worst tokens alone do most of what restoring these tokens does. In `norms.png`
mass off the diagonal is norm error. Example:

  python -m experiments.error_anatomy --out=out/anatomy        (again with --resume after an interruption)
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import kvq_jax as kvq
from experiments import ablation
from experiments import error_anatomy_report as report
from experiments import pseudo_decode as decode
from experiments.ablation import REGIMES, Row, Setting
from experiments.harness import flags as common
from experiments.harness import oracles, quick, replay
from experiments.harness.conclusion import conclude
from experiments.harness.progress import Progress
from experiments.harness.run import Run
from experiments.harness.statistics import interval
from kvq_jax.measures import VectorErrors, magnitude_direction
from kvq_jax.schemes import full_precision

BINARY = "error_anatomy"
for module in (common, decode, ablation, quick):
    flags.adopt_module_key_flags(module)
TAILS = (1.0, 0.5, 0.1, 0.05, 0.01, 0.001)  # of the tokens, by squared error
SHARES = (0.01, 0.05, 0.1)  # that are restored
BINS, MOST = 48, 2.5  # of the heat map, in a layer's mean norm

Pairs = list[tuple[jax.Array, jax.Array]]  # x and x̂ of each layer, `[batch, kv_heads, tokens, head_dim]`


def column(share: float) -> str:
    """A share in a column's name: `5` for 5 %, `0p1` for 0.1 %."""
    return f"{100 * share:g}".replace(".", "p")


def tail(error: np.ndarray, share: float) -> np.ndarray:
    """The indices of the worst `share` of all errors `[n]`, at least one."""
    return np.argsort(-error, kind="stable")[: max(1, round(share * error.size))]


def magnitude_share(magnitude: np.ndarray, direction: np.ndarray, share: float) -> float:
    """ΣE_M / Σ(E_M + E_D) over the worst `share` of the vectors; NaN where there is no error."""
    worst = tail(magnitude + direction, share)
    total = (magnitude[worst] + direction[worst]).sum()
    return float(magnitude[worst].sum() / total) if total > 0 else float("nan")


def anatomy(pairs: Pairs, seed: int) -> Row:
    """What there is to say about the errors of one side in one regime: means over layers with 95 % intervals."""
    by_layer: dict[str, list[float]] = {}
    thresholds: dict[str, list[float]] = {}
    counts = np.zeros((BINS, BINS), int)
    for x, x_hat in pairs:
        split = magnitude_direction(x, x_hat)
        magnitude, direction = (np.asarray(part, np.float64).ravel() for part in split)
        error = magnitude + direction
        sums = VectorErrors.of(x, x_hat, jnp.ones(x.shape[:-1], bool))
        own = {
            "relative_mse": float(sums.relative_mse()),
            "norm_ratio_mean": float(sums.ratio_mean()),
            "norm_ratio_std": float(sums.ratio_std()),
        }
        for share in TAILS:
            own[f"magnitude_share_{column(share)}"] = magnitude_share(magnitude, direction, share)
        for share in SHARES:
            same = np.intersect1d(tail(error, share), tail(magnitude, share)).size / tail(error, share).size
            own[f"same_tokens_{column(share)}"] = same
            squared = np.asarray(jnp.square(x - x_hat), np.float32)
            for by, values in ("token", squared.sum(-1)), ("element", squared):
                threshold = float(np.float32(np.quantile(values, 1 - share)))
                thresholds.setdefault(f"{by}_threshold_{column(share)}", []).append(threshold)
        for name, value in own.items():
            by_layer.setdefault(name, []).append(value)
        norms = [np.linalg.norm(np.asarray(one, np.float64), axis=-1).ravel() for one in (x, x_hat)]
        unit = norms[0].mean() or 1.0
        counts += np.histogram2d(norms[0] / unit, norms[1] / unit, BINS, [[0, MOST]] * 2)[0].astype(int)
    row: Row = {"layers": len(pairs), "vectors": int(sum(x[..., 0].size for x, _ in pairs)), "packed": True}
    for name, values in by_layer.items():
        column_of = np.array(values)[:, None]
        low, high = interval(column_of, np.isfinite(column_of), seed=seed) if len(values) > 1 else (np.nan, np.nan)
        row |= {name: float(np.nanmean(values)), f"{name}_lo": low, f"{name}_hi": high, f"{name}_by_layer": values}
    return row | thresholds | {"norm_counts": counts.tolist(), "norm_most": MOST}


def measure_anatomy(given: decode.Inputs, scheme: kvq.Scheme, results: Run) -> list[Row]:
    """The anatomy of both regimes and sides, from the run's rows where it has them."""
    names = {(regime, side): f"anatomy of {side.upper()}: {scheme}" for regime in REGIMES for side in "kv"}
    key = {"block_size": ablation.BLOCK, "constants_digest": None}
    if not all(results.has(method=name, regime=regime, **key) for (regime, _), name in names.items()):
        batch, dtype, forward = len(given.tokens), common.DTYPE.value, given.model.forward
        own = given.constants.get(scheme.calibrated())
        exact, of = (
            replay.plan(forward, one, constants, batch, ablation.BLOCK, dtype)
            for one, constants in ((full_precision(dtype), None), (scheme, own))
        )

        def compute(title: str, what: replay.Plan) -> Any:
            with Progress(title, unit="token") as progress:
                how: dict[str, Any] = {"block": ablation.BLOCK, "implementation": given.implementation}
                return common.interruptible(
                    lambda: replay.replay(forward, given.tokens, what, progress=progress, **how)
                )

        kv, _ = compute("errors of the reference's keys and values", exact)
        kv = replay.regrouped(kv, of.runs)
        _, accumulated = compute("errors that accumulate", of)
        rows = []
        for regime, caches in ("static", replay.filled(of, kv)), ("accumulated", accumulated):
            layers = replay.quantized(kv, caches)
            for side in "kv":
                about = {"label": f"anatomy of {side.upper()}", "method": names[regime, side], "regime": regime}
                measured = anatomy([one[side] for one in layers], common.SEED.value)
                rows.append(decode.provenance(given, own) | key | about | {"side": side} | measured)
        results.append(rows)
    return [row for row in results.rows if row.get("side")]


def settings(given: decode.Inputs, scheme: kvq.Scheme, found: Sequence[Row]) -> list[Setting]:
    """The method itself and every restore, with the thresholds of the static regime."""
    static = {row["side"]: row for row in found if row["regime"] == "static"}
    inner, layers = given.constants.get(scheme.calibrated()), given.model.config.num_hidden_layers
    kept = scheme.protect

    def limits(side: str, by: str, share: float | None, part: str) -> tuple[Any, Any]:
        if share is None:
            return oracles.EVERYTHING
        known = static[side][f"{'element' if by == 'element' else 'token'}_threshold_{column(share)}"]
        threshold = np.pad(np.array(known, np.float32), kept)  # protected layers round nothing
        return (threshold, oracles.EVERYTHING[1]) if part == "worst" else (0.0, threshold)

    def restore(by: str, share: float | None, part: str = "worst", sides: str = "kv") -> Setting:
        oracle, own = oracles.Restored.of(scheme, by=by), {}
        for side in "kv":
            low_high = limits(side, by, share, part) if side in sides else oracles.NOTHING
            for name, value in zip(("low", "high"), low_high, strict=True):
                own[f"{side}_{name}"] = np.broadcast_to(np.float32(value), layers)
        axes = {"restored": by, "share": column(share or 1.0), "part": part, "sides": " and ".join(sides.upper())}
        return Setting(report.name(axes), oracle, axes, oracles.constants(oracle, own, inner, given.model))

    nothing = {"restored": "nothing", "share": "0", "part": "worst", "sides": "K and V"}
    plan = [Setting("nothing", scheme, nothing, inner)]
    plan += [restore("magnitude", None, sides=sides) for sides in ("k", "kv")]
    shares = SHARES[1:2] if quick.QUICK.value else SHARES
    plan += [restore(by, share) for by in oracles.BY for share in shares]
    plan += [restore(by, share, "rest") for by in ("token", "element") for share in shares]
    return plan + ([] if quick.QUICK.value else [restore("token", share, sides="k") for share in shares])


def body() -> None:
    """The binary, after its flags have been parsed."""
    methods = ablation.methods(["kivi:bits=2"])
    if len(methods) != 1:
        raise ValueError(f"--method is given {len(methods)} times; the anatomy is of one cache, so pass one")
    oracles.check_rounds(methods)
    given = common.interruptible(lambda: decode.load_inputs(methods))
    (scheme,) = methods.values()
    with decode.open_results(BINARY, given, key=ablation.KEY, of=str(scheme)) as results:
        print(f"{scheme}: whose errors they are, and what restoring some of them does.\n")
        found = measure_anatomy(given, scheme, results)
        plan = settings(given, scheme, found)
        given = dataclasses.replace(given, constants={})  # a row's key has its own
        ablation.measure_all(given, plan, results)
        measured = ablation.units([row for row in results.rows if row.get("restored")], report.AXES)
        pngs = report.draw(found, measured, common.SEED.value)
        said = report.sentences(found, measured, common.SEED.value)
        conclude(results, pngs, report.tables(found, measured, common.SEED.value), said)


if __name__ == "__main__":
    ablation.main(body)
