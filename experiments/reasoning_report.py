"""What `experiments.reasoning` shows: the table, two plots, and sentences made from the numbers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.harness import conclusion, plots, proportions, run, tasks
from experiments.harness.proportions import Interval
from experiments.harness.table import table
from experiments.reasoning_problems import Source

BINS = 4  # of response lengths, with equally many of the reference's responses
FEWEST = 5  # responses that a point of a curve needs


@dataclass(frozen=True)
class Unit:
    """One method on one kind of problems: `[problems, seeds]`."""

    label: str
    problems: str
    solved: np.ndarray
    tokens: np.ndarray
    ended: float

    def accuracy(self, seed: int) -> Interval:
        if self.solved.min() == self.solved.max():  # resamples of equal values say nothing
            return proportions.wilson(int(self.solved[:, 0].sum()), len(self.solved))
        return proportions.bootstrap(self.solved, seed=seed, within=True)

    def length(self, seed: int) -> Interval:
        return proportions.bootstrap(self.tokens, seed=seed, within=True)


def units(rows: Iterable[run.Row]) -> list[Unit]:
    """In the order in which they were measured; of the seeds that all methods have a row of, which are paired."""
    groups: dict[tuple[str, str], dict[int, run.Row]] = {}
    for row in rows:
        groups.setdefault((row["problems"], row["label"]), {})[row["response_seed"]] = row
    made = []
    for (problems, label), by_seed in groups.items():
        common = set.intersection(*(set(seeds) for (kind, _), seeds in groups.items() if kind == problems))
        own = [by_seed[seed] for seed in sorted(common)]
        solved, tokens = (
            np.array([row[f"{name}_each"] for row in own], float).T for name in ("solved", "response_tokens")
        )
        made.append(Unit(label, problems, solved, tokens, float(np.mean([row["ended"] for row in own]))))
    return made


def against(unit: Unit, reference: Unit, what: str, seed: int) -> Interval:
    """unit − reference of `solved` or `tokens`, paired by problem and seed."""
    return proportions.paired_difference(getattr(unit, what), getattr(reference, what), seed=seed, within=True)


def introduction(model: str, given: tasks.Given, source: Source, count: int, seeds: int) -> str:
    """What is done, with the first problem."""
    first = source.problems[0]
    return conclusion.wrap(
        f"{model} answers up to {count} problems of each kind, {seeds} times each, unquantized (the reference) and "
        f"with all that it reads and writes seen through the packed cache of {len(given.methods)} methods. The first: "
        f"{first.prompt!r}, answer {first.answer!r}.\n"
    )


HEADERS = (
    "method",
    "right\n[95 %]",
    "against the reference\npoints [95 %]",
    "tokens a response\n[95 %]",
    "against the reference\n[95 %]",
    "ended by\nitself",
    "rank correlation of length\nand right answer [95 %]",
)


def _number(interval: Interval, form: str, scale: float = 1.0) -> str:
    value, low, high = (scale * one for one in interval)
    return f"{value:{form}} [{low:{form}}, {high:{form}}]" if np.isfinite(low) else f"{value:{form}}"


def shown(measured: Sequence[Unit], seed: int) -> str:
    """The table of one kind of problems."""
    reference = next(unit for unit in measured if unit.label == tasks.REFERENCE)
    lines = []
    for unit in measured:
        same = unit is reference
        lines.append(
            [
                unit.label,
                proportions.percent(unit.accuracy(seed)),
                "–" if same else _number(against(unit, reference, "solved", seed), "+.1f", 100),
                _number(unit.length(seed), ".1f"),
                "–" if same else _number(against(unit, reference, "tokens", seed), "+.1f"),
                f"{unit.ended:.0%}",
                _number(proportions.spearman(unit.tokens, unit.solved, seed=seed), "+.2f"),
            ]
        )
    return table(HEADERS, lines)


def by_problems(measured: Iterable[Unit]) -> dict[str, list[Unit]]:
    groups: dict[str, list[Unit]] = {}
    for unit in measured:
        groups.setdefault(unit.problems, []).append(unit)
    return groups


def _short(problems: str) -> str:
    return problems.removeprefix("gym:").partition(":")[0].rpartition("/")[2]


def accuracy_against_length(measured: Sequence[Unit], seed: int) -> bytes:
    """One panel a kind of problems, one point a method."""
    groups = by_problems(measured)
    fig, axes = plots.figure(len(groups))
    for axis, (problems, own) in zip(axes, groups.items(), strict=True):
        for i, unit in enumerate(own):
            x, y = unit.length(seed), unit.accuracy(seed)
            x_error = [[max(x.value - x.low, 0)], [max(x.high - x.value, 0)]]
            y_error = [[max(y.value - y.low, 0)], [max(y.high - y.value, 0)]]
            look = plots.look(i)
            axis.errorbar(x.value, y.value, yerr=y_error, xerr=x_error, label=unit.label, elinewidth=0.8, **look)
        axis.set(title=_short(problems), xlabel="tokens a response", ylim=(0, 1))
    axes[0].set_ylabel("right answers")
    return plots.as_png(fig, "Right answers against the length of the response; bars: 95 % over problems and seeds")


def accuracy_by_length(measured: Sequence[Unit]) -> bytes:
    """One panel a kind of problems: right answers among short and long responses of each method."""
    groups = by_problems(measured)
    fig, axes = plots.figure(len(groups))
    for axis, (problems, own) in zip(axes, groups.items(), strict=True):
        reference = next(unit for unit in own if unit.label == tasks.REFERENCE)
        edges = np.unique(np.quantile(reference.tokens, np.linspace(0, 1, BINS + 1)[1:-1]))
        for i, unit in enumerate(own):
            at = np.digitize(unit.tokens, edges, right=True)
            bins = [b for b in range(len(edges) + 1) if (at == b).sum() >= FEWEST]
            rates = [proportions.wilson(int(unit.solved[at == b].sum()), int((at == b).sum())) for b in bins]
            x = [unit.tokens[at == b].mean() * (1 + 0.01 * i) for b in bins]
            y = [rate.value for rate in rates]
            error = [[max(r.value - r.low, 0) for r in rates], [max(r.high - r.value, 0) for r in rates]]
            axis.errorbar(x, y, yerr=error, label=unit.label, elinewidth=0.6, **plots.look(i))
        axis.set(title=_short(problems), xlabel="tokens a response", ylim=(0, 1))
    axes[0].set_ylabel("right answers")
    return plots.as_png(fig, "Right answers among responses of about the same length; bars: 95 % (Wilson)")


def sentences(measured: Sequence[Unit], seed: int) -> list[str]:
    """What was asked, what was found, how sure."""
    said, sure = [], []
    for problems, own in by_problems(measured).items():
        reference = next(unit for unit in own if unit.label == tasks.REFERENCE)
        others = [unit for unit in own if unit is not reference]
        parts = []
        for unit in others:
            right, longer = (against(unit, reference, what, seed) for what in ("solved", "tokens"))
            parts.append(f"{unit.label} {_number(right, '+.0f', 100)} points, {_number(longer, '+.1f')} tokens")
        few = "" if reference.accuracy(seed).low > 0.05 else " (too few to lose)"
        said.append(f"{_short(problems)}, reference {reference.solved.mean():.0%}{few}: {'; '.join(parts)}")
        lost = [unit.label for unit in others if against(unit, reference, "solved", seed).high < 0]
        sure.append(
            f"on {_short(problems)} {', '.join(lost) or 'no method'} loses right answers beyond chance, of "
            f"{reference.solved.shape[0]} problems with {reference.solved.shape[1]} seeds"
        )
        correlated = [
            f"{unit.label} {_number(found, '+.2f')}"
            for unit in own
            if np.isfinite((found := proportions.spearman(unit.tokens, unit.solved, seed=seed)).value)
        ]
        said.append(f"rank correlation of length and right answer: {', '.join(correlated) or 'none, as all are alike'}")
    return [
        "Asked: whether a quantized cache costs right answers, and more of them the longer the response.",
        "Found: " + "; ".join(said) + ".",
        "How sure: " + "; ".join(sure) + "; 95 % intervals by a paired bootstrap over problems and seeds, one model.",
    ]


def conclude(results: run.Run, seed: int) -> None:
    """Draw, and print the tables, the sentences and the files."""
    measured = units(results.rows)
    drawn = {
        "accuracy_against_length.png": accuracy_against_length(measured, seed),
        "accuracy_by_length.png": accuracy_by_length(measured),
    }
    tables = [f"{problems}\n{shown(own, seed)}" for problems, own in by_problems(measured).items()]
    conclusion.conclude(results, drawn, "\n\n".join(tables), sentences(measured, seed))
