"""What `experiments.pseudo_decode` shows: the introduction, the table, sentences made from the numbers, and plots."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from experiments.harness import conclusion
from experiments.harness.table import table

Row = dict[str, Any]
REGIMES = ("static", "accumulated")


def introduction(model: str, text: str, shape: tuple[int, ...], blocks: tuple[int, ...], skip: int) -> str:
    """What is compared, for a reader who has not seen the papers."""
    batch, tokens = shape
    many, sizes = f"{batch} sequences of " if batch > 1 else "", " and ".join(map(str, blocks))
    paragraphs = [
        conclusion.wrap(
            f"{model} reads {many}{tokens:,} tokens of {text}, in blocks of {sizes}. Each block attends to a cache of "
            "the keys and values of all earlier ones: once unquantized (the reference), and through each method's "
            "packed cache."
        ),
        conclusion.wrap(
            "the cache is filled with the reference's keys and values. A rounding error is read, but never becomes an "
            "input: so prefill sees a method.",
            " " * 15,
            "  static       ",
        ),
        conclusion.wrap(
            "the cache is filled with what the quantized run itself computed. Errors travel down the layers and on in "
            "time: so decoding sees a method.",
            " " * 15,
            "  accumulated  ",
        ),
        conclusion.wrap(
            "KL is how far the quantized run's next-token distribution is from the reference's, in nats; 0 is "
            f"identical. Positions from {skip} on are counted."
        ),
    ]
    return "\n".join([*paragraphs, ""])


def window(row: Row) -> tuple[int, ...]:
    return tuple(row[name] for name in ("sink", "k_recent", "k_group", "v_recent", "v_group"))


class Unit:
    """One method at one block size: its rows by regime, and a name that is unique in the run."""

    def __init__(self, rows: list[Row], name: str) -> None:
        self.name, self.rows = name, {row["regime"]: row for row in rows}
        self.any = rows[0]
        self.last = self.rows.get("accumulated", self.any)  # what the single-regime columns show

    def get(self, regime: str, column: str) -> float | None:
        return self.rows[regime][column] if regime in self.rows else None

    def ratio(self) -> float | None:
        """KL accumulated / static."""
        static, accumulated = self.get("static", "kl_nats"), self.get("accumulated", "kl_nats")
        return accumulated / static if static and accumulated is not None else None


def units(rows: Iterable[Row]) -> list[Unit]:
    """The rows' methods and block sizes, in the order in which they were measured. What differs is in the name."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["block_size"]), []).append(row)
    firsts = [group[0] for group in groups.values()]
    blocks = len({row["block_size"] for row in firsts}) > 1
    labels: dict[str, set[str]] = {}
    for row in firsts:
        labels.setdefault(row["label"], set()).add(row["method"])

    def name(row: Row) -> str:
        label = row["label"] if len(labels[row["label"]]) == 1 else row["method"]
        return label + (f", b={row['block_size']}" if blocks else "")

    return [Unit(group, name(group[0])) for group in groups.values()]


def number(value: float | None, form: str = ".3g") -> str:
    return "–" if value is None or not math.isfinite(value) else format(value, form)


def _perplexity(value: float | None) -> str:
    return number(value, ".2f" if value is not None and value < 1e5 else ".3g")


def _with_sem(unit: Unit, regime: str) -> str:
    value, error = unit.get(regime, "kl_nats"), unit.get(regime, "kl_nats_sem")
    return number(value, ".4f") + (f" ±{number(error, '.4f')}" if error is not None else "")


def _table(measured: list[Unit]) -> str:
    over = measured[0].any["kl_nats_sem_over"]
    correlated = " (too small, as they are correlated; --batch gives one over sequences)" if over == "positions" else ""
    columns: list[tuple[str, Callable[[Unit], str]]] = [
        ("method", lambda u: u.name),
        ("bits a number\nstore", lambda u: number(u.any["bits_per_element_store"], ".2f")),
        ("\ncache", lambda u: number(u.any["bits_per_element_cache"], ".2f")),
        ("KL, nats\nstatic", lambda u: _with_sem(u, "static")),
        ("\naccumulated", lambda u: _with_sem(u, "accumulated")),
        ("\nratio", lambda u: number(u.ratio(), ".2f")),
        ("same top-1\ntoken", lambda u: number(u.last["top1_agreement"], ".1%")),
        ("perplexity\n", lambda u: _perplexity(u.last["perplexity"])),
        ("attention error\nstatic", lambda u: number(u.get("static", "attention_error_relative"), ".1%")),
        ("\naccumulated", lambda u: number(u.get("accumulated", "attention_error_relative"), ".1%")),
        ("‖k̂‖/‖k‖\n", _norms),
    ]
    reference = measured[0].any
    windows = {window(unit.any) for unit in measured}
    if len(windows) > 1:
        columns.insert(1, ("full precision\nsink, K, V", lambda u: "{}, {}+{}, {}+{}".format(*window(u.any))))
        how = (
            "Full precision: the first tokens (sink), then of K and V the newest, as recent+group: a side rounds group "
            "tokens whenever it holds recent+group. These methods differ in it: --sink, --recent and --group make it "
            "equal."
        )
    else:
        how = "In full precision: the first {} tokens, of K the newest {}+{}, of V {}+{} (recent + group)."
        how = how.format(*windows.pop())
    notes = [
        f"Perplexity of the reference: {_perplexity(reference['perplexity_reference'])}. ± is one standard error, over "
        f"{over}{correlated}. Bits a number: of the main store (codes and scales), and of the whole cache, whose "
        "full-precision part weighs less the longer the text.",
        "Attention error: mean |O − O_ref| / mean |O_ref| before W_O, mean over layers. ‖k̂‖/‖k‖: the length of a key "
        "after rounding against before, mean ± spread over tokens. This, the same top-1 token and perplexity are "
        f"{_main_regime(measured)}.",
        how,
    ]
    shown = table([header for header, _ in columns], [[cell(unit) for _, cell in columns] for unit in measured])
    return "\n".join([shown, "", *map(conclusion.wrap, notes)])


def _main_regime(measured: list[Unit]) -> str:
    """The regime of the columns that show only one."""
    return "accumulated" if any("accumulated" in unit.rows for unit in measured) else "static"


def _norms(unit: Unit) -> str:
    mean, spread = unit.last["key_norm_ratio_mean"], unit.last["key_norm_ratio_std"]
    return "–" if mean is None else f"{mean:.3f} ±{spread:.3f}"


def _interval(unit: Unit, regime: str) -> tuple[float, float]:
    row = unit.rows[regime]
    half = 1.96 * (row["kl_nats_sem"] or 0.0)
    return row["kl_nats"] - half, row["kl_nats"] + half


def _ranking(measured: list[Unit], regime: str) -> list[str]:
    """Which of the methods that quantize is best, and whether the others' intervals overlap."""
    ranked = sorted(
        (u for u in measured if regime in u.rows and u.any["layers_quantized"]), key=lambda u: u.rows[regime]["kl_nats"]
    )
    if len(ranked) < 2:
        return []
    best, *others = ranked
    low_to_high = _interval(best, regime)
    close = [u.name for u in others if _interval(u, regime)[0] <= low_to_high[1]]
    worst = others[-1]
    text = f"Lowest {regime} KL: {best.name}, {best.rows[regime]['kl_nats']:.4f} nats"
    if best.rows[regime]["kl_nats"] > 0:
        text += f", {worst.rows[regime]['kl_nats'] / best.rows[regime]['kl_nats']:.1f} times below {worst.name}"
    if close:
        text += f". Its 95 % interval overlaps that of {', '.join(close)}: this text does not tell them apart"
    else:
        text += "; no other method's 95 % interval overlaps its own"
    return [text + "."]


def _regimes(measured: list[Unit]) -> list[str]:
    """What accumulation does to each method, and to their order."""
    both = [u for u in measured if u.ratio() is not None]
    if not both:
        return []
    text = "From static to accumulated, KL changes by " + ", ".join(f"×{u.ratio():.2f} ({u.name})" for u in both) + "."
    if len(both) == 1:
        return [text]
    static, accumulated = (sorted(both, key=lambda u: u.rows[r]["kl_nats"]) for r in REGIMES)
    if static == accumulated:
        return [text, "Both regimes rank the methods alike."]
    order = " < ".join(u.name for u in static)
    return [text, f"The regimes rank the methods differently; by static KL: {order}."]


def conclusions(rows: list[Row]) -> str:
    """The table and what it says, in sentences."""
    measured = units(rows)
    said: list[str] = []
    for block in dict.fromkeys(u.any["block_size"] for u in measured):
        group = [u for u in measured if u.any["block_size"] == block]
        said += _ranking(group, _main_regime(group))
        said += _regimes(group)
    small = [u.any for u in measured]
    sizes, dense = [row["cache_bytes"] / 2**20 for row in small], small[0]["cache_bytes_16_bit"] / 2**20
    said.append(f"Cache at the end: {min(sizes):.2f} to {max(sizes):.2f} MiB as stored; in 16 bits {dense:.2f} MiB.")
    speeds = [row["tokens_per_second"] for row in small if row["tokens_per_second"]]
    if speeds:
        said.append(
            f"Speed: {min(speeds):,.0f} to {max(speeds):,.0f} tokens a second, the reference and all regimes side by "
            f"side, without compilation. Peak memory: {max(r['peak_memory_bytes'] for r in small) / 2**30:.2f} GiB."
        )
    return "\n".join(["", _table(measured), "", *conclusion.said(said)])
