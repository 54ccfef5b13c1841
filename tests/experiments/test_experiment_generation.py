"""Reading, generating and scoring through a cache: an exact one gives the plain forward, and no row sees another."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
import models
from experiments.harness import generation

ROWS = [list(b"The quick brown fox jumped over the lazy dog, twice!"), list(b"A row that is shorter."), list(b"Short")]
NEW, ROOM, BLOCK = 6, 128, 16
SCHEME = kvq.scheme("kivi:bits=2,subgroup=8", sink=4, recent=0, group=8)


@pytest.fixture(scope="module")
def loaded(model: Path) -> models.Model:
    return models.load(model, scan_layers=True)


@pytest.fixture(scope="module")
def exact(loaded: models.Model) -> generation.Reader:
    return generation.reader(loaded.forward, kvq.scheme("fp32"))


@pytest.fixture(scope="module")
def quantized(loaded: models.Model) -> generation.Reader:
    return generation.reader(loaded.forward, SCHEME)


def read(reader: generation.Reader, rows: list[list[int]]) -> generation.State:
    return generation.read(reader, reader.empty(len(rows), ROOM), rows, block=BLOCK)


def never(_: list[int]) -> bool:
    return False


def plain_logits(loaded: models.Model, rows: list[list[int]]) -> np.ndarray:
    """`[rows, ROOM, vocab]`; what stands to the right of a token does not change its logits."""
    return np.asarray(loaded.logits(generation.padded(rows, ROOM)[0]))


def test_greedy_generation_through_an_exact_cache_is_a_plain_loop(
    loaded: models.Model, exact: generation.Reader
) -> None:
    rows = [list(row) for row in ROWS]
    for _ in range(NEW):
        logits = plain_logits(loaded, rows)
        for i, row in enumerate(rows):
            row.append(int(logits[i, len(row) - 1].argmax()))
    state = read(exact, ROWS)
    assert generation.generate(exact, state, most=NEW, stop=never) == [row[-NEW:] for row in rows]
    assert np.asarray(state.length).tolist() == [len(row) for row in ROWS]  # the state that was given still stands


@pytest.mark.parametrize("sampled", [False, True])
def test_a_row_of_a_ragged_batch_says_what_it_says_alone(quantized: generation.Reader, sampled: bool) -> None:
    how = {"temperature": 1.0} if sampled else {}
    seeds = [11, 12, 13]
    state = read(quantized, ROWS)
    assert (state.quantized_tokens[:2] > 0).all()
    together = generation.generate(quantized, state, most=NEW, stop=never, seeds=seeds, **how)
    for i in (0, 1):
        alone = read(quantized, [ROWS[i]])
        np.testing.assert_allclose(alone.logits[0], state.logits[i], rtol=0, atol=2e-4)
        assert generation.generate(quantized, alone, most=NEW, stop=never, seeds=seeds[i : i + 1], **how) == [
            together[i]
        ]
    if sampled:
        other = generation.generate(quantized, state, most=NEW, stop=never, seeds=[14, 15, 16], **how)
        assert other != together


def test_logits_that_are_not_finite_are_an_error(loaded: models.Model, exact: generation.Reader) -> None:
    broken = dataclasses.replace(exact, forward=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), loaded.forward))
    with pytest.raises(ValueError, match="the logits are not finite"):
        read(broken, ROWS)


def test_a_row_that_stopped_does_not_go_on_and_the_others_do(exact: generation.Reader) -> None:
    state = read(exact, ROWS)
    whole = generation.generate(exact, state, most=NEW, stop=never)
    stopped = generation.generate(exact, state, most=NEW, stop=lambda tokens: tokens == whole[0][:2])
    assert stopped == [whole[0][:2], whole[1], whole[2]]


def test_scores_are_those_of_the_plain_forward_and_a_quantized_cache_moves_them(
    loaded: models.Model, exact: generation.Reader, quantized: generation.Reader
) -> None:
    rest = [list(b" and what comes then"), list(b" x"), list(b"er")]
    whole = [a + b for a, b in zip(ROWS, rest, strict=True)]
    p = np.asarray(jax.nn.log_softmax(plain_logits(loaded, whole)))
    wanted = [sum(p[i, len(ROWS[i]) + j - 1, t] for j, t in enumerate(row)) for i, row in enumerate(rest)]
    nats, greedy = generation.score(exact, read(exact, ROWS), rest, block=BLOCK)  # the first row's in two blocks
    np.testing.assert_allclose(nats, wanted, rtol=1e-4, atol=1e-3)
    assert not greedy.any()
    moved, _ = generation.score(quantized, read(quantized, ROWS), rest, block=BLOCK)
    assert (np.abs(moved - nats)[:2] > 1e-3).all()
    assert moved[2] == pytest.approx(nats[2], abs=1e-3)  # too short for anything to be quantized

    most_likely = generation.generate(exact, read(exact, ROWS), most=NEW, stop=never)
    assert generation.score(exact, read(exact, ROWS), most_likely, block=BLOCK)[1].all()


def codes(state: generation.State) -> np.ndarray:
    """Of K, `[layers, ...]`."""
    return np.asarray(state.caches[0].k.store["codes"])


def test_static_and_accumulated_caches_differ_from_the_second_layer_on(
    exact: generation.Reader, quantized: generation.Reader
) -> None:
    exact_state = read(exact, ROWS)
    static, accumulated = generation.filled(quantized, exact_state), read(quantized, ROWS)
    assert np.asarray(static.length).tolist() == np.asarray(accumulated.length).tolist()
    assert (static.quantized_tokens == accumulated.quantized_tokens).all()
    same = [(a == b).mean() for a, b in zip(codes(static), codes(accumulated), strict=True)]
    assert same[0] > 0.999  # nothing that the first layer's keys depend on is quantized
    assert same[1] < 0.999
    again = generation.filled(exact, exact_state)  # an exact cache holds what it was given
    np.testing.assert_allclose(*(kvq_read(state) for state in (again, exact_state)), rtol=0, atol=0)
    with pytest.raises(ValueError, match="unquantized"):
        generation.filled(quantized, accumulated)


def kvq_read(state: generation.State) -> np.ndarray:
    return np.asarray(jax.vmap(kvq.read)(state.caches[0])[0])


def test_rows_that_begin_alike_are_read_on_side_by_side(quantized: generation.Reader) -> None:
    """A common beginning that ends with a block is read once, and repeated."""
    begin = ROWS[0][: 2 * BLOCK]
    ends = [ROWS[0][2 * BLOCK :], list(b"else"), list(b"!")]
    state = generation.repeated(read(quantized, [begin]), 3)
    state = generation.read(quantized, state, ends, block=BLOCK)
    wanted = read(quantized, [begin + end for end in ends])
    np.testing.assert_allclose(state.logits, wanted.logits, rtol=0, atol=2e-4)


def test_what_cannot_be_is_said(exact: generation.Reader) -> None:
    state = read(exact, ROWS)
    with pytest.raises(ValueError, match="capacity=128"):
        generation.generate(exact, state, most=100, stop=never)
    with pytest.raises(ValueError, match="a seed for each"):
        generation.generate(exact, state, most=2, stop=never, temperature=1.0, seeds=[1])
    with pytest.raises(ValueError, match="2 sequences"):
        generation.read(exact, state, ROWS[:2], block=BLOCK)
    with pytest.raises(ValueError, match="nothing was read"):
        generation.score(exact, exact.empty(3, ROOM), ROWS, block=BLOCK)
