"""What each part of the `tile` scheme is worth: parts on and off, both regimes, several texts, at the bytes as stored.

The first table takes the tile apart at 2 bits, beside KIVI, the rotation alone and KVarN; the second, and the plot,
hold every family at other numbers of bits. Writes config.json, rows.jsonl, summary.csv and plots to --out. Example:

  python -m experiments.tile_ablation --text=hamlet,argparse
  python -m experiments.tile_ablation --sink=4 --recent=124 --constants=DIR  (of --method=tile:feedback=true)
"""

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from absl import flags

import kvq_jax as kvq
from experiments import pseudo_decode
from experiments.harness import flags as common
from experiments.harness import inputs, plots, quick, run
from experiments.harness.table import table

BINARY = "tile_ablation"
FLAGS = flags.FLAGS
flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(pseudo_decode)
flags.adopt_module_key_flags(quick)

TEXTS = ("hamlet", "argparse")  # where --text does not say; it may be a list with commas
# spec -> its name in the table of parts
PARTS = {
    "kivi:bits=2": "KIVI, no rotation",
    "hadamard:bits=2": "rotation, min/max",
    "kvarn:bits=2": "KVarN published",
    "kvarn:bits=2,normalize=equivariant": "KVarN equivariant",
    "tile:v_mean=token,normalize=none,grid=lloyd,refit=none": "rotation, Lloyd–Max",
    "tile:v_mean=token,normalize=none,grid=lloyd": "rotation, Lloyd–Max, norm",
    "tile:v_mean=token,normalize=published,iters=8,grid=uniform": "published, min/max, norm",
    "tile:v_mean=token,grid=lloyd,refit=none": "equivariant, Lloyd–Max",
    "tile:v_mean=token,grid=lloyd,refit=lsq": "equivariant, Lloyd–Max, least squares",
    "tile:v_mean=token,grid=lloyd": "equivariant, Lloyd–Max, norm",
    "tile:v_mean=token,normalize=none": "rotation, trellis, norm",
    "tile:v_mean=token,refit=none": "equivariant, trellis",
    "tile:v_mean=token": "equivariant, trellis, norm",
    "tile:v_mean=channel": "… V's mean by channel",
    "tile:v_mean=none": "… V without a mean",
    "tile:v_mean=none,scales=fp8": "… and FP8 scales of channels",
}
FAMILIES = ("kivi", "hadamard", "kvarn", "turboquant", "tile")
FIXED = ("ultraquant", "ultraquant:c=0.195")  # 4 bits, and no others
# Which side carries the rest.
APART = tuple(f"tile:k_bits={k},v_bits={v}" for k, v in ((2, 4), (4, 2), (3, 1), (3, 2)))
CALIBRATED = "tile:feedback=true"  # where --constants has it
SWEEP = ("bits=1", "k_bits=2,v_bits=1", "bits=2", "bits=3", "bits=4")
BASE = "kvarn:bits=2"  # of the ratios
QUICK_SPECS = ("kvarn:bits=2", "tile:v_mean=token,grid=lloyd", "tile:v_mean=token")
QUICK_TOKENS = 768


@dataclasses.dataclass(frozen=True)
class Work:
    """One unit: a scheme on a text. `part` is its name in the first table; a family's own measurements have none."""

    text: str
    spec: str
    part: str = ""


def windows() -> dict[str, int]:
    """The window that every method gets: sink 128, recent 0, group 128 where no flag says otherwise."""
    return {"sink": 128, "recent": 0, "group": 128} | common.window_flags()


def build(spec: str) -> kvq.Scheme:
    """The scheme of a spec in the common window; KIVI's groups of one channel are as long as a tile."""
    same_tile = {"subgroup": windows()["group"]} if spec.startswith("kivi") and "subgroup" not in spec else {}
    return kvq.scheme(spec, **windows(), **same_tile)


def plan() -> list[Work]:
    """What is measured, the parts of every text first, no scheme twice."""
    texts = common.TEXT.value.split(",") if FLAGS["text"].present else list(TEXTS)
    specs = [*PARTS, *(f"{name}:{bits}" for name in FAMILIES for bits in SWEEP), *FIXED, *APART]
    specs += [CALIBRATED] if common.CONSTANTS.value else []
    if quick.QUICK.value:
        texts, specs = texts[:1], list(QUICK_SPECS)
    if FLAGS["method"].present:
        specs = list(common.METHOD.value)
    common.designed(specs)
    unique: dict[kvq.Scheme, str] = {}
    for spec in specs:
        unique.setdefault(build(spec), spec)
    return [Work(text, spec, PARTS.get(spec, "")) for text in texts for spec in unique.values()]


def load(text: str, work: list[Work], like: pseudo_decode.Inputs | None) -> pseudo_decode.Inputs:
    """Everything that this text's units read, checked; the model is loaded once."""
    FLAGS["text"].value = text  # what the harness reads, and writes into the rows
    blocks = tuple(dict.fromkeys(pseudo_decode.BLOCK_SIZE.value))
    model = inputs.load_model(blocks) if like is None else like.model
    methods = {one.spec: build(one.spec) for one in work if one.text == text}
    tokens = inputs.windows(model)
    constants = inputs.load_constants(methods.values(), model)
    inputs.check_methods(methods.values(), model, blocks, constants)
    regimes = tuple(dict.fromkeys(pseudo_decode.REGIME.value))
    implementation = kvq.resolve_implementation(common.IMPLEMENTATION.value)
    return pseudo_decode.Inputs(model, tokens, methods, constants, blocks, regimes, implementation)


def body() -> None:
    """The binary, after its flags have been parsed."""
    if quick.QUICK.value and not FLAGS["num_tokens"].present:
        FLAGS["num_tokens"].value = QUICK_TOKENS
    work = plan()
    given: dict[str, pseudo_decode.Inputs] = {}
    texts = list(dict.fromkeys(one.text for one in work))
    for text in texts:
        inputs.read_text(text)
    for text in texts:
        known = next(iter(given.values()), None)
        given[text] = common.interruptible(functools.partial(load, text, work, known))
    first = next(iter(given.values()))
    determines = pseudo_decode.determines(first) | windows()
    determines["text_digest"] = {text: inputs.digest(one.tokens) for text, one in given.items()}
    out = Path(common.OUT.value) if common.OUT.value else run.default_path(BINARY)
    key = ("text", "method", "block_size", "regime")
    with run.open_run(
        out, config=common.about(BINARY), determines=determines, key=key, resume=common.RESUME.value
    ) as results:
        print(f"{len(work)} measurements of {first.tokens.shape[1]:,} tokens each; every method with {windows()}.")
        for i, one in enumerate(work, start=1):
            here, title = given[one.text], f"[{i}/{len(work)}] {Path(one.text).name}: {one.spec}"
            FLAGS["text"].value = one.text
            for block in here.blocks:
                about = {"text": one.text, "method": str(here.methods[one.spec]), "block_size": block}
                if all(results.has(**about, regime=regime) for regime in here.regimes):
                    print(f"{title}: already in {out}")
                    continue
                rows = pseudo_decode.measure(here, one.spec, block, title)
                results.append([row | {"part": one.part} for row in rows])
        files = [results.path / name for name in ("config.json", "rows.jsonl", "summary.csv")]
        files.append(results.write("kl_against_bits.png", kl_against_bits(results.rows)))
        results.tell(conclusions(results.rows))
        print("\nWritten:", *(f"  {file}" for file in files), sep="\n")


def by_unit(rows: Iterable[run.Row]) -> dict[tuple[str, str, int], dict[str, run.Row]]:
    """(text, method, block size) -> regime -> row."""
    found: dict[tuple[str, str, int], dict[str, run.Row]] = {}
    for row in rows:
        found.setdefault((row["text"], row["method"], row["block_size"]), {})[row["regime"]] = row
    return found


def _cells(unit: dict[str, run.Row], base: dict[str, run.Row] | None) -> list[str]:
    """One line of the table: bits, bytes, KL of both regimes, the last block, top-1, the ratio to the base."""
    static, accumulated = unit.get("static"), unit.get("accumulated")
    any_row = accumulated or static or {}

    def kl(row: run.Row | None) -> str:
        return "–" if row is None else f"{row['kl_nats']:.4f} ±{1.96 * (row['kl_nats_sem'] or float('nan')):.4f}"

    main = "accumulated" if accumulated else "static"
    ratio = "–" if base is None or main not in base else f"{any_row['kl_nats'] / base[main]['kl_nats']:.2f}"
    return [
        f"{any_row['bits_per_element_store']:.4g}",
        f"{any_row['cache_bytes'] / 2**20:.2f}",
        kl(accumulated),
        ratio,
        kl(static),
        "–" if static is None else f"{static['kl_nats_last_block']:.4f}",
        f"{any_row['top1_agreement']:.1%}",
    ]


HEADERS = (
    "bits\nstored",
    "cache\nMiB",
    "KL, nats\naccumulated",
    "of\nKVarN's",
    "KL, nats\nstatic",
    "last\nblock",
    "same\ntop-1",
)


def conclusions(rows: list[run.Row]) -> str:
    """Two tables a text, and what ± means."""
    said = []
    for text in dict.fromkeys(row["text"] for row in rows):
        units = {key[1:]: unit for key, unit in by_unit(rows).items() if key[0] == text}
        base = next((unit for (method, _), unit in units.items() if method == str(build(BASE))), None)
        for title, wanted in (("parts, 2 bits", True), ("every number of bits", False)):
            lines = []
            for unit in units.values():
                row = next(iter(unit.values()))
                if bool(row["part"]) == wanted:
                    lines.append([row["part"] or row["label"], *_cells(unit, base)])
            if lines:
                said += ["", f"{Path(text).name}: {title}", table((title.split(",")[0], *HEADERS), lines)]
    over = rows[0]["kl_nats_sem_over"]
    said += [
        "",
        f"± is half a 95 % interval over {over}"
        + (
            ", which are correlated, so that it is too small; --batch gives one over sequences."
            if over == "positions"
            else "."
        ),
        "One model, read by teacher forcing: it ranks roundings of its own keys and values, and says nothing of tasks.",
    ]
    return "\n".join(said)


def kl_against_bits(rows: list[run.Row]) -> bytes:
    """One panel a text: a line a family from few bits to many, accumulated where it was measured."""
    texts = list(dict.fromkeys(row["text"] for row in rows))
    fig, axes = plots.figure(len(texts))
    families = list(dict.fromkeys(row["method"].partition(":")[0] for row in rows))
    for axis, text in zip(axes, texts, strict=True):
        for i, family in enumerate(families):
            points = []
            for (where, method, _), unit in by_unit(rows).items():
                if where == text and method.partition(":")[0] == family:
                    row: dict[str, Any] = unit.get("accumulated") or unit["static"]
                    if not row["part"] or method == str(build(f"{family}:bits=2")):
                        points.append((row["bits_per_element_store"], row["kl_nats"]))
            if points:
                axis.plot(*zip(*sorted(points), strict=True), label=family, **plots.look(i))
        axis.set_yscale("log")
        axis.set_xlabel("bits a stored number, scales included")
        axis.set_title(Path(text).name)
    axes[0].set_ylabel("KL(reference ‖ quantized), nats")
    return plots.as_png(fig, f"What the bits buy: {Path(rows[0]['model'].rstrip('/')).name}")


if __name__ == "__main__":
    common.main(body)
