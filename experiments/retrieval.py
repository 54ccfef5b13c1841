"""Does a model still find a fact in its quantized cache, and does it matter whose errors fill the cache?

Facts are hidden at several depths of contexts of several lengths (`needles`: in a text; `lines`: a list of registers).
The context is put into the cache of every method at the same windows, either as the unquantized model computed it
(static: each rounding error is made once) or as the quantized model itself reads it, block by block (accumulated). Then
each fact is asked for, the question being read through the cache, and scored twice: by what the model generates, and by
whether ln p of the right answer is above that of four others. The unquantized model runs first; a family of prompts
that it answers below --min_reference is not used. In `<family>.png` each cell is a length and a depth: a row that fades
from static to accumulated is retrieval that errors in time destroy; a column that fades, one that distance does.

  python -m experiments.retrieval --out=out/retrieval        (again with --resume after an interruption)
"""

import re
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from absl import flags

from experiments import retrieval_prompts as prompts
from experiments import retrieval_report as report
from experiments.harness import flags as common
from experiments.harness import generation, inputs, proportions, quick, run, tasks
from experiments.harness.progress import Progress

BINARY = "retrieval"
flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(quick)
flags.adopt_module_key_flags(tasks)
LENGTH = flags.DEFINE_multi_integer("length", [512, 1024], "Tokens of a context. Repeat for several.", lower_bound=32)
DEPTHS = flags.DEFINE_integer("depths", 5, "Facts of a context that are asked for.", lower_bound=1)
CONTEXTS = flags.DEFINE_integer("contexts", 8, "Contexts of each length and family.", lower_bound=2)
FAMILY = flags.DEFINE_multi_enum("family", list(prompts.FAMILIES), list(prompts.FAMILIES), "Of prompts. Repeatable.")
MIN_REFERENCE = flags.DEFINE_float(
    "min_reference", 0.8, "A family is used where the unquantized model answers this part.", 0.0, 1.0
)
ASKED = 8  # question and answers are read so many tokens at a time, by one program
REGIMES = ("static", "accumulated")
KEY = ("family", "length", "method", "regime", "depth")


class Cell:
    """The contexts of one family and length, and what the unquantized model has read of them, once it is asked for."""

    def __init__(self, given: tasks.Given, family: str, length: int, text: Sequence[int]) -> None:
        self.given, self.family, self.length = given, family, length
        how = {"length": length, "depths": DEPTHS.value, "count": CONTEXTS.value, "seed": common.SEED.value}
        self.contexts = prompts.contexts(family, given.model.tokenizer, text, **how)
        self.parts = tasks.chunks(self.contexts, common.BATCH.value)  # those that are read side by side
        self._exact: list[generation.State] = []

    def read(self, label: str, report: generation.Report | None) -> Iterator[generation.State]:
        """The state after the context, for each part of the contexts."""
        reader = self.given.reader(label)
        for part in self.parts:
            rows = [context.tokens for context in part]
            yield generation.read(
                reader, reader.empty(len(rows), capacity()), rows, block=tasks.READ.value, progress=report
            )

    def exact(self, report: generation.Report | None) -> list[generation.State]:
        """Of the unquantized model; read once."""
        if not self._exact:
            self._exact = list(self.read(tasks.REFERENCE, report))
        return self._exact

    def states(self, label: str, regime: str, report: generation.Report | None) -> Iterator[generation.State]:
        """A method's state after the context, for each part of the contexts."""
        if label == tasks.REFERENCE:
            yield from self.exact(report)
        elif regime == "static":
            reader = self.given.reader(label)
            yield from (generation.filled(reader, exact) for exact in self.exact(report))
        else:
            yield from self.read(label, report)


def capacity() -> int:
    """Tokens of the longest context, its question and its answer."""
    return max(LENGTH.value) + 80


class Answers(NamedTuple):
    """Of the questions of one depth, `[contexts]`."""

    generated: np.ndarray  # bool: the first word is the answer
    ranked: np.ndarray  # bool: no other candidate is as likely
    nats: np.ndarray  # ln p(answer)


def right(answer: str, generated: str) -> bool:
    """Whether the first word that was generated is the answer."""
    found = re.match(r"\W*(\w+)", generated)
    return found is not None and found[1] == answer


def ask(given: tasks.Given, label: str, state: generation.State, asked: Sequence[prompts.Question]) -> Answers:
    """One question a row: whether the answer was generated, whether it was ranked first, and ln p of it."""
    encode, decode, reader = given.model.tokenizer.encode, given.model.tokenizer.decode, given.reader(label)
    state = generation.read(reader, state, [one.prompt for one in asked], block=ASKED)
    candidates = [[encode(" " + one) for one in question.candidates] for question in asked]
    scores = np.stack(
        [generation.score(reader, state, one, block=ASKED)[0] for one in zip(*candidates, strict=True)], axis=1
    )  # [rows, candidates], the answer first
    most = max(len(row[0]) for row in candidates) + 1

    def stop(tokens: list[int]) -> bool:
        return re.search(r"\w\W", decode(tokens)) is not None  # the first word has ended

    texts = [decode(tokens) for tokens in generation.generate(reader, state, most=most, stop=stop)]
    generated = np.array([right(one.answer, text) for one, text in zip(asked, texts, strict=True)])
    return Answers(generated, scores[:, 0] > scores[:, 1:].max(1), scores[:, 0])


def answers(cell: Cell, label: str, regime: str, progress: Progress) -> tuple[list[Answers], float]:
    """Of every context, for each depth; and how many tokens of a context were quantized when it was asked."""
    found: list[list[Answers]] = [[] for _ in range(DEPTHS.value)]
    quantized = []
    asked, steps = 0, len(cell.parts) * DEPTHS.value
    for part, state in zip(cell.parts, cell.states(label, regime, None), strict=True):
        tasks.check_quantized(label, cell.given.scheme(label), state)
        quantized.append(state.quantized_tokens)
        for depth in range(DEPTHS.value):
            found[depth].append(ask(cell.given, label, state, [context.questions[depth] for context in part]))
            asked += 1
            progress(asked, steps)
    count = len(cell.contexts)  # the last part was filled up
    whole = [Answers(*(np.concatenate(one)[:count] for one in zip(*parts, strict=True))) for parts in found]
    return whole, float(np.concatenate(quantized)[:count].mean())


def measure(cell: Cell, label: str, regime: str, title: str) -> list[run.Row]:
    """One unit of work: a row for each depth."""
    start = time.perf_counter()
    with Progress(title, unit="question") as progress:
        found, quantized = common.interruptible(lambda: answers(cell, label, regime, progress))
    about = tasks.about(cell.given, label) | {"seconds": time.perf_counter() - start}
    rows = []
    for depth, of_depth in enumerate(found):
        row: run.Row = {"family": cell.family, "length": cell.length, "regime": regime, "depth": depth}
        row |= {"depth_of_context": cell.contexts[0].questions[depth].depth, "contexts": len(cell.contexts)}
        for name, hits in (("generated", of_depth.generated), ("ranked", of_depth.ranked)):
            rate = proportions.wilson(int(hits.sum()), len(hits))
            row |= {name: rate.value, f"{name}_lo": rate.low, f"{name}_hi": rate.high, f"{name}_each": hits}
        mean = proportions.bootstrap(of_depth.nats, seed=common.SEED.value)
        row |= {"answer_nats": mean.value, "answer_nats_lo": mean.low, "answer_nats_hi": mean.high}
        rows.append(row | {"answer_nats_each": of_depth.nats, "quantized_tokens": quantized} | about)
    return rows


def measure_cell(cell: Cell, results: run.Run, title: str) -> None:
    """The reference, and where it passes every method in both regimes."""
    units = [(tasks.REFERENCE, "none")]
    units += [(label, regime) for regime in REGIMES for label in cell.given.methods]
    for i, (label, regime) in enumerate(units):
        if i == 1 and not report.passing(results.rows, cell.family, cell.length, MIN_REFERENCE.value):
            print(f"{title} not used, the reference is below --min_reference={MIN_REFERENCE.value:g}")
            return
        key = {"family": cell.family, "length": cell.length, "method": str(cell.given.scheme(label)), "regime": regime}
        name = f"{title}: {label}" + (f", {regime}" if i else "")
        if all(results.has(**key, depth=depth) for depth in range(DEPTHS.value)):
            print(f"{name}: already in {results.path}")
            continue
        results.append(measure(cell, label, regime, name))


def body() -> None:
    """The binary, after its flags have been parsed."""
    if quick.QUICK.value:
        few = ["kivi:bits=2", "kvarn:bits=2"]
        small = ((LENGTH, [384]), (CONTEXTS, 4), (DEPTHS, 3), (FAMILY, ["needles"]), (common.METHOD, few))
        for flag, value in small:
            if not common.FLAGS[flag.name].present:
                common.FLAGS[flag.name].value = value
    text = inputs.read_text(common.TEXT.value)
    given = common.interruptible(lambda: tasks.load(capacity(), scan=True))
    tasks.check_reads(given, min(LENGTH.value) * 7 // 8, "--length")
    ids = given.model.tokenizer.encode(text)
    design = {
        "depths": DEPTHS.value,
        "contexts": CONTEXTS.value,
        "read_block": tasks.READ.value,
        **common.window_flags(),
    }
    cells = [(family, length) for family in dict.fromkeys(FAMILY.value) for length in dict.fromkeys(LENGTH.value)]
    # One capacity for all lengths: which lengths are asked for does not change a number, and nothing compiles twice.
    with tasks.open_results(
        BINARY, given, key=KEY, capacity=capacity(), text_digest=inputs.digest(np.array(ids)), **design
    ) as results:
        print(report.introduction(common.MODEL.value, given, CONTEXTS.value, DEPTHS.value))
        for i, (family, length) in enumerate(cells, start=1):
            title = f"[{i}/{len(cells)}] {family}, {length} tokens"
            measure_cell(Cell(given, family, length, ids), results, title)
        report.conclude(results, MIN_REFERENCE.value, common.SEED.value)


if __name__ == "__main__":
    tasks.set_defaults(sink=32, recent=0, group=128, batch=8)
    common.main(body)
