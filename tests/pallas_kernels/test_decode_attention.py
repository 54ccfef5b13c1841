"""Decode kernels in interpret mode against the reference path; deliberate bugs; what the dispatch refuses.

Programs are compiled without optimization: they run once.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scheme_cases import pinned
from store_problem import Problem, distance, problem
from triton_ir_call import call

import kvq_jax as kvq
from kvq_jax.layers import Run
from kvq_jax.online_softmax import Softmax
from kvq_jax.pseudo_decode import _implementation as what_ran
from pallas_kernels import bodies, decode_attention, dispatch

CAPACITY = 200
LENGTHS = (199, 77)


def run(fn: Callable[..., Any], *args: Any) -> Any:
    """fn(*args), compiled for one call."""
    return jax.jit(fn).lower(*args).compile(compiler_options={"xla_backend_optimization_level": 0})(*args)


@dataclass(frozen=True)
class Case:
    spec: str
    head_dim: int = 64
    queries: int = 4  # a KV head
    tokens: int = 1  # of the block
    lengths: tuple[int, int] = LENGTHS
    appended: bool = False  # the block is in the cache, so that what is stored is seen causally
    sliding_window: int | None = None
    dtype: Any = np.float32
    capacity: int = CAPACITY

    def inputs(self) -> tuple[Any, ...]:
        """q, cache, and the block's k and v, or None twice."""
        k, v = (pinned(2, self.capacity, head_dim=self.head_dim, seed=seed) for seed in (1, 2))
        q = pinned(2, self.tokens, head_dim=self.head_dim, kv_heads=2 * self.queries, seed=3)
        held = [length - self.tokens for length in self.lengths]
        block = [np.stack([x[i, :, n : n + self.tokens] for i, n in enumerate(held)]) for x in (k, v)]
        cache = kvq.init_cache(
            self.spec, batch=2, kv_heads=2, head_dim=self.head_dim, capacity=self.capacity, dtype=self.dtype
        )
        filled = self.lengths if self.appended else held
        cache = kvq.append(cache, k, v, valid=jnp.arange(self.capacity) < jnp.array(filled)[:, None])
        return (q, cache, None, None) if self.appended else (q, cache, *block)

    def __str__(self) -> str:
        parts = [self.spec, self.head_dim, f"{self.queries}x{self.tokens}", *self.lengths]
        return "-".join(map(str, [*parts, "appended" * self.appended, self.sliding_window or ""])).rstrip("-")


CASES = [  # between them: every body, 1 to 4 bits, groups of 32 to 128, every head_dim, 1 to 384 queries a KV head
    Case("ultraquant:", queries=16),
    Case("ultraquant:block=64", head_dim=256, queries=8),
    Case("ultraquant:block=16,p=bf16", queries=6),
    Case("ultraquant:rotate_v=true,query=f32,sink=3,group=4", queries=3, tokens=5, lengths=(64, 5)),
    Case("ultraquant:", queries=3, tokens=128, appended=True, lengths=(200, 130), sliding_window=33),
    Case("mxfp4:rotate=true,sink=4,recent=9", head_dim=128, tokens=3, appended=True),
    Case("kivi:bits=2,residual=64,scales=bf16", queries=1),
    Case("kivi:bits=4,residual=32", head_dim=128, tokens=2, appended=True, sliding_window=90),
    Case("hadamard:bits=2,group=64,scales=f32,sink=2", head_dim=256, queries=2),
    Case("kvarn:bits=2,iters=1", head_dim=128, lengths=(129, 1)),
    Case("kvarn:k_bits=4,v_bits=2,group=64,scales=fp8,recent=3,iters=1", queries=3, tokens=7, appended=True),
    Case("bf16:", tokens=4, appended=True),
    Case("kvarn:bits=3,group=32,iters=1", queries=2),
    Case("kivi:bits=2,subgroup=256,residual=256", queries=2, capacity=300, lengths=(299, 77)),  # steps of half a tile
    Case("kivi:k_bits=1,v_bits=3,subgroup=16,residual=32", queries=2),
    Case("tile:iters=1", queries=5, tokens=3, appended=True),  # steps of half a tile
    Case("tile:k_bits=3,v_bits=1,group=64,iters=1,scales=fp8,v_mean=none", head_dim=128, lengths=(129, 64)),
    Case("tile:k_bits=1,v_bits=3,group=32,iters=1,v_mean=token", queries=2),
    Case("tile:bits=4,group=32,iters=1", sliding_window=50, appended=True),
    Case("tile:grid=lloyd,group=32,iters=1", queries=2),
    Case("tile:grid=uniform,k_bits=4,v_bits=1,group=16,iters=1,v_mean=none", queries=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attend_with_a_kernel_equals_the_reference(case: Case) -> None:
    q, cache, k, v = case.inputs()
    with dispatch.interpreted():
        assert kvq.resolve_implementation("pallas_triton", cache, q) == "pallas_triton"
        out, expected = (
            run(lambda *x, i=i: kvq.attend(*x, implementation=i, sliding_window=case.sliding_window), q, cache, k, v)
            for i in ("pallas_triton", "reference")
        )
    stored = int(np.minimum(cache.k.flushed, cache.v.flushed).max())
    assert stored > 0, "the kernel has something to read"
    error = 4e-3 if "p=bf16" in case.spec else 2e-5  # the reference never rounds probabilities
    np.testing.assert_allclose(out, expected, rtol=0, atol=error * float(np.abs(expected).max()))


@pytest.mark.parametrize("case", [Case("ultraquant:", queries=16), Case("tile:iters=1")], ids=str)
def test_what_is_said_to_run_is_what_runs(case: Case) -> None:
    """XLA's path agrees with the reference, too: only the program tells which of them it holds."""
    q, cache, k, v = case.inputs()
    with dispatch.interpreted():
        programs = {
            name: str(jax.make_jaxpr(lambda *x, name=name: kvq.attend(*x, implementation=name))(q, cache, k, v))
            for name in ("pallas_triton", "auto", "xla", "reference")
        }
    holds = {name: "pallas_call" in program for name, program in programs.items()}
    assert holds == {"pallas_triton": True, "auto": True, "xla": False, "reference": False}


def interpreted(given: Problem) -> tuple[Any, ...]:
    """Output and log-sum-exp in interpret mode, and what they should be."""
    how = {**given.how, "interpret": True}
    out, lse = run(lambda *x: decode_attention.decode_attention(*x, **how), *given.arguments)
    return out, lse, given.output, given.log_sum_exp


TILE = "tile:k_bits=2,v_bits=3,group=64,iters=1"
SCHEMES = ["ultraquant:", "mxfp4:", "hadamard:bits=2,group=64", "kivi:bits=2,residual=64", TILE]


@pytest.mark.parametrize("spec", SCHEMES)
def test_output_and_log_sum_exp_of_a_store_alone_to_float32(spec: str) -> None:
    """With three terms, bfloat16 products lose nothing of a float32 number."""
    assert distance(*interpreted(problem(spec))) < 5e-6


@pytest.mark.parametrize(("spec", "scaled"), [("ultraquant:", True), ("hadamard:bits=2,group=64", None)])
def test_the_lowered_kernel_touches_no_row_beyond_the_queries(spec: str, scaled: bool | None) -> None:
    """Four queries in programs of 16 rows: an access outside of an operand is an error to the evaluator."""
    given = problem(spec, scaled=scaled)
    fn = functools.partial(decode_attention.decode_attention, **given.how)
    (out, lse), _ = call(fn, *given.arguments, platform="cuda")
    assert distance(out, lse, given.output, given.log_sum_exp) < 5e-6


@pytest.mark.parametrize("swapped", [False, True])
def test_the_scaled_product_reads_the_packed_keys(swapped: bool) -> None:
    assert distance(*interpreted(problem("ultraquant:", scaled=swapped))) < 5e-6
    assert isinstance(problem("ultraquant:", scaled=swapped).how["keys"], bodies.ScaledKeys)


def swapped_nibbles(monkeypatch: pytest.MonkeyPatch) -> None:
    planes = bodies.planes
    monkeypatch.setattr(bodies, "planes", lambda codes, bits: planes(codes, bits)[::-1])


def swapped_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = bodies.joined_planes
    monkeypatch.setattr(bodies, "joined_planes", lambda parts: joined(parts[::-1]))


def scale_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scale is that of the next block, token or channel."""
    repeated, widen = bodies.repeated, bodies.widen
    monkeypatch.setattr(bodies, "repeated", lambda x, times: repeated(jnp.roll(x, 1, axis=-1), times))
    monkeypatch.setattr(bodies, "widen", lambda x: widen(jnp.roll(x, 1, axis=-1)))


def forgotten_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trellis that begins anew with every word."""
    indices = bodies.trellis_indices
    monkeypatch.setattr(bodies, "trellis_indices", lambda word, before, bits: indices(word, 0 * before, bits))


def missing_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = property(lambda part: jnp.zeros(part.size, jnp.int32) + 3)
    monkeypatch.setattr(bodies.Part, "tokens", everything)


def forgotten_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares are added as if they had the same largest score."""
    merge = decode_attention.merge

    def flat(parts: Softmax) -> Softmax:
        return dataclasses.replace(parts, largest=jnp.broadcast_to(parts.largest.max(), parts.largest.shape))

    monkeypatch.setattr(decode_attention, "merge", lambda parts: merge(flat(parts)))


@pytest.mark.parametrize(
    ("spec", "bug"),
    [
        *(("ultraquant:", bug) for bug in (swapped_nibbles, scale_off_by_one, missing_mask, forgotten_decay)),
        *(("hadamard:bits=2,group=64", bug) for bug in (swapped_pairs, scale_off_by_one)),
        *((TILE, bug) for bug in (swapped_pairs, scale_off_by_one, forgotten_byte)),
    ],
)
def test_a_deliberate_bug_is_seen(spec: str, bug: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    assert distance(*interpreted(problem(spec))) > 1e-3


REFUSED = {
    "k_bits=8": ("kivi:k_bits=8,v_bits=2", 64, 1),
    "v_bits=8": ("kivi:k_bits=2,v_bits=8", 64, 1),
    "k_group=8": ("kivi:bits=2,subgroup=8,residual=16", 64, 1),
    "k_group=48": ("hadamard:bits=2,group=48", 64, 1),
    "head_dim=80": ("kvarn:bits=2", 80, 1),
    "k_quantizer='Codebook'": ("turboquant:bits=4", 64, 1),
    "k_quantizer='PromotedChannelRows'": ("kitty:", 64, 1),
    "tokens=129": ("ultraquant:", 64, 129),
}


@pytest.mark.parametrize("says", REFUSED)
def test_requirement_20_what_no_kernel_covers_is_named_and_auto_takes_xla(says: str) -> None:
    spec, head_dim, tokens = REFUSED[says]
    cache = kvq.init_cache(spec, batch=1, kv_heads=1, head_dim=head_dim, capacity=256)
    q = jnp.zeros((1, 2, tokens, head_dim))
    with dispatch.interpreted():
        with pytest.raises(NotImplementedError, match=f"no kernel covers {says}; covered: .*; use 'xla' or None"):
            kvq.attend(q, cache, q[:, :1], q[:, :1], implementation="pallas_triton")
        assert kvq.resolve_implementation("auto", cache, q) == "xla"


def test_a_store_beyond_the_reach_of_its_offsets_is_refused() -> None:
    def layouts(capacity: int) -> None:
        shape = {"batch": 64, "kv_heads": 8, "head_dim": 128, "capacity": capacity}
        dispatch.layouts(jax.eval_shape(lambda: kvq.init_cache("ultraquant:", **shape)))

    layouts(65535)
    with pytest.raises(NotImplementedError, match="no kernel covers elements of a leaf=2147483648"):
        layouts(65536)


def test_without_a_cache_there_is_no_kernel() -> None:
    q = jnp.zeros((1, 2, 1, 64))
    with dispatch.interpreted(), pytest.raises(NotImplementedError, match="no kernel covers cache=None"):
        kvq.attend(q, None, q, q, implementation="pallas_triton")


def test_requirement_20_on_a_cpu_the_kernel_is_refused_and_none_is_xla() -> None:
    q, cache, *block = Case("ultraquant:").inputs()
    with pytest.raises(NotImplementedError, match="it needs a GPU, and the platform here is 'cpu'"):
        kvq.attend(q, cache, *block, implementation="pallas_triton")
    assert kvq.resolve_implementation(None) == kvq.resolve_implementation(None, cache, q) == "xla"
    assert kvq.resolve_implementation("auto", cache, q) == "xla"


def test_another_version_of_jax_makes_the_kernels_unavailable_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    q, cache, *block = Case("ultraquant:").inputs()
    monkeypatch.setattr(dispatch, "target", lambda: "sm_90")
    assert kvq.resolve_implementation("auto", cache, q) == "pallas_triton"
    monkeypatch.setattr(dispatch._internals, "why_unavailable", lambda: "jax 9 is installed")
    with pytest.raises(NotImplementedError, match="is installed"):
        kvq.attend(q, cache, *block, implementation="pallas_triton")
    assert kvq.resolve_implementation("auto", cache, q) == "xla"


def test_a_gradient_through_the_kernel_is_that_of_the_tiled_path() -> None:
    q, cache, *block = Case("ultraquant:", queries=16).inputs()

    def loss(implementation: str) -> Callable[[Any], Any]:
        return lambda q: jnp.sum(kvq.attend(q, cache, *block, implementation=implementation) ** 2)

    with dispatch.interpreted():
        (value, gradient), (expected, tiled) = (
            run(jax.value_and_grad(loss(name)), q) for name in ("pallas_triton", "xla")
        )
    assert value == pytest.approx(float(expected), rel=1e-4)
    np.testing.assert_allclose(gradient, tiled, atol=1e-4 * float(np.abs(tiled).max()))


def test_a_trace_says_what_ran_where_layers_differ() -> None:
    runs = [Run(2, 64, stacked, scheme=kvq.scheme(spec)) for stacked, spec in ((None, "ultraquant:"), (3, "int8:"))]
    caches = jax.eval_shape(lambda: [run.empty(run.scheme, 1, 256, jnp.float32) for run in runs])
    for implementation, what in {"auto": "pallas_triton+xla", "xla": "xla"}.items():
        with dispatch.interpreted():
            assert what_ran(implementation, runs, caches, block=4) == what
    with dispatch.interpreted(), pytest.raises(NotImplementedError, match="no kernel covers k_quantizer"):
        what_ran("pallas_triton", runs, caches, block=4)
