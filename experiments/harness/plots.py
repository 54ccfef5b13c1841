"""Plots of result rows in one style: colours that differ for every kind of sight, units on every axis, PNG."""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = dict[str, Any]

# Okabe and Ito's palette without its yellow, which is too light for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX"
STYLE: Any = {
    "figure.dpi": 150,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}


def look(i: int) -> dict[str, Any]:
    """The i-th line's look; beyond the colours the dashes change."""
    n = len(COLOURS)
    return {"color": COLOURS[i % n], "linestyle": DASHES[i // n % len(DASHES)], "marker": MARKERS[i % n]}


def figure(panels: int) -> tuple[Figure, list[Axes]]:
    """A row of panels."""
    with plt.rc_context(STYLE):
        fig, axes = plt.subplots(1, panels, figsize=(4.2 * panels if panels > 1 else 6.4, 3.2), squeeze=False)
    return fig, list(axes[0])


def as_png(fig: Figure, title: str) -> bytes:
    """Finish a figure: title, one legend below all panels."""
    handles, labels = fig.axes[0].get_legend_handles_labels()
    columns = min(len(fig.axes), 2)
    legend = 0.2 * -(-len(labels) // columns) + 0.05  # inches
    fig.set_figheight(fig.get_figheight() + legend)
    with plt.rc_context(STYLE):
        fig.suptitle(title, fontsize=10)
        fig.tight_layout(rect=(0, legend / fig.get_figheight(), 1, 1))
        fig.legend(handles, labels, loc="lower center", ncols=columns)
        buffer = io.BytesIO()
        fig.savefig(buffer, format="png")
    plt.close(fig)
    return buffer.getvalue()


def centres(row: Row) -> list[float]:
    """The middle position of each bucket."""
    ends = [*row["bucket_start"][1:], row["num_tokens"]]
    return [(a + b) / 2 for a, b in zip(row["bucket_start"], ends, strict=True)]


def curve(axis: Axes, x: Sequence[float], y: Sequence[float], sem: Sequence[float | None], label: str, i: int) -> None:
    """A line with a band of one standard error."""
    axis.plot(x, y, label=label, **look(i))
    error = [e or 0.0 for e in sem]
    low, high = ([a + sign * e for a, e in zip(y, error, strict=True)] for sign in (-1, 1))
    axis.fill_between(x, low, high, color=look(i)["color"], alpha=0.15, linewidth=0)


def positions_axis(axis: Axes, row: Row) -> None:
    """x: positions; the part that is not counted in the means is shaded."""
    axis.set_xlabel("position in the text (tokens)")
    axis.set_xlim(0, row["num_tokens"])
    if row["skip_positions"]:
        axis.axvspan(0, row["skip_positions"], color="#f0f0f0", zorder=0)
