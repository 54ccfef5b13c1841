"""What `experiments.trajectory` shows: two tables, two plots, three sentences made from the numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from experiments.ablation import Estimate
from experiments.harness import plots
from experiments.harness.statistics import interval
from experiments.harness.table import table

Row = dict[str, Any]
RESAMPLES = 1000
FEWEST = 5  # prompts that an interval needs: resamples of fewer are mostly alike, and so are their rank correlations
PREDICTORS = {
    "flip_step_or_end": "the step at which flips begin",
    "flips_first": "flipped pairs of all heads at the first step",
    "attention_js_nats_first": "JS of attention at the first step",
    "key_relative_mse": "MSE of the prompt's K",
}


def settings(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each method and control, by label, prompts in order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["label"], []).append(row)
    return {label: sorted(own, key=lambda row: row["prompt"]) for label, own in found.items()}


def _spearman(x: np.ndarray, y: np.ndarray) -> float:
    """NaN where either is constant."""
    if len(np.unique(x)) < 2 or len(np.unique(y)) < 2:
        return float("nan")
    return float(np.corrcoef(stats.rankdata(x), stats.rankdata(y))[0, 1])


def rank_correlation(x: np.ndarray, y: np.ndarray, *, within: bool, seed: int) -> Estimate:
    """Spearman's ρ of x and y `[settings, prompts]`, with the 95 % interval of resampled prompts, all settings alike.

    Over all pairs; or, `within`, the mean of the settings' own, which differences between settings do not move. NaN
    where all is constant; without an interval where there are fewer than FEWEST prompts.
    """

    def rho(at: np.ndarray) -> float:
        if not within:
            return _spearman(x[:, at].ravel(), y[:, at].ravel())
        own = np.array([_spearman(a[at], b[at]) for a, b in zip(x, y, strict=True)])
        return float(own[np.isfinite(own)].mean()) if np.isfinite(own).any() else float("nan")

    prompts = x.shape[1]
    drawn = np.random.default_rng(seed).integers(prompts, size=(RESAMPLES, prompts))
    values = np.array([rho(np.arange(prompts)), *(rho(at) for at in drawn)])
    if prompts < FEWEST or not np.isfinite(values[1:]).any():
        return Estimate(float(values[0]), float("nan"), float("nan"))
    low, high = np.nanquantile(values[1:], [0.025, 0.975])
    return Estimate(float(values[0]), float(low), float(high))


def _column(groups: dict[str, list[Row]], name: str) -> np.ndarray:
    """`[settings, prompts]`"""
    return np.array([[row[name] for row in own] for own in groups.values()], float)


def correlations(rows: Sequence[Row], seed: int) -> dict[str, tuple[Estimate, Estimate]]:
    """Of each predictor and the step of the first divergent token: over all, and within settings."""
    groups = settings(rows)
    step = _column(groups, "divergence_step_or_end")

    def both(name: str) -> tuple[Estimate, Estimate]:
        x = _column(groups, name)
        return rank_correlation(x, step, within=False, seed=seed), rank_correlation(x, step, within=True, seed=seed)

    return {name: both(name) for name in PREDICTORS}


def _with_interval(own: Sequence[Row], name: str, form: str) -> str:
    values = np.array([row[name] for row in own], float)[:, None]
    low, high = interval(values, np.ones_like(values), seed=0) if len(own) > 1 else (np.nan, np.nan)
    low, high = np.clip((low, high), 0, 1 if form.endswith("%") else np.inf)  # what is shown has no other values
    return f"{values.mean():{form}}" + (f" [{low:{form}}, {high:{form}}]" if np.isfinite(low) else "")


def tables(rows: Sequence[Row], seed: int) -> str:
    """Every setting's means over prompts, and what predicts the divergence."""

    def steps(own: Sequence[Row], name: str) -> str:
        never = sum(row[name] is None for row in own)
        return f"{np.median([row[f'{name}_or_end'] for row in own]):g}" + (f" ({never} never)" if never else "")

    columns: list[tuple[str, Callable[[Sequence[Row]], str]]] = [
        ("relative MSE\nK", lambda own: f"{np.mean([row['key_relative_mse'] for row in own]):.4f}"),
        ("\nV", lambda own: f"{np.mean([row['value_relative_mse'] for row in own]):.4f}"),
        ("attention, nats [95 %]\nKL", lambda own: _with_interval(own, "attention_kl_nats", ".4f")),
        ("\nJS", lambda own: _with_interval(own, "attention_js_nats", ".4f")),
        ("flipped pairs\nof heads", lambda own: _with_interval(own, "flips", ".1%")),
        ("\nat first", lambda own: f"{np.mean([row['flips_first'] for row in own]):.1%}"),
        ("\nof all mass", lambda own: _with_interval(own, "flips_of_all_mass", ".1%")),
        ("next token's\nKL, nats", lambda own: _with_interval(own, "kl_nats", ".3f")),
        ("median step\nflips begin", lambda own: steps(own, "flip_step")),
        ("\ntext diverges", lambda own: steps(own, "divergence_step")),
        ("answer, tokens\n", lambda own: _with_interval(own, "response_length", ".0f")),
    ]
    groups = settings(rows)
    shown = table(
        ["method\n", *(header for header, _ in columns)],
        [[label, *(cell(own) for _, cell in columns)] for label, own in groups.items()],
    )
    known = [[PREDICTORS[name], str(a), str(b)] for name, (a, b) in correlations(rows, seed).items()]
    return f"{shown}\n\n" + table(["Spearman's ρ with the step of divergence", "all pairs", "within methods"], known)


def draw(rows: Sequence[Row]) -> dict[str, bytes]:
    """`by_step.png` and `flips_and_text.png`."""
    groups = settings(rows)
    looks = {}
    methods = list(dict.fromkeys(row["of_method"] for row in rows))
    for label, own in groups.items():
        look = plots.look(methods.index(own[0]["of_method"])) | {"linestyle": "--" if own[0]["control"] else "-"}
        looks[label] = look
    panels = {"flips": "flipped pairs of heads' top tokens", "attention_js_nats": "JS of attention, nats"}
    panels |= {"kl_nats": "next token's KL, nats"}
    fig, axes = plots.figure(len(panels))
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        for label, own in groups.items():
            most = max(len(row[f"{name}_by_step"]) for row in own)
            padded = np.full((len(own), most), np.nan)
            for i, row in enumerate(own):
                padded[i, : len(row[f"{name}_by_step"])] = row[f"{name}_by_step"]
            width = max(1, most // 16)
            starts = range(0, most, width)
            y = [np.nanmean(padded[:, i : i + width]) for i in starts]
            axis.plot([i + 1 + width / 2 for i in starts], y, label=label, **looks[label])
        axis.set(title=title, xlabel="decoded step", ylim=(0, None))
    drawn = {"by_step.png": plots.as_png(fig, "Over the reference's answer, mean over prompts")}
    fig, axes = plots.figure(2)
    for axis, name in zip(axes, ("flip_step_or_end", "flips_first"), strict=True):
        for label, own in groups.items():
            face = "none" if own[0]["control"] else looks[label]["color"]
            look = looks[label] | {"linestyle": "none", "markerfacecolor": face}
            x, y = ([row[column] for row in own] for column in (name, "divergence_step_or_end"))
            axis.plot(x, y, label=label, **look)
        axis.set(xlabel=PREDICTORS[name], yscale="log")
    axes[0].set_ylabel("first divergent token")
    return drawn | {"flips_and_text.png": plots.as_png(fig, "Each point a prompt; what never begins is at the end")}


def sentences(rows: Sequence[Row], flipped: float, seed: int) -> list[str]:
    """What was asked, what was found, how sure."""
    groups, known = settings(rows), correlations(rows, seed)
    everywhere, within = known["flip_step_or_end"]
    finite = [name for name, (over_all, _) in known.items() if np.isfinite(over_all.value)]
    best = max(finite, key=lambda name: abs(known[name][0].value), default=None)
    strongest = (
        "none of the predictors varies"
        if best is None
        else (f"the strongest of the predictors over all is {PREDICTORS[best]} (ρ {known[best][0]})")
    )
    ratios = []
    for label, own in groups.items():
        control = next((g for g in groups.values() if g[0]["control"] and g[0]["of_method"] == label), None)
        if control is not None and not own[0]["control"]:
            pairs = zip(own, control, strict=True)
            log = np.array([np.log(a["attention_js_nats"] / b["attention_js_nats"]) for a, b in pairs])[:, None]
            low, high = interval(log, np.ones_like(log), seed=seed) if len(log) > 1 else (np.nan, np.nan)
            ratios.append(f"×{Estimate(*(float(x) for x in np.exp([log.mean(), low, high])))} ({label})")
    at_once = np.mean([row["flip_step"] == 1 for row in rows])
    verdict = "predicts" if np.isfinite(within.low) and within.low > 0 else "is not shown to predict"
    return [
        f"Asked: does the step at which the ranks of {rows[0]['model']}'s most attended tokens flip predict the step "
        "at which its greedy text leaves the reference's?",
        f"Found: the step at which more than {flipped:.0%} of the pairs are flipped {verdict} it (Spearman's ρ "
        f"{everywhere} over all, {within} within methods; {at_once:.0%} begin at the first step), and {strongest}; "
        f"against scale noise of equal energy, rounding moves attention (JS) by {', '.join(ratios)}.",
        f"How sure: {len(rows)} pairs from {len(next(iter(groups.values())))} prompts, which are what the 95 % "
        "intervals resample; steps are counted up to the end of the reference's answer; it is one text and one model, "
        "and the control is simulated.",
    ]
