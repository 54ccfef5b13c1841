"""A table for the terminal."""

from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right; headers may have several lines."""
    tall = max(header.count("\n") for header in headers) + 1
    split = [[""] * (tall - 1 - header.count("\n")) + header.split("\n") for header in headers]
    lines = [list(line) for line in zip(*split, strict=True)]
    widths = [max(map(len, column)) for column in zip(*lines, *rows, strict=True)]

    def show(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()

    rule = "  ".join("─" * width for width in widths)
    return "\n".join([*map(show, lines), rule, *map(show, rows)])
