"""Which method is best, and does the answer depend on how it is measured: static or accumulated, at which block size?

Design: every method at the same sink, recent window and group (but Kitty rounds its values one at a time) reads one
text with blocks of b tokens, b in {1, 16, 64, 128, 512}; b = 1 is decoding itself. Where b divides the group, a block
holds in full precision just what decoding would still hold, so that accumulated KL must not depend on b; beyond it
must. Static KL may: a block's own keys and values are always those of the quantized run, and the rest of the window is
the reference's. UltraQuant is also measured with every token rounded as soon as it comes ("rounded at once"), so that
any b > 1 hides errors from the block. A decode loop is slow: at b = 1, and at b = 64 which lies between others, only
the methods of FEW are measured, at the same positions. Ranks, Kendall's tau of static and accumulated KL, and tau of
each error without labels and accumulated perplexity have intervals from one bootstrap that draws the same stretches of
the text for all. Reading `ranks.png`: lines that cross, or lie elsewhere in the other panel, are methods whose place
depends on the measurement; where bars overlap, the text does not tell them apart. In `block_sizes.png` a point at 1
says that this b measures what b = 1 does. KVQuant and others take part where --constants are given. Example:

  python -m experiments.ranking --out=out/ranking        (again with --resume after an interruption)
"""

import dataclasses

from absl import flags

import kvq_jax as kvq
from experiments import ablation, ranking_report
from experiments import pseudo_decode as decode
from experiments.harness import flags as common
from experiments.harness import inputs, quick
from experiments.harness.conclusion import conclude
from experiments.harness.run import Run

BINARY = "ranking"
FLAGS = flags.FLAGS
for module in (common, decode, ablation, quick):
    flags.adopt_module_key_flags(module)
METHODS = (
    "kivi:bits=2,subgroup=128",
    "hadamard:bits=2",
    "kvarn:bits=2",
    "kvarn:bits=2,normalize=equivariant",
    "kitty",
    "turboquant:bits=4",
    "ultraquant",
    "tile",
)
FEW, FEW_AT = ("kvarn:bits=2", "kitty", "ultraquant"), (1, 64)  # methods, and the block sizes that have no others
AT_ONCE = ("ultraquant",)  # also with recent 0 and group 1
QUICK = ("kivi:bits=2,subgroup=128", "kvarn:bits=2", "ultraquant")
BLOCKS = (128, 16, 512, 1, 64)  # what decides comes first
UNQUANTIZED = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
SAME = 1e-4  # nats: an unquantized cache must be closer than this to the reference


@dataclasses.dataclass(frozen=True)
class Work:
    """One method at one block size."""

    label: str
    block: int
    at_once: bool = False
    identity: bool = False


def design() -> tuple[dict[str, kvq.Scheme], list[Work]]:
    """The methods by label, and what is measured, in order."""
    windows, blocks = common.window_flags(), tuple(dict.fromkeys(decode.BLOCK_SIZE.value))
    if common.METHOD.present:
        methods = common.methods()
        if sum(one.quantizes for one in methods.values()) < 2:
            raise ValueError("--method: a ranking is of two methods that quantize, at least; pass more")
        return methods, [Work(label, block) for block in blocks for label in methods]
    own = [str(kvq.load_constants(path).scheme) for path in common.CONSTANTS.value]
    names = list(dict.fromkeys([*(QUICK if quick.QUICK.value else METHODS), *own]))
    common.designed(names)
    methods = {name: kvq.scheme(name, **windows) for name in names}
    exact = UNQUANTIZED[common.DTYPE.value]
    methods[exact] = kvq.scheme(exact, **windows)
    once = {f"{name}, rounded at once": name for name in (*AT_ONCE, *own) if name in names and _each_token(name)}
    methods |= {label: kvq.scheme(name, **windows | {"recent": 0, "group": 1}) for label, name in once.items()}
    work = [
        Work(label, block, label in once, label == exact)
        for block in blocks
        for label in methods
        if (block not in FEW_AT or label in (*FEW, *once))
        and not (quick.QUICK.value and label == exact and block != blocks[0])
    ]
    return methods, work


def _each_token(name: str) -> bool:
    """Whether a scheme can round a token as soon as it comes."""
    try:
        kvq.scheme(name, recent=0, group=1)
    except ValueError:
        return False
    return True


def measure_all(given: decode.Inputs, work: list[Work], results: Run) -> None:
    """All that has no row yet. Layers are scanned for large blocks only, which is faster for each."""
    models = {min(given.blocks) >= inputs.SCAN_FROM: given.model}
    for i, one in enumerate(work, start=1):
        title, method = f"[{i}/{len(work)}] {one.label}, blocks of {one.block}", str(given.methods[one.label])
        if all(results.has(method=method, block_size=one.block, regime=regime) for regime in given.regimes):
            print(f"{title}: already in {results.path}")
            continue
        many = one.block >= inputs.SCAN_FROM
        if many not in models:
            models[many] = inputs.load_model([one.block])
        rows = decode.measure(dataclasses.replace(given, model=models[many]), one.label, one.block, title)
        results.append([row | {"at_once": one.at_once, "identity": one.identity} for row in rows])
        if one.identity and max(abs(row["kl_nats"]) for row in rows) > SAME:
            raise ValueError(f"{title}: an unquantized cache changes the model, so that no other row counts")


def body() -> None:
    """The binary, after its flags have been parsed."""
    if decode.REGIME.value != list(ablation.REGIMES):
        raise ValueError("--regime is not for this binary: it compares both regimes")
    if quick.QUICK.value:
        for name, value in (("num_tokens", 768), ("block_size", [128, 512])):
            if not FLAGS[name].present:
                FLAGS[name].value = value
    ablation.check_stretches()
    methods, work = design()
    given = common.interruptible(lambda: decode.load_inputs(methods))
    with decode.open_results(BINARY, given) as results:
        print(f"{len(work)} measurements of {given.tokens.shape[1]:,} tokens; windows {common.window_flags()}.\n")
        measure_all(given, work, results)
        rows, seed = results.rows, common.SEED.value
        ranked = ranking_report.blocks(rows, seed)
        pngs = ranking_report.draw(rows, ranked, seed)
        said = ranking_report.sentences(rows, ranked, seed)
        conclude(results, pngs, ranking_report.tables(rows, ranked, seed), said)


if __name__ == "__main__":
    flags.set_default(common.NUM_TOKENS, 1536)
    flags.set_default(decode.SKIP_POSITIONS, 512)  # the first block of 512 reads no cache
    flags.set_default(decode.BLOCK_SIZE, list(BLOCKS))
    ablation.main(body)
