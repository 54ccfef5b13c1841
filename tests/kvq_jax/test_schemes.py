"""Spec strings, their errors, and what every scheme of the table costs and loses."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from scheme_cases import CASES, empty, pinned

import kvq_jax as kvq
from kvq_jax.schemes import layer_schemes


@pytest.fixture(scope="module")
def kv() -> tuple[np.ndarray, np.ndarray]:
    return pinned(seed=0), pinned(seed=1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_the_schemes_own_so_a_no_op_or_a_scale_of_one_shows(case, kv) -> None:
    cache = kvq.append(empty(case.spec, kv[0]), *kv)
    for x, x_hat, side, (low, high) in zip(kv, kvq.read(cache), cache.sides, (case.k_error, case.v_error), strict=True):
        n = int(side.flushed[0])
        assert n >= 128
        error = float(np.square(x - x_hat)[:, :, :n].sum() / np.square(x)[:, :, :n].sum())
        assert low <= error <= high


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_are_those_of_the_specification(case) -> None:
    for i, head_dim in enumerate((64, 128)):
        bits = kvq.bits_per_element(case.spec, head_dim=head_dim)
        assert bits == {
            "k": case.k_bits[i],
            "v": case.v_bits[i],
            "store": (case.k_bits[i] + case.v_bits[i]) / 2,
        }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_canonical_spec_gives_the_same_scheme(case) -> None:
    one = kvq.scheme(case.spec)
    again = kvq.scheme(str(one))
    keywords = {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}
    assert again == one == kvq.scheme(one) == kvq.scheme(one.name, **keywords)
    assert hash(again) == hash(one)
    assert str(again) == str(one)


def test_every_scheme_has_a_row_in_the_table_and_a_small_one() -> None:
    assert {kvq.scheme(case.spec).name for case in CASES} == set(kvq.list_schemes())
    quantizing = {kvq.scheme(case.spec).name for case in CASES if kvq.scheme(case.spec).quantizes}
    assert quantizing <= {kvq.scheme(case.small).name for case in CASES if case.small}


@pytest.mark.parametrize(
    ("spec", "fields", "canonical"),
    [
        ("kvarn:bits=2,iters=8", {}, "kvarn:group=128,bits=2,iters=8,normalize=published,scales=f16"),
        ("kvarn", {"bits": 2, "iters": 8}, "kvarn:group=128,bits=2,iters=8,normalize=published,scales=f16"),
        (" kvarn: k_bits=4, v_bits=4 ", {}, "kvarn:group=128,bits=4,iters=8,normalize=published,scales=f16"),
        ("kvarn:v_bits=4", {}, "kvarn:group=128,k_bits=2,v_bits=4,iters=8,normalize=published,scales=f16"),
        ("kivi:", {"sink": 4}, "kivi:bits=2,subgroup=32,residual=128,scales=f16,arithmetic=f32,sink=4"),
        ("hadamard:", {"sink": 4, "recent": 128}, "hadamard:group=128,bits=2,scales=f16,sink=4,recent=128"),
        ("bf16", {"protect": 1, "reads_own": "quantized"}, "bf16:reads_own=quantized,protect=1"),
        ("fp32", {}, "fp32"),
        ("hadamard:sink=0", {}, "hadamard:group=128,bits=2,scales=f16"),
    ],
)  # fmt: skip
def test_canonical_spec(spec, fields, canonical) -> None:
    assert str(kvq.scheme(spec, **fields)) == canonical
    assert kvq.scheme(spec, **fields) == kvq.scheme(canonical)


def test_changing_one_sides_bits_keeps_the_others() -> None:
    four = kvq.scheme("kvarn:bits=4")
    assert kvq.scheme(four, v_bits=2) == kvq.scheme("kvarn:k_bits=4,v_bits=2")
    assert kvq.scheme(four, bits=2) == kvq.scheme("kvarn:bits=2")
    mixed = kvq.scheme("kvarn:k_bits=4,v_bits=2")
    assert kvq.scheme(mixed, k_bits=2) == kvq.scheme("kvarn:bits=2")


@pytest.mark.parametrize(
    ("spec", "fields", "says"),
    [
        ("kvarm", {}, ["kvarm", "kivi", "did you mean 'kvarn'"]),
        ("", {}, ["''", "known:", "kvarn"]),
        ("kvarn:step=2", {}, ["kvarn", "'step'", "iters"]),
        ("kvarn", {"step": 2}, ["kvarn", "'step'", "iters"]),
        ("kvarn:bits=5", {}, ["bits=5", "1, 2, 3, 4, 8"]),
        ("kvarn:bits=two", {}, ["bits='two'", "1, 2, 3, 4, 8"]),
        ("kvarn:bits=2.0", {}, ["bits='2.0'", "1, 2, 3, 4, 8"]),
        ("kvarn", {"bits": True}, ["bits=True", "1, 2, 3, 4, 8"]),
        ("kvarn", {"bits": 2.0}, ["bits=2.0", "1, 2, 3, 4, 8"]),
        ("kvarn", {"bits": None}, ["bits=None", "k_bits", "v_bits"]),
        ("kvarn:bits", {}, ["'bits'", "field=value"]),
        ("kvarn:bits=", {}, ["'bits='", "field=value"]),
        ("kvarn:bits=2,bits=4", {}, ["bits", "twice"]),
        ("kvarn:bits=2", {"bits": 4}, ["bits", "2", "4"]),
        ("kvarn:iters=-1", {}, ["iters=-1", "at least 0"]),
        ("kvarn:normalize=none", {}, ["normalize='none'", "published", "equivariant"]),
        ("kvarn:scales=bf16", {}, ["scales='bf16'", "f16, fp8, f32"]),
        ("kivi:scales=fp8", {}, ["scales='fp8'", "f16, bf16, f32"]),
        ("kvarn:group=1", {}, ["group=1", "at least 2"]),
        ("kvarn:group=50", {}, ["50", "multiple of"]),
        ("kvarn:bits=3,group=20", {}, ["20", "multiple of 8"]),
        ("kivi:residual=100", {}, ["100", "multiple of 32"]),
        ("kivi:group=48", {}, ["group=48", "multiple of 32"]),
        ("kivi:subgroup=1", {}, ["subgroup=1", "at least 2"]),
        ("kivi:residual=0", {}, ["residual=0", "at least 1"]),
        ("kivi:sink=-1", {}, ["sink=-1", "at least 0"]),
        ("kivi:recent=-1", {}, ["recent=-1", "at least 0"]),
        ("kivi:group=0", {}, ["group=0", "at least 1"]),
        ("kivi:protect=-2", {}, ["protect=-2", "at least 0"]),
        ("kivi:reads_own=yes", {}, ["reads_own='yes'", "raw, quantized"]),
        ("bf16:bits=2", {}, ["bf16", "'bits'", "sink"]),
    ],
)  # fmt: skip
def test_a_wrong_spec_names_the_field_the_value_and_what_is_allowed(spec, fields, says) -> None:
    with pytest.raises(ValueError) as error:
        kvq.scheme(spec, **fields)
    for part in says:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("spec", "head_dim", "says"),
    [
        ("kvarn:", 65, "65"),
        ("kvarn:bits=2", 66, "66 codes of 2 bits"),
        ("kvarn:bits=3", 68, "68 codes of 3 bits"),
        ("hadamard:bits=4", 7, "7"),
        ("kivi:bits=1", 20, "20 codes of 1 bits"),
    ],
)
def test_requirement_10_a_head_dim_that_cannot_be_stored_is_an_error_that_names_it(spec, head_dim, says) -> None:
    with pytest.raises(ValueError, match=says):
        kvq.init_cache(spec, batch=1, kv_heads=1, head_dim=head_dim, capacity=8)


def test_kivi_value_groups_are_the_largest_divisor_of_head_dim() -> None:
    for head_dim, subgroup, group in ((80, 32, 20), (96, 32, 32), (64, 128, 64), (128, 32, 32), (80, 128, 80)):
        _, v = kvq.scheme("kivi:", subgroup=subgroup).resolve(head_dim)
        assert v.quantizer.group == group


def test_requirement_1_windows_are_explicit_and_one_override_sets_both_sides() -> None:
    def windows(spec: str) -> list[tuple[int, int]]:
        return [(side.window.recent, side.window.group) for side in kvq.scheme(spec).resolve(64)]

    assert windows("kivi:") == [(0, 128), (128, 1)]  # K: residual; V: sliding
    assert windows("kivi:residual=64") == [(0, 64), (64, 1)]
    assert windows("kivi:recent=0,group=128") == [(0, 128), (0, 128)]
    assert windows("hadamard:") == windows("kvarn:") == [(0, 128), (0, 128)]
    assert windows("kvarn:recent=64") == [(64, 128), (64, 128)]
    assert windows("bf16:recent=3") == [(3, 1), (3, 1)]


def test_requirement_11_the_policy_is_per_layer_and_says_which_are_quantized() -> None:
    inner, kept = kvq.scheme("kvarn:sink=4"), kvq.scheme("fp32")
    assert layer_schemes(kvq.scheme("kvarn:sink=4,protect=2"), 5, jnp.float32) == (kept, kept, inner, kept, kept)
    assert layer_schemes(kvq.scheme("kvarn:sink=4"), 2, jnp.float32) == (inner, inner)
    caches = kvq.init_cache("kivi:protect=1", batch=1, kv_heads=1, head_dim=64, capacity=300, layers=3)
    assert [cache.scheme.quantizes for cache in caches] == [False, True, False]
    total = kvq.nbytes(caches)
    assert total["k_values"] == 2 * 300 * 64 * 2
    assert total["k_codes"] == 256 * 64 * 2 // 8
    with pytest.raises(ValueError, match="protect=2 leaves none of 4 layers"):
        layer_schemes(kvq.scheme("kvarn:protect=2"), 4, jnp.float32)


def test_bits_are_given_for_both_sides_or_for_each() -> None:
    with pytest.raises(ValueError, match="bits, k_bits and v_bits are all given"):
        kvq.scheme("kivi:bits=3,k_bits=2,v_bits=4")
    assert kvq.scheme(kvq.scheme("kivi", k_bits=2, v_bits=4), bits=3) == kvq.scheme("kivi:bits=3")
    assert kvq.scheme("kivi", bits=np.int64(4)) == kvq.scheme("kivi:bits=4")
    with pytest.raises(ValueError, match="iters=1000000000000 is out of range"):
        kvq.scheme("kvarn:iters=1000000000000")
