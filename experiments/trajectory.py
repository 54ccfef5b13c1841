"""How does a quantized decode leave the reference's path, and do the ranks of the most attended tokens say when?

Design: the reference answers every prompt (windows of the text, prefilled in full precision) greedily. Each method
reads the same prompts from its cache and decodes twice, side by side: over the reference's answer, token by token,
where the attention of every head of both is compared (KL, Jensen–Shannon, and the pairs among the 3.125 % of the tokens
with most mass whose order is flipped); and freely, to the first token that is another one and to the end of the answer.
Every method has a control: noise in the scale of each token in place of its rounding, with equal error energy, token by
token. Flips begin at the first step at which more than the part --flipped of these pairs is flipped in the mass of all
heads and layers together. Reading `by_step.png`: a line above its control says that the direction of the errors does
more harm than their size. In `flips_and_text.png` points on a rising line say that the step at which flips begin
predicts the step at which the text diverges. Example:

  python -m experiments.trajectory --out=out/trajectory        (again with --resume after an interruption)
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import Array

import kvq_jax as kvq
from experiments import pseudo_decode as decode
from experiments import trajectory_report as report
from experiments.harness import decode_steps, inputs, oracles, quick, replay
from experiments.harness import flags as common
from experiments.harness.conclusion import conclude
from experiments.harness.decode_steps import Asked, Reference, responses
from experiments.harness.progress import Progress
from experiments.harness.run import Row, Run
from kvq_jax import measures
from kvq_jax.rows import select_rows

BINARY = "trajectory"
for module in (common, quick):
    flags.adopt_module_key_flags(module)
PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 288, "Of --num_tokens; the others are decoded.", lower_bound=1)
FLIPPED = flags.DEFINE_float("flipped", 0.0, "Flips begin above this part of the top pairs of all mass.", lower_bound=0)
METHODS = ("kivi:bits=2", "kvarn:bits=2", "ultraquant")
TOP = 1 / 32  # of the tokens that are attended to: those that hold most of the mass
STOPS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>", "<|end|>")  # end an answer, where the tokenizer has them
KEY = ("method", "prompt")


@functools.partial(jax.jit, static_argnames="most")
def _compare_layer(
    ref: Asked, keys: Array, own: Asked, cache: kvq.Cache, k: Array, *, most: int
) -> tuple[dict[str, Array], tuple[Array, Array]]:
    """One layer's attention of one step, the reference's against that of the same first rows of own, cache and k: means
    over heads and each token's mass, `[prompts]` and `[prompts, positions]`. All layers run this one program."""
    prompts = jnp.arange(len(keys))
    cache = select_rows(cache, prompts)
    a = decode_steps.exact_logits(ref, keys, cache.length)
    b = decode_steps.cached_logits(own._replace(q=own.q[prompts]), cache, k[prompts])
    p, q = (jax.nn.softmax(x, axis=-1)[..., : keys.shape[2]] for x in (a, b))
    found = {
        "attention_kl_nats": measures.kl_divergence(a, b),
        "attention_js_nats": measures.jensen_shannon(p, q),
        "flips": measures.rank_flips(p, q, _top(cache.length), most),
        "first_changed": p.argmax(-1) != q.argmax(-1),
    }
    return {name: x.mean((1, 2), dtype=jnp.float32) for name, x in found.items()}, (p.mean((1, 2)), q.mean((1, 2)))


def _top(length: Array) -> Array:
    """How many tokens hold most of the mass where a row's token number `length[0]` attends; all rows are as long."""
    return jnp.maximum(jnp.ceil(TOP * (length[0] + 1)).astype(jnp.int32), 2)


@functools.partial(jax.jit, static_argnames="most")
def _compare_step(
    by_layer: list[tuple[dict[str, Array], tuple[Array, Array]]], length: Array, a: Array, b: Array, *, most: int
) -> dict[str, Array]:
    """Means over layers, the mass of all layers, and the next token's KL from logits a and b `[prompts, vocab]`."""
    curves = {name: jnp.stack([found[name] for found, _ in by_layer]).mean(0) for name in by_layer[0][0]}
    p, q = (jnp.stack(side).mean(0) for side in zip(*(mass for _, mass in by_layer), strict=True))
    return curves | {
        "flips_of_all_mass": measures.rank_flips(p, q, _top(length), most),
        "kl_nats": measures.kl_divergence(a, b),
    }


def measure(
    given: decode.Inputs, reference: Reference, scheme: kvq.Scheme, about: Row, stops: tuple[int, ...], title: str
) -> list[Row]:
    """One unit of work: a method, or its control, over all prompts; a row each."""
    prompts, total = given.tokens.shape
    steps, dtype = total - PROMPT_TOKENS.value, common.DTYPE.value
    constants = given.constants.get(about["of"])
    if isinstance(scheme, oracles.OracleScheme):
        constants = oracles.constants(scheme, {}, constants, given.model)
    with Progress(title, unit="step") as progress:
        of = replay.plan(given.model.forward, scheme, constants, 2 * prompts, 1, dtype)
        twice = [(jnp.tile(k, (2, 1, 1, 1)), jnp.tile(v, (2, 1, 1, 1))) for k, v in reference.prompt]
        caches = replay.filled(of, twice, total)
        of_prompts = [select_rows(cache, jnp.arange(prompts)) for cache in caches]
        errors = replay.relative_errors(reference.prompt, of_prompts)
        free, curves = [jnp.asarray(reference.answer[:, 0])], []
        how: dict[str, Any] = {"runs": of.runs, "implementation": given.implementation}
        most = max(2, math.ceil(TOP * total))
        for i in range(steps):
            tokens = jnp.concatenate([jnp.asarray(reference.answer[:, i]), free[-1]])[:, None]
            now = decode_steps.compiled_step(given.model.forward, tokens, caches, **how)
            layers = zip(reference.asked[i], reference.keys, now.asked, caches, now.new, strict=True)
            found = [_compare_layer(ref, keys, own, cache, k, most=most) for ref, keys, own, cache, (k, _) in layers]
            step = _compare_step(found, caches[0].length, reference.logits[i], now.logits[:prompts], most=most)
            curves.append(jax.device_get(step))
            free.append(jnp.argmax(now.logits[prompts:], -1))
            caches = now.caches
            progress(i + 1, steps)
    answer = np.stack([np.asarray(one) for one in free], axis=1)
    by_name = {name: np.stack([one[name] for one in curves], axis=1) for name in curves[0]}
    if bad := [name for name, x in by_name.items() if not np.isfinite(x).all()]:
        raise ValueError(f"{title}: {bad[0]} is not finite; pass --dtype=float32, or wider scales of the method")
    length = responses(answer, stops)
    about = decode.provenance(given, constants) | about
    return [
        about
        | {"method": str(scheme), "prompt": i, "packed": scheme.packed, "prompt_tokens": PROMPT_TOKENS.value}
        | {name: float(x[i]) for name, x in errors.items()}
        | row(by_name, answer, reference, i, flipped=FLIPPED.value)
        | {"response_length": int(length[i]), "response_length_reference": int(reference.length[i])}
        for i in range(prompts)
    ]


def decoded(given: decode.Inputs, stops: tuple[int, ...]) -> Reference:
    """The reference's answers to the prompts."""
    with Progress("reference", unit="step") as progress:
        return decode_steps.read_reference(
            given.model.forward,
            given.tokens[:, : PROMPT_TOKENS.value],
            steps=given.tokens.shape[1] - PROMPT_TOKENS.value,
            stops=stops,
            dtype=common.DTYPE.value,
            implementation=given.implementation,
            progress=progress,
        )


def first(happens: np.ndarray) -> int | None:
    """The first index where it happens."""
    return int(happens.argmax()) if happens.any() else None


def row(curves: dict[str, np.ndarray], answer: np.ndarray, reference: Reference, i: int, *, flipped: float) -> Row:
    """Prompt i: means and curves over the steps of the reference's answer, and when things begin; steps count from 1,
    and what never begins has None there and one more than the steps in `*_or_end`."""
    steps = max(1, min(reference.length[i], reference.answer.shape[1]) - 1)
    own = {name: x[i, :steps] for name, x in curves.items()}
    differs = answer[i, 1 : steps + 1] != reference.answer[i, 1 : steps + 1]
    begins = {"flip_step": first(own["flips_of_all_mass"] > flipped), "divergence_step": first(differs)}
    found: Row = {"steps": steps}
    for name, index in begins.items():
        found[name] = None if index is None else index + 1
        found[f"{name}_or_end"] = steps + 1 if index is None else index + 1
    before = found["divergence_step_or_end"]  # steps whose attention the diverging text has seen
    found |= {f"{name}_first": float(x[0]) for name, x in own.items()}
    found |= {f"{name}_before": float(x[:before].mean()) for name, x in own.items()}
    found |= {name: float(x.mean()) for name, x in own.items()}
    return found | {f"{name}_by_step": x.tolist() for name, x in own.items()}


def load() -> decode.Inputs:
    """Read and check flags, text and model."""
    if quick.QUICK.value:
        for flag, value in (common.BATCH, 2), (common.NUM_TOKENS, 192), (PROMPT_TOKENS, 160):
            if not common.FLAGS[flag.name].present:
                flags.set_default(flag, value)
    if common.RESUME.value and not common.OUT.value:
        raise ValueError("--resume needs to know which run to go on with; pass its folder as --out")
    if PROMPT_TOKENS.value >= common.NUM_TOKENS.value:
        raise ValueError(
            f"--prompt_tokens={PROMPT_TOKENS.value} leaves nothing of --num_tokens={common.NUM_TOKENS.value} to "
            "decode; pass a shorter prompt, or more tokens"
        )
    design = METHODS[:1] if quick.QUICK.value else METHODS
    given = common.METHOD.present  # its default is that of another binary
    if not given:
        common.designed(design)
    methods = common.methods() if given else {spec: kvq.scheme(spec, **common.window_flags()) for spec in design}
    oracles.check_rounds(methods)
    for spec, scheme in methods.items():
        if scheme.reads_own != "raw":
            raise ValueError(f"--method={spec}: reads_own={scheme.reads_own} is not for trajectories; use raw")
    implementation = kvq.resolve_implementation(common.IMPLEMENTATION.value)
    inputs.read_text(common.TEXT.value)
    model = inputs.load_model([1])
    for spec, scheme in methods.items():
        windows = [side.window for side in scheme.resolve(model.config.head_dim)]
        fewest = scheme.sink + max(one.recent + one.group for one in windows)
        if fewest > PROMPT_TOKENS.value:
            raise ValueError(
                f"--method={spec} quantizes nothing of --prompt_tokens={PROMPT_TOKENS.value}: its first tokens leave "
                f"the full-precision window once {fewest} are there; pass a longer prompt, or a smaller --group"
            )
    tokens, constants = inputs.windows(model), inputs.load_constants(methods.values(), model)
    inputs.check_methods(methods.values(), model, [1], constants)
    return decode.Inputs(model, tokens, methods, constants, (1,), ("accumulated",), implementation)


def body() -> None:
    """The binary, after its flags have been parsed."""
    given = common.interruptible(load)
    stopping = [given.model.tokenizer.encode(text) for text in STOPS]
    stops = tuple(ids[0] for ids in stopping if len(ids) == 1)
    units: list[tuple[kvq.Scheme, Row]] = []
    for spec, scheme in given.methods.items():
        noise = oracles.ScaleNoise.of(scheme, seed=common.SEED.value)
        for one, control, label in (scheme, False, spec), (noise, True, f"{spec}, as scale noise"):
            units.append((one, {"label": label, "control": control, "of": scheme.calibrated(), "of_method": spec}))
    also = {"prompt_tokens": PROMPT_TOKENS.value, "flipped": FLIPPED.value, "stops": list(stops)}
    with decode.open_results(BINARY, given, key=KEY, **also) as results:
        print(f"{len(given.tokens)} prompts of {PROMPT_TOKENS.value} tokens; {common.window_flags()}.\n")
        measure_all(given, units, stops, results)
        seed = common.SEED.value
        said = report.sentences(results.rows, FLIPPED.value, seed)
        conclude(results, report.draw(results.rows), report.tables(results.rows, seed), said)


def measure_all(
    given: decode.Inputs, units: list[tuple[kvq.Scheme, Row]], stops: tuple[int, ...], results: Run
) -> None:
    """Every method and control that has no rows yet."""
    reference = None
    for i, (scheme, about) in enumerate(units, start=1):
        title = f"[{i}/{len(units)}] {about['label']}"
        if all(results.has(method=str(scheme), prompt=prompt) for prompt in range(len(given.tokens))):
            print(f"{title}: already in {results.path}")
            continue
        if reference is None:
            reference = common.interruptible(lambda: decoded(given, stops))
        unit = functools.partial(measure, given, reference, scheme, about, stops, title)
        results.append(common.interruptible(unit))


def main() -> None:
    """Run the binary as the process's main program: eight prompts in equal windows."""
    for flag, value in (common.SINK, 32), (common.RECENT, 0), (common.GROUP, 128), (common.BATCH, 8):
        flags.set_default(flag, value)
    flags.set_default(common.NUM_TOKENS, 384)
    common.main(body)


if __name__ == "__main__":
    main()
