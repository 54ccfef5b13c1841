"""Every published method on one model at equal windows: what a number costs, and what it does while decoding.

The methods read one text side by side with the unquantized reference, as in `experiments.pseudo_decode`, all with the
same sink, recent window and group, and are ranked by accumulated KL. The plot sets that against the bytes of the whole
cache; a method is worth its bytes where none is both below it and to its left. Example:

  python -m experiments.leaderboard --out=out/board        (again with --resume after an interruption)
"""

import contextlib
import functools
import hashlib
import shutil
from pathlib import Path

from absl import flags

import kvq_jax as kvq
import models
from experiments import pseudo_decode as decode
from experiments import pseudo_decode_report as report
from experiments.harness import conclusion, environment, inputs, plots
from experiments.harness import flags as common
from experiments.harness.progress import Progress
from experiments.harness.table import table

BINARY = "leaderboard"
flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(decode)
METHODS = [
    "bf16",
    "fp8",
    "fp8:scaling=tensor",
    "int8",
    "int4",
    "int4:symmetric=false",
    "hf_quantized_cache",
    "kivi:bits=4",
    "kivi:bits=2",
    "kivi:bits=2,subgroup=128",
    "kitty",
    "kitty:boost=0.25",
    "quarot:bits=4",
    "quarot:bits=2",
    "hadamard:bits=2",
    "kvarn:bits=2",
    "kvarn:bits=2,normalize=equivariant",
    "kvarn:bits=2,scales=fp8",
    "kvarn:k_bits=4,v_bits=2",
    "tile",
    "tile:bits=3",
    "tile:bits=4",
    "kvquant:bits=2",
    "kvquant:bits=3",
    "kvquant:bits=4",
    "turboquant:bits=4",
    "turboquant:bits=3",
    "ultra_tq:bits=4",
    "ultraquant",
    "ultraquant:c=0.195",
    "ultraquant:protect=2",
    "mxfp4",
    "mxint4",
    "nvfp4",
]
# Methods that need constants and get none from --constants are calibrated on sequences of the same text that nothing
# is measured on: those right after. Kept in the folder, by all that determines them.
SEQUENCES, TOKENS, CONSTANTS = 4, 1024, Path("out", "constants")


def calibrated(scheme: kvq.Scheme, model: models.Model) -> kvq.Constants:
    """The constants of a method, read or made."""
    start = common.TEXT_START.value + common.BATCH.value * common.NUM_TOKENS.value
    tokens = inputs.read_windows(model, SEQUENCES, TOKENS, start)
    versions = environment.versions()
    determines = [scheme.calibrated(), model.digest, inputs.digest(tokens), versions["jax"], versions["kvq-jax"]]
    path = CONSTANTS / hashlib.sha256("\n".join(determines).encode()).hexdigest()[:16]
    if path.is_dir():
        with contextlib.suppress(ValueError):  # an interrupted save is made again
            return kvq.load_constants(path, scheme, model_digest=model.digest)
    with Progress(f"calibration of {scheme.calibrated()}, {SEQUENCES} times {TOKENS} tokens", unit="step") as progress:
        constants = kvq.calibrate(
            scheme,
            model.forward,
            tokens,
            model_digest=model.digest,
            text_digest=inputs.digest(tokens),
            progress=progress,
            workdir=CONSTANTS / "captures",
        )
    kvq.save_constants(path, constants)
    return constants


def _cell(unit: report.Unit, regime: str, column: str, form: str) -> str:
    """A mean with its 95 % interval."""
    if regime not in unit.rows:
        return "–"
    mean, low, high = (unit.rows[regime][column + end] for end in ("", "_lo", "_hi"))
    return format(mean, form) + ("" if low is None else f" [{low:{form}}, {high:{form}}]")


def ranking(units: list[report.Unit]) -> list[report.Unit]:
    """By accumulated KL (static, where that is all there is), lowest first."""
    return sorted(units, key=lambda unit: unit.last["kl_nats"])


def leaderboard(units: list[report.Unit]) -> str:
    """The table and what it says."""
    headers = ["method", "bits a number\nstore", "\ncache", "KL, nats [95 %]\naccumulated", "\nstatic"]
    headers += [
        "same top-1 token [95 %]\naccumulated",
        "\nstatic",
        "attention error\naccumulated",
        "\nstatic",
        "tokens\na second",
    ]
    lines = []
    for unit in ranking(units):
        error = [unit.get(regime, "attention_error_relative") for regime in ("accumulated", "static")]
        lines.append(
            [
                unit.name,
                report.number(unit.any["bits_per_element_store"], ".2f"),
                f"{unit.any['bits_per_element_cache']:.2f}",
                *(_cell(unit, regime, "kl_nats", ".4f") for regime in ("accumulated", "static")),
                *(_cell(unit, regime, "top1_agreement", ".1%") for regime in ("accumulated", "static")),
                *("–" if x is None else f"{x:.1%}" for x in error),
                f"{unit.any['tokens_per_second'] or float('nan'):.0f}",
            ]
        )
    return table(headers, lines)


def windows(units: list[report.Unit]) -> str:
    """The full-precision window of the methods, and which differ from it."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for unit in units:
        groups.setdefault(report.window(unit.any), []).append(unit.name)
    (most, _), *others = sorted(groups.items(), key=lambda group: -len(group[1]))
    said = "In full precision: the first {} tokens, of K the newest {}+{}, of V {}+{} (recent + group)".format(*most)
    return said + "".join("; but {}, {}+{}, {}+{}: ".format(*window) + ", ".join(n) for window, n in others) + "."


def pareto(units: list[report.Unit]) -> list[report.Unit]:
    """Methods that no other beats in both bytes and accumulated KL, by bytes."""
    best: list[report.Unit] = []
    for unit in sorted(units, key=lambda unit: (unit.any["cache_bytes"], unit.last["kl_nats"])):
        if not best or unit.last["kl_nats"] < best[-1].last["kl_nats"]:
            best.append(unit)
    return best


def kl_against_bytes(units: list[report.Unit]) -> bytes:
    """One point a method, named beside it; the line joins those that no other beats in both."""
    fig, (axis,) = plots.figure(1)
    fig.set_size_inches(8.4, 5.4)
    shown = [unit for unit in units if unit.last["kl_nats"] > 0]
    for i, unit in enumerate(shown):
        row, x = unit.last, unit.any["cache_bytes"] / 2**20
        low, high = (row["kl_nats"] if end is None else end for end in (row["kl_nats_lo"], row["kl_nats_hi"]))
        error = [[max(row["kl_nats"] - low, 0)], [max(high - row["kl_nats"], 0)]]
        look = plots.look(i)
        axis.errorbar(x, row["kl_nats"], yerr=error, color=look["color"], marker=look["marker"], linestyle="none")
        axis.annotate(unit.name, (x, row["kl_nats"]), xytext=(4, 3), textcoords="offset points", fontsize=6)
    front = pareto(shown)
    axis.plot(
        [u.any["cache_bytes"] / 2**20 for u in front], [u.last["kl_nats"] for u in front], color="#999999", zorder=0
    )
    axis.set_yscale("log")
    axis.set_xlabel("whole cache as stored, sink and window included (MiB)")
    axis.set_ylabel("accumulated KL(reference ‖ quantized), nats; bars: 95 %")
    return plots.as_png(fig, f"What the bytes buy: {units[0].any['model']} reading {units[0].any['text']}")


def body() -> None:
    """The binary, after its flags have been parsed."""
    find = functools.partial(inputs.load_constants, make=calibrated)
    given = common.interruptible(lambda: decode.load_inputs(find_constants=find))
    shutil.rmtree(CONSTANTS / "captures", ignore_errors=True)
    with decode.open_results(BINARY, given) as results:
        print(f"{len(given.methods)} methods; sink, recent and group {common.window_flags()}.\n")
        decode.measure_all(given, results)
        units = report.units(results.rows)
        drawn = [results.write("kl_against_bytes.png", kl_against_bytes(units))]
        front = ", ".join(unit.name for unit in pareto(units))
        front = f"No other method has both fewer bytes and less accumulated KL (by bytes): {front}."
        results.tell(f"\n{leaderboard(units)}\n\n{windows(units)}\n{front}")
        print(conclusion.written(results.path, drawn))


if __name__ == "__main__":  # defaults of this program, not of whoever imports it beside another binary
    flags.set_default(common.METHOD, METHODS)
    for flag in (common.SINK, common.RECENT, common.GROUP):
        flags.set_default(flag, 128)
    common.main(body)
