"""Scale or codebook: what makes a 4-bit cache good, and does the rotation do it alone?

Design: every combination of rotation (of K and V, or none), scale (one ℓ2 norm a token; the largest magnitude of blocks
of 128, 64, 32 or 16 channels, as far as a head has them) and 16 levels (uniform; Lloyd–Max for normal values in that
scale; FP4 E2M1; without rotation also Lloyd–Max refitted to the model's own K and V on the part of the text behind the
one that is read). Scales are float16; all settings have the same sink, window,
group and protected layers. MSE is that of rounding what
the unquantized model computed. Reading `by_scale.png`: a line that falls to the right says that finer scales help; the
distance between lines of one colour at a scale is what the levels do, solid against other dashes what the rotation
does. In `kl_against_mse.png` points on one rising line say that MSE is all that matters. Example:

  python -m experiments.scale_ablation --out=out/scale        (again with --resume after an interruption)
"""

import dataclasses
import tempfile
from collections.abc import Iterable

from absl import flags

import kvq_jax as kvq
import models
from experiments import ablation
from experiments import pseudo_decode as decode
from experiments.ablation import Unit
from experiments.harness import flags as common
from experiments.harness import inputs, quick
from experiments.harness.conclusion import conclude
from experiments.harness.progress import Progress
from experiments.harness.table import table
from kvq_jax.quantizers.blockgrid import BlockGrid
from kvq_jax.quantizers.blocks import BLOCKS
from models.registry import open_checkpoint

BINARY = "scale_ablation"
for module in (common, decode, ablation, quick):
    flags.adopt_module_key_flags(module)
AXES = ("rotation", "scale", "levels")
SCALES = ["ℓ2, token", "absmax, token", *(f"absmax/{block}" for block in sorted(BLOCKS, reverse=True))]
QUICK = ("l2,grid=uniform", "l2,grid=lloyd", *(f"absmax,block=32,grid={grid}" for grid in ("uniform", "lloyd", "fp4")))


def design(head_dim: int) -> list[str]:
    """The specs of all settings that a head of this size has."""
    if quick.QUICK.value:
        return [f"blockgrid:rotate=true,scale={one}" for one in QUICK] + [
            f"blockgrid:rotate=false,scale={one}" for one in QUICK[2:4]
        ]
    scales = ["l2", *(f"absmax,block={block}" for block in sorted(BLOCKS, reverse=True) if head_dim % block == 0)]
    rotated = [f"rotate=true,scale={scale},grid={grid}" for scale in scales for grid in ("uniform", "lloyd", "fp4")]
    plain = [one.replace("true", "false") for one in rotated]
    return [f"blockgrid:{one}" for one in [*rotated, *plain, *(f"rotate=false,scale={s},grid=refit" for s in scales)]]


def axes(scheme: kvq.Scheme) -> dict[str, str]:
    """What the setting varies."""
    if not isinstance(scheme, BlockGrid):
        raise ValueError(f"--method={scheme}: this ablation is of blockgrid:…; experiments.leaderboard compares others")
    scale = {"l2": "ℓ2", "absmax": "absmax"}[scheme.scale]
    size = f"/{scheme.block}" if scheme.block else ", token"
    k_only = ", K only" if scheme.values != "grid" else ""
    return {"rotation": "on" if scheme.rotate else "off", "scale": scale + size, "levels": scheme.grid + k_only}


def constants(schemes: Iterable[kvq.Scheme], model: models.Model) -> dict[str, kvq.Constants]:
    """Those of --constants, or levels fitted to the text that follows."""
    needing = [scheme for scheme in schemes if scheme.needs_constants]
    if common.CONSTANTS.value or not needing:
        return inputs.load_constants(needing, model)
    tokens, found = ablation.tokens_behind(model), {}
    with tempfile.TemporaryDirectory() as folder:  # what is captured once serves all
        for scheme in needing:
            with Progress(f"refitting {scheme.calibrated()}", unit="step") as progress:
                found[scheme.calibrated()] = kvq.calibrate(
                    scheme, model.forward, tokens, model_digest=model.digest, progress=progress, workdir=folder
                )
    return found


def shown(measured: list[Unit]) -> str:
    """The table, by accumulated KL."""
    ranked = sorted(measured, key=lambda unit: unit.rows["accumulated"]["kl_nats"])
    lines = [[unit.axes["scale"], unit.axes["levels"], unit.axes["rotation"], *ablation.cells(unit)] for unit in ranked]
    return table(["scale\n", "levels\n", "rotation\n", *ablation.HEADERS], lines)


EFFECTS = {
    "the rotation under one ℓ2 norm a token": (
        {"scale": "ℓ2, token", "rotation": "off"},
        {"scale": "ℓ2, token", "rotation": "on"},
    ),
    "the rotation under absmax of 32": (
        {"scale": "absmax/32", "rotation": "off"},
        {"scale": "absmax/32", "rotation": "on"},
    ),
    "absmax of 32 in place of one ℓ2 norm a token, rotated": (
        {"scale": "ℓ2, token", "rotation": "on"},
        {"scale": "absmax/32", "rotation": "on"},
    ),
    "the same without rotation": (
        {"scale": "ℓ2, token", "rotation": "off"},
        {"scale": "absmax/32", "rotation": "off"},
    ),
    "blocks of 16 in place of 32": ({"scale": "absmax/32"}, {"scale": "absmax/16"}),
    "Lloyd–Max levels in place of uniform ones": ({"levels": "uniform"}, {"levels": "lloyd"}),
    "FP4 in place of uniform levels": ({"levels": "uniform"}, {"levels": "fp4"}),
    "refitting the levels to the unrotated model": (
        {"levels": "lloyd", "rotation": "off"},
        {"levels": "refit", "rotation": "off"},
    ),
    "the rotation with Lloyd–Max levels in place of refitted levels without it": (
        {"levels": "refit", "rotation": "off"},
        {"levels": "lloyd", "rotation": "on"},
    ),
}


def sentences(measured: list[Unit], seed: int) -> list[str]:
    """What was asked, what was found, how sure."""
    mean_kl = ablation.draws(measured, "accumulated", seed)
    effects = {name: ablation.effect(measured, mean_kl, *change) for name, change in EFFECTS.items()}
    known = {name: found for name, found in effects.items() if found is not None}
    found = "; ".join(f"{name}, ×{one} ({pairs} pairs)" for name, (one, pairs) in known.items())
    open_ = [name for name, (one, _) in known.items() if one.low <= 1 <= one.high]
    best = min(measured, key=lambda unit: unit.rows["accumulated"]["kl_nats"])
    wrong, pairs = ablation.inversions(measured, mean_kl)
    many, size = measured[0].kl["accumulated"].size, measured[0].any["bucket"]
    doubt = f"does not tell from 1: {'; '.join(open_)}" if open_ else "tells every one of these from 1"
    return [
        f"Asked: of a 4-bit cache's rotation, scale and levels, which lowers the accumulated KL of "
        f"{measured[0].any['model']}, each changed alone with the rest equal?",
        f"Found: {found}; lowest is {best.name}, and K's MSE ranks KL with Spearman's "
        f"ρ = {ablation.rank_correlation(measured, mean_kl, 'key')}, {wrong} of {pairs} pairs the other way round.",
        f"How sure: factors are geometric means over matched pairs with 95 % intervals from resampling the same {many} "
        f"stretches of {size} positions for all settings, which {doubt}; it is one text and one model.",
    ]


def body() -> None:
    """The binary, after its flags have been parsed."""
    methods = ablation.methods(design(open_checkpoint(common.MODEL.value).config.head_dim))
    varied = {label: axes(scheme) for label, scheme in methods.items()}
    given = common.interruptible(lambda: decode.load_inputs(methods, constants))
    settings = [
        ablation.Setting(label, scheme, varied[label], given.constants.get(scheme.calibrated()))
        for label, scheme in methods.items()
    ]
    given = dataclasses.replace(given, constants={})  # a row's key has its own
    also = {"calibration_tokens": ablation.CALIBRATION_TOKENS.value}
    with decode.open_results(BINARY, given, key=ablation.KEY, **also) as results:
        print(f"{len(settings)} settings; sink, recent and group {common.window_flags()}.\n")
        ablation.measure_all(given, settings, results)
        measured = ablation.units(results.rows, AXES)
        pngs = ablation.draw(measured, "scale", SCALES, lambda u: f"{u.axes['levels']}, rotation {u.axes['rotation']}")
        conclude(results, pngs, shown(measured), sentences(measured, common.SEED.value))


if __name__ == "__main__":
    ablation.main(body, protect=2)
