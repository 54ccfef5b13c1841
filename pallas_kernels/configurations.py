"""How the kernels are cut, by layout and target: by what compiles without spills (docs/kernels.md), not by time."""

from dataclasses import dataclass

from pallas_kernels.bodies import SMALLEST, AffineKeys, DenseKeys, Keys, ScaledKeys, Values

PROGRAMS = 264  # that keep a large GPU busy: two for each of 132 multiprocessors
MOST_ROWS = 64


@dataclass(frozen=True)
class Config:
    """tokens: of a step, a multiple of K's tile; rows: queries of a program, 16 or more; splits: of the tokens."""

    tokens: int
    splits: int
    warps: int = 4
    stages: int = 2
    rows: int = SMALLEST


def _power_of_two(at_least: int) -> int:
    return 1 << max(at_least - 1, 0).bit_length()


def configuration(keys: Keys, values: Values, *, rows: int, programs: int, tokens: int, target: str) -> Config:
    """rows: queries a KV head; programs: batch · KV heads; tokens: that the store has room for."""
    warps = 4
    if isinstance(keys, AffineKeys):
        step = max(keys.tile, 64)
    elif isinstance(keys, ScaledKeys) and keys.swapped:
        step, warps = 128, 8  # the M side of tcgen05
    else:
        step = 32 if isinstance(keys, DenseKeys) or keys.head_dim > 128 else 64
    block = min(max(_power_of_two(rows), SMALLEST), MOST_ROWS)
    steps = max(-(-tokens // step), 1)
    wanted = -(-PROGRAMS // (programs * -(-rows // block)))
    return Config(step, min(_power_of_two(wanted), _power_of_two(steps)), warps=warps, rows=block)
