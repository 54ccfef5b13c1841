"""What `experiments.retrieval` shows: the table, the heat maps, and sentences made from the numbers."""

from collections.abc import Iterable, Sequence

import numpy as np

from experiments.harness import plots, proportions, run, tasks
from experiments.harness.table import table
from experiments.pseudo_decode_report import wrap, written

SCORES = ("generated", "ranked")
REGIMES = ("static", "accumulated")
Cells = list[run.Row]  # the rows of one unit, one a depth


def select(rows: Iterable[run.Row], **where: object) -> Cells:
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


def pooled(cells: Cells, score: str) -> proportions.Interval:
    """The rate over all depths. Wilson's interval takes the questions of one context for independent."""
    hits = np.array([row[f"{score}_each"] for row in cells])
    return proportions.wilson(int(hits.sum()), hits.size)


def each(cells: Cells, column: str) -> np.ndarray:
    """`[contexts, depths]`."""
    return np.array([row[f"{column}_each"] for row in cells], float).T


def passing(rows: Sequence[run.Row], family: str, length: int, least: float) -> tuple[str, ...]:
    """The scores by which the reference answers at least this part."""
    cells = select(rows, family=family, length=length, label=tasks.REFERENCE)
    return tuple(score for score in SCORES if cells and pooled(cells, score).value >= least)


def groups(rows: Sequence[run.Row]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((row["family"], row["length"]) for row in rows))


def introduction(model: str, given: tasks.Given, contexts: int, depths: int) -> str:
    """What is done, for a reader who has not seen the papers."""
    return wrap(
        f"{model} reads {contexts} contexts of each length with {depths} facts each, unquantized (the reference) and "
        f"through the packed cache of {len(given.methods)} methods, and is asked for every fact. Static: the cache "
        "holds what the reference computed. Accumulated: what the quantized model itself has read.\n"
    )


def _lines(rows: Sequence[run.Row], family: str, length: int, seed: int) -> list[list[str]]:
    """One line a method."""
    reference = select(rows, family=family, length=length, label=tasks.REFERENCE)
    shown = []
    for label in dict.fromkeys(row["label"] for row in select(rows, family=family, length=length)):
        units = [select(rows, family=family, length=length, label=label, regime=r) for r in ("none", *REGIMES)]
        line = [label]
        for cells in units[1:] if label != tasks.REFERENCE else [units[0], []]:
            line += [proportions.percent(pooled(cells, score)) if cells else "–" for score in SCORES]
        for cells in units[1:] if label != tasks.REFERENCE else [[], []]:
            line.append(_signed(lost(cells, reference, seed)) if cells else "–")
        shown.append(line)
    return shown


def lost(cells: Cells, reference: Cells, seed: int) -> proportions.Interval:
    """ln p(answer) less that of the reference, in nats, paired; the bootstrap draws contexts."""
    return proportions.paired_difference(each(cells, "answer_nats"), each(reference, "answer_nats"), seed=seed)


def _signed(interval: proportions.Interval) -> str:
    return f"{interval.value:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]"


HEADERS = (
    "method",
    "static\ngenerated [95 %]",
    "\nranked first [95 %]",
    "accumulated\ngenerated [95 %]",
    "\nranked first [95 %]",
    "ln p(answer) against the reference\nstatic [95 %]",
    "\naccumulated [95 %]",
)


def check_changed(rows: Sequence[run.Row]) -> None:
    """Raise ValueError where a method gives every answer exactly the reference's probability: it was not read."""
    for family, length in groups(rows):
        reference = each(select(rows, family=family, length=length, label=tasks.REFERENCE), "answer_nats")
        for row in select(rows, family=family, length=length, depth=0):
            cells = select(rows, family=family, length=length, label=row["label"], regime=row["regime"])
            if row["packed"] and np.array_equal(each(cells, "answer_nats"), reference):
                raise ValueError(
                    f"{row['label']}, {row['regime']}: nothing differs from the reference, so that nothing "
                    "quantized was read; pass a longer --length, or a smaller --sink or --group"
                )


def heat_map(rows: Sequence[run.Row], family: str, scores: Sequence[str]) -> bytes:
    """One panel a regime and score; y: method and length, x: depth."""
    own = select(rows, family=family)
    panels = [(score, regime) for score in SCORES for regime in REGIMES]
    units = list(dict.fromkeys((row["label"], row["length"]) for row in own))
    units = [
        (label, length)
        for label in dict.fromkeys(label for label, _ in units)
        for length in sorted({length for one, length in units if one == label})
    ]
    depths = sorted({(row["depth"], row["depth_of_context"]) for row in own})
    fig, axes = plots.figure(len(panels))
    fig.set_size_inches(2.3 * len(panels) + 1.6, 0.26 * len(units) + 1.3)
    for axis, (score, regime) in zip(axes, panels, strict=True):
        rate = np.full((len(units), len(depths)), np.nan)
        for y, (label, length) in enumerate(units):
            which = "none" if label == tasks.REFERENCE else regime
            for row in select(own, label=label, length=length, regime=which):
                rate[y, row["depth"]] = row[score]
        axis.imshow(rate, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        for (y, x), value in np.ndenumerate(rate):
            if np.isfinite(value):
                axis.text(
                    x,
                    y,
                    f"{100 * value:.0f}",
                    ha="center",
                    va="center",
                    fontsize=6,
                    color="white" if value < 0.6 else "black",
                )
        axis.grid(False)
        axis.set_title(f"{score}, {regime}" + ("" if score in scores else "\n(reference too low)"), fontsize=8)
        axis.set_xticks(range(len(depths)), [f"{100 * depth:.0f} %" for _, depth in depths], fontsize=7)
        axis.set_xlabel("depth of the fact", fontsize=7)
        axis.set_yticks(range(len(units)), [f"{label}, {length}" for label, length in units], fontsize=7)
        if axis is not axes[0]:
            axis.tick_params(labelleft=False)
    count, model = own[0]["contexts"], own[0]["model"].rstrip("/").rpartition("/")[2]
    return plots.as_png(fig, f"{family}: percent of {count} contexts answered, by length and depth; {model}")


def sentences(rows: Sequence[run.Row], least: float, seed: int) -> list[str]:
    """What was asked, what was found, how sure."""
    used = {group: scores for group in groups(rows) if (scores := passing(rows, *group, least))}
    unused = [f"{family} at {length}" for family, length in groups(rows) if (family, length) not in used]
    asked = "Asked: whether a fact can still be found in a quantized cache, and whether errors that accumulate matter "
    asked += f"beyond errors made once, on {', '.join(f'{f} at {n} tokens' for f, n in used) or 'no family'}"
    asked += f"; not used, as the reference passes less than {least:.0%}: {', '.join(unused)}." if unused else "."
    labels = [one for one in dict.fromkeys(row["label"] for row in rows) if one != tasks.REFERENCE]
    if not used or not labels:
        sure = "How sure: the reference fails these prompts, so no method was asked."
        return [asked, "Found: nothing about the methods.", sure]
    found: list[str] = []
    gaps_found: list[str] = []
    separated = 0
    for label in labels:
        hits: dict[str, list[np.ndarray]] = {regime: [] for regime in REGIMES}
        gaps = []
        for (family, length), scores in used.items():
            where = {"family": family, "length": length}
            units = {r: select(rows, **where, label=label, regime=r) for r in REGIMES}
            if all(units.values()):
                for regime in REGIMES:
                    hits[regime].append(np.concatenate([each(units[regime], score) for score in scores], axis=1))
                gaps.append([each(units[r], "answer_nats").mean(1) for r in REGIMES])
        if gaps:
            static, accumulated = (np.concatenate(hits[r], axis=1) for r in REGIMES)
            found.append(f"{label} {static.mean():.0%} static and {accumulated.mean():.0%} accumulated")
            a, b = (np.stack([gap[i] for gap in gaps], axis=1) for i in (1, 0))
            gap = proportions.paired_difference(a, b, seed=seed)
            separated += gap.high < 0 or gap.low > 0
            gaps_found.append(f"{label} {_signed(gap)}")
    return [
        asked,
        "Found (generated and ranked together, where the reference passes): " + "; ".join(found) + ".",
        f"How sure: ln p(answer), accumulated less static, in nats with 95 % over contexts: {'; '.join(gaps_found)}; "
        f"{separated} of {len(gaps_found)} exclude 0. {rows[0]['contexts']} contexts a cell, one model.",
    ]


def conclude(results: run.Run, least: float, seed: int) -> None:
    """Check, draw, and print the tables, the sentences and the files."""
    rows = results.rows
    check_changed(rows)
    drawn, said = [], []
    for family in dict.fromkeys(row["family"] for row in rows):
        lengths = [length for one, length in groups(rows) if one == family]
        passed = {score for length in lengths for score in passing(rows, family, length, least)}
        drawn.append(results.write(f"{family}.png", heat_map(rows, family, sorted(passed))))
        for length in lengths:
            scores = passing(rows, family, length, least)
            note = "" if len(scores) == 2 else f" (reference passes by: {', '.join(scores) or 'none; not used'})"
            said.append(f"\n{family}, {length} tokens{note}\n{table(HEADERS, _lines(rows, family, length, seed))}")
    results.tell("\n".join([*said, "", *(wrap(one, "  ", "• ") for one in sentences(rows, least, seed))]))
    print(written(results.path, drawn))
