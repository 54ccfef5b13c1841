"""What `experiments.calibrate` prints of clipping constants: how much they differ, and how much that matters."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.harness.table import table
from kvq_jax.calibration.clipping import lowest


def report(found: Mapping[str, Any]) -> str:
    """Of what `UltraQuant.calibrate` found in every layer, `[layers, ...]` by name: the optimum and its error, what
    one constant for all leaves on the table, and what fewer tokens would have given."""
    return "\n\n".join(_side(side, {name: np.asarray(x, np.float64) for name, x in found.items()}) for side in "kv")


def _percent(ratio: Any) -> str:
    return f"{100 * (ratio - 1):z.1f} %"


def _span(c: np.ndarray) -> str:
    return f"{c.min():.4f} … {c.max():.4f}"


def _side(side: str, found: Mapping[str, np.ndarray]) -> str:
    grid, lengths = found["grid"][0], found["lengths"][0].astype(int)
    heads, of_heads = found[f"{side}_curve"], found[f"{side}_norm"]  # [layers, lengths, heads(, grid)]
    curve, norm = heads.sum(2), of_heads.sum(2)
    total = curve.sum(0)  # [lengths, grid]

    def at(c: np.ndarray, errors: np.ndarray) -> np.ndarray:
        """The errors `[..., grid]` at c `[...]`, by the parabola through the three nearest of the grid."""
        x = np.log(c / grid[0]) / np.log(grid[1] / grid[0])
        i = np.clip(np.rint(x).astype(int), 1, len(grid) - 2)
        before, middle, after = (np.take_along_axis(errors, (i + d)[..., None], -1)[..., 0] for d in (-1, 0, 1))
        return middle + (x - i) * (after - before) / 2 + (x - i) ** 2 * (after - 2 * middle + before) / 2

    own, own_heads, one = lowest(grid, curve), lowest(grid, heads), lowest(grid, total)  # at all lengths
    start = grid[len(grid) // 2]
    last = curve[:, -1]
    layers, best = len(last), at(own[:, -1], last)
    shared = at(np.full(layers, one[-1]), last)
    begun = last[:, len(grid) // 2]
    rows = [
        [
            str(i),
            f"{own[i, -1]:.4f}",
            f"{best[i] / norm[i, -1]:.3e}",
            _span(own_heads[i, -1]),
            _percent(shared[i] / best[i]),
            _percent(begun[i] / best[i]),
        ]
        for i in range(layers)
    ]
    headers = [side.upper(), "best c", "error", "c of its heads", f"more at\n{one[-1]:.4f}", f"more at\n{start:.4g}"]
    of_each = at(own_heads[:, -1], heads[:, -1]).sum()
    text = [
        table(headers, rows),
        f"{side.upper()}: layers' best c {_span(own[:, -1])}, median {np.median(own[:, -1]):.4f}; of all together "
        f"{one[-1]:.4f}. Above the error of a constant for each layer are: one for all by "
        f"{_percent(shared.sum() / best.sum())}, {start:.4g} by {_percent(begun.sum() / best.sum())}; a constant for "
        f"each head is {_percent(best.sum() / of_each)} below.",
    ]
    text.append(
        table(
            [f"{side.upper()}, of the first", "best c", "of layers", "more at all tokens"],
            [
                [
                    f"{n:,} tokens",
                    f"{one[i]:.4f}",
                    _span(own[:, i]),
                    _percent(at(own[:, i], last).sum() / best.sum()),
                ]
                for i, n in enumerate(lengths)
            ],
        )
    )
    return "\n\n".join(text)
