"""UltraQuant's clipping constant: 0.156 or 0.195, for which rounding of the scale, and does MSE tell?

Design: c in {0.156 (published), 1/6 (the grid ends at the maximum), 0.195, 1.0 (no clipping constant)} for every rule
that rounds log2(c · max) to a power of two (nearest, even, floor, ceil), one c for all layers and heads; and, for every
rule, the constants that have the least MSE through it on the part of the text behind the one that is read, K's and V's:
for the whole model, for a layer, for a head. They are kept in the run's `constants/`. Others are more rows:
--constants=DIR, as `experiments.calibrate` saves them. All settings have the same sink, window, group and protected
layers. MSE is that of rounding what the unquantized model computed, of K
(rotated) and V (not). Reading `by_c.png`: the lowest point of a line is the best c for its rule; where the panels of
MSE and of KL put it elsewhere, MSE picks the wrong constant. In `kl_against_mse.png` points on one rising line say that
MSE ranks the settings as KL does. Example:

  python -m experiments.constant_ablation --out=out/constant        (again with --resume after an interruption)
"""

import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from absl import flags

import kvq_jax as kvq
import models
from experiments import ablation
from experiments import pseudo_decode as decode
from experiments.ablation import Setting, Unit
from experiments.harness import flags as common
from experiments.harness import inputs, quick
from experiments.harness.conclusion import conclude
from experiments.harness.progress import Progress
from experiments.harness.table import table
from kvq_jax.block_formats import ROUNDINGS
from kvq_jax.quantizers.ultraquant import UltraQuant

BINARY = "constant_ablation"
for module in (common, decode, ablation, quick):
    flags.adopt_module_key_flags(module)
PUBLISHED = {0.156: "0.156", 1 / 6: "1/6", 0.195: "0.195", 1.0: "1.0"}
AXES = ("c", "rounding", "granularity")


def design() -> list[str]:
    """The specs of all settings."""
    if quick.QUICK.value:
        pairs = [*((c, "nearest") for c in PUBLISHED), (0.195, "floor"), (0.156, "ceil")]
    else:
        pairs = [(c, rounding) for rounding in ROUNDINGS for c in PUBLISHED]
    return [f"ultraquant:c={c},rounding={rounding}" for c, rounding in pairs]


def axes(scheme: kvq.Scheme, kind: str = "global", solved: bool = False) -> dict[str, str]:
    """What the setting varies; kind: over what a c is one number."""
    if not isinstance(scheme, UltraQuant):
        raise ValueError(f"{scheme}: this ablation is of ultraquant:…; experiments.leaderboard compares others")
    c = f"solved, {kind}" if solved else PUBLISHED.get(scheme.c, f"{scheme.c:g}")
    return {"c": c, "rounding": scheme.rounding, "granularity": kind}


def granularity(constants: kvq.Constants) -> str:
    """Over what a c `[layers, kv_heads]` is one number."""
    arrays = [np.asarray(x) for x in constants.arrays.values()]
    if all((x == x[:1, :1]).all() for x in arrays):
        return "global"
    return "layer" if all((x == x[:, :1]).all() for x in arrays) else "head"


def solve(model: models.Model, folder: Path) -> dict[str, str | None]:
    """Constants through every rounding rule and of every granularity, those in `folder` that are not there yet; their
    folders and granularities."""
    rules, kinds = ("nearest",) if quick.QUICK.value else ROUNDINGS, UltraQuant.choices["granularity"]
    wanted = {folder / f"{rule}-{kind}": (rule, kind) for rule in rules for kind in kinds}
    tokens = ablation.tokens_behind(model)
    with tempfile.TemporaryDirectory() as captures:  # what is captured once serves all
        for path, (rule, kind) in wanted.items():
            with contextlib.suppress(ValueError):  # it is not there, or its save was interrupted
                kvq.load_constants(path, f"ultraquant:rounding={rule}", model_digest=model.digest)
                continue
            with Progress(f"solving c ({rule}, {kind})", unit="step") as progress:
                constants = kvq.calibrate(
                    f"ultraquant:rounding={rule}",
                    model.forward,
                    tokens,
                    model_digest=model.digest,
                    text_digest=inputs.digest(tokens),
                    choices={"granularity": kind},
                    progress=progress,
                    workdir=captures,
                )
            kvq.save_constants(path, constants)
    return {str(path): kind for path, (_, kind) in wanted.items()}


def solved(model: models.Model, folders: Mapping[str, str | None]) -> list[Setting]:
    """A setting for every folder of constants, at the windows of the flags; several may be of one scheme. What shares a
    constant is seen in them where it is not given."""
    found = []
    for path, kind in folders.items():
        try:
            one = kvq.load_constants(path, model_digest=model.digest)
            scheme = kvq.scheme(one.scheme, **common.window_flags())
            varied = axes(scheme, kind or granularity(one), solved=True)
        except ValueError as error:
            raise ValueError(f"--constants={path}: {error}") from None
        found.append(Setting(f"{one.scheme} with {path}", scheme, varied, one))
    return found


def shown(measured: list[Unit]) -> str:
    """The table, by accumulated KL."""
    ranked = sorted(measured, key=lambda unit: unit.rows["accumulated"]["kl_nats"])
    lines = [[*(unit.axes[name] for name in AXES), *ablation.cells(unit)] for unit in ranked]
    return table(["c\n", "rounding\n", "granularity\n", *ablation.HEADERS], lines)


def sentences(measured: list[Unit], seed: int) -> list[str]:
    """What was asked, what was found, how sure."""
    mean_kl = {regime: ablation.draws(measured, regime, seed) for regime in ablation.REGIMES}
    best = min(measured, key=lambda unit: unit.rows["accumulated"]["kl_nats"])
    least = min(measured, key=lambda unit: unit.mse("key"))

    def name(unit: Unit) -> str:
        return f"c = {unit.axes['c']} with {unit.axes['rounding']}"

    rho = {
        (side, regime): ablation.rank_correlation(measured, mean_kl[regime], side)
        for side in ("key", "value")
        for regime in ablation.REGIMES
    }
    said = [
        f"Asked: which clipping constant and which rounding of the scale lower the KL of {measured[0].any['model']} "
        "most, and does the MSE that constants are solved for rank them as KL does?"
    ]
    found = [f"the lowest accumulated KL has {name(best)}, the least MSE of K {name(least)}"]
    for rounding in ROUNDINGS:
        change = [{"c": c, "rounding": rounding} for c in ("0.156", "0.195")]
        if one := ablation.effect(measured, mean_kl["accumulated"], *change):
            found.append(f"0.195 in place of 0.156 changes it by ×{one[0]} ({rounding})")
    for before, after, what in (
        ({"c": "0.195", "rounding": "nearest"}, "global", "c solved for the model in place of 0.195 (nearest)"),
        ({"c": "solved, global"}, "layer", "c solved for a layer in place of the model"),
        ({"c": "solved, global"}, "head", "c solved for a head in place of the model"),
    ):
        if one := ablation.effect(
            measured, mean_kl["accumulated"], before, {"c": f"solved, {after}", "granularity": after}
        ):
            found.append(f"{what} by ×{one[0]}")
    k_static, k_accumulated, v_static, v_accumulated = rho.values()
    wrong, pairs = ablation.inversions(measured, mean_kl["accumulated"])
    found.append(
        f"Spearman's ρ of the MSE of K and KL is {k_static} static and {k_accumulated} accumulated (of V {v_static} "
        f"and {v_accumulated}), {wrong} of {pairs} pairs the other way round"
    )
    ratio = mean_kl["accumulated"] / mean_kl["accumulated"][measured.index(best)]
    close = [u for u, r in zip(measured, ratio, strict=True) if u is not best and np.quantile(r[1:], 0.025) <= 1]
    doubt = f"does not tell {'; '.join(map(name, close))} from the best" if close else "tells all others from the best"
    many, size = measured[0].kl["accumulated"].size, measured[0].any["bucket"]
    said.append(f"Found: {'; '.join(found)}.")
    said.append(
        f"How sure: intervals are of 95 %, from resampling the same {many} stretches of {size} positions for all "
        f"settings, which {doubt}; it is one text and one model."
    )
    return said


def body() -> None:
    """The binary, after its flags have been parsed."""
    methods = ablation.methods(design())
    settings = [Setting(label, scheme, axes(scheme)) for label, scheme in methods.items()]
    given = common.interruptible(lambda: decode.load_inputs(methods, lambda *_: {}))
    settings += solved(given.model, dict.fromkeys(common.CONSTANTS.value))
    also = {"calibration_tokens": ablation.CALIBRATION_TOKENS.value}
    with decode.open_results(BINARY, given, key=ablation.KEY, **also) as results:
        if not common.METHOD.present:
            settings += solved(
                given.model, common.interruptible(lambda: solve(given.model, results.path / "constants"))
            )
        print(f"{len(settings)} settings; sink, recent and group {common.window_flags()}.\n")
        ablation.measure_all(given, settings, results)
        measured = ablation.units(results.rows, AXES)
        pngs = ablation.draw(measured, "c", list(PUBLISHED.values()), lambda unit: unit.axes["rounding"])
        conclude(results, pngs, shown(measured), sentences(measured, common.SEED.value))


if __name__ == "__main__":
    ablation.main(body, protect=2)
