"""A table for the terminal."""

import unicodedata
from collections.abc import Sequence


def _width(text: str) -> int:
    """Columns on the terminal; an accent that stands over the letter before it takes none."""
    return sum(not unicodedata.combining(letter) for letter in text)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right; headers may have several lines."""
    tall = max(header.count("\n") for header in headers) + 1
    split = [[""] * (tall - 1 - header.count("\n")) + header.split("\n") for header in headers]
    lines = [list(line) for line in zip(*split, strict=True)]
    widths = [max(map(_width, column)) for column in zip(*lines, *rows, strict=True)]

    def show(cells: Sequence[str]) -> str:
        gaps = [" " * (width - _width(cell)) for cell, width in zip(cells, widths, strict=True)]
        first, *others = zip(cells, gaps, strict=True)
        return "  ".join([first[0] + first[1], *(gap + cell for cell, gap in others)]).rstrip()

    rule = "  ".join("─" * width for width in widths)
    return "\n".join([*map(show, lines), rule, *map(show, rows)])
