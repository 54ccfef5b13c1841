"""The table, the plot and the sentences of `experiments.lm_eval`."""

import math
from collections.abc import Sequence

from experiments.harness import plots, proportions, run, tasks
from experiments.harness.table import table

PANELS = 6


def against(row: run.Row, rows: Sequence[run.Row]) -> proportions.Interval | None:
    """Less the reference's, paired by document; None for the reference itself."""
    if row["label"] == tasks.REFERENCE:
        return None
    reference = next(
        one
        for one in rows
        if (one["task"], one["metric"], one["label"]) == (row["task"], row["metric"], tasks.REFERENCE)
    )
    if row["value_each"] is None or reference["value_each"] is None:
        return proportions.Interval(row["value"] - reference["value"], math.nan, math.nan)
    return proportions.paired_difference(row["value_each"], reference["value_each"], seed=row["seed"])


def interval_text(found: proportions.Interval | None, form: str) -> str:
    if found is None:
        return "–"
    return f"{found.value:{form}}" + (f" [{found.low:{form}}, {found.high:{form}}]" if math.isfinite(found.low) else "")


def _interval(row: run.Row) -> proportions.Interval:
    return proportions.Interval(
        *(math.nan if row[f"value{end}"] is None else row[f"value{end}"] for end in ("", "_lo", "_hi"))
    )


def metrics_png(rows: Sequence[run.Row]) -> bytes:
    """One panel a metric, one line a method; dashed: the reference."""
    every = list(dict.fromkeys((row["task"], row["metric"]) for row in rows))
    names = every[:PANELS]
    labels = list(dict.fromkeys(row["label"] for row in rows))
    fig, axes = plots.figure(len(names))
    for axis, (task, metric) in zip(axes, names, strict=True):
        for row in (row for row in rows if (row["task"], row["metric"]) == (task, metric)):
            found, y = _interval(row), -labels.index(row["label"])
            error = [[max(found.value - found.low, 0)], [max(found.high - found.value, 0)]]
            look = plots.look(labels.index(row["label"])) | {"linestyle": "none"}
            axis.errorbar(found.value, y, xerr=error if math.isfinite(found.low) else None, label=row["label"], **look)
            if row["label"] == tasks.REFERENCE:
                axis.axvline(found.value, color="#888888", linestyle="--", linewidth=0.8)
        axis.set(title=task, xlabel=metric, yticks=[])
    which = f" (the first {PANELS} of {len(every)} metrics)" if len(every) > PANELS else ""
    return plots.as_png(fig, f"Tasks through the quantized cache{which}; bars: 95 % over documents")


def sentences(rows: Sequence[run.Row]) -> list[str]:
    """What was asked, what was found, how sure."""
    parts, apart = [], 0
    for row in rows:
        gap = against(row, rows)
        if gap is not None:
            parts.append(f"{row['label']} {interval_text(gap, '+.3f')} {row['metric']} on {row['task']}")
            apart += gap.high < 0 or gap.low > 0
    documents = sorted({row["documents"] for row in rows if row["documents"]})
    return [
        f"Asked: what a quantized cache changes on {', '.join(dict.fromkeys(row['task'] for row in rows))}.",
        f"Found, less the reference: {'; '.join(parts)}.",
        f"How sure: {apart} of {len(parts)} differences exclude 0 at 95 % (paired bootstrap over "
        f"{' or '.join(map(str, documents)) or 'no'} documents); "
        f"{min(row['quantized'] for row in rows if row['packed']):.0%} or more of what was read lay quantized.",
    ]


def shown(rows: Sequence[run.Row]) -> str:
    """The table."""
    lines = [
        [
            row["label"],
            row["task"],
            row["metric"],
            interval_text(_interval(row), ".3f"),
            interval_text(against(row, rows), "+.3f"),
            f"{row['quantized']:.0%}",
        ]
        for row in rows
    ]
    headers = ["method", "task", "metric", "value [95 %]", "less the reference [95 %]", "quantized"]
    return table(headers, lines)
