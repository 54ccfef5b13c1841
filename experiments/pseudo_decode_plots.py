"""The plots of `experiments.pseudo_decode`, from its rows."""

from experiments.harness import plots
from experiments.pseudo_decode_report import REGIMES, Row, Unit, units


def draw(rows: list[Row]) -> dict[str, bytes]:
    """Every plot that the rows allow, as PNG by file name."""
    measured = units(rows)
    return {
        "kl_by_position.png": kl_by_position(measured),
        "attention_error_by_position.png": attention_error_by_position(measured),
        "kl_against_bytes.png": kl_against_bytes(measured),
    }


def _regimes(measured: list[Unit]) -> list[str]:
    return [regime for regime in REGIMES if any(regime in unit.rows for unit in measured)]


def _about(measured: list[Unit]) -> str:
    row = measured[0].any
    return f"{row['model'].rstrip('/').split('/')[-1]} reading {row['text'].split('/')[-1]}"


def _top(measured: list[Unit], curve: str) -> float:
    """A little above the highest band of all panels, so that they share one scale."""
    rows = [row for unit in measured for row in unit.rows.values()]
    return 1.05 * max(y + (e or 0.0) for row in rows for y, e in zip(row[curve], row[curve + "_sem"], strict=True))


def kl_by_position(measured: list[Unit]) -> bytes:
    """One panel a regime, on one scale."""
    shown = _regimes(measured)
    fig, axes = plots.figure(len(shown))
    top = _top(measured, "kl_by_bucket")
    for axis, regime in zip(axes, shown, strict=True):
        for i, unit in enumerate(measured):
            if row := unit.rows.get(regime):
                plots.curve(axis, plots.centres(row), row["kl_by_bucket"], row["kl_by_bucket_sem"], unit.name, i)
        plots.positions_axis(axis, measured[0].any)
        axis.set_ylim(0, top or None)
        axis.set_title(regime)
    axes[0].set_ylabel("KL(reference ‖ quantized), nats")
    return plots.as_png(fig, f"Distance of the next-token distribution: {_about(measured)}")


def attention_error_by_position(measured: list[Unit]) -> bytes:
    """One panel a regime on one scale, and what accumulation adds: the gap."""
    shown = _regimes(measured)
    both = len(shown) == len(REGIMES)
    fig, axes = plots.figure(len(shown) + both)
    name = "attention_mae_by_bucket"
    top = _top(measured, name)
    for axis, regime in zip(axes, shown, strict=False):
        for i, unit in enumerate(measured):
            if row := unit.rows.get(regime):
                plots.curve(axis, plots.centres(row), row[name], row[name + "_sem"], unit.name, i)
        axis.set_ylim(0, top or None)
        axis.set_title(regime)
    if both:
        for i, unit in enumerate(measured):
            if len(unit.rows) == len(REGIMES):
                static, accumulated = (unit.rows[regime][name] for regime in REGIMES)
                gap = [a - s for s, a in zip(static, accumulated, strict=True)]
                axes[-1].plot(plots.centres(unit.any), gap, label=unit.name, **plots.look(i))
        axes[-1].axhline(0, color="#888888", linewidth=0.8)
        axes[-1].set_title("gap: accumulated − static")
    for axis in axes:
        plots.positions_axis(axis, measured[0].any)
    axes[0].set_ylabel("mean |O − O_ref| (units of V)")
    return plots.as_png(fig, f"Error of the attention output before W_O: {_about(measured)}")


def kl_against_bytes(measured: list[Unit]) -> bytes:
    """Bytes as stored; accumulated filled, static hollow, a line between the two."""
    fig, (axis,) = plots.figure(1)
    for i, unit in enumerate(measured):
        colour, marker = plots.look(i)["color"], plots.look(i)["marker"]
        for regime, row in unit.rows.items():
            axis.errorbar(
                row["cache_bytes"] / 2**20,
                row["kl_nats"],
                yerr=row["kl_nats_sem"] or 0.0,
                color=colour,
                marker=marker,
                markersize=7,
                markerfacecolor="white" if regime == "static" else colour,
                label=f"{unit.name}: {row['cache_bytes'] / 2**20:.4g} MiB" if regime == unit.last["regime"] else None,
            )
    dense = measured[0].any["cache_bytes_16_bit"] / 2**20
    axis.axvline(dense, color="#888888", linestyle=":", label=f"unquantized in 16 bits: {dense:.4g} MiB")
    axis.set_xlabel("cache as stored, with its full-precision part (MiB)")
    axis.set_xlim(left=0)
    axis.set_ylabel("KL(reference ‖ quantized), nats")
    axis.set_title("filled: accumulated, hollow: static; bars: one standard error", fontsize=9)
    axis.set_ylim(bottom=0)
    return plots.as_png(fig, f"What the bytes buy: {_about(measured)}")
