"""What the two ablations share: settings that differ by one thing at a time, read side by side on one text.

Every setting is a row of `experiments.pseudo_decode` with what it varies as columns. All read the same tokens, so they
are compared in pairs: the text is cut into stretches of --bucket positions, and one bootstrap draws the same stretches
for all settings.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from absl import flags
from matplotlib.axes import Axes
from scipy import stats

import kvq_jax as kvq
import models
from experiments import pseudo_decode as decode
from experiments.harness import flags as common
from experiments.harness import inputs, plots
from experiments.harness.quick import QUICK
from experiments.harness.run import Run

BLOCK, REGIMES, RESAMPLES = 128, ("static", "accumulated"), 2000
FEWEST = 4  # stretches
KEY = (*decode.KEY, "constants_digest")
CALIBRATION_TOKENS = flags.DEFINE_integer(
    "calibration_tokens", 2048, "Tokens behind those that are read, for what is fitted to the model.", lower_bound=16
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """One scheme, with constants or without, and what it varies, by the name of the column."""

    label: str
    scheme: kvq.Scheme
    axes: dict[str, str]
    constants: kvq.Constants | None = None


def main(body: Callable[[], None], protect: int | None = None) -> None:
    """Run an ablation as the process's main program: windows of 128, stretches of 64 positions; `protect` is the
    default of --protect, 2 where UltraQuant is measured as it is deployed."""
    for flag in (common.SINK, common.RECENT, common.GROUP):
        flags.set_default(flag, 128)
    flags.set_default(common.PROTECT, protect)
    flags.set_default(decode.BUCKET, 64)
    common.main(body)


def methods(design: Sequence[str]) -> dict[str, kvq.Scheme]:
    """The design's specs, or those of --method, at the windows of the flags; and what --quick means for the text."""
    if QUICK.value and not common.FLAGS["num_tokens"].present:
        flags.set_default(common.NUM_TOKENS, 768)
    if decode.REGIME.value != list(REGIMES) or decode.BLOCK_SIZE.value != [BLOCK]:
        raise ValueError(f"--regime and --block_size are not for ablations: both regimes, blocks of {BLOCK}")
    check_stretches()
    if common.METHOD.present:
        return common.methods()
    common.designed(design)
    return {spec: kvq.scheme(spec, **common.window_flags()) for spec in design}


def check_stretches() -> None:
    """Raise ValueError where the flags leave too few stretches of the text to resample: of two or three, resamples are
    so much alike that nearly every difference would look certain."""
    tokens, skip, bucket = common.NUM_TOKENS.value, decode.SKIP_POSITIONS.value, decode.BUCKET.value
    if (many := sum(start >= skip for start in range(0, tokens, bucket))) < FEWEST:
        raise ValueError(
            f"--num_tokens={tokens} and --skip_positions={skip} leave {many} stretches of --bucket={bucket} positions, "
            f"of which intervals need {FEWEST} or more; pass more tokens, or a smaller --bucket"
        )


def tokens_behind(model: models.Model) -> np.ndarray:
    """The text behind the part that is read, int32 `[1, --calibration_tokens]`. Raises ValueError where it ends."""
    first, count = common.TEXT_START.value + common.BATCH.value * common.NUM_TOKENS.value, CALIBRATION_TOKENS.value
    ids = model.tokenizer.encode(inputs.read_text(common.TEXT.value))[first : first + count]
    if len(ids) < count:
        raise ValueError(
            f"--text={common.TEXT.value} has {len(ids)} tokens behind the {first} that are read, and "
            f"--calibration_tokens={count} are needed; pass a longer text, or fewer tokens"
        )
    return np.array([ids], np.int32)


def measure_all(given: decode.Inputs, settings: Sequence[Setting], results: Run) -> None:
    """Every setting that has no row yet."""
    for i, one in enumerate(settings, start=1):
        title = f"[{i}/{len(settings)}] {one.label}"
        digest = None if one.constants is None else one.constants.digest
        key = {"method": str(one.scheme), "block_size": BLOCK, "constants_digest": digest}
        if all(results.has(**key, regime=regime) for regime in REGIMES):
            print(f"{title}: already in {results.path}")
            continue
        constants = {} if one.constants is None else {one.scheme.calibrated(): one.constants}
        own = dataclasses.replace(given, methods={one.label: one.scheme}, constants=constants)
        results.append([row | one.axes for row in decode.measure(own, one.label, BLOCK, title)])


class Unit:
    """One measured setting: what it varies, its rows by regime, and its KL in every stretch that counts."""

    def __init__(self, rows: Sequence[Row], axes: Sequence[str]) -> None:
        self.rows = {row["regime"]: row for row in rows}
        self.any = rows[0]
        self.name, self.axes = self.any["label"], {name: self.any[name] for name in axes}
        counted = np.array(self.any["bucket_start"]) >= self.any["skip_positions"]
        self.kl = {regime: np.array(row["kl_by_bucket"], float)[counted] for regime, row in self.rows.items()}

    def mse(self, side: str) -> float:
        """Of rounding alone: ‖x − x̂‖²/‖x‖² of what the reference computed; side: key or value."""
        return float(self.rows["static"][f"{side}_relative_mse"])


def units(rows: Sequence[Row], axes: Sequence[str]) -> list[Unit]:
    """The rows' settings, in the order in which they were measured."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["constants_digest"]), []).append(row)
    return [Unit(group, axes) for group in groups.values()]


def draws(measured: Sequence[Unit], regime: str, seed: int) -> np.ndarray:
    """Mean KL `[settings, 1 + RESAMPLES]`: of the text, then of resampled stretches, the same ones for all settings."""
    return resampled(np.stack([unit.kl[regime] for unit in measured]), seed)


def resampled(values: np.ndarray, seed: int) -> np.ndarray:
    """`[settings, stretches]` to means `[settings, 1 + RESAMPLES]`: of all stretches, then of drawn ones, the same for
    all settings and for every array of as many stretches."""
    drawn = np.random.default_rng(seed).integers(values.shape[1], size=(RESAMPLES, values.shape[1]))
    return np.concatenate([values.mean(1, keepdims=True), values[:, drawn].mean(-1)], axis=1)


@dataclass(frozen=True)
class Estimate:
    """Of the text, and the 95 % interval of its resamples."""

    value: float
    low: float
    high: float

    @staticmethod
    def of(values: np.ndarray) -> "Estimate":
        return Estimate(float(values[0]), *(float(x) for x in np.quantile(values[1:], [0.025, 0.975])))

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def effect(
    measured: Sequence[Unit], mean_kl: np.ndarray, before: dict[str, str], after: dict[str, str]
) -> tuple[Estimate, int] | None:
    """KL with `after` over KL with `before`, and of how many pairs it is the geometric mean: all settings with the
    axes `before` and their twins, which differ from them in nothing but these axes. None where there are no pairs."""
    index = {tuple(sorted(unit.axes.items())): i for i, unit in enumerate(measured)}
    ratios = []
    for unit, i in zip(measured, index.values(), strict=True):
        if before.items() <= unit.axes.items():
            twin = index.get(tuple(sorted((unit.axes | after).items())))
            if twin is not None:
                ratios.append(np.log(mean_kl[twin] / mean_kl[i]))
    return (Estimate.of(np.exp(np.mean(ratios, axis=0))), len(ratios)) if ratios else None


def rank_correlation(measured: Sequence[Unit], mean_kl: np.ndarray, side: str) -> Estimate:
    """Spearman's, over the settings, of the MSE of K (key) or V (value) and KL."""
    mse = stats.rankdata([unit.mse(side) for unit in measured])
    with np.errstate(invalid="ignore"):  # all equal: NaN
        return Estimate.of(np.array([np.corrcoef(mse, ranks)[0, 1] for ranks in stats.rankdata(mean_kl, axis=0).T]))


def inversions(measured: Sequence[Unit], mean_kl: np.ndarray) -> tuple[int, int]:
    """Pairs of settings whose order by K's MSE is not that by KL, and pairs in all."""
    pairs = list(itertools.combinations(range(len(measured)), 2))
    signs = [(measured[i].mse("key") - measured[j].mse("key")) * (mean_kl[i, 0] - mean_kl[j, 0]) for i, j in pairs]
    return sum(sign < 0 for sign in signs), len(pairs)


def cells(unit: Unit) -> list[str]:
    """What every table shows of a setting: bits, MSE of K and V, and KL with its 95 % interval."""
    shown = [f"{unit.any['bits_per_element_store']:.2f}", f"{unit.mse('key'):.5f}", f"{unit.mse('value'):.5f}"]
    for row in (unit.rows[regime] for regime in REGIMES):
        low, high = row["kl_nats_lo"], row["kl_nats_hi"]
        interval = "" if low is None else f" [{low:.4f}, {high:.4f}]"
        shown.append(f"{row['kl_nats']:.4f}{interval}")
    return shown


HEADERS = ["bits a number\n", "relative MSE\nK", "\nV", "KL, nats [95 %]\nstatic", "\naccumulated"]


@contextlib.contextmanager
def three_panels(title: str, drawn: dict[str, bytes], name: str) -> Iterator[list[Axes]]:
    """MSE of K, static KL, accumulated KL; kept in `drawn` as a PNG."""
    fig, axes = plots.figure(3)
    fig.set_figheight(3.8)
    for axis, what in zip(axes, ("relative MSE of K", "static KL, nats", "accumulated KL, nats"), strict=True):
        axis.set_title(what)
        axis.set_yscale("log")
    yield axes
    drawn[name] = plots.as_png(fig, title)


def draw(measured: Sequence[Unit], x: str, order: Sequence[str], line: Callable[[Unit], str]) -> dict[str, bytes]:
    """`by_<x>.png`: the categories of the axis `x`, those of `order` first, one line for every `line`; and
    `kl_against_mse.png`."""
    drawn: dict[str, bytes] = {}
    about = f"{measured[0].any['model'].split('/')[-1]} reading {measured[0].any['text'].split('/')[-1]}"
    there = dict.fromkeys(unit.axes[x] for unit in measured)
    ticks = [*(one for one in order if one in there), *(one for one in there if one not in order)]
    lines = list(dict.fromkeys(map(line, measured)))
    with three_panels(f"{about}; bars: 95 %", drawn, f"by_{x}.png") as axes:
        for i, name in enumerate(lines):
            own = sorted((u for u in measured if line(u) == name), key=lambda u: ticks.index(u.axes[x]))
            at = [ticks.index(unit.axes[x]) + 0.04 * (i - len(lines) / 2) for unit in own]
            axes[0].plot(at, [unit.mse("key") for unit in own], label=name, **plots.look(i))
            for axis, regime in zip(axes[1:], REGIMES, strict=True):
                rows = [unit.rows[regime] for unit in own]
                y = [row["kl_nats"] for row in rows]
                error = [
                    [abs((row[f"kl_nats_{end}"] or kl) - kl) for row, kl in zip(rows, y, strict=True)]
                    for end in ("lo", "hi")
                ]
                axis.errorbar(at, y, yerr=error, label=name, elinewidth=0.7, **plots.look(i))
        for axis in axes:
            axis.set_xticks(range(len(ticks)), ticks)
            axis.set_xlabel(x)
    fig, panels = plots.figure(2)
    for panel, regime in zip(panels, REGIMES, strict=True):
        for i, name in enumerate(lines):
            own = [unit for unit in measured if line(unit) == name]
            look = plots.look(i) | {"linestyle": "none"}
            panel.plot([u.mse("key") for u in own], [u.rows[regime]["kl_nats"] for u in own], label=name, **look)
        panel.set(title=regime, xscale="log", yscale="log", xlabel="relative MSE of K", ylabel="KL, nats")
    drawn["kl_against_mse.png"] = plots.as_png(fig, f"Does the error of K rank KL? {about}")
    return drawn
