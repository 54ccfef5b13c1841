"""What `experiments.error_anatomy` shows: two tables, two plots, three sentences made from the numbers."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments import ablation
from experiments.ablation import REGIMES, Estimate, Row, Unit
from experiments.harness import plots
from experiments.harness.table import table

AXES = ("restored", "share", "part", "sides")
TAILS = ("100", "50", "10", "5", "1", "0p1")
TAIL = 0.03  # of the tokens: restoring all norms has to be worth more, between 1 and 5 to 10 %, to explain the tail
MOST = 0.5  # and those of the tail alone have to do more than this part of what restoring its tokens does


def name(axes: Mapping[str, str]) -> str:
    """A setting in words."""
    what = {"token": "tokens", "element": "elements", "magnitude": "tokens' norms"}[axes["restored"]]
    of_k = ", K only" if axes["sides"] == "K" else ""
    if axes["share"] == "100":
        return f"all {what}{of_k}"
    return f"{'all but ' if axes['part'] == 'rest' else ''}worst {axes['share']} % of {what}{of_k}"


def _find(measured: Sequence[Unit], **axes: str) -> int | None:
    """The unit of these axes."""
    return next((i for i, unit in enumerate(measured) if axes.items() <= unit.axes.items()), None)


def left(measured: Sequence[Unit], regime: str, seed: int) -> np.ndarray:
    """KL over that of the method itself, `[settings, 1 + resamples]`."""
    mean_kl = ablation.draws(measured, regime, seed)
    return mean_kl / mean_kl[_find(measured, restored="nothing")]


def worth(measured: Sequence[Unit], kl: np.ndarray, sides: str) -> Estimate | None:
    """The part of the tokens, worst first, whose restoring lowers KL as restoring all norms of `sides` does. Linear
    between the parts that were measured, of which 0 leaves all KL and 1 none. None where none was measured."""
    norms = _find(measured, restored="magnitude", share="100", sides=sides)
    known = {
        float(unit.axes["share"]) / 100: kl[i]
        for i, unit in enumerate(measured)
        if {"restored": "token", "part": "worst", "sides": sides}.items() <= unit.axes.items()
    }
    if norms is None or not known:
        return None
    shares = [0.0, *sorted(known), 1.0]
    lines = np.stack([np.ones(kl.shape[1]), *(known[share] for share in shares[1:-1]), np.zeros(kl.shape[1])])
    falling = np.minimum.accumulate(lines, axis=0)
    return Estimate.of(np.array([np.interp(-x, -line, shares) for x, line in zip(kl[norms], falling.T, strict=True)]))


def of_tail(measured: Sequence[Unit], kl: np.ndarray) -> tuple[str, Estimate] | None:
    """The part of what restoring the worst tokens does that restoring only their norms does, and of the worst how many
    per cent: the largest share that was measured of both, and that lowers KL for certain. None where there is none."""
    both = {"part": "worst", "sides": "K and V"}
    shares = [unit.axes["share"] for unit in measured if {"restored": "token"}.items() <= unit.axes.items()]
    for share in sorted(set(shares), key=float, reverse=True):
        norm, whole = (_find(measured, restored=by, share=share, **both) for by in ("magnitude", "token"))
        if norm is not None and whole is not None and np.quantile(kl[whole][1:], 0.975) < 1:
            done, all_ = 1 - kl[norm], 1 - kl[whole]
            return share, Estimate.of(np.divide(done, all_, out=np.full_like(done, np.inf), where=all_ > 0))
    return None


def tables(found: Sequence[Row], measured: Sequence[Unit], seed: int) -> str:
    """The errors, and what restoring does."""

    def percent(row: Row, tail: str) -> str:
        return f"{row[f'magnitude_share_{tail}']:.1%}"

    headers = ["errors of\n", "regime\n", "relative\nMSE", "‖k̂‖/‖k‖\n", "norm's part\nall", "of the worst\n50 %"]
    headers += ["\n10 %", "\n5 %", "\n1 %", "\n0.1 %", "the worst by norm among\nthe worst 10 %", "\n1 %"]
    lines = [
        [
            row["side"].upper(),
            row["regime"],
            f"{row['relative_mse']:.4f}",
            f"{row['norm_ratio_mean']:.3f} ±{row['norm_ratio_std']:.3f}",
            *(percent(row, tail) for tail in TAILS),
            *(f"{row[f'same_tokens_{share}']:.0%}" for share in ("10", "1")),
        ]
        for row in found
    ]
    kls = {regime: left(measured, regime, seed) for regime in REGIMES}
    restores = [
        [unit.name, *ablation.cells(unit)[1:], *(str(Estimate.of(kls[regime][i])) for regime in REGIMES)]
        for i, unit in enumerate(measured)
    ]
    more = ["KL left, of 1\nstatic", "\naccumulated"]
    shown = table(headers, lines), table(["restored (simulated)\n", *ablation.HEADERS[1:], *more], restores)
    return "\n\n".join(shown)


def draw(found: Sequence[Row], measured: Sequence[Unit], seed: int) -> dict[str, bytes]:
    """`kl_by_restore.png` and `norms.png`."""
    about = f"{measured[0].any['method']}, {measured[0].any['model'].split('/')[-1]}"
    fig, axes = plots.figure(3)
    fig.set_figheight(3.8)
    lines = [("token", "worst", "K and V"), ("token", "worst", "K"), ("element", "worst", "K and V")]
    lines += [("magnitude", "worst", "K and V"), ("token", "rest", "K and V"), ("element", "rest", "K and V")]
    for panel, regime in zip(axes, REGIMES, strict=False):
        kl = left(measured, regime, seed)
        for number, (by, part, sides) in enumerate(lines):
            own = [
                (float(unit.axes["share"]), Estimate.of(kl[i]))
                for i, unit in enumerate(measured)
                if (unit.axes["restored"], unit.axes["part"], unit.axes["sides"]) == (by, part, sides)
                and unit.axes["share"] not in ("100", "0")
            ]
            if own:
                x, y = [share for share, _ in own], [one.value for _, one in own]
                error = [[one.value - one.low for _, one in own], [one.high - one.value for _, one in own]]
                label = name({"restored": by, "part": part, "sides": sides, "share": "x"})
                panel.errorbar(x, y, yerr=error, label=label, elinewidth=0.7, **plots.look(number))
        for number, sides in enumerate(("K", "K and V")):
            i = _find(measured, restored="magnitude", share="100", sides=sides)
            if i is not None:
                panel.axhline(kl[i, 0], color="black", linestyle=plots.DASHES[number + 1], label=measured[i].name)
        panel.set(title=f"{regime} KL left", xscale="log", xlabel="x, % of tokens or elements", ylim=(0, None))
    for number, row in enumerate(found):
        shares = [float(tail.replace("p", ".")) for tail in TAILS]
        y = [row[f"magnitude_share_{tail}"] for tail in TAILS]
        axes[2].plot(shares, y, label=f"{row['side'].upper()}, {row['regime']}", **plots.look(number))
    axes[2].set(title="the norm's part of the error", xscale="log", xlabel="worst % of tokens", ylim=(0, None))
    axes[2].legend(frameon=False, fontsize=7)
    drawn = {"kl_by_restore.png": plots.as_png(fig, f"What restoring leaves of {about}; bars: 95 %")}
    fig, axes = plots.figure(len(found))
    for panel, row in zip(axes, found, strict=True):
        most, counts = row["norm_most"], np.array(row["norm_counts"], float)
        panel.imshow(np.log1p(counts).T, origin="lower", extent=(0, most, 0, most), cmap="Greys", aspect="auto")
        panel.plot([0, most], [0, most], label="equal", **(plots.look(1) | {"marker": "", "linewidth": 0.8}))
        panel.set(title=f"{row['side'].upper()}, {row['regime']}", xlabel="true norm / layer's mean")
        panel.grid(False)
    axes[0].set_ylabel("reconstructed norm / layer's mean")
    return drawn | {"norms.png": plots.as_png(fig, f"Norms of all tokens and layers, log counts; {about}")}


def _percent(one: Estimate | None) -> str:
    return "an unknown part" if one is None else f"{one.value:.1%} [{one.low:.1%}, {one.high:.1%}]"


def sentences(found: Sequence[Row], measured: Sequence[Unit], seed: int) -> list[str]:
    """What was asked, what was found, how sure."""
    k = next(row for row in found if (row["side"], row["regime"]) == ("k", "static"))
    kls = {regime: left(measured, regime, seed) for regime in REGIMES}

    def in_words(show: Callable[[str], str]) -> str:
        return " and ".join(f"{show(regime)} ({regime})" for regime in REGIMES)

    def leaves(**axes: str) -> str:
        i = _find(measured, **axes, sides="K and V")
        return "unknown" if i is None else in_words(lambda regime: f"×{Estimate.of(kls[regime][i])}")

    worths = {regime: worth(measured, kls[regime], "K and V") for regime in REGIMES}
    tails = {regime: of_tail(measured, kls[regime]) for regime in REGIMES}
    known = [(one, tail[1]) for one, tail in zip(worths.values(), tails.values(), strict=True) if one and tail]
    if known and all(one.low >= TAIL and tail.low >= MOST for one, tail in known):
        verdict = "both speak of the same tokens"
    elif known and all(one.high <= TAIL or tail.high <= MOST for one, tail in known):
        verdict = "they do not speak of the same tokens"
    else:
        verdict = "this text does not tell whether they speak of the same tokens"
    parts = {regime: None if tail is None else tail[1] for regime, tail in tails.items()}
    share = next((tail[0] for tail in tails.values() if tail), "unknown")
    many, size = measured[0].kl["static"].size, measured[0].any["bucket"]
    return [
        f"Asked: “the tail of the error is magnitude” and “the tail drives KL”: of {measured[0].any['method']} on "
        f"{measured[0].any['model']}, do both speak of the same tokens?",
        f"Found: {verdict}. Of K's static error the norm has {k['magnitude_share_100']:.1%} in all and "
        f"{k['magnitude_share_1']:.1%} among the worst 1 % of tokens; restoring the worst {share} % of tokens leaves "
        f"KL {leaves(restored='token', share=share, part='worst')}; restoring all norms leaves "
        f"{leaves(restored='magnitude', share='100')}, as the worst {in_words(lambda r: _percent(worths[r]))} of the "
        f"tokens would, but the norms of the worst {share} % alone do {in_words(lambda r: _percent(parts[r]))} of "
        f"what restoring these does.",
        f"How sure: factors and parts have 95 % intervals from resampling the same {many} stretches of {size} "
        f"positions for all restores, the norm's part of the error from {k['layers']} layers "
        f"({k['magnitude_share_1_lo']:.1%} to {k['magnitude_share_1_hi']:.1%} of K's worst 1 %); restores are "
        "simulated, and it is one text and one model.",
    ]
