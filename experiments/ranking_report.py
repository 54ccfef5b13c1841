"""What `experiments.ranking` makes of its rows: ranks, rank correlations and block sizes, with paired intervals.

One bootstrap draws the same stretches of the text for every method, regime, block size and measure.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from scipy import stats

from experiments.ablation import REGIMES, Estimate, Row, Unit, resampled, units
from experiments.harness import plots
from experiments.harness.table import table

ALIKE = 0.05  # a block size is as good as the smallest where the interval of the KL's ratio lies within 1 ± this
KL, ATTENTION, NLL = "kl_by_bucket", "attention_mae_by_bucket", "nll_by_bucket"
ORDER_OF = "tau of static and accumulated KL"
MEASURES = (
    "attention error, static",
    "attention error, accumulated",
    "attention error, gap",
    "KL, static",
    "KL, accumulated",
)


def kendall(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Kendall's τ_b over the first axis of two `[settings, draws]` (source: Kendall 1945); NaN where all are equal."""
    i, j = np.triu_indices(len(x), 1)
    dx, dy = np.sign(x[i] - x[j]), np.sign(y[i] - y[j])
    with np.errstate(invalid="ignore"):
        return (dx * dy).sum(0) / np.sqrt((dx**2).sum(0) * (dy**2).sum(0))


def defined(values: np.ndarray) -> Estimate:
    """The estimate from the draws that have a value: one whose stretches are all alike has no τ."""
    kept = values[1:][np.isfinite(values[1:])]
    return Estimate.of(np.array([values[0], *(kept if kept.size else [np.nan])]))


def means(measured: Sequence[Unit], column: str, regime: str, seed: int) -> np.ndarray:
    """Of a curve by bucket: `[settings, 1 + draws]`, of the stretches that count, then resampled."""
    counted = np.array(measured[0].any["bucket_start"]) >= measured[0].any["skip_positions"]
    return resampled(np.array([unit.rows[regime][column] for unit in measured], float)[:, counted], seed)


class Block:
    """The ranked methods at one block size."""

    def __init__(self, size: int, measured: Sequence[Unit], seed: int) -> None:
        self.size, self.units = size, list(measured)
        self.kl = {regime: means(measured, KL, regime, seed) for regime in REGIMES}
        ranked = {regime: stats.rankdata(kl, axis=0) for regime, kl in self.kl.items()}
        self.ranks = {regime: [Estimate.of(one) for one in ranks] for regime, ranks in ranked.items()}
        static, accumulated = (means(measured, ATTENTION, regime, seed) for regime in REGIMES)
        perplexity = means(measured, NLL, "accumulated", seed)  # its logarithm, which ranks alike
        of = (static, accumulated, accumulated - static, *self.kl.values())
        self.tau = {ORDER_OF: defined(kendall(*self.kl.values()))}
        self.tau |= {name: defined(kendall(x, perplexity)) for name, x in zip(MEASURES, of, strict=True)}

    def name(self, i: int) -> str:
        return self.units[i].name

    def reordered(self) -> list[tuple[str, str, bool]]:
        """Pairs (a, b), a before b by static KL and after it by accumulated KL; whether both intervals say so."""
        found = []
        for i, j in itertools.permutations(range(len(self.units)), 2):
            static, accumulated = (Estimate.of(self.kl[regime][i] - self.kl[regime][j]) for regime in REGIMES)
            if static.value < 0 < accumulated.value:
                found.append((self.name(i), self.name(j), static.high < 0 < accumulated.low))
        return found


def grouped(rows: Sequence[Row]) -> dict[int, list[Unit]]:
    """Every method that quantizes, by block size, the smallest first."""
    sizes = sorted({row["block_size"] for row in rows})
    there = [row for row in rows if row["layers_quantized"] and not row["identity"]]
    return {size: units([row for row in there if row["block_size"] == size], ()) for size in sizes}


def blocks(rows: Sequence[Row], seed: int) -> list[Block]:
    """The block sizes at which all methods at the common windows were measured."""
    ranked = {size: [u for u in found if not u.any["at_once"]] for size, found in grouped(rows).items()}
    most = max(map(len, ranked.values()))
    return [Block(size, found, seed) for size, found in ranked.items() if len(found) == most]


Curves = dict[str, dict[int, dict[str, np.ndarray]]]  # method -> block size -> regime -> KL [1 + draws]


def curves(rows: Sequence[Row], seed: int) -> Curves:
    """Of every method that quantizes, the smallest block first."""
    found: Curves = {}
    for size, measured in grouped(rows).items():
        for unit in measured:
            by_regime = {regime: means([unit], KL, regime, seed)[0] for regime in REGIMES}
            found.setdefault(unit.name, {})[size] = by_regime
    return found


def over_smallest(of: dict[int, dict[str, np.ndarray]], regime: str) -> dict[int, Estimate]:
    """Block size -> KL over that at the smallest one, paired by stretches."""
    return {size: Estimate.of(kl[regime] / next(iter(of.values()))[regime]) for size, kl in of.items()}


def gaps(of: Sequence[dict[int, dict[str, np.ndarray]]]) -> dict[int, Estimate]:
    """Block size -> accumulated over static KL, the geometric mean over methods that were measured at all of them."""
    sizes = {size: None for method in of for size in method}
    whole = [method for method in of if len(method) == len(sizes)]
    logs = {size: [np.log(m[size]["accumulated"] / m[size]["static"]) for m in whole] for size in sorted(sizes)}
    return {size: Estimate.of(np.exp(np.mean(log, axis=0))) for size, log in logs.items()} if whole else {}


def saturated(ratios: dict[int, Estimate]) -> int:
    """The largest block size that, with all smaller ones, is as good as the smallest."""
    good = itertools.takewhile(lambda size: ratios[size].low >= 1 - ALIKE and ratios[size].high <= 1 + ALIKE, ratios)
    return max(good)


def rank(one: Estimate) -> str:
    return f"{one.value:g} [{one.low:g}, {one.high:g}]"


def tables(rows: Sequence[Row], ranked: Sequence[Block], seed: int) -> str:
    """Ranks, rank correlations, and the KL at each block size."""
    first = ranked[0]  # nearest to decoding
    order = np.argsort(first.kl["accumulated"][:, 0])
    headers = ["rank by KL [95 %]\n", "bits\n"]
    headers += [
        f"b = {b.size}\n{regime}" if regime == "static" else f"\n{regime}" for b in ranked for regime in REGIMES
    ]
    lines = []
    for i in order:
        cells = [rank(block.ranks[regime][i]) for block in ranked for regime in REGIMES]
        lines.append([first.name(i), f"{first.units[i].any['bits_per_element_store']:.2f}", *cells])
    said = [table(headers, lines)]
    headers = ["Kendall's tau [95 %]\nof accumulated perplexity and", *(f"b = {block.size}\n" for block in ranked)]
    lines = [[name, *(str(block.tau[name]) for block in ranked)] for name in (*MEASURES, ORDER_OF)]
    said.append(table(headers, lines))
    by_method = {name: of for name, of in curves(rows, seed).items() if len(of) > 1}
    sizes = sorted({row["block_size"] for row in rows})
    for title, shown in (
        *(
            (f"{r} KL over that\nat the smallest b", {n: over_smallest(of, r) for n, of in by_method.items()})
            for r in REGIMES
        ),
        ("KL accumulated\nover static", {n: gaps([of]) for n, of in by_method.items()}),
    ):
        lines = [[name, *(str(of[size]) if size in of else "–" for size in sizes)] for name, of in shown.items()]
        if lines:
            said.append(table([title, *(f"\nb = {size}" for size in sizes)], lines))
    return "\n\n".join(said)


def sentences(rows: Sequence[Row], ranked: Sequence[Block], seed: int) -> list[str]:
    """What was asked, what was found, how sure."""
    row, last = rows[0], ranked[-1]
    asked = (
        f"Asked: does the order of {len(last.units)} methods at equal windows on {row['model']} change from static to "
        "accumulated KL or with the block size b, which b is as good as the smallest, and does an error without labels "
        "rank perplexity?"
    )
    found = []
    for block in ranked:
        pairs = block.reordered()
        certain = [f"{a} is before {b} by static KL and after it by accumulated" for a, b, both in pairs if both]
        found.append(
            f"at b = {block.size} tau of static and accumulated ranks is {block.tau[ORDER_OF]}, and {len(pairs)} of "
            f"{math.comb(len(block.units), 2)} pairs change places, {len(certain)} of them for sure"
            + (f" ({'; '.join(certain)})" if certain else "")
        )
    once, of = {r["label"] for r in rows if r["at_once"]}, curves(rows, seed)
    if many := gaps([sizes for name, sizes in of.items() if name not in once]):
        shown = ", ".join(f"{one} at b = {size}" for size, one in many.items())
        found.append(f"accumulated over static KL, of the methods measured at every b, is {shown}")
    for kind, names in (("at equal windows", of.keys() - once), ("rounded at once", of.keys() & once)):
        ends = {name: saturated(over_smallest(of[name], "accumulated")) for name in sorted(names)}
        if ends:
            sizes = {size: [name for name, end in ends.items() if end == size] for size in sorted(set(ends.values()))}
            found.append(
                f"{kind} accumulated KL is that of the smallest b within {ALIKE:.0%} up to "
                + ", ".join(f"b = {size} ({', '.join(group)})" for size, group in sizes.items())
            )
    first = ranked[0]  # nearest to decoding
    known = {name: first.tau[name] for name in MEASURES if np.isfinite(first.tau[name].value)}
    most = max((tau.value for tau in known.values()), default=0.0)
    best = [f"{name} (tau {tau})" for name, tau in known.items() if tau.value > most - 1e-9]
    if best:
        found.append(f"at b = {first.size} accumulated perplexity is ranked best by {' and '.join(best)}")
    open_ = sum(one.high - one.low > 0 for block in ranked for regime in REGIMES for one in block.ranks[regime])
    counted = sum(start >= row["skip_positions"] for start in row["bucket_start"])
    identity = [abs(r["kl_nats"]) for r in rows if r["identity"]]
    check = f"; the unquantized cache, as a check, has a KL of at most {max(identity):.1e}" if identity else ""
    sure = (
        f"How sure: intervals are of 95 %, from resampling the same {counted} stretches of {row['bucket']} positions "
        f"for all, and leave {open_} of {2 * len(ranked) * len(last.units)} ranks open; it is one text and one model"
        f"{check}."
    )
    return [asked, f"Found: {'; '.join(found)}.", sure]


def draw(rows: Sequence[Row], ranked: Sequence[Block], seed: int) -> dict[str, bytes]:
    """`ranks.png` and, where a method was measured at several block sizes, `block_sizes.png`."""
    about = f"{rows[0]['model'].rstrip('/').split('/')[-1]} reading {rows[0]['text'].split('/')[-1]}; bars: 95 %"
    fig, axes = plots.figure(2)
    fig.set_figheight(3.8)
    for axis, regime in zip(axes, REGIMES, strict=True):
        for i, unit in enumerate(ranked[-1].units):
            ranks = [block.ranks[regime][i] for block in ranked]
            _errorbars(axis, np.arange(len(ranked)) + 0.04 * (i - len(ranked[-1].units) / 2), ranks, unit.name, i)
        axis.set_xticks(range(len(ranked)), [str(block.size) for block in ranked])
        axis.set(title=regime, xlabel="tokens a block")
        axis.invert_yaxis()
    axes[0].set_ylabel("rank by KL, 1 is the lowest")
    drawn = {"ranks.png": plots.as_png(fig, f"Ranks: {about}")}
    of = curves(rows, seed)
    least = min(row["block_size"] for row in rows)
    names = [name for name, sizes in of.items() if len(sizes) > 1 and least in sizes]
    if names:
        fig, axes = plots.figure(3)
        sizes = sorted({size for name in names for size in of[name]})
        for i, name in enumerate(names):
            ratios = [over_smallest(of[name], regime) for regime in REGIMES]
            for axis, by_size in zip(axes, (*ratios, gaps([of[name]])), strict=True):
                at = np.array([sizes.index(size) for size in by_size]) + 0.04 * (i - len(names) / 2)
                _errorbars(axis, at, list(by_size.values()), name, i)
        titles = [*(f"{regime}: KL over that at b = {least}" for regime in REGIMES), "KL accumulated over static"]
        for axis, title in zip(axes, titles, strict=True):
            axis.set_xticks(range(len(sizes)), list(map(str, sizes)))
            axis.set(title=title, xlabel="tokens a block")
        drawn["block_sizes.png"] = plots.as_png(fig, f"What a block hides: {about}")
    return drawn


def _errorbars(axis: Axes, x: np.ndarray, y: Sequence[Estimate], label: str, i: int) -> None:
    error = [[one.value - one.low for one in y], [one.high - one.value for one in y]]
    axis.errorbar(x, [one.value for one in y], yerr=np.maximum(error, 0), label=label, elinewidth=0.7, **plots.look(i))
