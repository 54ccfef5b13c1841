"""How the kernels are cut, by layout and target: by what compiles without spills (docs/kernels.md), not by time."""

from dataclasses import dataclass

from pallas_kernels.bodies import SMALLEST, AffineKeys, DenseKeys, Keys, ScaledKeys, Values

PROGRAMS = 264  # that keep a large GPU busy: two for each of 132 multiprocessors
MOST_ROWS = 64
LONGEST = 128  # tokens of a step: what is longer does not fit into shared memory
SHARE = 1024  # tokens of a split at least: each reads the queries and writes an output


@dataclass(frozen=True)
class Config:
    """tokens: of a step, a multiple of K's tile or a part of one; rows: queries of a program, 16 or more; splits: of
    the tokens."""

    tokens: int
    splits: int
    warps: int = 4
    stages: int = 2
    rows: int = SMALLEST


def _power_of_two(at_least: int) -> int:
    return 1 << max(at_least - 1, 0).bit_length()


def _cut(keys: Keys, target: str) -> tuple[int, int, int]:
    """Tokens of a step, warps and stages. A thread of NVIDIA has 255 registers, one of AMD 512 while there are four
    warps. AMD's pipelining of many small loads runs out of scalar registers. gfx942, which rounds to bfloat16 in many
    instructions, keeps the largest tiles of K in registers only with two warps."""
    amd, wide = target.startswith("gfx"), keys.head_dim > 128
    if isinstance(keys, AffineKeys) and keys.codes.grid:  # levels are computed: half a tile of KVarN's size is enough
        tokens = min(keys.tile, 32 if wide else 64)
        return (tokens, 4, 1) if amd else (tokens, 4 if keys.head_dim < 128 else 8, 2)
    if isinstance(keys, AffineKeys):
        tokens = min(max(keys.tile, 32 if wide else 64), LONGEST)
        narrow = keys.head_dim < 128
        largest = target == "gfx942" and tokens * keys.head_dim > 2**14
        return (tokens, 2 if narrow or largest else 4, 1) if amd else (tokens, 4 if narrow else 8, 2)
    if isinstance(keys, ScaledKeys) and keys.swapped:
        return 128, 8, 2  # the M side of tcgen05 has 128 rows
    return (32 if wide or isinstance(keys, DenseKeys) else 64), 4, 2


def configuration(keys: Keys, values: Values, *, rows: int, programs: int, tokens: int, target: str) -> Config:
    """rows: queries a KV head; programs: batch · KV heads; tokens: that the store has room for."""
    step, warps, stages = _cut(keys, target)
    block = min(max(_power_of_two(rows), SMALLEST), MOST_ROWS)
    wanted = -(-PROGRAMS // (programs * -(-rows // block)))
    splits = min(_power_of_two(wanted), 1 << max(tokens // SHARE, 1).bit_length() - 1)
    return Config(step, splits, warps, stages, block)
