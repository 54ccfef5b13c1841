"""Grids for rows of zero mean and unit mean square: what a code stands for, and the code of a number.

A grid is an odd polynomial g over equispaced points t of [−1, 1], because a vector unit multiplies faster than it looks
up. Code q of b bits means

    lloyd     g(t), t = 2q/(2^b − 1) − 1: the 2^b levels of least squared error on N(0, 1) (Lloyd; Max)
    uniform   the same with g the identity: equispaced from −1 to 1
    trellis   g(t), t = 2m/(2^(b+1) − 1) − 1, m_j = 2(q_j xor u_(j−2)) + u_(j−1), u = q mod 2, and 0 before the row

The last is trellis-coded quantization (Marcellin and Fischer 1990) with Ungerboeck's code of four states: there are
twice as many levels as codes, and which half a code chooses from follows from the two codes before it in the row, so
that the encoder picks the best of many paths. Squared error on N(0, 1) at 1 to 4 bits: 0.316, 0.0894, 0.0243, 0.0064,
where lloyd has 0.363, 0.1175, 0.0345, 0.0095. No bit is spent on it; a code means nothing without its row.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvq_jax.lloyd_max import gaussian_levels
from kvq_jax.packing import codes_in_word, planes, words

BITS = (1, 2, 3, 4)
GRIDS = ("trellis", "lloyd", "uniform")

# Odd polynomials through (1, 2 bits) or near (3, 4 bits) levels that generalized Lloyd iterations found on N(0, 1).
TRELLIS: dict[int, tuple[float, ...]] = {
    1: (1.1594, 0.0326),
    2: (1.20176, 2.32716, -5.22042, 3.56345),
    3: (1.58899, 0.38416, -0.17782, 0.68581),
    4: (1.60930, 0.72811, -0.98209, 1.59359),
}


@functools.cache
def coefficients(bits: int, grid: str) -> tuple[float, ...]:
    """(c_0, c_1, …) of g(t) = Σ c_i t^(2i+1)."""
    if grid == "uniform":
        return (1.0,)
    if grid == "trellis":
        return TRELLIS[bits]
    half = np.array(gaussian_levels(bits)[2 ** (bits - 1) :])
    t = _points(2 * len(half))[len(half) :]
    return tuple(np.linalg.solve(t[:, None] ** (2 * np.arange(len(half)) + 1), half))


def _points(count: int) -> np.ndarray:
    return (2 * np.arange(count) - (count - 1)) / (count - 1)


@functools.cache
def levels(bits: int, grid: str) -> np.ndarray:
    """All levels, ascending, float64: 2^bits, of `trellis` twice as many."""
    t = _points(2 ** (bits + (grid == "trellis")))
    return sum(c * t ** (2 * i + 1) for i, c in enumerate(coefficients(bits, grid)))  # type: ignore[return-value]


def _index(codes: Array, grid: str) -> Array:
    """Codes `[..., C]` of whole rows -> which of `levels` each stands for."""
    index = codes.astype(jnp.int32)
    if grid == "trellis":
        before = jnp.pad(index & 1, [(0, 0)] * (index.ndim - 1) + [(2, 0)])
        index = 2 * (index ^ before[..., :-2]) + before[..., 1:-1]
    return index


def grid_table_values(codes: Array, bits: int, grid: str) -> Array:
    """Codes `[..., C]` of whole rows -> their levels, looked up: slower than `grid_planes`, but the same bits in every
    program, where a polynomial's products may be fused into its sums or not. For what decides about stored bytes."""
    return jnp.asarray(levels(bits, grid), jnp.float32)[_index(codes, grid)]


def level_values(index: Array, bits: int, grid: str, scale: Array | float = 1.0) -> Array:
    """Levels by their index, int32, times a positive scale.

    The sign, an odd function's, is put on as bits: that also ends what XLA:CPU would take into the product that reads
    the levels, and there it works element by element.
    """
    count = len(levels(bits, grid))
    twice = 2 * index - (count - 1)
    t = jnp.abs(twice).astype(jnp.float32) * np.float32(1 / (count - 1))
    *rest, last = (np.float32(c) for c in coefficients(bits, grid))
    square, value = t * t, jnp.full_like(t, last)
    for c in reversed(rest):
        value = value * square + c
    magnitude = lax.bitcast_convert_type(value * t * scale, jnp.int32)
    return lax.bitcast_convert_type(magnitude | (twice & np.int32(-(2**31))), jnp.float32)


def trellis_indices(word: Array, before: Array, bits: int) -> list[Array]:
    """Which level each code of packed words (`packing.words`) stands for: entry i of the codes i, i + P, …

    before: the last two codes of the word before, as the two codes of a word.
    """
    word = (word << (2 * bits)) | before
    codes = [word >> ((i + 2) * bits) & (2**bits - 1) for i in range(codes_in_word(bits))]
    last, older = ([(word >> ((i + back) * bits)) & 1 for i in range(len(codes))] for back in (1, 0))
    return [2 * (code ^ o) + b for code, b, o in zip(codes, last, older, strict=True)]


def grid_planes(packed: Array, bits: int, grid: str, scale: Array | None = None) -> list[Array]:
    """The levels of packed whole rows, as `packing.planes`, times a positive scale `[..., C]` of their elements."""
    if grid == "trellis":
        word = words(packed, bits)
        before = jnp.pad(word, [(0, 0)] * (word.ndim - 1) + [(1, 0)])[..., :-1]
        index = trellis_indices(word, before >> ((codes_in_word(bits) - 2) * bits), bits)
    else:
        index = planes(packed, bits, jnp.int32)
    count = len(index)
    scales: list[Array | float] = [1.0] * count if scale is None else [scale[..., i::count] for i in range(count)]
    return [level_values(i, bits, grid, s) for i, s in zip(index, scales, strict=True)]


def grid_codes(x: Array, bits: int, grid: str) -> Array:
    """The codes uint8 of rows x `[..., C]`: the nearest level, or with `trellis` the row of least squared error.

    What decides is a comparison of x with constants, or integer arithmetic: no code depends on how many rows there are.
    """
    if grid == "trellis":
        return _trellis_codes(x, bits)
    all_levels = levels(bits, grid)
    between = ((all_levels[1:] + all_levels[:-1]) / 2).astype(np.float32)
    return sum((x > b).astype(jnp.uint8) for b in between)


UNIT, LARGEST = 512, 8  # fixed point: a level is off by 0.001 at most, and a squared error fits 32 bits
ROWS = 512  # that take a step together on a CPU: what a step carries stays in its first cache
_UNREACHED = 2**29


def _trellis_codes(x: Array, bits: int) -> Array:
    """`_search`, on a CPU for ROWS rows after the other."""

    def by_rows(x: Array) -> Array:
        rows = x.reshape(-1, x.shape[-1])
        padded = jnp.pad(rows, ((0, -len(rows) % ROWS), (0, 0))).reshape(-1, ROWS, x.shape[-1])
        codes = lax.map(functools.partial(_search, bits=bits), padded)
        return codes.reshape(-1, x.shape[-1])[: len(rows)].reshape(x.shape)

    at_once = functools.partial(_search, bits=bits)
    if x.size <= ROWS * x.shape[-1]:
        return at_once(x)
    return lax.platform_dependent(x, cpu=by_rows, default=at_once)


def _search(x: Array, bits: int) -> Array:
    """Viterbi's algorithm over the rows, which all take a step together. Costs are integers."""
    level = np.round(levels(bits, "trellis") * UNIT).astype(np.int32)
    fixed = jnp.round(jnp.clip(jnp.where(jnp.isnan(x), 0.0, x), -LARGEST, LARGEST) * UNIT).astype(jnp.int32)

    def step(costs: tuple[Array, ...], x: Array) -> tuple[tuple[Array, ...], Array]:
        """costs: of the best path into each state 2·u_(j−2) + u_(j−1) before x, over that into state 0. Returns with
        the new ones, for each state a byte of the choice that led there: 2·(high bits of the code) + u_(j−2)."""
        nearest, high = [], []  # of the levels m, m + 4, … that a branch may choose from
        for m in range(4):
            errors = [g * (g - 2 * x) for g in level[m::4]]
            nearest.append(functools.reduce(jnp.minimum, errors))
            mids = (level[m::4][1:] + level[m::4][:-1]) / 2
            high.append(sum((x > int(np.floor(mid))).astype(jnp.int32) for mid in mids))
        into, choices = [], jnp.zeros_like(x)
        for state in range(4):
            u, before = state & 1, state >> 1  # u_j and u_(j−1)
            paths = [costs[2 * old + before] + nearest[2 * (u ^ old) + before] for old in (0, 1)]
            older = paths[1] < paths[0]
            into.append(jnp.minimum(*paths))
            top = jnp.where(older, high[2 * (u ^ 1) + before], high[2 * u + before])
            choices |= (2 * top + older) << (8 * state)
        return tuple(cost - into[0] for cost in into), choices

    first = jnp.zeros(x.shape[:-1], jnp.int32)
    costs, choices = lax.scan(step, (first, *[first + _UNREACHED] * 3), jnp.moveaxis(fixed, -1, 0))

    def back(state: Array, choices: Array) -> tuple[Array, Array]:
        choice = choices >> (8 * state) & 0xFF
        # state 2·u_(j−1) + u_j after the step
        return (state >> 1) + 2 * (choice & 1), ((choice >> 1 << 1) + (state & 1)).astype(jnp.uint8)

    last = jnp.argmin(jnp.stack(costs), axis=0).astype(jnp.int32)
    _, codes = lax.scan(back, last, choices, reverse=True)
    return jnp.moveaxis(codes, 0, -1)
